"""Tokens chosen from logits on the device: greedy, or by temperature, top-k, top-p and min-p, and a random number.

A program has a row. It sorts nothing: the logit at which top-k or top-p cuts is found by bisection over the order of
floating-point numbers, in 32 passes over a row that the card's cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .tables import power_of_two

#: logits of a step of a program's loops. Untimed: no card was there.
TILE = 4096


class Choice(NamedTuple):
    """How one row's token is chosen, in stock's order of processors.

    temperature: above 0. top_k: 0 for all. top_p: 1 for all. min_p: 0 for all. uniform: the row's random number, in
    [0, 1); below 0: the likeliest token is taken.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = -1.0


@triton.jit
def _scores(logits, places, is_place, temperature):
    """Scaled logits, -inf beyond the row."""
    x = tl.load(logits + places, mask=is_place, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return tl.where(x == 0.0, 0.0, x)  # there is one zero


@triton.jit
def _order(x):
    """int32 in the order of fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _shares(logits, places, size, temperature, best, cut, num_at_cut, left_out, min_p):
    """exp(score - best) of what is left, 0 of the rest, fp64; and how many scores are at the cut.

    num_at_cut: of the places before these. left_out: of those at the cut the first so many are not left.
    """
    x = _scores(logits, places, places < size, temperature)
    at = ((_order(x) == cut) & (places < size)).to(tl.int32)
    rank = num_at_cut + tl.cumsum(at)
    share = tl.exp(x - best)
    is_left = (places < size) & (_order(x) >= cut) & ((at == 0) | (rank > left_out)) & (share >= min_p)
    return tl.where(is_left, share, 0.0).to(tl.float64), tl.sum(at)


@triton.jit
def _choose(logits, stride, choices, tokens, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    choices += row * 5
    temperature, top_k = tl.load(choices).to(tl.float32), tl.load(choices + 1).to(tl.int32)
    top_p, min_p, uniform = tl.load(choices + 2), tl.load(choices + 3).to(tl.float32), tl.load(choices + 4)

    best, token, num_nan = float("-inf"), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(logits + place, mask=place < size, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum((x != x).to(tl.int32))
        most = tl.max(tl.where(x != x, float("-inf"), x))
        first = tl.min(tl.where(x == most, place, size))
        token = tl.where(most > best, first, token)
        best = tl.maximum(best, most)
    is_bad = (num_nan > 0) | (best == float("-inf")) | (best == float("inf"))
    token = tl.where(is_bad, -1, token)

    if (uniform >= 0) & (token >= 0):
        best = tl.div_rn(best, temperature)
        best = tl.where(best == 0.0, 0.0, best)
        highest = _order(best)
        lowest = _order(tl.full((), float("-inf"), tl.float32))

        # top-k: the highest cut that at least k reach
        cut = lowest
        if (top_k > 0) & (top_k < size):
            over = highest
            while cut < over:
                middle = (over.to(tl.int64) - (over.to(tl.int64) - cut.to(tl.int64)) // 2).to(tl.int32)
                count = tl.full((), 0, tl.int32)
                for start in range(0, size, TILE):
                    place = start + tl.arange(0, TILE)
                    x = _scores(logits, place, place < size, temperature)
                    count += tl.sum(((_order(x) >= middle) & (place < size)).to(tl.int32))
                enough = count >= top_k
                cut = tl.where(enough, middle, cut)
                over = tl.where(enough, over, middle - 1)

        # top-p: the highest cut that no more than 1 - p lies below, and how many of those at it are left out
        left_out = tl.full((), 0, tl.int32)
        if top_p < 1.0:
            whole = tl.full((), 0.0, tl.float64)
            for start in range(0, size, TILE):
                place = start + tl.arange(0, TILE)
                x = _scores(logits, place, place < size, temperature)
                whole += tl.sum(tl.where(_order(x) >= cut, tl.exp(x - best), 0.0)).to(tl.float64)
            spared = (1.0 - top_p) * whole
            kept, over = cut, highest
            below = tl.full((), 0.0, tl.float64)
            while cut < over:
                middle = (over.to(tl.int64) - (over.to(tl.int64) - cut.to(tl.int64)) // 2).to(tl.int32)
                mass = tl.full((), 0.0, tl.float64)
                for start in range(0, size, TILE):
                    place = start + tl.arange(0, TILE)
                    x = _scores(logits, place, place < size, temperature)
                    is_below = (_order(x) >= kept) & (_order(x) < middle)
                    mass += tl.sum(tl.where(is_below, tl.exp(x - best), 0.0)).to(tl.float64)
                little = mass <= spared
                cut = tl.where(little, middle, cut)
                below = tl.where(little, mass, below)
                over = tl.where(little, over, middle - 1)
            score_at_cut = (cut ^ ((cut >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            each = tl.exp(score_at_cut - best).to(tl.float64)
            count = tl.full((), 0, tl.int32)
            for start in range(0, size, TILE):
                place = start + tl.arange(0, TILE)
                x = _scores(logits, place, place < size, temperature)
                count += tl.sum(((_order(x) == cut) & (place < size)).to(tl.int32))
            fitting = tl.where(each > 0, (spared - below) / tl.where(each > 0, each, 1.0), 0.0)
            left_out = tl.minimum(tl.minimum(fitting, 2147483647.0).to(tl.int32), count - 1)

        # Inversion of the cumulative distribution, summed in fp64, of what is left.
        total = tl.full((), 0.0, tl.float64)
        num_at_cut = tl.full((), 0, tl.int32)
        for start in range(0, size, TILE):
            place = start + tl.arange(0, TILE)
            share, at_cut = _shares(logits, place, size, temperature, best, cut, num_at_cut, left_out, min_p)
            total += tl.sum(share)
            num_at_cut += at_cut
        target = uniform * total
        passed = tl.full((), 0.0, tl.float64)
        num_at_cut = tl.full((), 0, tl.int32)
        found = tl.full((), 0, tl.int32)
        for start in range(0, size, TILE):
            place = start + tl.arange(0, TILE)
            share, at_cut = _shares(logits, place, size, temperature, best, cut, num_at_cut, left_out, min_p)
            here = tl.min(tl.where((share > 0) & (passed + tl.cumsum(share) > target), place, size))
            last = tl.max(tl.where(share > 0, place, -1))
            is_here = (found == 0) & (here < size)
            # (The last that there is, where rounding finds none.)
            token = tl.where(is_here, here, tl.where((found == 0) & (last >= 0), last, token))
            found = tl.where(is_here, 1, found)
            passed += tl.sum(share)
            num_at_cut += at_cut
    tl.store(tokens + row, token.to(tl.int64))


def pack_choices(choices: Sequence[tuple[float, int, float, float, float]], device: torch.device) -> torch.Tensor:
    """`Choice`s as `choose` takes them, in one asynchronous copy: fp64 `[rows, 5]`, the fields of each."""
    host = torch.tensor(choices, dtype=torch.float64).view(-1, 5)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def choose(logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """A token for every row of logits `[rows, vocab]`, fp32, bf16 or fp16: int64 `[rows]`, on the device; -1: a logit
    is NaN or +inf, or all are -inf.

    With the random numbers that the sampler draws on a CPU, what it draws there: but for sums within a rounding of
    one, and of equal logits at the line of top-p, of which the first are left out.

    Args: choices: of `pack_choices`.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    size = logits.shape[1]
    tile = min(power_of_two(size), TILE)
    _choose[(len(logits),)](logits, logits.stride(0), choices, tokens, size, TILE=tile, num_warps=8)
    return tokens
