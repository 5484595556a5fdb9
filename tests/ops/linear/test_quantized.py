"""Low-bit matrices: how they are rounded, and the kernels that multiply by them beside a float64 reference."""

import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from emulated_units import with_emulation
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.linear.int4 import GROUP_SIZE, Int4Weights
from lfm2_cb.ops.linear.int8 import (
    GROUP,
    MOST,
    PADDED,
    PANEL,
    Int8Weights,
    native_rows_int8,
    quantize_inputs,
    quantize_int8,
)
from lfm2_cb.ops.linear.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    native_linear,
    quantized_linear,
    reference_linear,
)
from lfm2_cb.ops.native import library as native

BITS = {8: Int8Weights, 4: Int4Weights}
needs_compiler = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
WIDTHS = [1, 15, 31, 32, 33, 64, 100, 127, 128, 129, 512, 1023, 1024, 1025, 2080, 4608]


class Case:
    """A product of a random shape, its answer in float64, and how far the kernels may be from that.

    Of 8 bits the answer is that of the inputs in 8 bits, and kernels differ from it where an input is between two.
    """

    def __init__(self, seed: int, bits: int, dtype=torch.float32, rows=None) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = rows or rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 300])
        width, outputs = rng.choice(WIDTHS), rng.choice([1, 2, 3, 15, 16, 17, 100, 257])
        weight = torch.randn(outputs, width, generator=generator) * 10 ** rng.uniform(-3, 1)
        self.x = (torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 3)).to(dtype)
        self.bias = torch.randn(outputs, generator=generator).to(dtype) if rng.random() < 0.5 else None
        self.weights = BITS[bits].quantize(weight)
        self.args = self.x, self.weights, self.bias
        exact = self.weights.dequantize(width, torch.float64)
        inputs, uncertain = round_exactly(self.x) if bits == 8 else (self.x.double(), None)
        self.answer = inputs @ exact.T + (0 if self.bias is None else self.bias.double())
        if uncertain is None:  # half a step of the inputs' 15 bits each
            uncertain = self.x.double().abs().amax(-1, keepdim=True).expand(-1, width) / 16383 / 2 * 1.01
        self.in_fp32 = 2e-6 * (inputs.abs() @ exact.abs().T + self.answer.abs())
        self.by_kernel = uncertain @ exact.abs().T + self.in_fp32


