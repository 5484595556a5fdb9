"""Kernels for matrix units (AMX), emulated: so they are tested on any processor, as the tables choose them."""

from emulator import ArmKernels

from lfm2_cb.ops.native import NativeKernels
from lfm2_cb.ops.native.instruction_sets import EMULATORS


class AsAmx(NativeKernels):
    """A processor with matrix units, by the emulation of another instruction set."""

    def __init__(self, kernels):
        super().__init__(kernels._library, kernels.isa)
        self._by, self.isa = kernels.isa, "amx"

    def _find(self, name):
        return getattr(self._library, f"{name}_{self._by}")


def with_emulation(kernels):
    """By an instruction set, and by its emulation of matrix units where it has one."""
    emulates = kernels.isa in EMULATORS and not isinstance(kernels, ArmKernels)
    return [kernels, AsAmx(kernels)] if emulates else [kernels]
