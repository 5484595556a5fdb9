"""Norm, SwiGLU and short convolution by the native kernels beside the torch reference, by every instruction set."""

import shutil

import pytest
import torch
from torch import nn

from lfm2_cb.ops.attention.kv_blocks import write_rows
from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.pointwise import add, add_rms_norm, gather_rows, norm_rotate, rms_norm, rotary, rotate_alike, swiglu
from lfm2_cb.ops.short_conv import gated_short_conv

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def assert_near(got, exact, roundings=1):
    """fp32: a few units in the last place; bf16: so many roundings of the exact result."""
    limits = {"rtol": roundings * 2**-8, "atol": 1e-6} if got.dtype == torch.bfloat16 else {"rtol": 3e-6, "atol": 3e-6}
    torch.testing.assert_close(got.double(), exact.double(), **limits)


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 8, 10, 64, 1000])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rms_norm(kernels, dtype, size, tokens):
    x, residual = torch.randn(tokens, 2 * size).to(dtype).split(size, dim=1)  # as parts of a larger matrix
    weight = torch.randn(size).to(dtype)
    assert_near(rms_norm(x, weight, 1e-5, kernels), rms_norm(x.double(), weight.double(), 1e-5), 2)
    total, normed = add_rms_norm(x, residual, weight, 1e-5, kernels)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5, kernels))


