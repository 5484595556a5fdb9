"""The experts of a layer by native kernels, beside float64 and the torch reference."""

import random
import shutil

import pytest
import torch
from emulated_units import AsAmx, with_emulation

from lfm2_cb.ops.experts import QuantizedExperts, mix_experts, native_mix_experts, route
from lfm2_cb.ops.experts import native as experts_module
from lfm2_cb.ops.experts.native import TABLE, scratch_bytes
from lfm2_cb.ops.linear.table import ANY_ISA, DENSE, INT4, INT8
from lfm2_cb.ops.native import Arena, empty, lend
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.arena import LARGE

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
ODD = [1, 15, 17, 31, 33, 47, 65, 127, 129, 511, 513, 1023, 1025]
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Case:
    """A layer of a random shape, the choices of its rows, and what they come to in float64."""

    def __init__(self, seed: int, dtype: torch.dtype, rows: int | None = None) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows = rows or rng.choice([1, 2, 3, 7, 9, 40, 200])
        self.num_experts, hidden = rng.choice([1, 4, 5, 16, 64]), rng.choice([1, 33, 64, 100, 128, 257])
        self.top_k, self.width = rng.randint(1, min(8, self.num_experts)), rng.choice([1, 17, 32, 50, 96, 129])
        logits = torch.randn(rows, self.num_experts, generator=generator).to(dtype)
        self.selected, self.weights = route(logits, None, self.top_k, True, 1.5)
        self.x = torch.randn(rows, hidden, generator=generator).to(dtype)
        gate_up = torch.randn(self.num_experts, 2 * self.width, hidden, generator=generator) * hidden**-0.5
        down = torch.randn(self.num_experts, hidden, self.width, generator=generator) * self.width**-0.5
        self.stacks = gate_up.to(dtype), down.to(dtype)
        self.args = self.x, self.selected, self.weights
        wide = [stack.double().unbind() for stack in self.stacks]
        self.exact = mix_experts(self.x.double(), self.selected, self.weights.double(), *wide)

    def quantized(self, bits: int) -> QuantizedExperts:
        experts = QuantizedExperts(self.num_experts, self.x.shape[1], self.width, bits)
        for held, stack in zip((experts.gate_up_proj, experts.down_proj), self.stacks, strict=True):
            held.put(held.quantize(stack))
        return experts


def largest(tensor: torch.Tensor) -> float:
    return tensor.double().abs().max().item()


@EVERY_DTYPE
@pytest.mark.parametrize("seed", range(12))
def test_full_precision_is_as_good_as_torch(seed, dtype, kernels):
    torch.set_num_threads(1 + seed % 3)
    case = Case(seed, dtype)
    reference = mix_experts(*case.args, *(stack.unbind() for stack in case.stacks))
    for by in with_emulation(kernels):
        out = native_mix_experts(by, *case.args, *case.stacks)
        assert out.dtype == dtype
        assert largest(out - case.exact) <= 1.2 * largest(reference - case.exact) + 1e-6 * largest(case.exact)


@EVERY_DTYPE
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", range(8))
def test_low_bits_come_out_as_in_torch(seed, bits, dtype, kernels):
    torch.set_num_threads(1 + seed % 3)
    case = Case(seed, dtype)
    experts = case.quantized(bits)
    reference = experts.mix(*case.args, None)
    outs = [experts.mix(*case.args, by) for by in with_emulation(kernels)]
    # Of 8 bits, inputs may be rounded either way.
    assert largest(outs[0] - reference) <= (0.01 if dtype == torch.float32 else 0.05) * largest(reference)
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("bits", [None, 8, 4])
@EVERY_DTYPE
def test_neither_threads_nor_other_rows_matter(bits, dtype, kernels):
    case = Case(1, dtype, rows=30)
    experts = case.quantized(bits) if bits else None

    def mix(*args):
        return experts.mix(*args, kernels) if experts else native_mix_experts(kernels, *args, *case.stacks)

    torch.set_num_threads(1)
    whole = mix(*case.args)
    torch.set_num_threads(3)
    assert torch.equal(mix(*case.args), whole)
    parts = torch.cat([mix(*(t[i : i + 7] for t in case.args)) for i in range(0, 30, 7)])
    if bits:
        assert torch.equal(parts, whole)
    torch.testing.assert_close(parts, whole, rtol=0, atol=(1e-5 if dtype == torch.float32 else 0.02) * largest(whole))


def test_every_row_to_one_expert_and_no_rows(kernels):
    case = Case(3, torch.float32, rows=70)
    selected, weights = torch.zeros(70, 1, dtype=torch.int64), torch.full((70, 1), 0.5)
    out = native_mix_experts(kernels, case.x, selected, weights, *case.stacks)
    torch.testing.assert_close(out, mix_experts(case.x, selected, weights, *(s.unbind() for s in case.stacks)))
    none = native_mix_experts(kernels, case.x[:0], selected[:0], weights[:0], *case.stacks)
    assert none.shape == (0, case.x.shape[1])


