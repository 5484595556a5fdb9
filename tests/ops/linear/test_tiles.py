"""The kernels by tiles, emulated where the processor has no units for them: so their logic is tested anywhere."""

import ctypes
import random
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from emulated_units import by_instruction_set

from lfm2_cb.ops import pointwise
from lfm2_cb.ops.linear.dense import (
    IN_PLACE,
    IN_PLACE_ROWS,
    few_rows_linear,
    in_place_tile_linear,
    in_place_tile_swiglu,
    packed_tile_linear,
    packed_tile_swiglu,
    tile_linear,
)
from lfm2_cb.ops.linear.int8 import (
    Int8Weights,
    native_linear_int8,
    tile_linear_int8,
    tile_mlp_int8,
    tile_swiglu_int8,
)
from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import EMULATED, EMULATORS, ISAS, ONCE

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)
ROWS = [1, 2, 13, 15, 16, 17, 31, 32, 33, 48, 65, 130, 300]
WIDTHS = [1, 2, 31, 32, 33, 63, 64, 100, 512, 1023, 1024, 1025, 2048, 2080]
OUTPUTS = [1, 3, 15, 16, 17, 31, 32, 33, 64, 100, 257]


class Case:
    """A product in bf16 of a random shape, its answer in float64, and how far sums in fp32 may be from that."""

    def __init__(self, seed: int, rows: int | None = None, width: int | None = None) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows, width, outputs = rows or rng.choice(ROWS), width or rng.choice(WIDTHS), rng.choice(OUTPUTS)
        self.x = (torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 3)).to(torch.bfloat16)
        self.weight = torch.randn(outputs, width, generator=generator).to(torch.bfloat16)
        self.bias = torch.randn(outputs, generator=generator).to(torch.bfloat16) if rng.random() < 0.5 else None
        self.args = self.x, self.weight, self.bias
        bias = 0 if self.bias is None else self.bias.double()
        self.answer = self.x.double() @ self.weight.double().T + bias
        in_fp32 = 2e-6 * (self.x.double().abs() @ self.weight.double().abs().T + self.answer.abs())
        self.bound = in_fp32 + self.answer.abs() * 2**-8


class Int8Case:
    """A product with 8-bit weights of a random shape."""

    def __init__(self, seed: int, rows: int | None = None) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows, width, outputs = rows or rng.choice(ROWS), rng.choice([*WIDTHS, 4608]), rng.choice(OUTPUTS)
        dtype = rng.choice([torch.float32, torch.bfloat16])
        self.x = (torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 3)).to(dtype)
        self.bias = torch.randn(outputs, generator=generator).to(dtype) if rng.random() < 0.5 else None
        self.args = self.x, Int8Weights.quantize(torch.randn(outputs, width, generator=generator)), self.bias


@pytest.fixture(params=[*EMULATORS, "amx"])
def kernels(request):
    """The library by each instruction set that has kernels in 8 bits by tiles."""
    return by_instruction_set(request.param)


# bf16


@pytest.fixture(params=[in_place_tile_linear, packed_tile_linear], ids=["in place", "packed"])
def product(request):
    return request.param


@pytest.mark.parametrize("seed", range(30))
def test_bf16_is_near_float64(seed, bf16_kernels, product):
    case = Case(seed)
    out = product(bf16_kernels, *case.args)
    assert out.dtype == torch.bfloat16 and ((out.double() - case.answer).abs() <= case.bound).all()


def test_every_number_of_rows(bf16_kernels, product):
    for rows in range(1, 71):
        case = Case(rows, rows=rows, width=70)
        assert ((product(bf16_kernels, *case.args).double() - case.answer).abs() <= case.bound).all(), rows


def test_rows_beyond_what_the_cache_holds(bf16_kernels, product):
    case = Case(1, rows=300, width=4640)  # which both take in chunks
    assert ((product(bf16_kernels, *case.args).double() - case.answer).abs() <= case.bound).all()


