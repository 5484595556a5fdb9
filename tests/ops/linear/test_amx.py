"""The kernels for the matrix units (AMX), emulated where the processor has none: so their logic is tested anywhere.

And which instruction set is taken where the units are there, are not, or are wrong.
"""

import ctypes
import random
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from lfm2_cb.ops import pointwise
from lfm2_cb.ops.kernel_set import KernelSet, mlp
from lfm2_cb.ops.linear import dense
from lfm2_cb.ops.linear.dense import (
    IN_PLACE,
    IN_PLACE_ROWS,
    PackedLinear,
    in_place_matrix_linear,
    in_place_matrix_swiglu,
    matrix_linear,
    packed_matrix_linear,
    packed_matrix_swiglu,
)
from lfm2_cb.ops.linear.int8 import (
    Int8Weights,
    matrix_linear_int8,
    matrix_mlp_int8,
    matrix_swiglu_int8,
    native_linear_int8,
)
from lfm2_cb.ops.linear.quantized import QuantizedLinear
from lfm2_cb.ops.linear.table import DENSE, products
from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import EMULATED, EMULATORS, ISAS, ONCE
from lfm2_cb.ops.native.self_check import addition_is_right

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
    """The library by each instruction set that has these kernels."""
    loaded = native.load()
    if request.param not in loaded.supported:
        pytest.skip(f"this processor has no {request.param}")
    torch.manual_seed(0)
    return loaded.using(request.param)


# bf16


@pytest.fixture(params=[in_place_matrix_linear, packed_matrix_linear], ids=["in place", "packed"])
def product(request):
    return request.param


@pytest.mark.parametrize("seed", range(30))
def test_bf16_is_near_float64(seed, kernels, product):
    case = Case(seed)
    out = product(kernels, *case.args)
    assert out.dtype == torch.bfloat16 and ((out.double() - case.answer).abs() <= case.bound).all()


def test_every_number_of_rows(kernels, product):
    for rows in range(1, 71):
        case = Case(rows, rows=rows, width=70)
        assert ((product(kernels, *case.args).double() - case.answer).abs() <= case.bound).all(), rows


def test_rows_beyond_what_the_cache_holds(kernels, product):
    case = Case(1, rows=300, width=4640)  # which both take in chunks
    assert ((product(kernels, *case.args).double() - case.answer).abs() <= case.bound).all()


@pytest.mark.parametrize("rows", [40, 203])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_bf16_row_is_the_same_to_the_bit_whoever_is_beside_it(width, seed, rows, kernels, product):
    case = Case(seed, rows=rows, width=width)
    together = product(kernels, *case.args)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        torch.set_num_threads(rng.choice([1, 2, 5]))
        part = slice(begin, begin + rng.choice([1, 5, 13, 16, 17, 40]))
        assert torch.equal(product(kernels, case.x[part], *case.args[1:]), together[part])
        begin = part.stop


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_residual_is_added_as_apart(width, seed, kernels, product):
    case = Case(seed, width=width)
    apart = product(kernels, *case.args)
    residual = torch.randn(apart.shape).mul_(apart.abs().amax()).bfloat16()
    assert torch.equal(product(kernels, *case.args, residual), pointwise.add(apart, residual, kernels))


# bf16, gates and values


@pytest.mark.parametrize("swiglu", [in_place_matrix_swiglu, packed_matrix_swiglu], ids=["in place", "packed"])
@pytest.mark.parametrize("seed", range(30))
def test_swiglu_of_a_product_is_near_float64(seed, kernels, swiglu):
    case = Case(seed)
    case.weight = case.weight.repeat(2, 1).roll(1, 1).contiguous()
    case.weight[: len(case.weight) // 2] *= 0.1
    gates, values = (case.x.double() @ case.weight.double().T).chunk(2, 1)
    gate_error, value_error = (2e-6 * (case.x.double().abs() @ case.weight.double().abs().T)).chunk(2, 1)
    gated = torch.nn.functional.silu(gates)
    answer = gated * values
    in_fp32 = 1.1 * gate_error * (values.abs() + value_error) + gated.abs() * value_error
    out = swiglu(kernels, case.x, case.weight)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - answer).abs() <= in_fp32 + answer.abs() * 2**-8 + 1e-30).all()


