"""The Triton kernels, run on the CPU by Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


FILES = ("test_attention.py", "test_engine.py", "test_kernels.py", "test_sampling.py")


def test_under_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " skipped" not in run.stdout, run.stdout + run.stderr


def test_nothing_imports_triton_unless_it_is_asked_for():
    code = (
        "import sys, torch, lfm2_cb\n"
        "from lfm2_cb.ops.kernel_set import KernelSet\n"
        "before = set(sys.modules)\n"
        "KernelSet.resolve('auto', torch.device('cpu'), torch.float32)\n"
        "assert not [n for n in sys.modules if n.startswith('lfm2_cb.ops.triton.') and not n.endswith('tables')]\n"
        "assert 'triton' not in set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