@pytest.mark.parametrize("rows", [40, 203])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_bf16_row_is_the_same_to_the_bit_whoever_is_beside_it(width, seed, rows, bf16_kernels, product):
    case = Case(seed, rows=rows, width=width)
    together = product(bf16_kernels, *case.args)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        torch.set_num_threads(rng.choice([1, 2, 5]))
        part = slice(begin, begin + rng.choice([1, 5, 13, 16, 17, 40]))
        assert torch.equal(product(bf16_kernels, case.x[part], *case.args[1:]), together[part])
        begin = part.stop


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_residual_is_added_as_apart(width, seed, bf16_kernels, product):
    case = Case(seed, width=width)
    apart = product(bf16_kernels, *case.args)
    residual = torch.randn(apart.shape).mul_(apart.abs().amax()).bfloat16()
    assert torch.equal(product(bf16_kernels, *case.args, residual), pointwise.add(apart, residual, bf16_kernels))


def test_few_rows_are_near_float64(bf16_kernels):
    for seed in range(60):
        case = Case(seed, rows=1 + seed % 20)
        out = few_rows_linear(bf16_kernels, *case.args)
        assert ((out.double() - case.answer).abs() <= case.bound).all()


# bf16, gates and values


@pytest.mark.parametrize("swiglu", [in_place_tile_swiglu, packed_tile_swiglu], ids=["in place", "packed"])
@pytest.mark.parametrize("seed", range(30))
def test_swiglu_of_a_product_is_near_float64(seed, bf16_kernels, swiglu):
    case = Case(seed)
    case.weight = case.weight.repeat(2, 1).roll(1, 1).contiguous()
    case.weight[: len(case.weight) // 2] *= 0.1
    gates, values = (case.x.double() @ case.weight.double().T).chunk(2, 1)
    gate_error, value_error = (2e-6 * (case.x.double().abs() @ case.weight.double().abs().T)).chunk(2, 1)
    gated = torch.nn.functional.silu(gates)
    answer = gated * values
    in_fp32 = 1.1 * gate_error * (values.abs() + value_error) + gated.abs() * value_error
    out = swiglu(bf16_kernels, case.x, case.weight)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - answer).abs() <= in_fp32 + answer.abs() * 2**-8 + 1e-30).all()


@pytest.mark.parametrize("rows", [40, 203])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_row_of_swiglu_is_the_same_to_the_bit_whoever_is_beside_it(width, seed, rows, bf16_kernels):
    case = Case(seed, rows=rows, width=width)
    case.weight = case.weight.repeat(2, 1)
    together = in_place_tile_swiglu(bf16_kernels, case.x, case.weight)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        torch.set_num_threads(rng.choice([1, 2, 5]))
        part = slice(begin, begin + rng.choice([1, 5, 13, 16, 17, 40]))
        for swiglu in (in_place_tile_swiglu, packed_tile_swiglu):
            assert torch.equal(swiglu(bf16_kernels, case.x[part], case.weight), together[part])
        begin = part.stop


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(bad, bf16_kernels, product):
    case = Case(5, rows=20, width=33)
    case.x[7, -1] = bad
    out = product(bf16_kernels, *case.args)
    assert not out[7].isfinite().any()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()


@pytest.mark.parametrize(("rows", "width"), [(20, 33), (300, 4641)])  # at once; in chunks
def test_bad_weights_stay_in_their_output(rows, width, bf16_kernels, product):
    """What lies behind a row of weights, in memory, is the next one: it must not be read as inputs beyond the last."""
    weight = torch.randn(40, width).to(torch.bfloat16)
    weight[3, 0] = weight[9] = float("nan")
    bad = weight.isnan().any(1)
    out = product(bf16_kernels, torch.randn(rows, width).to(torch.bfloat16), weight)
    assert out[:, bad].isnan().all() and out[:, ~bad].isfinite().all()


