"""Norm, SwiGLU and short convolution by the native kernels beside the torch reference, by every instruction set."""

import shutil

import pytest
import torch

from lfm2_cb.ops import native
from lfm2_cb.ops.pointwise import rms_norm, swiglu
from lfm2_cb.ops.short_conv import native_short_conv, ragged_short_conv

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=list(native.ISAS))
def kernels(request):
    loaded = native.load()
    if request.param not in loaded.supported:
        pytest.skip(f"this processor has no {request.param}")
    torch.manual_seed(0)
    return loaded.using(request.param)


def assert_near(got, exact, roundings=1):
    """fp32: a few units in the last place; bf16: so many roundings of the exact result."""
    limits = {"rtol": roundings * 2**-8, "atol": 1e-6} if got.dtype == torch.bfloat16 else {"rtol": 3e-6, "atol": 3e-6}
    torch.testing.assert_close(got.double(), exact.double(), **limits)


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 8, 10, 64, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rms_norm(kernels, dtype, size, tokens):
    x, weight = torch.randn(tokens, 3 * size).to(dtype), torch.randn(size).to(dtype)
    assert_near(rms_norm(x[:, :size], weight, 1e-5, kernels), rms_norm(x[:, :size].double(), weight.double(), 1e-5), 2)
    heads = x[:, size:].unflatten(1, (2, size))  # as a part of a larger projection
    got = rms_norm(heads, weight, 1e-5, kernels)
    assert got.is_contiguous()
    assert_near(got, rms_norm(heads.double(), weight.double(), 1e-5), 2)


@DTYPES
@pytest.mark.parametrize("width", [1, 9, 64, 500])
def test_swiglu(kernels, dtype, width):
    x = 30 * torch.randn(40, 2 * width).to(dtype)
    x[0, :width] = -200.0
    assert_near(swiglu(x, kernels), swiglu(x.double()))


@DTYPES
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("hidden", [3, 16, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_short_conv(kernels, dtype, kernel, hidden, bias):
    sequences, tokens, window = 4, 50, kernel - 1
    states, x = torch.randn(sequences, window, hidden).to(dtype), torch.randn(tokens, hidden).to(dtype)
    weight, b = torch.randn(hidden, kernel).to(dtype), torch.randn(hidden).to(dtype) if bias else None
    cache = torch.randn(9, window, hidden).to(dtype)
    total = sequences * window + tokens
    taps, index = torch.randint(total, (kernel, tokens)), torch.randint(total, (6, window))
    rows = torch.randperm(9)[:6]
    extended = torch.cat((states.flatten(0, 1), x))
    expected = cache.clone()
    expected[rows] = extended[index]
    got = native_short_conv(kernels, states, x, taps, weight, b, cache, rows, index)
    assert torch.equal(cache, expected)
    exact = ragged_short_conv(extended.double(), taps, weight.double(), None if b is None else b.double())
    assert_near(got, exact)
