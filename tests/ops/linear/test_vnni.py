"""8-bit weights by VNNI, where this processor has none: its instruction under a handler of the signal it raises."""

import ctypes
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler

from lfm2_cb.ops.linear.int8 import Int8Weights
from lfm2_cb.ops.linear.quantized import native_linear
from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import ISAS, ONCE


class Instructions(NativeKernels):
    """What is compiled for AVX-VNNI, beside AVX2."""

    def __init__(self, library):
        super().__init__(native.load()._library, "avx2")
        self.with_vnni = library

    def _find(self, name):
        return getattr(self.with_vnni, f"{name}_avxvnni")


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    if sys.platform != "linux" or shutil.which(get_cxx_compiler()) is None:
        pytest.skip("not Linux, or no C++ compiler")
    supported = native.load().supported
    if "avx2" not in supported or "avxvnni" in supported:
        pytest.skip("no AVX2, or VNNI is there")
    folder, compiler = tmp_path_factory.mktemp("vnni"), get_cxx_compiler()
    if "avxvnni" not in build._known_isas(compiler, folder):
        pytest.skip("the compiler knows no VNNI")
    flags = [*build.FLAGS, *ISAS["avxvnni"], "-I", str(build.SOURCES), "-DISA=avxvnni", "-shared"]
    once = [str(next(build.SOURCES.rglob(name))) for name in ONCE]
    for source in (build.SOURCES / "linear" / "int8.cpp", Path(__file__).parent / "vnni_trap.cpp"):
        build._run([compiler, *flags, str(source), *once, "-o", str(folder / source.stem)])
    yield ctypes.CDLL(str(folder / "vnni_trap")), Instructions(ctypes.CDLL(str(folder / "int8")))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 40])
def test_the_instruction_gives_the_same_bits(rows, trap):
    library, kernels = trap
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(19, 1100, generator=generator), torch.randn(rows, 1100, generator=generator)
    weights = Int8Weights.quantize(weight)
    expected = native_linear(native.load().using("avx2"), x, weights)
    library.begin_trap()
    try:
        out = native_linear(kernels, x, weights)
    finally:
        trapped = library.end_trap()
    assert torch.equal(out, expected)
    assert trapped >= rows * 19 * (1100 // 32)  # 32 products each: so all were made by it
