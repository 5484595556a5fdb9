"""Which kernels are taken where the processor has units for tiles, has none, or has wrong ones."""

import ctypes
import shutil

import pytest
import torch
from emulated_units import AsZen4

from lfm2_cb.ops import pointwise
from lfm2_cb.ops.kernel_set import KernelSet, mlp
from lfm2_cb.ops.linear import dense
from lfm2_cb.ops.linear.dense import (
    IN_PLACE_ROWS,
    PackedLinear,
)
from lfm2_cb.ops.linear.quantized import QuantizedLinear
from lfm2_cb.ops.linear.table import DENSE, products
from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import ISAS
from lfm2_cb.ops.native.self_check import addition_is_right

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)


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
        few + 1: "tile_in_place_linear_bf16",
        some + 1: "tile_packed_linear_bf16",
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
    fused = {7: "tile_in_place_swiglu_bf16", some + 1: "tile_packed_swiglu_bf16"}
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

    assert called(64, 9) == called(64, 300) == ["tile_swiglu_int8"]
    assert called(64, 8) == ["linear_int8", "swiglu"]
    assert called(48, 40) == ["tile_linear_int8", "swiglu"]  # gates end within a panel
    assert called(64, 40, bias=True) == ["tile_linear_int8", "swiglu"]
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

    assert called(33) == called(300) == ["tile_mlp_int8"]
    assert called(32) == ["tile_swiglu_int8", "tile_linear_int8"]
    assert called(8) == ["linear_int8", "swiglu", "linear_int8"]
    assert called(40, bits=4)[0] == "tile_swiglu_int8"
    assert called(40, bias=True) == ["tile_swiglu_int8", "tile_linear_int8"]
    assert "tile_mlp_int8" not in called(40, hook=True) + called(40, gated=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_layer_takes_the_units_for_many_rows(amx, dtype):
    layer, kernels = QuantizedLinear(70, 33, bias=False, bits=8), KernelSet(amx)
    layer.put(layer.quantize(torch.randn(33, 70)))
    for rows, kernel in ((8, "linear_int8"), (9, "tile_linear_int8"), (40, "tile_linear_int8")):
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
    bf16 = {"tile_in_place_linear_bf16": 4, "tile_packed_linear_bf16": 4, "tile_adapted_linear_bf16": 3}
    int8 = {"tile_linear_int8": 9, "tile_swiglu_int8": 7, "tile_mlp_int8": 11}
    for kernel, out in {**bf16, **int8}.items():

        class Wrong(AsAmx):
            def call(self, name, *args, kernel=kernel, out=out):
                super().call(name, *args)
                if name == kernel:
                    args[out][-1, -1] += 0.05 * args[out].abs().max()

        assert not addition_is_right(Wrong())

    class Silent(AsAmx):
        def call(self, name, *args):
            if not name.startswith("tile_"):
                super().call(name, *args)

    assert not addition_is_right(Silent())


def test_the_check_sees_wrong_products_of_pairs(zen4_emulation):
    assert addition_is_right(AsZen4(zen4_emulation))
    outs = {"few_rows_linear_bf16": 4, "tile_in_place_linear_bf16": 4, "tile_packed_linear_bf16": 4}
    outs |= {"tile_in_place_swiglu_bf16": 2, "tile_packed_swiglu_bf16": 2, "tile_experts_bf16": 5}
    outs["tile_adapted_linear_bf16"] = 3
    for kernel, out in outs.items():

        class Wrong(AsZen4):
            def call(self, name, *args, kernel=kernel, out=out):
                super().call(name, *args)
                if name == kernel:
                    args[out][-1, -1] += 0.05 * args[out].abs().max()

        assert not addition_is_right(Wrong(zen4_emulation)), kernel


def test_pairs_take_tiles_for_many_rows(zen4_emulation):
    called, few = [], int(products(DENSE, torch.bfloat16, "zen4")[0][0])

    class Heard(AsZen4):
        def call(self, name, *args):
            called.append(name)
            super().call(name, *args)

    kernels = KernelSet(Heard(zen4_emulation))
    layer = PackedLinear(70, 34, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        for rows in (few, few + 1, IN_PLACE_ROWS, 8000):
            x = torch.randn(rows, 70).to(torch.bfloat16)
            product = (x @ layer.weight.T).float()
            torch.testing.assert_close(kernels.linear(layer, x).float(), product, rtol=2e-2, atol=2e-2)
            gated = pointwise.swiglu(product)
            torch.testing.assert_close(kernels.linear_swiglu(layer, x).float(), gated, rtol=2e-2, atol=2e-2)
    by_vectors = ["few_rows_linear_bf16"] * 2 + ["swiglu"]
    in_place = ["tile_in_place_linear_bf16", "tile_in_place_swiglu_bf16"]
    assert called == [*by_vectors, *in_place * 2, "tile_packed_linear_bf16", "tile_packed_swiglu_bf16"]


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
