"""The gated short convolution over packed sequences, its states read and written in place, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tables import CONV_TOKENS, TablesOfConv, power_of_two

#: channels of a program. Untimed: no card was there.
CHANNELS = 128


@triton.jit
def _products(bcx, state, start, place, is_place, channel, is_channel, hidden, WINDOW: tl.constexpr):
    """B * x of places of a sequence's chunk `[places, channels]`, rounded as it is stored; below 0 lies its state."""
    row = (start + place).to(tl.int64)[:, None] * (3 * hidden) + channel[None, :]
    in_chunk = (is_place & (place >= 0))[:, None] & is_channel[None, :]
    b = tl.load(bcx + row, mask=in_chunk, other=0.0)
    x = tl.load(bcx + row + 2 * hidden, mask=in_chunk, other=0.0)
    in_state = (is_place & (place < 0))[:, None] & is_channel[None, :]
    before = tl.load(state + (place + WINDOW)[:, None] * hidden + channel[None, :], mask=in_state, other=0.0)
    product = (b.to(tl.float32) * x.to(tl.float32)).to(before.dtype)
    return tl.where(in_state, before, product)


@triton.jit
def _short_conv(
    bcx,
    source,
    cache,
    weight,
    bias,
    out,
    tiles,
    first,
    read_rows,
    write_first,
    write_rows,
    write_ends,
    hidden,
    KERNEL: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE_ROWS: tl.constexpr,
):
    """The first tile of a sequence also writes its states: all that is read of a state, it reads.

    source: the cache, or a copy where a sequence begins from what another writes.
    """
    WINDOW: tl.constexpr = KERNEL - 1
    sequence, place = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    start, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    token = place + tl.arange(0, TOKENS)
    is_token = start + token < end
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < hidden
    state = source + tl.load(read_rows + sequence).to(tl.int64) * WINDOW * hidden

    mixed = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        mixed += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(KERNEL):
        value = _products(bcx, state, start, token - (WINDOW - tap), is_token, channel, is_channel, hidden, WINDOW)
        factor = tl.load(weight + channel * KERNEL + tap, mask=is_channel, other=0.0).to(tl.float32)
        mixed += value.to(tl.float32) * factor[None, :]
    row = (start + token).to(tl.int64)[:, None]
    inside = is_token[:, None] & is_channel[None, :]
    c = tl.load(bcx + row * (3 * hidden) + hidden + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + channel[None, :], (c * mixed).to(out.dtype.element_ty), mask=inside)

    if place == 0:
        age = tl.arange(0, STATE_ROWS)
        for write in range(tl.load(write_first + sequence), tl.load(write_first + sequence + 1)):
            target, seen = tl.load(write_rows + write).to(tl.int64), tl.load(write_ends + write)
            is_age = age < WINDOW
            kept = _products(bcx, state, start, seen - WINDOW + age, is_age, channel, is_channel, hidden, WINDOW)
            tl.debug_barrier()  # the target may be the state itself: all threads have read it
            place_out = (target * WINDOW + age)[:, None] * hidden + channel[None, :]
            tl.store(cache + place_out, kept, mask=is_age[:, None] & is_channel[None, :])


def short_conv(
    bcx: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tables: TablesOfConv,
    source: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `ops.short_conv.gated_short_conv`, between the rows of the cache that the tables name.

    Args:
        bcx: `[tokens, 3 * hidden]`. cache: `[rows, kernel - 1, hidden]` in the same dtype.
        source: what the sequences begin from lies there; None: in the cache. A copy of it is needed where a sequence
            begins from a row that another writes: programs run in any order.
        weight: `[hidden, 1, kernel]`, kernel up to `CONV_TOKENS + 1`. bias: `[hidden]`, or None.
    Returns: `[tokens, hidden]`.
    """
    bcx, hidden, kernel = bcx.contiguous(), bcx.shape[1] // 3, weight.shape[-1]
    out = torch.empty((len(bcx), hidden), dtype=bcx.dtype, device=bcx.device)
    num_tiles, channels = len(tables.conv_tiles), min(power_of_two(hidden), CHANNELS)
    _short_conv[num_tiles, triton.cdiv(hidden, channels)](
        *(bcx, cache if source is None else source, cache, weight.contiguous(), bias, out),
        *(tables.conv_tiles, tables.first, tables.read_rows),
        *(tables.write_first, tables.write_rows, tables.write_ends, hidden),
        KERNEL=kernel,
        TOKENS=1 if num_tiles == len(bcx) else CONV_TOKENS,
        CHANNELS=channels,
        STATE_ROWS=power_of_two(kernel - 1),
    )
    return out
