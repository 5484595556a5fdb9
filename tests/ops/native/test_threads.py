"""The kernels' own pool of threads: it sleeps when it waits, survives a fork, and serves one caller at a time."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lfm2_cb.ops import native
from lfm2_cb.ops.linear.dense import few_rows_linear, many_rows_linear
from lfm2_cb.ops.native import build

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)


def case(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 512, generator=generator), torch.randn(700, 512, generator=generator)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_threads_sleep_whatever_openmp_is_told():
    script = """
import os, time, torch
from pathlib import Path
from lfm2_cb.ops import native
from lfm2_cb.ops.linear.dense import few_rows_linear
torch.set_num_threads(1)
kernels, x, w = native.load(), torch.randn(4, 512), torch.randn(700, 512)
torch.set_num_threads(3)
before = set(os.listdir("/proc/self/task"))
few_rows_linear(kernels, x, w)
ours = set(os.listdir("/proc/self/task")) - before
assert len(ours) == 2, ours
state = lambda thread: Path("/proc/self/task", thread, "stat").read_text().rsplit(")", 1)[1].split()[0]
while any(state(thread) != "S" for thread in ours):
    time.sleep(0.01)
"""
    environment = os.environ | {"OMP_WAIT_POLICY": "ACTIVE"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_threads_of_its_own():
    script = """
import os, torch
from lfm2_cb.ops import native
from lfm2_cb.ops.linear.dense import few_rows_linear
kernels, x, w = native.load(), torch.randn(4, 512), torch.randn(700, 512)
torch.set_num_threads(3)
expected = few_rows_linear(kernels, x, w)
child = os.fork()
for _ in range(20):
    right = torch.equal(few_rows_linear(kernels, x, w), expected)
    assert right
if child == 0:
    os._exit(0 if len(os.listdir("/proc/self/task")) == 3 or not os.path.exists("/proc/self/task") else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_callers_side_by_side_get_their_own_results():
    kernels, wrong = native.load(), []
    torch.set_num_threads(3)
    cases = [case(seed) for seed in range(4)]
    expected = [few_rows_linear(kernels, *args) for args in cases]

    def call(i):
        for _ in range(200):
            if not torch.equal(few_rows_linear(kernels, *cases[i]), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("linear", [few_rows_linear, many_rows_linear])
def test_the_number_of_threads_changes_no_bit(linear):
    kernels, args = native.load(), case()
    results = []
    for threads in (1, 2, 3, 8, 300):  # more than the pool has, too
        torch.set_num_threads(threads)
        results += [linear(kernels, *args) for _ in range(20)]
    assert all(torch.equal(results[0], result) for result in results)


def test_no_kernel_waits_by_openmp():
    sources = [path for path in Path(build.SOURCES).rglob("*") if path.suffix in (".h", ".cpp")]
    assert sources
    for path in sources:
        text = path.read_text("utf-8")
        assert "#pragma omp" not in text and "<omp.h>" not in text, path
    assert not any("openmp" in flag for flag in build.FLAGS)
