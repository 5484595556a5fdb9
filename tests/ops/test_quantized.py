"""Low-bit matrices: how they are rounded, and the kernels that multiply by them beside a float64 reference."""

import random
import shutil

import pytest
import torch

from lfm2_cb.ops import native
from lfm2_cb.ops.quantized import (
    GROUP_SIZE,
    QuantizedEmbedding,
    QuantizedLinear,
    dequantize,
    linear_kernels,
    native_linear,
    quantize_int4,
    quantize_int8,
    quantized_linear,
    reference_linear,
)

BITS = {8: quantize_int8, 4: quantize_int4}
needs_compiler = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
WIDTHS = [1, 15, 31, 32, 33, 64, 100, 512, 1023, 1024, 1025, 2080, 4608]


class Case:
    """A product of a random shape, its answer in float64, and how far the kernels may be from that."""

    def __init__(self, seed: int, bits: int, dtype=torch.float32, rows=None) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = rows or rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 300])
        width, outputs = rng.choice(WIDTHS), rng.choice([1, 2, 3, 15, 16, 17, 100, 257])
        weight = torch.randn(outputs, width, generator=generator) * 10 ** rng.uniform(-3, 1)
        self.x = (torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 3)).to(dtype)
        self.bias = torch.randn(outputs, generator=generator).to(dtype) if rng.random() < 0.5 else None
        self.values, self.scale = BITS[bits](weight)
        self.args = self.x, self.values, self.scale, self.bias
        exact = dequantize(self.values, self.scale, width, torch.float64)
        self.answer = self.x.double() @ exact.T + (0 if self.bias is None else self.bias.double())
        # Half a step of the inputs' 15 bits each, and sums in fp32.
        half_steps = self.x.double().abs().amax(-1, keepdim=True) / 16383 / 2
        self.in_fp32 = 2e-6 * (self.x.double().abs() @ exact.abs().T + self.answer.abs())
        self.by_kernel = 1.01 * half_steps * exact.abs().sum(-1) + self.in_fp32


# Rounding


def test_int8_is_within_half_a_step_and_int4_within_one():
    weight = torch.randn(65, 130) * torch.logspace(-6, 3, 65)[:, None]
    values, scale = quantize_int8(weight)
    assert ((dequantize(values, scale, 130, torch.float32) - weight).abs() <= 0.51 * scale).all()
    values, scale = quantize_int4(weight)
    steps = scale.float().abs().repeat_interleave(GROUP_SIZE, dim=1)[:, :130]
    assert ((dequantize(values, scale, 130, torch.float32) - weight).abs() <= 2.1 * steps).all()  # where narrowed


def test_int4_is_no_worse_than_its_plain_grid():
    weight = torch.randn(64, 256)
    values, scale = quantize_int4(weight)
    grouped = weight.view(64, -1, GROUP_SIZE)
    step = grouped.abs().amax(-1, keepdim=True) / 7
    plain = (grouped / step).round() * step
    error = (dequantize(values, scale, 256, torch.float32) - weight).square().mean()
    assert error < 0.9 * (plain.view_as(weight) - weight).square().mean()


@pytest.mark.parametrize("bits", BITS)
def test_what_the_grid_holds_is_kept_exactly(bits):
    limit = 127 if bits == 8 else 8
    whole = torch.randint(-limit, limit, (7, 96)).float()
    whole[:, ::GROUP_SIZE] = -limit
    for step in (2.0**-9, 1.0, 2.0**5):
        assert torch.equal(dequantize(*BITS[bits](whole * step), 96, torch.float32), whole * step)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_of_zeros_stays_one(bits):
    weight = torch.randn(3, 70)
    weight[1] = 0
    assert not dequantize(*BITS[bits](weight), 70, torch.float32)[1].any()


@pytest.mark.parametrize("bits", BITS)
def test_scales_survive_a_cast_to_bfloat16(bits):
    _, scale = BITS[bits](torch.randn(20, 100))
    assert torch.equal(scale, scale.to(torch.bfloat16).to(scale.dtype))


def test_weights_that_are_not_finite_are_refused():
    layer = QuantizedLinear(4, 2, bias=False, bits=8)
    with pytest.raises(ValueError, match="finite"):
        layer.quantize(torch.tensor([[0.0, 1, float("nan"), 2], [0, 0, 0, 0]]))


# Products


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(12))
def test_the_reference_is_near_float64(seed, bits):
    case = Case(seed, bits)
    assert ((reference_linear(*case.args).double() - case.answer).abs() <= case.in_fp32).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(25))
def test_the_kernels_are_near_float64(seed, bits, kernels):
    case = Case(seed, bits)
    assert ((native_linear(*case.args, kernels=kernels).double() - case.answer).abs() <= case.by_kernel).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(8))