def test_the_emulation_is_the_same_for_every_instruction_set(product):
    loaded = native.load()
    for seed in range(6):
        case = Case(seed)
        first, *others = [product(loaded.using(isa), *case.args) for isa in EMULATORS if isa in loaded.supported]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("width", [None, 2048, 4608])  # any; rows a whole way of the cache apart; in chunks
@pytest.mark.parametrize("seed", range(4))
def test_both_products_give_the_same_bits(seed, width, bf16_kernels):
    case = Case(seed, width=width)
    assert torch.equal(in_place_tile_linear(bf16_kernels, *case.args), packed_tile_linear(bf16_kernels, *case.args))


def test_weights_are_multiplied_in_place_while_the_inputs_fit_the_cache(bf16_kernels, monkeypatch):
    called = []
    monkeypatch.setitem(NativeKernels.recorders, threading.get_ident(), lambda _, name, *others: called.append(name))
    weight = torch.ones(3, 4096, dtype=torch.bfloat16)
    for rows, width in ((IN_PLACE // 2048, 1024), (IN_PLACE // 2048 + 1, 1024), (IN_PLACE_ROWS, 4096)):
        x = torch.ones(rows, width, dtype=torch.bfloat16)
        assert (tile_linear(bf16_kernels, x, weight[:, :width].contiguous()) == width).all()
    assert called == ["tile_in_place_linear_bf16", "tile_packed_linear_bf16", "tile_in_place_linear_bf16"]


def test_more_threads_than_panels_share_the_rows(bf16_kernels, product):
    case = Case(2, rows=300)
    case.args = case.x, case.weight[:40], None
    torch.set_num_threads(1)
    alone = product(bf16_kernels, *case.args)
    torch.set_num_threads(5)
    assert torch.equal(product(bf16_kernels, *case.args), alone)


# int8


@pytest.mark.parametrize("seed", range(30))
def test_int8_is_the_other_kernels_to_the_bit(seed, kernels):
    case = Int8Case(seed)
    apart = native_linear_int8(kernels, *case.args)
    assert torch.equal(tile_linear_int8(kernels, *case.args), apart)
    residual = torch.randn(apart.shape).mul_(apart.abs().amax()).to(apart.dtype)
    for product in (native_linear_int8, tile_linear_int8):
        assert torch.equal(product(kernels, *case.args, residual), pointwise.add(apart, residual, kernels))


@pytest.mark.parametrize("seed", range(20))
def test_int8_gates_and_values_are_as_if_they_were_stored(seed, kernels):
    """By other kernels, for few rows too; of inputs in one group, in several, and in more than are held at once."""
    torch.set_num_threads(1 + seed % 3)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = rng.choice(ROWS), rng.choice([*WIDTHS, 576, 1100, 1600, 4608])
    weights = Int8Weights.quantize(torch.randn(rng.choice([32, 64, 96, 256]), width, generator=generator))
    x = torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 1)
    x[rng.randrange(rows), rng.randrange(width)] = rng.choice([0.0, 1e4, float("nan")])
    x = x.to(rng.choice([torch.float32, torch.bfloat16]))
    out = tile_swiglu_int8(kernels, x, weights)
    apart = pointwise.swiglu(native_linear_int8(kernels, x, weights), kernels)
    assert out.dtype == x.dtype and torch.equal(out.nan_to_num(7.0), apart.nan_to_num(7.0))


@pytest.mark.parametrize("seed", range(20))
def test_int8_products_with_gates_between_are_as_if_these_were_stored(seed, kernels):
    """By other kernels: of gated results that are one group of inputs, some and part of one; of rows that pass
    one block of weights and several; and however many threads share them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width, gated = rng.choice(ROWS), rng.choice([1, 64, 100, 513]), 16 * rng.choice([1, 3, 31, 32, 33, 70])
    weights13 = Int8Weights.quantize(torch.randn(2 * gated, width, generator=generator))
    weights2 = Int8Weights.quantize(torch.randn(rng.choice([1, 16, 37]), gated, generator=generator))
    x = torch.randn(rows, width, generator=generator) * 10 ** rng.uniform(-3, 1)
    x[rng.randrange(rows), rng.randrange(width)] = rng.choice([0.0, 1e4, float("nan")])
    x = x.to(rng.choice([torch.float32, torch.bfloat16]))
    stored = pointwise.swiglu(native_linear_int8(kernels, x, weights13), kernels)
    apart = native_linear_int8(kernels, stored, weights2)
    torch.set_num_threads(rng.choice([1, 2, 3, 5]))
    out = tile_mlp_int8(kernels, x, weights13, weights2)
    assert out.dtype == x.dtype and torch.equal(out.nan_to_num(7.0), apart.nan_to_num(7.0))


def test_the_largest_values_do_not_overflow(kernels):
    for sign in (1, -1):
        weights = Int8Weights.quantize(torch.full((3, 4608), float(sign)))
        x = torch.full((17, 4608), 7.5)
        out = tile_linear_int8(kernels, x, weights)
        expected = x @ weights.dequantize(4608, torch.float32).T
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_an_int8_row_is_the_same_to_the_bit_whoever_is_beside_it(seed, kernels):
    case = Int8Case(seed, rows=130)
    together = tile_linear_int8(kernels, *case.args)
    for threads, begin, end in ((1, 0, 14), (2, 14, 47), (5, 47, 130)):
        torch.set_num_threads(threads)
        assert torch.equal(tile_linear_int8(kernels, case.x[begin:end], *case.args[1:]), together[begin:end])


def test_a_bad_int8_row_stays_bad_and_alone(kernels):
    case = Int8Case(3, rows=20)
    case.x[7, -1] = float("nan")
    out = tile_linear_int8(kernels, *case.args)
    assert not out[7].isfinite().any()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()


# The instructions themselves


class Instructions(NativeKernels):
    """The kernels compiled for AMX, beside AVX2."""

    def __init__(self, library):
        super().__init__(native.load()._library, "avx2")
        self.with_amx = library

    def _find(self, name):
        return getattr(self.with_amx, f"{name}_amx")


@pytest.fixture(scope="module")
def instructions(tmp_path_factory):
    """Run by a handler of the signal that a processor without AMX raises at them."""
    supported = native.load().supported
    if sys.platform != "linux" or "amx" in supported or "avx2" not in supported:
        pytest.skip("not Linux, or no AVX2, or AMX is there")
    folder, compiler = tmp_path_factory.mktemp("amx"), torch.utils.cpp_extension.get_cxx_compiler()
    if "amx" not in build._known_isas(compiler, folder):
        pytest.skip("the compiler knows no AMX")
    flags = [*build.FLAGS, *ISAS["avx2"], "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DISA=amx"]
    flags += ["-I", str(build.SOURCES)]
    sources = [str(next(build.SOURCES.rglob(name))) for name in (*EMULATED["amx"], *ONCE)]
    build._run([compiler, *flags, "-shared", *sources, "-o", str(folder / "amx")])
    trap_source = Path(__file__).parent / "amx_trap.cpp"
    build._run([compiler, *flags, "-shared", str(trap_source), "-o", str(folder / "amx_trap")])
    trap = ctypes.CDLL(str(folder / "amx_trap"))
    trap.begin_trap()
    yield Instructions(ctypes.CDLL(str(folder / "amx")))
    assert trap.end_trap() > 0


@pytest.mark.parametrize("seed", range(12))
def test_the_instructions_do_what_the_emulation_does(seed, instructions, product):
    torch.set_num_threads(1 + seed % 3)
    emulated = native.load().using("avx2")
    case = Case(seed)
    assert torch.equal(product(instructions, *case.args), product(emulated, *case.args))
    case = Int8Case(seed)
    by_emulation = tile_linear_int8(emulated, *case.args)
    assert torch.equal(tile_linear_int8(instructions, *case.args), by_emulation)
