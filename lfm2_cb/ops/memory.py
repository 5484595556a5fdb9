"""Memory for what is large and is read over and over: weights and caches."""

from __future__ import annotations

import contextlib
import ctypes
import math

import numpy as np
import torch

#: bytes of a huge page, and of the smallest region that is to have them
HUGE_PAGE, HUGE = 2 << 20, 4 << 20


def region(num_bytes: int) -> np.ndarray:
    """Zeros, uint8 `[num_bytes]`, aligned to 64 bytes, in this process's own memory.

    The system commits pages when they are first written to, and huge ones where it has them for the asking: numpy asks
    Linux for them from 4 MB on. (Measured on one core of a Xeon: the linears of a decode step of a 350M model in bf16
    take 63, 68 and 100 ms at 4, 16 and 64 rows from pages of 4 KB, and 46, 57 and 82 from huge ones; attention takes
    10 to 14 % less.) Such a region begins with one, as many small ones (64 adapters of 4 MB) would be half without:
    they are read 5 % more quickly.
    """
    alignment = 64 if num_bytes < HUGE else HUGE_PAGE
    memory = np.zeros(num_bytes + alignment, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, but on CPU in a `region` (`torch.zeros` writes to all of it): a budget of gigabytes then costs
    what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(region(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def return_free_memory() -> None:
    """Give what is free in the heap back to the system: glibc keeps what lies below something in use, and between what
    comes and goes while a model is loaded there is what stays (random-350m: 0.4 GB would be kept)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