def test_bfloat16_rounds_once(seed, bits, kernels):
    case = Case(seed, bits, torch.bfloat16)
    out = native_linear(*case.args, kernels=kernels)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - case.answer).abs() <= case.by_kernel + case.answer.abs() * 2**-8).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [23, 203])  # tiles of all sizes, and more than one block of rows
@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(seed, rows, bits, kernels):
    case = Case(seed, bits, rows=rows)
    torch.set_num_threads(2)
    together = native_linear(*case.args, kernels=kernels)
    torch.set_num_threads(1)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        part = slice(begin, begin + rng.choice([1, 2, 3, 4, 5, 6, 7, 11, 40]))
        alone = native_linear(case.x[part], *case.args[1:], kernels=kernels)
        assert torch.equal(alone, together[part])
        begin = part.stop


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_every_number_of_rows_is_near_float64(bits, kernels):
    for rows in range(1, 71):
        case = Case(rows, bits, rows=rows)
        out = native_linear(*case.args, kernels=kernels).double()
        assert ((out - case.answer).abs() <= case.by_kernel).all(), rows


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_instruction_sets_agree_to_the_bit(bits):
    loaded = native.load()
    for seed in range(12):
        case = Case(seed, bits)
        plain, *others = [native_linear(*case.args, kernels=loaded.using(isa)) for isa in loaded.supported]
        assert all(torch.equal(out, others[0]) for out in others)
        assert not others or ((plain - others[0]).double().abs() <= case.in_fp32 + 0.1 * case.by_kernel).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_values_do_not_overflow(bits, kernels):
    """Every product at its limit, all of one sign: what the integer sums must hold."""
    weight = torch.full((3, 4608), -1.0)
    values, scale = BITS[bits](weight)
    for x in (torch.full((5, 4608), 7.5), torch.full((5, 4608), -7.5)):
        out = native_linear(x, values, scale, kernels=kernels)
        torch.testing.assert_close(out, x @ dequantize(values, scale, 4608, torch.float32).T, rtol=1e-5, atol=0)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_a_bad_row_stays_bad_and_alone(bits, bad, kernels):
    case = Case(3, bits, rows=6)
    case.x[2, -1] = bad
    out = native_linear(*case.args, kernels=kernels)
    assert not out[2].isfinite().any()
    rest = [0, 1, 3, 4, 5]
    assert out[rest].isfinite().all()


@needs_compiler
def test_zeros_and_tiny_inputs(kernels):
    values, scale = quantize_int8(torch.randn(5, 40))
    for x in (torch.zeros(2, 40), torch.full((2, 40), 1e-38)):
        assert (native_linear(x, values, scale, kernels=kernels).abs() <= 1e-30).all()


# Layers


def make_layer(bits: int, bias: bool = True) -> QuantizedLinear:
    layer = QuantizedLinear(70, 33, bias, bits)
    values, scale = layer.quantize(torch.randn(33, 70))
    layer.weight.data, layer.weight_scale.data = values, scale
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_a_layer_runs_by_the_kernels_it_is_told(bits):
    layer, x = make_layer(bits), torch.randn(2, 3, 70)
    by_torch = reference_linear(x, layer.weight, layer.weight_scale, layer.bias)
    by_native = native_linear(x, layer.weight, layer.weight_scale, layer.bias, kernels=native.load())
    assert not torch.equal(by_torch, by_native)  # or the next lines say nothing
    with torch.no_grad():
        assert torch.equal(layer(x), by_native)
        with linear_kernels(None):
            assert torch.equal(layer(x), by_torch)
        with linear_kernels(native.load()):
            assert torch.equal(layer(x), by_native)
    torch.testing.assert_close(layer.dequantize(torch.float32) @ x[0].T + layer.bias[:, None], by_torch[0].T)


@pytest.mark.parametrize("bits", BITS)
def test_gradients_reach_the_inputs_and_the_bias(bits):
    layer = make_layer(bits)
    x = torch.randn(4, 70, requires_grad=True)
    layer(x).square().sum().backward()
    twice = 2 * layer(x).detach()
    torch.testing.assert_close(x.grad, twice @ layer.dequantize(torch.float32))
    torch.testing.assert_close(layer.bias.grad, twice.sum(0))
    assert layer.weight.grad is None and not layer.weight_scale.requires_grad


@pytest.mark.parametrize("shape", [(0, 70), (2, 0, 70)])
def test_no_rows(shape):
    layer = make_layer(8)
    out = quantized_linear(torch.empty(shape), layer.weight, layer.weight_scale, layer.bias)
    assert out.shape == (*shape[:-1], 33)


def test_an_embedding_gives_the_rows_that_its_head_multiplies_by():
    embedding = QuantizedEmbedding(50, 24)
    values, scale = embedding.quantize(torch.randn(50, 24))
    embedding.weight.data, embedding.weight_scale.data = values, scale
    ids = torch.randint(50, (2, 3))
    assert torch.equal(embedding(ids), embedding.dequantize(torch.float32)[ids])
