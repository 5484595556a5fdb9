"""The kernels for ARM, cross-compiled and run by qemu-user beside the torch references; never on such a processor.

Here a few of each; with `-m slow` all tests of kernels run by them too (the fixture `kernels`).
"""

import pytest
import torch
from emulator import CAN_RUN, ArmKernels, emulated

from lfm2_cb.ops.attention.kv_blocks import write_rows
from lfm2_cb.ops.linear.dense import few_rows_linear, many_rows_linear
from lfm2_cb.ops.linear.int4 import Int4Weights, native_linear_int4
from lfm2_cb.ops.linear.int8 import Int8Weights, native_linear_int8
from lfm2_cb.ops.linear.quantized import reference_linear
from lfm2_cb.ops.native.instruction_sets import ARM
from lfm2_cb.ops.native.self_check import addition_is_right
from lfm2_cb.ops.pointwise import add, add_rms_norm, norm_rotate, rms_norm, rotary, swiglu

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs g++-aarch64-linux-gnu and qemu-user-static")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Optimised less than what a wheel brings, which takes a minute to compile."""
    with emulated(tmp_path_factory.mktemp("arm"), "-O1") as process:
        yield process


@pytest.fixture(params=list(ARM))
def kernels(request, process):
    torch.manual_seed(0)
    torch.set_num_threads(2)
    return ArmKernels(process, request.param)


def near(got, exact, bound=None):
    limit = 2**-7 if got.dtype == torch.bfloat16 else 3e-5
    bound = exact.abs() * limit + limit * exact.abs().mean() if bound is None else bound
    assert ((got.double() - exact).abs() <= bound).all()


def test_the_processor_has_them_all(process):
    assert ArmKernels(process).supported == tuple(ARM)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 7, 20])
def test_dense_products(kernels, dtype, rows):
    x, w, bias = torch.randn(rows, 130).to(dtype), torch.randn(37, 130).to(dtype), torch.randn(37).to(dtype)
    exact = x.double() @ w.double().T + bias.double()
    near(few_rows_linear(kernels, x, w, bias), exact)
    near(many_rows_linear(kernels, x, w, bias), exact)


@DTYPES
@pytest.mark.parametrize("rows", [1, 4, 13, 90])
def test_low_bit_products(kernels, dtype, rows):
    """To the bit what plain C++ makes of them, which is near the reference."""
    x, w = torch.randn(rows, 1100).to(dtype), torch.randn(37, 1100)
    for format, product in ((Int8Weights, native_linear_int8), (Int4Weights, native_linear_int4)):
        weights = format.quantize(w)
        assert torch.equal(product(kernels, x, weights), product(kernels.using("plain"), x, weights))
        exact = reference_linear(x.float(), weights).double()
        near(product(kernels, x, weights), exact, 0.01 * exact.abs().amax())


@DTYPES
def test_what_a_layer_does_to_each_token(kernels, dtype):
    x, y, weight = torch.randn(9, 100).to(dtype), torch.randn(9, 100).to(dtype), torch.randn(100).to(dtype)
    near(rms_norm(x, weight, 1e-5, kernels), rms_norm(x.double(), weight.double(), 1e-5))
    total, normed = add_rms_norm(x, y, weight, 1e-5, kernels)
    assert torch.equal(total, x + y) and torch.equal(normed, rms_norm(x + y, weight, 1e-5, kernels))
    assert torch.equal(add(x, y, kernels), x + y)
    near(swiglu(x, kernels), swiglu(x.double()))
    positions, inv_freq = torch.randint(0, 99_000, (9,)), 1 / 1e6 ** (torch.arange(32) / 32)
    rope = rotary(positions, inv_freq, 1.0, dtype, kernels)
    for got, expected in zip(rope, rotary(positions, inv_freq, 1.0, dtype), strict=True):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)
    qkv = torch.randn(9, 4 * 64).to(dtype)
    weights = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    for got, expected in zip(
        norm_rotate(qkv, 2, *weights, rope, 1e-5, kernels), norm_rotate(qkv, 2, *weights, rope, 1e-5), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-5)
    blocks, expected = torch.zeros(2, 5, 3, 16, 10, dtype=dtype)
    slots, rows = torch.randperm(5 * 3 * 16)[:27], torch.randn(9, 3, 10).to(dtype)
    write_rows(blocks, slots, rows, kernels)
    write_rows(expected, slots, rows)
    assert torch.equal(blocks, expected)


def test_what_an_instruction_set_adds_is_right_by_the_check_at_load(process):
    """8-bit products to the bit; attention of single queries over caches of bf16 and of 8 bits."""
    for isa in ("dotprod", "i8mm", "bf16"):
        assert addition_is_right(ArmKernels(process, isa, without=tuple(ARM)[tuple(ARM).index(isa) + 1 :])), isa
