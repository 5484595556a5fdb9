"""The short convolution over packed sequences of any lengths, vectorised over all of them."""

from __future__ import annotations

import torch


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
