"""Choosing from `[rows, vocab]` logits by the native kernels (`csrc/sampling.cpp`), which sort nothing.

The torch references are in the engine's sampler and, for the warpers, stock's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .native import NativeKernels

#: most candidates that `top_candidates` finds a row, and the largest k it takes
MAX_CANDIDATES = 1024


def best_places(native: NativeKernels, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of the largest value of every row, int64 `[rows]`, and that value in fp32: NaN where any is.

    Args: x: `[rows, size]`, fp32 or bf16.
    """
    rows, size = x.shape
    places, best = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    native.call("best_places", x.contiguous(), places, best, rows, size, x.dtype == torch.bfloat16)
    return places, best


def top_candidates(
    native: NativeKernels, x: torch.Tensor, k: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of every row all that are among its k largest or tie with them, and maybe more; None: too many.

    Args: x: `[rows, size]` fp32; k: of each row, from 1 to `MAX_CANDIDATES`.
    Returns: values and places, `[rows, most of a row]`, by place; a row of fewer is filled up with -inf.
    """
    rows, room = len(x), min(x.shape[1], MAX_CANDIDATES)
    values = torch.empty(rows, room, dtype=torch.float32)
    places, counts = torch.empty(rows, room, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    native.call("top_candidates", x.contiguous(), torch.tensor(k), places, values, counts, *x.shape, room)
    found = counts.tolist()
    width = -(-max(found) // 16) * 16  # whole vectors: a row's sums then do not depend on the others' numbers
    return None if min(found) < 0 else (values[:, :width], places[:, :width])


def nucleus(native: NativeKernels, x: torch.Tensor, p: Sequence[float]) -> tuple[torch.Tensor, list[int]]:
    """x with -inf for all that stock's top-p leaves out, and the rows that are not done: those whose choice hangs on
    the rounding of stock's sums, or have nothing to choose from.

    Of equal logits at the line as many are left out as in stock (or one more or less, by rounding), but the first:
    stock's sort leaves to chance which.

    Args: x: `[rows, size]` fp32; p: of each row.
    """
    rows, size = x.shape
    out, done = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(rows, dtype=torch.int64)
    native.call("nucleus", x.contiguous(), torch.tensor(p, dtype=torch.float64), out, done, rows, size)
    return out, [i for i, is_done in enumerate(done.tolist()) if not is_done]


def draw_places(native: NativeKernels, x: torch.Tensor, uniform: Sequence[float]) -> torch.Tensor:
    """One place a row, int64 `[rows]`, drawn from softmax(x) by inversion; -1: nothing to choose from, or NaN.

    Args: x: `[rows, size]` fp32; uniform: of each row, in [0, 1).
    """
    places = torch.empty(len(x), dtype=torch.int64)
    native.call("draw", x.contiguous(), torch.tensor(uniform, dtype=torch.float64), places, *x.shape)
    return places
