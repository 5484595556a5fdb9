"""The short convolution over packed sequences of any lengths, vectorised over all of them."""

from __future__ import annotations

import torch

from .native import NativeKernels, empty


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


def gated_short_conv(
    bcx: torch.Tensor,
    cache: torch.Tensor,
    read_rows: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    write_rows: torch.Tensor,
    write_index: torch.Tensor,
    native: NativeKernels | None = None,
    whole: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`C * conv(B * x)`, starting from cached states, and new states written back.

    Args:
        bcx: `[tokens, 3 * hidden]`: B, C and x side by side.
        cache: `[rows, kernel - 1, hidden]`: the sequences' states are its `read_rows` `[sequences]`; at the end
            `cache[write_rows] = extended[write_index]`, int64 `[n]` and `[n, kernel - 1]`.
        taps, bias: as in `ragged_short_conv`. weight: `[hidden, 1, kernel]`, as a depthwise `nn.Conv1d` has it.
        native: what to run it with (fp32 or bf16, on CPU); None: torch.
        whole: whether `extended` is returned with B * x, which costs a pass over memory.
    Returns:
        `[tokens, hidden]`; and `extended`, all states with B * x behind them, as in `ragged_short_conv`, or the states
        alone.
    """
    hidden, num_states = bcx.shape[-1] // 3, len(read_rows) * (len(taps) - 1)
    if native is None:
        b, c, x = bcx.split(hidden, dim=-1)
        extended = torch.cat((cache[read_rows].flatten(0, 1), b * x))
        cache[write_rows] = extended[write_index]
        mixed = c * ragged_short_conv(extended, taps, weight.squeeze(1), bias)
        return mixed, extended if whole else extended[:num_states]
    weight, bias = weight.to(bcx.dtype).contiguous(), None if bias is None else bias.to(bcx.dtype)
    kernel, tokens, sequences = len(taps), len(bcx), len(read_rows)
    extended = empty((num_states + whole * tokens, hidden), bcx.dtype)
    out = empty((tokens, hidden), bcx.dtype)
    native.call(
        "short_conv",
        *(bcx.contiguous(), taps, weight, bias, extended, out, cache, read_rows, write_rows, write_index),
        *(sequences, tokens, hidden, kernel, len(write_rows), whole, bcx.dtype == torch.bfloat16),
    )
    return out, extended