@EVERY_DTYPE
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_experts_with_as_many_rows_as_a_product_is_for_at_most(bits, dtype, kernels):
    """And with one more: products lay their inputs out in ways of their own."""
    weights_format = {None: DENSE, 8: INT8, 4: INT4}[bits]
    for by in with_emulation(kernels):
        _, thresholds = TABLE.get((weights_format, dtype, by.isa)) or TABLE[weights_format, dtype, ANY_ISA]
        for rows in sorted({most + more for most in thresholds for more in (0, 1)}):
            case = Case(9, dtype, rows=rows)
            args = case.x, torch.zeros(rows, 1, dtype=torch.int64), torch.full((rows, 1), 0.5, dtype=dtype)
            if bits:
                experts = case.quantized(bits)
                out, reference = experts.mix(*args, by), experts.mix(*args, None)
            else:
                stacks = [stack.double().unbind() for stack in case.stacks]
                out = native_mix_experts(by, *args, *case.stacks)
                reference = mix_experts(args[0].double(), args[1], args[2].double(), *stacks)
            bound = 0.05 if dtype == torch.bfloat16 else 0.01 if bits else 1e-5
            assert largest(out - reference) <= bound * largest(reference), rows


def test_scratch_lies_in_the_arena(kernels):
    """Asked for by shape alone, so that steps that choose differently, and replays, have the same."""
    case, arena = Case(1, torch.float32, rows=300), Arena()
    scratch = scratch_bytes(300, case.top_k, case.num_experts, case.x.shape[1], case.width)
    assert scratch >= LARGE
    for selected in (case.selected, (case.selected + 1) % case.num_experts, case.selected):
        with lend(arena):
            out = native_mix_experts(kernels, case.x, selected, case.weights, *case.stacks)
        assert scratch <= arena.num_bytes <= 2 * scratch
    assert largest(out - case.exact) <= 1e-5 * largest(case.exact)


@EVERY_DTYPE
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("seed", range(3))
def test_scratch_suffices(seed, bits, dtype, kernels, monkeypatch):
    """Odd shapes, and choices that ask for as much as can be: a kernel that runs short of it aborts, and none writes
    behind it."""
    guards, rng = [], random.Random(seed)

    def guarded(shape, dtype):
        if dtype != torch.uint8:
            return empty(shape, dtype)
        memory = torch.full((shape[0] + 4096,), 0xA5, dtype=dtype)
        guards.append(memory[shape[0] :])
        return memory[: shape[0]]

    monkeypatch.setattr(experts_module, "empty", guarded)
    for rows in (1, 7, 31, 33, 130):
        num_experts, hidden, width = rng.randint(1, 9), rng.choice(ODD), rng.choice(ODD)
        top_k = rng.randint(1, min(4, num_experts))
        gate_up, down = torch.ones(num_experts, 2 * width, hidden), torch.ones(num_experts, hidden, width)
        x, weights = torch.ones(rows, hidden, dtype=dtype), torch.ones(rows, top_k, dtype=dtype)
        experts = QuantizedExperts(num_experts, hidden, width, bits or 8)
        for held, stack in zip((experts.gate_up_proj, experts.down_proj), (gate_up, down), strict=True):
            held.put(held.quantize(stack.to(dtype)))
        in_turn = torch.arange(rows)[:, None] + torch.arange(top_k)
        for selected in (in_turn % num_experts, torch.arange(top_k).repeat(rows, 1)):
            for by in with_emulation(kernels):
                if bits:
                    experts.mix(x, selected, weights, by)
                else:
                    native_mix_experts(by, x, selected, weights, gate_up.to(dtype), down.to(dtype))
    assert guards and all((guard == 0xA5).all() for guard in guards)


@EVERY_DTYPE
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "normalize", "scale"),
    [(4, 1, True, 1.0), (32, 4, True, 2.5), (64, 8, False, 1.0), (1, 1, True, 1.0)],
)
def test_routing(experts, top_k, normalize, scale, bias, dtype, kernels):
    generator = torch.Generator().manual_seed(experts)
    rows = 300
    # Scores that lie apart, so that no rounding exchanges two of them.
    logits = torch.rand(rows, experts, generator=generator).argsort(-1).sub(experts / 2).div(experts / 4).to(dtype)
    moved = torch.randn(experts, generator=generator) if bias else None
    arguments = logits, moved, top_k, normalize, scale
    selected, weights = route(*arguments, kernels)
    expected, expected_weights = route(*arguments)
    assert selected.dtype == torch.int64 and weights.dtype == dtype
    assert torch.equal(selected, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=0)


@EVERY_DTYPE
def test_of_equal_scores_the_first_is_chosen(dtype, kernels):
    logits = torch.randint(-2, 3, (300, 16)).to(dtype)
    selected, _ = route(logits, None, 4, True, 1.0, kernels)
    assert torch.equal(selected, logits.argsort(dim=-1, descending=True, stable=True)[:, :4])


def test_a_nan_comes_out(kernels):
    logits = torch.zeros(2, 8)
    logits[1] = torch.nan
    selected, weights = route(logits, None, 3, True, 1.0, kernels)
    assert all(len({*row}) == 3 and min(row) >= 0 and max(row) < 8 for row in selected.tolist())
    assert weights[0].isfinite().all() and weights[1].isnan().all()


def test_the_table_names_kernels_that_are_there():
    loaded = native.load()
    for (_, _, isa), (name, _) in TABLE.items():
        by = AsAmx(loaded.using("plain")) if isa == "amx" else loaded.using("plain")
        assert by.address(name) and by.address(f"replay_{name}")
    assert {kind for kind, *_ in TABLE} >= {DENSE}