def round_exactly(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits, in float64; and a step for each input that is nearly in the middle between two of them."""
    grouped = F.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1, keepdim=True)
    steps = grouped.double() * (127 / largest).double()
    near_middle = ((steps - steps.floor()) - 0.5).abs() < 1e-4
    step = (largest / 127).double()
    return tuple(part.flatten(1)[:, : x.shape[1]] for part in (steps.round() * step, near_middle * step))


# Rounding


def test_int8_is_within_half_a_step_and_int4_within_one():
    weight = torch.randn(65, 130) * torch.logspace(-6, 3, 65)[:, None]
    weights = Int8Weights.quantize(weight)
    assert ((weights.dequantize(130, torch.float32) - weight).abs() <= 0.51 * weights.scale).all()
    weights = Int4Weights.quantize(weight)
    steps = weights.scale.float().abs().repeat_interleave(GROUP_SIZE, dim=1)[:, :130]
    assert ((weights.dequantize(130, torch.float32) - weight).abs() <= 2.1 * steps).all()  # where narrowed


def largest_sums(values: torch.Tensor) -> tuple[int, int]:
    """Of the positive, and of the negative, of the four values each that kernels sum in 16 bits."""
    values = F.pad(values.int(), (0, -values.shape[1] % 8)).unflatten(-1, (-1, 8))
    fours = torch.cat((values[..., [0, 1, 4, 5]], values[..., [2, 3, 6, 7]]))
    return fours.clamp_min(0).sum(-1).max().item(), (-fours).clamp_min(0).sum(-1).max().item()


@given(seed=st.integers(0, 2**32), width=st.integers(1, 40), power=st.sampled_from([1, 3, 9]))
@settings(max_examples=60, deadline=None)
def test_int8_values_that_are_summed_fit_in_16_bits(seed, width, power):
    """From weights that are all alike to ones with few large among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(7, width, generator=generator) ** power * 10.0 ** (seed % 7)
    weight *= torch.randint(0, 2, (7, 1), generator=generator) * 2 - 1  # of one sign, or
    weight[3:] *= torch.randint(0, 2, (4, width), generator=generator) * 2 - 1  # of both
    values, _ = quantize_int8(weight)
    assert max(largest_sums(values)) <= MOST and values.abs().max() <= 127


def test_int8_takes_the_whole_grid_where_it_can():
    weight = torch.rand(9, 64) * 0.05
    weight[:, ::8] = 1.0  # one large in each that are summed
    values, _ = quantize_int8(weight)
    assert (values.amax(-1) > 100).all()


def test_int8_lies_as_it_says():
    """16 outputs' fours of inputs, filled up with zeros, and the sum of each group."""
    weight = torch.randn(21, 1100)
    values, scale = quantize_int8(weight)
    weights = Int8Weights.quantize(weight)
    packed, sums = weights.values, weights.sums
    assert packed.shape == (2, 288, PANEL, 4) and 4 * packed.shape[1] % PADDED == 0 and sums.shape == (2, 3, PANEL)
    for out, inner in ((0, 0), (3, 7), (15, 1099), (16, 530), (20, 1023)):
        assert packed[out // 16, inner // 4, out % 16, inner % 4] == values[out, inner]
        group = values[out, inner // GROUP * GROUP :][:GROUP]
        assert sums[out // 16, inner // GROUP, out % 16] == group.int().sum()
    assert packed.count_nonzero() == values.count_nonzero()
    assert torch.equal(weights.dequantize(1100, torch.float32), values * scale)


def test_inputs_in_8_bits():
    x = torch.randn(5, 300) * torch.logspace(-4, 4, 5)[:, None]
    exact, uncertain = round_exactly(x)
    assert ((quantize_inputs(x).double() - exact).abs() <= uncertain + 1e-6 * exact.abs()).all()
    assert (uncertain == 0).float().mean() > 0.99
    assert not quantize_inputs(torch.zeros(2, 9)).any()


def test_int4_is_no_worse_than_its_plain_grid():
    weight = torch.randn(64, 256)
    grouped = weight.view(64, -1, GROUP_SIZE)
    step = grouped.abs().amax(-1, keepdim=True) / 7
    plain = (grouped / step).round() * step
    error = (Int4Weights.quantize(weight).dequantize(256, torch.float32) - weight).square().mean()
    assert error < 0.9 * (plain.view_as(weight) - weight).square().mean()


@pytest.mark.parametrize("bits", BITS)
def test_what_the_grid_holds_is_kept_exactly(bits):
    limit = 31 if bits == 8 else 8
    whole = torch.randint(-limit, limit, (7, 96)).float()
    if bits == 8:
        whole[:, :8] = 0
        whole[:, 0] = 126  # the most that four may be together, and the grid is not made wider for
    else:
        whole[:, ::GROUP_SIZE] = -limit
    for step in (2.0**-9, 1.0, 2.0**5):
        assert torch.equal(BITS[bits].quantize(whole * step).dequantize(96, torch.float32), whole * step)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_of_zeros_stays_one(bits):
    weight = torch.randn(3, 70)
    weight[1] = 0
    assert not BITS[bits].quantize(weight).dequantize(70, torch.float32)[1].any()


@pytest.mark.parametrize("bits", BITS)
def test_scales_survive_a_cast_to_bfloat16(bits):
    scale = BITS[bits].quantize(torch.randn(20, 100)).scale
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
    assert ((reference_linear(*case.args).double() - case.answer).abs() <= case.by_kernel).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(25))
def test_the_kernels_are_near_float64(seed, bits, kernels):
    case = Case(seed, bits)
    assert ((native_linear(kernels, *case.args).double() - case.answer).abs() <= case.by_kernel).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(8))
def test_bfloat16_rounds_once(seed, bits, kernels):
    case = Case(seed, bits, torch.bfloat16)
    out = native_linear(kernels, *case.args)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - case.answer).abs() <= case.by_kernel + case.answer.abs() * 2**-8).all()
    residual = torch.randn(out.shape).mul_(out.abs().amax()).bfloat16()
    assert torch.equal(native_linear(kernels, *case.args, residual), out + residual)


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [23, 203])  # tiles of all sizes, and more than one block of rows
@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_the_same_to_the_bit_whoever_is_beside_it(seed, rows, bits, kernels):
    case = Case(seed, bits, rows=rows)
    torch.set_num_threads(2)
    together = native_linear(kernels, *case.args)
    torch.set_num_threads(1)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        part = slice(begin, begin + rng.choice([1, 2, 3, 4, 5, 6, 7, 11, 40]))
        alone = native_linear(kernels, case.x[part], *case.args[1:])
        assert torch.equal(alone, together[part])
        begin = part.stop


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_every_number_of_rows_is_near_float64(bits, kernels):
    for rows in range(1, 71):
        case = Case(rows, bits, rows=rows)
        out = native_linear(kernels, *case.args).double()
        assert ((out - case.answer).abs() <= case.by_kernel).all(), rows


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_layers_row_is_the_same_alone_and_among_any_number(bits, dtype, kernels, monkeypatch):
    """By each instruction set, on a processor that has units of its own for bf16: those must not be torch's for many
    rows, which rounds differently."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    layer, among, x = make_layer(bits).to(dtype), KernelSet(kernels), torch.randn(80, 70).to(dtype)
    alone = torch.cat([among.linear(layer, row) for row in x.split(1)])
    for rows in range(1, 81):
        assert torch.equal(among.linear(layer, x[:rows]), alone[:rows]), rows


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_layers_row_is_the_same_on_either_side_of_the_tables_boundaries(bits, dtype, kernels):
    """Whichever kernels the table chooses for so many rows, those for matrix units among them."""
    layer, x = make_layer(bits, inputs=1100, outputs=263).to(dtype), torch.randn(300, 1100).to(dtype)
    for by in with_emulation(kernels):
        among = KernelSet(by)
        torch.set_num_threads(2)
        together = among.linear(layer, x)
        torch.set_num_threads(1)
        for rows in (1, 5, 8, 9, 64):
            assert torch.equal(among.linear(layer, x[:rows]), together[:rows]), rows
            assert torch.equal(among.linear(layer, x[-rows:]), together[-rows:]), rows


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_instruction_sets_agree_to_the_bit(bits):
    loaded = native.load()
    for seed in range(12):
        case = Case(seed, bits)
        plain, *others = [native_linear(loaded.using(isa), *case.args) for isa in loaded.supported]
        assert all(torch.equal(out, others[0]) for out in others)
        assert not others or ((plain - others[0]).double().abs() <= 2 * case.by_kernel).all()


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_values_do_not_overflow(bits, kernels):
    """Every product at its limit, all of one sign: what the integer sums must hold."""
    weights = BITS[bits].quantize(torch.full((3, 4608), -1.0))
    for x in (torch.full((5, 4608), 7.5), torch.full((5, 4608), -7.5)):
        out = native_linear(kernels, x, weights)
        torch.testing.assert_close(out, x @ weights.dequantize(4608, torch.float32).T, rtol=1e-5, atol=0)


@needs_compiler
def test_sums_at_their_limit_do_not_overflow(kernels):
    """Values whose sums are the most they may be, times inputs that are the most, for them and against them."""
    choices = [[127, 1, -127, -1], [64, 64, -64, -64], [-100, 100, -28, 28], [32] * 4, [-32] * 4]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(choices)[torch.randint(len(choices), (20, 128), generator=generator)]
    fours = chosen.gather(-1, torch.rand(20, 128, 4, generator=generator).argsort(-1)).view(20, 64, 2, 2, 2)
    values = fours.transpose(2, 3).reshape(20, 512)  # halves of a four beside another four's: those are summed
    assert largest_sums(values) == (MOST, MOST)
    weights = Int8Weights.quantize(torch.ones(20, 512))
    padded = F.pad(values, (0, 0, 0, 12)).to(torch.int8)
    weights.values.copy_(padded.view(2, PANEL, 128, 4).transpose(1, 2))
    weights.sums.copy_(padded.view(2, PANEL, -1, GROUP).sum(-1).transpose(1, 2))
    weights.scale.fill_(1)
    x = torch.cat((values.sign(), -values.sign(), torch.ones(3, 512), -torch.ones(3, 512))) * 127.0
    exact = x.double() @ values.double().T
    assert torch.equal(native_linear(kernels, x, weights).double(), exact)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_a_bad_row_stays_bad_and_alone(bits, bad, kernels):
    case = Case(3, bits, rows=6)
    case.x[2, -1] = bad
    out = native_linear(kernels, *case.args)
    assert not out[2].isfinite().any()
    rest = [0, 1, 3, 4, 5]
    assert out[rest].isfinite().all()


@needs_compiler
def test_zeros_and_tiny_inputs(kernels):
    weights = Int8Weights.quantize(torch.randn(5, 40))
    for x in (torch.zeros(2, 40), torch.full((2, 40), 1e-38)):
        assert (native_linear(kernels, x, weights).abs() <= 1e-30).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_input_sets_the_scale_wherever_it_is(dtype, kernels):
    """Within the vectors that it is looked for by and behind the last whole one; the others are rounded to 0."""
    for width in range(1, 68):
        x = torch.full((width, width), 0.01) + torch.eye(width) * 5
        weights = Int8Weights.quantize(torch.randn(3, width))
        expected = 5.01 * weights.dequantize(width, torch.float32).T
        out = native_linear(kernels, x.to(dtype), weights).float()
        torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=0)


# Layers


def make_layer(bits: int, bias: bool = True, inputs: int = 70, outputs: int = 33) -> QuantizedLinear:
    layer = QuantizedLinear(inputs, outputs, bias, bits)
    layer.put(layer.quantize(torch.randn(outputs, inputs)))
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_a_layer_runs_by_the_kernels_it_is_told(bits):
    layer, x = make_layer(bits), torch.randn(2, 3, 70)
    by_torch = reference_linear(x, layer.weights, layer.bias)
    by_native = native_linear(native.load(), x, layer.weights, layer.bias)
    assert not torch.equal(by_torch, by_native)  # or the next lines say nothing
    with torch.no_grad():
        assert torch.equal(layer(x), by_native)
        assert torch.equal(KernelSet(None).linear(layer, x), by_torch)
        assert torch.equal(KernelSet(native.load()).linear(layer, x), by_native)
    inputs = quantize_inputs(x) if bits == 8 else x
    torch.testing.assert_close(layer.dequantize(torch.float32) @ inputs[0].T + layer.bias[:, None], by_torch[0].T)


@pytest.mark.parametrize("bits", BITS)
def test_gradients_reach_the_inputs_and_the_bias(bits):
    layer = make_layer(bits)
    x = torch.randn(4, 70, requires_grad=True)
    layer(x).square().sum().backward()
    twice = 2 * layer(x).detach()
    torch.testing.assert_close(x.grad, twice @ layer.dequantize(torch.float32))
    torch.testing.assert_close(layer.bias.grad, twice.sum(0))
    assert layer.weight.grad is None and not any(weights.requires_grad for weights in layer.weights)


@pytest.mark.parametrize("shape", [(0, 70), (2, 0, 70)])
def test_no_rows(shape):
    layer = make_layer(8)
    out = quantized_linear(torch.empty(shape), layer.weights, layer.bias)
    assert out.shape == (*shape[:-1], 33)


def test_an_embedding_gives_the_rows_that_its_head_multiplies_by():
    embedding = QuantizedEmbedding(50, 24)
    embedding.put(embedding.quantize(torch.randn(50, 24)))
    ids = torch.randint(50, (2, 3))
    assert torch.equal(embedding(ids), embedding.dequantize(torch.float32)[ids])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_gives_the_same_rows(dtype, kernels):
    weights = Int8Weights.quantize(torch.randn(50, 70).to(dtype))
    indices = torch.tensor([49, 0, 15, 16, 49])
    out = torch.full((5, 70), torch.nan).to(dtype)
    native_rows_int8(kernels, weights, indices, out)
    assert torch.equal(out, weights.rows(indices, 70))
    assert torch.equal(out, weights.dequantize(70, dtype)[indices])
