"""Kernels by tiles, which the matrix units of AMX multiply or the vectors of Zen 4, emulated: so they are tested
on any processor, as the tables choose them."""

import ctypes

import pytest
import torch
from emulator import ArmKernels

from lfm2_cb.ops.native import NativeKernels, build
from lfm2_cb.ops.native import library as native
from lfm2_cb.ops.native.instruction_sets import ADDITIONS, EMULATORS, ONCE


class AsAmx(NativeKernels):
    """A processor with matrix units, by the emulation of another instruction set."""

    def __init__(self, kernels):
        super().__init__(kernels._library, kernels.isa)
        self._by, self.isa = kernels.isa, "amx"

    def _find(self, name):
        return getattr(self._library, f"{name}_{self._by}")


class AsZen4(NativeKernels):
    """A processor that multiplies pairs of bf16 at full rate, by an emulation of what it adds."""

    def __init__(self, emulation):
        super().__init__(native.load()._library, "plain")
        self.isa, self._emulation = "zen4", emulation

    def _find(self, name):
        try:
            return getattr(self._emulation, f"{name}_emulated")
        except AttributeError:
            return getattr(self._library, f"{name}_plain")

    def without(self, isa):
        return native.load().using("plain")


def build_zen4(folder, compiler):
    """The emulation, of all that is compiled for it."""
    flags = ["-O2", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-shared"]
    defines = ["-DEMULATED", "-DZEN4", "-DISA=emulated", "-I", str(build.SOURCES)]
    objects = []
    for name in (*ADDITIONS["zen4"][1], *ONCE):
        source = next(build.SOURCES.rglob(name))
        objects.append(str(folder / f"{name}.o"))
        build._run([compiler, *flags[:-1], *defines, "-c", str(source), "-o", objects[-1]])
    build._run([compiler, *flags, *objects, "-o", str(folder / "zen4")])
    return ctypes.CDLL(str(folder / "zen4"))


def by_instruction_set(isa):
    """The library by one that this processor has; skips the test where it has not."""
    loaded = native.load()
    if isa not in loaded.supported:
        pytest.skip(f"this processor has no {isa}")
    torch.manual_seed(0)
    return loaded.using(isa)


def with_emulation(kernels):
    """By an instruction set, and by its emulation of matrix units where it has one."""
    emulates = kernels.isa in EMULATORS and not isinstance(kernels, ArmKernels)
    return [kernels, AsAmx(kernels)] if emulates else [kernels]
