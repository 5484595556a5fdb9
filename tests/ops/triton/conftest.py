"""The Triton kernels' tests run on a card, marked `gpu`, and under Triton's interpreter on a CPU.

Whether a kernel is interpreted is settled when Triton is first imported, so they have a process of their own there,
which `test_interpreter.py` starts.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: those that need neither a card nor the interpreter
ELSEWHERE = ["test_compile.py", "test_interpreter.py"]
collect_ignore = ELSEWHERE if INTERPRETED else []
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore = ["test_attention.py", "test_engine.py", "test_kernels.py", "test_sampling.py"]
if INTERPRETED:
    from interpreter import patch

    patch()


def pytest_collection_modifyitems(items):
    for item in items:
        if not INTERPRETED and item.path.name not in ELSEWHERE and item.path.parent.name == "triton":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")
