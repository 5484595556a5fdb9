"""Native calls noted with their arguments, to be replayed from C together (`csrc/replay.cpp`)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from .kernels import NativeKernels


class CallList:
    """Calls in their order. Whoever notes one keeps the memory that it is given in place until it is made."""

    def __init__(self) -> None:
        self._kernels: list[int] = []  # of each call the kernel's address, and where its arguments begin
        self._args: list[int] = []
        self._arrays: tuple[np.ndarray, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._kernels) // 2

    def add(self, native: NativeKernels, name: str, values: Sequence[int | float | None]) -> bool:
        """Note a call, by its arguments as the kernel gets them.

        Returns: whether it can be made from C; if not, it was not noted.
        """
        if not (kernel := native.address(f"replay_{name}")):
            return False
        self._kernels += kernel, len(self._args)
        self._args += [value if value.__class__ is int else _bits(value) for value in values]  # type: ignore[misc]
        self._arrays = None
        return True

    def run(self, native: NativeKernels) -> None:
        """Make the calls, as often as one likes."""
        if self._arrays is None:
            args = np.array(self._args, dtype=np.int64)
            calls = np.array(self._kernels, dtype=np.int64).reshape(-1, 2)
            calls[:, 1] = args.ctypes.data + 8 * calls[:, 1]
            self._arrays = args, torch.from_numpy(calls)
        native.call("replay", self._arrays[1], len(self))


def _bits(value: int | float | None) -> int:
    """An argument as the 64 bits that the kernel finds."""
    return struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value or 0)