@pytest.mark.parametrize("rows", [40, 203])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [None, 4608])  # any; in chunks
def test_a_row_of_swiglu_is_the_same_to_the_bit_whoever_is_beside_it(width, seed, rows, kernels):
    case = Case(seed, rows=rows, width=width)
    case.weight = case.weight.repeat(2, 1)
    together = in_place_matrix_swiglu(kernels, case.x, case.weight)
    rng, begin = random.Random(seed), 0
    while begin < rows:
        torch.set_num_threads(rng.choice([1, 2, 5]))
        part = slice(begin, begin + rng.choice([1, 5, 13, 16, 17, 40]))
        for swiglu in (in_place_matrix_swiglu, packed_matrix_swiglu):
            assert torch.equal(swiglu(kernels, case.x[part], case.weight), together[part])
        begin = part.stop


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(bad, kernels, product):
    case = Case(5, rows=20, width=33)
    case.x[7, -1] = bad
    out = product(kernels, *case.args)
    assert not out[7].isfinite().any()
    assert out[:7].isfinite().all() and out[8:].isfinite().all()


@pytest.mark.parametrize(("rows", "width"), [(20, 33), (300, 4641)])  # at once; in chunks
def test_bad_weights_stay_in_their_output(rows, width, kernels, product):
    """What lies behind a row of weights, in memory, is the next one: it must not be read as inputs beyond the last."""
    weight = torch.randn(40, width).to(torch.bfloat16)
    weight[3, 0] = weight[9] = float("nan")
    bad = weight.isnan().any(1)
    out = product(kernels, torch.randn(rows, width).to(torch.bfloat16), weight)
    assert out[:, bad].isnan().all() and out[:, ~bad].isfinite().all()


def test_the_emulation_is_the_same_for_every_instruction_set(product):
    loaded = native.load()
    for seed in range(6):
        case = Case(seed)
        first, *others = [product(loaded.using(isa), *case.args) for isa in EMULATORS if isa in loaded.supported]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("width", [None, 2048, 4608])  # any; rows a whole way of the cache apart; in chunks
@pytest.mark.parametrize("seed", range(4))
def test_both_products_give_the_same_bits(seed, width, kernels):
    case = Case(seed, width=width)
    assert torch.equal(in_place_matrix_linear(kernels, *case.args), packed_matrix_linear(kernels, *case.args))