@DTYPES
@pytest.mark.parametrize("dim", [2, 6, 64, 100])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), (5, 19), (300, 4)])
def test_norm_rotate(kernels, dtype, dim, tokens, heads):
    """In bf16 as the torch reference to the bit, but where fp32 sums in another order round a norm otherwise."""
    kv_heads = 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    weights = torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)
    angles = 100 * torch.rand(tokens, 1, dim // 2).repeat(1, 1, 2)
    rope = angles.cos().to(dtype), angles.sin().to(dtype)
    got = norm_rotate(qkv, heads, *weights, rope, 1e-5, kernels)
    reference = norm_rotate(qkv, heads, *weights, rope, 1e-5)
    if dtype == torch.bfloat16:
        assert all((a == b).float().mean() > 0.98 for a, b in zip(got, reference, strict=True))
    doubles = [[x.double() for x in pair] for pair in (weights, rope)]
    exact = norm_rotate(qkv.double(), heads, *doubles[0], doubles[1], 1e-5)
    for a, b, c in zip(got, exact, reference, strict=True):
        assert a.shape == b.shape
        limit = (c - b).abs().max() + (2e-5 if dtype == torch.float32 else 0)  # at most the reference's own error …
        assert (a - b).abs().max() <= 1.1 * limit  # … but for a value that happens to be rounded to the other side
    assert torch.equal(got[2], reference[2])


@DTYPES
@pytest.mark.parametrize("dim", [2, 6, 64, 100])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rotate_alike(kernels, dtype, dim, tokens):
    x, angles = torch.randn(tokens, 3, dim).to(dtype), 100 * torch.rand(dim // 2)
    got = rotate_alike(x, angles.cos(), angles.sin(), kernels)
    reference = rotate_alike(x, angles.cos(), angles.sin())
    assert got.dtype == dtype and (got == reference).float().mean() > (0.98 if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(got, reference, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("half", [1, 5, 32])
@pytest.mark.parametrize("frequencies", [torch.float32, torch.bfloat16], ids=str)
def test_rotary(kernels, dtype, half, frequencies):
    """To half a unit in the last place of the angles' cosines and sines, however far the position."""
    positions = torch.randint(0, 128_000, (300,))
    inv_freq = (1 / 1e6 ** (torch.arange(half) / half)).to(frequencies)
    angles = (positions.float()[:, None] * inv_freq.float()).repeat(1, 2).unsqueeze(1).double()
    for got, exact in zip(rotary(positions, inv_freq, 0.7, dtype, kernels), (angles.cos(), angles.sin()), strict=True):
        assert got.shape == (300, 1, 2 * half) and got.dtype == dtype
        torch.testing.assert_close(got.double(), 0.7 * exact, rtol=2**-23 if dtype == torch.float32 else 2**-8, atol=0)
    reference = rotary(positions, inv_freq, 0.7, dtype)
    torch.testing.assert_close(got, reference[1], rtol=2**-7, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (5, 9), (300, 100)])
def test_add(kernels, dtype, shape):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype).t()
    assert torch.equal(add(x, y, kernels), x + y)


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_rows_written_to_blocks(kernels, dtype, tokens):
    blocks, heads, size, dim = 40, 3, 32, 10
    slots = torch.randperm(blocks * heads * size)[: tokens * heads]
    qkv = torch.randn(tokens, heads + 2, dim).to(dtype)
    rows = qkv[:, 2:]  # as part of a larger matrix
    got, expected = (torch.zeros(blocks, heads, size, dim, dtype=dtype) for _ in range(2))
    write_rows(got, slots, rows, kernels)
    write_rows(expected, slots, rows)
    assert torch.equal(got, expected)
    write_rows(got, slots, 2 * rows.transpose(1, 2).contiguous().transpose(1, 2), kernels)
    assert torch.equal(got, 2 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 7, 1024])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_gather_rows(kernels, dtype, size, rows):
    table, ids, out = torch.randn(50, size).to(dtype), torch.randint(50, (rows,)), torch.empty(rows, size, dtype=dtype)
    gather_rows(table, ids, out, kernels)
    assert torch.equal(out, table[ids])
    gather_rows(table, ids.flip(0), out)
    assert torch.equal(out, table[ids.flip(0)])


def test_an_embedding_that_does_more_than_look_up_is_called(kernels):
    class Doubled(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    hooked, patched, turned = (nn.Embedding(9, 4) for _ in range(3))
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    patched.forward = lambda ids: torch.ones(len(ids), 4)
    turned.weight = nn.Parameter(torch.randn(4, 9).T)
    ids = torch.tensor([3, 0, 8])
    for module in (
        nn.Embedding(9, 4, max_norm=0.5),
        Doubled(9, 4),
        hooked,
        patched,
        turned,
        nn.Embedding(9, 4).double(),
    ):
        out = torch.empty(3, 4)
        with torch.no_grad():
            KernelSet(kernels).embed(module, ids, out)
            assert torch.equal(out, module(ids).float())


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
def test_gated_short_conv(kernels, dtype, kernel, hidden, bias):
    """Also where states are read from rows that are written, and written to several."""
    sequences, tokens, window = 4, 50, kernel - 1
    bcx = torch.randn(tokens, 3 * hidden).to(dtype)
    weight, b = torch.randn(hidden, 1, kernel).to(dtype), torch.randn(hidden).to(dtype) if bias else None
    cache, read_rows, write_rows = torch.randn(9, window, hidden).to(dtype), torch.randint(9, (4,)), torch.arange(6)
    total = sequences * window + tokens
    taps, index = torch.randint(total, (kernel, tokens)), torch.randint(total, (6, window))
    plan = read_rows, taps, weight, b, write_rows, index
    expected_cache, exact_cache, other_cache = cache.clone(), cache.double(), cache.clone()
    reference, expected = gated_short_conv(bcx, expected_cache, *plan)
    got, extended = gated_short_conv(bcx, cache, *plan, kernels)
    assert torch.equal(extended, expected)
    assert torch.equal(cache, expected_cache)
    same, states = gated_short_conv(bcx, other_cache, *plan, kernels, whole=False)
    assert torch.equal(same, got) and torch.equal(other_cache, cache)
    assert torch.equal(states, extended[: sequences * window])
    exact_b = None if b is None else b.double()
    doubles = read_rows, taps, weight.double(), exact_b, write_rows, index
    exact, _ = gated_short_conv(bcx.double(), exact_cache, *doubles)
    if dtype == torch.float32:
        return assert_near(got, exact)
    # No worse than torch, which also rounds each tap's product (of few values the norms scatter).
    assert (got - exact).norm() <= (reference - exact).norm() * 1.1
