"""Choosing from `[rows, vocab]` logits by the native kernels (`csrc/sampling.cpp`), which sort nothing.

The torch references are in the engine's sampler and, for the warpers, stock's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .native import NativeKernels

#: most candidates that `top_candidates` finds a row, and the largest k it takes
MAX_CANDIDATES = 1024


@dataclass(frozen=True)
class TokenMasks:
    """Which places some rows of `[rows, size]` may take.

    bits: int32 `[masks, ⌈size / 32⌉]`, on the CPU: place i is bit i % 32 of word i // 32. Bits from `size` on mean
        nothing.
    mask_of: of each row its place in `bits`, or -1: it may take any.
    """

    bits: torch.Tensor
    mask_of: Sequence[int]

    @staticmethod
    def words(size: int) -> int:
        return (size + 31) // 32


def masked(x: torch.Tensor, bits: torch.Tensor, native: NativeKernels | None = None) -> torch.Tensor:
    """x in fp32, with -inf where a row may not take a place.

    Args:
        x: `[rows, size]`, fp32 or bf16.
        bits: of each row, `[rows, ⌈size / 32⌉]`; see `TokenMasks`.
        native: the kernels to run with; None: torch.
    """
    if native is not None:
        out = torch.empty(x.shape, dtype=torch.float32)
        native.call("mask_places", x.contiguous(), bits.contiguous(), out, *x.shape, x.dtype == torch.bfloat16)
        return out
    places = torch.arange(32, device=x.device)
    allowed = (bits.to(x.device).unsqueeze(-1) >> places & 1).flatten(1)[:, : x.shape[1]]
    return x.float().masked_fill(allowed == 0, -torch.inf)


def best_places(
    native: NativeKernels, x: torch.Tensor, masks: TokenMasks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of the largest value of every row, int64 `[rows]`, and that value in fp32: NaN where any is.

    Args:
        x: `[rows, size]`, fp32 or bf16.
        masks: which places the rows may take; -inf is the largest value of a row that may take none.
    """
    rows, size = x.shape
    places, best = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    bits, mask_of = (None, None) if masks is None else (masks.bits.contiguous(), torch.tensor(masks.mask_of))
    native.call("best_places", x.contiguous(), bits, mask_of, places, best, rows, size, x.dtype == torch.bfloat16)
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