def test_weights_are_multiplied_in_place_while_the_inputs_fit_the_cache(kernels, monkeypatch):
    called = []
    monkeypatch.setitem(NativeKernels.recorders, threading.get_ident(), lambda _, name, *others: called.append(name))
    weight = torch.ones(3, 4096, dtype=torch.bfloat16)
    for rows, width in ((IN_PLACE // 2048, 1024), (IN_PLACE // 2048 + 1, 1024), (IN_PLACE_ROWS, 4096)):
        x = torch.ones(rows, width, dtype=torch.bfloat16)
        assert (matrix_linear(kernels, x, weight[:, :width].contiguous()) == width).all()
    assert called == ["amx_in_place_linear_bf16", "amx_packed_linear_bf16", "amx_in_place_linear_bf16"]


def test_more_threads_than_panels_share_the_rows(kernels, product):
    case = Case(2, rows=300)
    case.args = case.x, case.weight[:40], None
    torch.set_num_threads(1)
    alone = product(kernels, *case.args)
    torch.set_num_threads(5)
    assert torch.equal(product(kernels, *case.args), alone)


# int8


@pytest.mark.parametrize("seed", range(30))
def test_int8_is_the_other_kernels_to_the_bit(seed, kernels):
    case = Int8Case(seed)
    apart = native_linear_int8(kernels, *case.args)
    assert torch.equal(matrix_linear_int8(kernels, *case.args), apart)
    residual = torch.randn(apart.shape).mul_(apart.abs().amax()).to(apart.dtype)
    for product in (native_linear_int8, matrix_linear_int8):
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
    out = matrix_swiglu_int8(kernels, x, weights)
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
    out = matrix_mlp_int8(kernels, x, weights13, weights2)
    assert out.dtype == x.dtype and torch.equal(out.nan_to_num(7.0), apart.nan_to_num(7.0))


def test_the_largest_values_do_not_overflow(kernels):
    for sign in (1, -1):
        weights = Int8Weights.quantize(torch.full((3, 4608), float(sign)))
        x = torch.full((17, 4608), 7.5)
        out = matrix_linear_int8(kernels, x, weights)
        expected = x @ weights.dequantize(4608, torch.float32).T
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_an_int8_row_is_the_same_to_the_bit_whoever_is_beside_it(seed, kernels):
    case = Int8Case(seed, rows=130)
    together = matrix_linear_int8(kernels, *case.args)
    for threads, begin, end in ((1, 0, 14), (2, 14, 47), (5, 47, 130)):
        torch.set_num_threads(threads)
        assert torch.equal(matrix_linear_int8(kernels, case.x[begin:end], *case.args[1:]), together[begin:end])


def test_a_bad_int8_row_stays_bad_and_alone(kernels):
    case = Int8Case(3, rows=20)
    case.x[7, -1] = float("nan")
    out = matrix_linear_int8(kernels, *case.args)
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
    by_emulation = matrix_linear_int8(emulated, *case.args)
    assert torch.equal(matrix_linear_int8(instructions, *case.args), by_emulation)


# What is taken where


class AsAmx(NativeKernels):
    """A processor with matrix units, by the emulation: its functions are those of "plain"."""

    def __init__(self):
        loaded = native.load()
        super().__init__(loaded._library, "plain")
        self.isa, self.called = "amx", []

    def call(self, name, *args):
        self.called.append(name)
        super().call(name, *args)

    def without(self, isa):
        return native.load().using("plain")  # others fuse products with sums, which changes last bits

    def _find(self, name):
        return getattr(self._library, f"{name}_plain")


@pytest.fixture
def amx():
    return AsAmx()


def test_a_layer_takes_the_units_for_many_rows(amx, monkeypatch):
    layer, kernels, some = PackedLinear(70, 33).to(torch.bfloat16), KernelSet(amx), 40
    few = int(products(DENSE, torch.bfloat16, "amx")[0][0])
    monkeypatch.setattr(dense, "IN_PLACE", some * 70 * 2)
    monkeypatch.setattr(dense, "IN_PLACE_ROWS", 0)
    kernels_by_rows = {
        few: "few_rows_linear_bf16",
        few + 1: "amx_in_place_linear_bf16",
        some + 1: "amx_packed_linear_bf16",
    }
    with torch.no_grad():
        for rows, kernel in kernels_by_rows.items():
            out = kernels.linear(layer, x := torch.randn(rows, 70).to(torch.bfloat16))
            assert amx.called.pop() == kernel
            torch.testing.assert_close(out.float(), (x @ layer.weight.T + layer.bias).float(), rtol=2e-2, atol=2e-2)
        kernels.linear(layer.float(), torch.randn(few + 20, 70))
        assert amx.called == ["many_rows_linear_f32"]


def test_gates_and_values_are_not_stored_for_many_rows(amx, monkeypatch):
    layer, kernels, some = PackedLinear(70, 34, bias=False).to(torch.bfloat16), KernelSet(amx), 40
    monkeypatch.setattr(dense, "IN_PLACE", some * 70 * 2)
    monkeypatch.setattr(dense, "IN_PLACE_ROWS", 0)
    fused = {7: "amx_in_place_swiglu_bf16", some + 1: "amx_packed_swiglu_bf16"}
    with torch.no_grad():
        for rows, kernel in fused.items():
            out = kernels.linear_swiglu(layer, x := torch.randn(rows, 70).to(torch.bfloat16))
            assert amx.called == [kernel]
            amx.called.clear()
            torch.testing.assert_close(out, pointwise.swiglu(x @ layer.weight.T), rtol=2e-2, atol=2e-2)
        kernels.linear_swiglu(layer, torch.randn(6, 70).to(torch.bfloat16))
        assert amx.called == ["few_rows_linear_bf16", "swiglu"]
        amx.called.clear()
        layer.register_forward_hook(lambda *_: None)
        kernels.linear_swiglu(layer, torch.randn(40, 70).to(torch.bfloat16))
        assert amx.called == ["swiglu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_gates_and_values_are_not_stored_for_many_rows(amx, dtype):
    kernels = KernelSet(amx)

    def called(outputs, rows, bias=False, needs_gradients=False):
        layer = QuantizedLinear(70, outputs, bias=bias, bits=8)
        layer.put(layer.quantize(torch.randn(outputs, 70)))
        amx.called.clear()
        kernels.linear_swiglu(layer, torch.randn(rows, 70).to(dtype).requires_grad_(needs_gradients))
        return amx.called

    assert called(64, 9) == called(64, 300) == ["amx_swiglu_int8"]
    assert called(64, 8) == ["linear_int8", "swiglu"]
    assert called(48, 40) == ["amx_linear_int8", "swiglu"]  # gates end within a panel
    assert called(64, 40, bias=True) == ["amx_linear_int8", "swiglu"]
    assert called(64, 40, needs_gradients=True) == ["swiglu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_gated_results_are_not_stored_for_many_rows(amx, dtype):
    kernels = KernelSet(amx)

    def called(rows, bits=8, bias=False, hook=False, gated=32):
        w13, w2 = QuantizedLinear(70, 2 * gated, False, bits=8), QuantizedLinear(gated, 20, bias, bits)
        for layer in (w13, w2):
            layer.put(layer.quantize(torch.randn(layer.out_features, layer.in_features)))
        if bias:
            torch.nn.init.zeros_(w2.bias)
        if hook:
            w13.register_forward_hook(lambda *_: None)
        x = torch.randn(rows, 70).to(dtype)
        with torch.no_grad():
            amx.called.clear()
            out = mlp(kernels, w13, w2, x)
            names = list(amx.called)
            assert torch.equal(out, kernels.linear(w2, kernels.linear_swiglu(w13, x)))
            residual = torch.randn_like(out)
            assert torch.equal(mlp(kernels, w13, w2, x, residual), kernels.add(out, residual))
        return names

    assert called(33) == called(300) == ["amx_mlp_int8"]
    assert called(32) == ["amx_swiglu_int8", "amx_linear_int8"]
    assert called(8) == ["linear_int8", "swiglu", "linear_int8"]
    assert called(40, bits=4)[0] == "amx_swiglu_int8"
    assert called(40, bias=True) == ["amx_swiglu_int8", "amx_linear_int8"]
    assert "amx_mlp_int8" not in called(40, hook=True) + called(40, gated=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_layer_takes_the_units_for_many_rows(amx, dtype):
    layer, kernels = QuantizedLinear(70, 33, bias=False, bits=8), KernelSet(amx)
    layer.put(layer.quantize(torch.randn(33, 70)))
    for rows, kernel in ((8, "linear_int8"), (9, "amx_linear_int8"), (40, "amx_linear_int8")):
        kernels.linear(layer, torch.randn(rows, 70).to(dtype))
        assert amx.called.pop() == kernel


class Library:
    """Stands for the built one on a processor that has the instruction sets given."""

    def __init__(self, *isas):
        for isa in isas:
            setattr(self, f"supported_{isa}", lambda: 1)


@pytest.fixture
def fresh():
    native._load_once.cache_clear()
    yield
    native._load_once.cache_clear()


ALL = ("plain", "avx2", "avx512", "amx")


@pytest.mark.skipif("amx" not in ISAS, reason="not x86")
def test_wrong_results_go_back_to_the_next_instruction_set_with_one_warning(monkeypatch, fresh):
    monkeypatch.setattr(native, "build_library", lambda: "library")
    monkeypatch.setattr(native.ctypes, "CDLL", lambda _: Library(*ALL))
    warnings = []
    monkeypatch.setattr(native.logger, "warning", lambda message, *args: warnings.append(message % args))
    monkeypatch.setattr(native, "addition_is_right", lambda kernels: True)
    assert native.load().isa == "amx" and not warnings
    native._load_once.cache_clear()
    monkeypatch.setattr(native, "addition_is_right", lambda kernels: False)
    assert native.load().isa == native.load().isa == "avx512"
    assert len(warnings) == 1 and "amx" in warnings[0] and "avx512" in warnings[0]
    assert native.load().using("avx2").supported == ALL[:-1]
    with pytest.raises(native.NativeUnavailable, match="amx"):
        native.load().using("amx")


def test_the_check_sees_what_is_wrong(monkeypatch):
    assert addition_is_right(AsAmx())
    bf16 = {"amx_in_place_linear_bf16": 4, "amx_packed_linear_bf16": 4}
    int8 = {"amx_linear_int8": 9, "amx_swiglu_int8": 7, "amx_mlp_int8": 11}
    for kernel, out in {**bf16, **int8}.items():

        class Wrong(AsAmx):
            def call(self, name, *args, kernel=kernel, out=out):
                super().call(name, *args)
                if name == kernel:
                    args[out][-1, -1] += 0.05 * args[out].abs().max()

        assert not addition_is_right(Wrong())

    class Silent(AsAmx):
        def call(self, name, *args):
            if not name.startswith("amx"):
                super().call(name, *args)

    assert not addition_is_right(Silent())


@pytest.mark.skipif("amx" not in ISAS, reason="not x86")
def test_what_adds_to_an_addition_goes_back_step_by_step(monkeypatch, fresh):
    monkeypatch.setattr(native, "build_library", lambda: "library")
    monkeypatch.setattr(native.ctypes, "CDLL", lambda _: Library("plain", "avx2", "avxvnni", "avx512", "vnni", "amx"))
    monkeypatch.setattr(native, "addition_is_right", lambda kernels: kernels.isa == "vnni")
    assert native.load().isa == "vnni"
    native._load_once.cache_clear()
    monkeypatch.setattr(native, "addition_is_right", lambda kernels: False)
    assert native.load().isa == "avx512"


@pytest.mark.parametrize("isa", ["vnni", "avxvnni"])
def test_the_check_sees_wrong_integers(isa):
    plain = native.load().using("plain")

    class AsVnni(NativeKernels):
        def __init__(self, error):
            super().__init__(plain._library, "plain")
            self.isa, self.error = isa, error

        def without(self, isa):
            assert isa == self.isa
            return plain

        def call(self, name, *args):
            plain.call(name, *args)
            if name != "linear_int8":
                return
            args[9][-1, -1] += self.error * args[9].abs().max()

    assert addition_is_right(AsVnni(0)) and not addition_is_right(AsVnni(0.05))


@pytest.mark.skipif("amx" not in ISAS, reason="not x86")
@pytest.mark.parametrize("flag", ["-mno-such-unit", "-Wa,--no-such-option"], ids=["compiler", "assembler"])
def test_an_old_compiler_builds_without_them(flag, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ISAS", {"plain": (), "amx": (flag,)})
    for name in ("arch", "core"):
        shutil.copytree(build.SOURCES / name, tmp_path / "csrc" / name)
    library = ctypes.CDLL(str(build.build_library(tmp_path / "csrc", tmp_path)))
    assert NativeKernels(library).supported == ("plain",)


@pytest.mark.skipif("amx" not in ISAS, reason="not x86")
def test_what_this_processor_has_not_compiles_too(tmp_path):
    """The library holds what the processor has; the rest is compiled here, and not run."""
    compiler = torch.utils.cpp_extension.get_cxx_compiler()
    commands = [
        [*build.compile_command(compiler, isa, source), "-O1", "-o", str(tmp_path / "x.o")]
        for isa in build._known_isas(compiler, tmp_path)
        if isa not in native.load().supported
        for source in build.sources_for(isa)
    ]
    for command in commands:
        build._run(command)
