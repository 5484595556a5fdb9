"""What the tests of native kernels share."""

import pytest
import torch

from lfm2_cb.ops import native
from lfm2_cb.ops.native.instruction_sets import ISAS


@pytest.fixture(params=list(ISAS))
def kernels(request):
    """The library by each instruction set in turn."""
    loaded = native.load()
    if request.param not in loaded.supported:
        pytest.skip(f"this processor has no {request.param}")
    torch.manual_seed(0)
    return loaded.using(request.param)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
