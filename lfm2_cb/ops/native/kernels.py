"""NativeKernels: the functions of the native library, called from Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from .build import NativeUnavailable
from .instruction_sets import ISAS, base_of

#: classes of arguments that go as they are
PLAIN = frozenset((int, float, bool, type(None)))


class NativeKernels:
    """The library's functions for one instruction set.

    library: a `ctypes.CDLL`, or what has functions as that has.
    isa: the instruction set. supported: all that this processor and the library have, but for those in `without`,
    best last. prebuilt: whether the library came with the wheel.
    recorders: by thread, what is told of each of its calls, of any instance, before the kernel runs: the kernels, the
    name, the arguments, and those as the kernel gets them. Where it returns True the kernel is not run.
    """

    recorders: dict[int, Callable[[NativeKernels, str, tuple, list], bool]] = {}

    def __init__(
        self, library: Any, isa: str | None = None, without: Collection[str] = (), prebuilt: bool = False
    ) -> None:
        self._library, self._without, self.prebuilt = library, without, prebuilt
        built = [name for name in ISAS if name not in without and hasattr(library, f"supported_{name}")]
        self.supported = tuple(name for name in built if getattr(library, f"supported_{name}")())
        self.isa = isa or self.supported[-1]
        if self.isa not in self.supported:
            raise NativeUnavailable(f"this processor has no {self.isa}, only {', '.join(self.supported)}")
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}
        self._addresses: dict[str, int] = {}

    def using(self, isa: str) -> NativeKernels:
        """The same library, by another instruction set. Raises: NativeUnavailable."""
        return NativeKernels(self._library, isa, self._without, self.prebuilt)

    def without(self, isa: str) -> NativeKernels:
        """The same library, by the best of the other instruction sets."""
        return NativeKernels(self._library, None, (*self._without, isa), self.prebuilt)

    def call(self, name: str, *args: torch.Tensor | int | float | None) -> None:
        """Run a kernel: tensors go as pointers (they must be contiguous as the kernel says), None as a null pointer,
        ints as int64_t, floats as double; torch's number of threads goes last."""
        function = self._functions.get(name)
        if function is None:  # a kernel's parameters do not change their kinds from call to call
            function = self._functions[name] = self._find(name)
            function.restype, function.argtypes = None, [*map(_c_type, args), ctypes.c_int64]
        # (`isinstance` asks torch's metaclass, which takes longer than the rest.)
        pointers = [a if a.__class__ in PLAIN else a.data_ptr() for a in args]  # type: ignore[union-attr]
        pointers.append(torch.get_num_threads())
        recorder = self.recorders.get(threading.get_ident()) if self.recorders else None
        if recorder is not None and recorder(self, name, args, pointers):
            return
        function(*pointers)

    def address(self, name: str) -> int:
        """Of a function of the library for this instruction set; 0: it has none of that name."""
        address = self._addresses.get(name)
        if address is None:
            try:
                address = ctypes.cast(self._find(name), ctypes.c_void_p).value or 0
            except AttributeError:
                address = 0
            self._addresses[name] = address
        return address

    def _find(self, name: str) -> ctypes._NamedFuncPointer:
        for isa in reversed(list(ISAS)[: list(ISAS).index(self.isa) + 1]):  # an addition leaves the rest to its base
            if base_of(isa) == base_of(self.isa) and hasattr(self._library, f"{name}_{isa}"):
                return getattr(self._library, f"{name}_{isa}")
        raise AttributeError(f"the native library has no {name}")


def _c_type(value: torch.Tensor | int | float | None) -> type:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(value, float) else ctypes.c_int64
