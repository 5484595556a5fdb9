"""The short convolution over packed sequences of any lengths, vectorised over all of them."""

from __future__ import annotations

import torch

from .native import NativeKernels


def ragged_short_conv(
    extended: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Causal depthwise convolution that stops at every sequence's start, where it takes up the sequence's state.

    Args:
        extended: `[sequences * (kernel - 1) + tokens, hidden]`: all states, then the packed inputs.
        taps: `[kernel, tokens]` int64: for each tap the row of `extended` that it reads, oldest first.
        weight: `[hidden, kernel]`.
        bias: `[hidden]` or None.
    Returns:
        `[tokens, hidden]`.
    """
    weight = weight.to(extended.dtype)
    mixed = extended[taps[-1]] * weight[:, -1]
    for k in range(taps.shape[0] - 1):
        mixed = torch.addcmul(mixed, extended[taps[k]], weight[:, k])
    return mixed if bias is None else mixed + bias


def native_short_conv(
    native: NativeKernels,
    states: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    write_rows: torch.Tensor,
    write_index: torch.Tensor,
) -> torch.Tensor:
    """The same by the native kernel (`csrc/pointwise.cpp`), which writes the new states too.

    Args:
        states: `[sequences, kernel - 1, hidden]`, no part of `cache`. x: `[tokens, hidden]`. `extended` is the two.
        cache: `[rows, kernel - 1, hidden]`: `cache[write_rows] = extended[write_index]`, int64 `[n]` and
            `[n, kernel - 1]`.
    """
    weight = weight.to(x.dtype).t().contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.call(
        "short_conv",
        *(states, x.contiguous(), taps, weight, bias, out, cache, write_rows, write_index),
        *(states.shape[0] * states.shape[1], *x.shape, len(weight), len(write_rows), int(x.dtype == torch.bfloat16)),
    )
    return out
