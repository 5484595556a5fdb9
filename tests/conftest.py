import os
import signal
import sys
from pathlib import Path

# Threads that spin at every barrier make many small operations a hundred times slower on a machine that is shared.
# (Read when torch loads its OpenMP library, so before anything imports torch.)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
import torch.utils.cpp_extension  # by which tests ask for the compiler's name

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers

import lfm2_cb

# A shell starts its background jobs deaf to Ctrl-C; the tests about it are not, nor are the commands they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

transformers.utils.logging.disable_progress_bar()

#: files that take minutes, by folder or name: they go first, as else one process ends with them alone
LONGEST = ("scripts", "soak", "test_readmes.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not set(LONGEST).intersection(item.path.parts))


@pytest.fixture(scope="session")
def demo_stock():
    """The shipped model in the stock class, fp32."""
    model = transformers.Lfm2ForCausalLM.from_pretrained(lfm2_cb.demo_model_path(), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def demo_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(lfm2_cb.demo_model_path())
