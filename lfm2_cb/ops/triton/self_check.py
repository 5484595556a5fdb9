"""Small cases, by which kernels that come out wrong on a device are found before they are used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..attention.kv_blocks import make_blocks, write_rows
from ..attention.reference import paged_attention
from ..pointwise import add_rms_norm, norm_rotate, rotary, swiglu
from ..short_conv import gated_short_conv
from .kernels import TritonKernels
from .sampling import Choice
from .tables import Packed, StepTables, lay_out

BLOCK_SIZE, HEADS, KV_HEADS, DIM, HIDDEN = 16, 4, 2, 64, 96


@torch.inference_mode()
def wrong_kernel(kernels: TritonKernels, device: torch.device, dtype: torch.dtype) -> str | None:
    """The name of a kernel whose results differ from the torch reference's by more than rounding; None: none do."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for name, got, expected in _cases(kernels, device, randn):
        tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        if not torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance):
            return name
    return None


def _cases(kernels: TritonKernels, device: torch.device, randn) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:  # type: ignore[no-untyped-def]
    """Names, and pairs that should be the same."""
    sequences = [Packed([0] * 5, 14, [3, 1], 1, [(1, 5), (3, 2)], 1), Packed([0], 20, [2, 5], 2, [(2, 1)], 1)]
    tables = StepTables(lay_out(sequences, BLOCK_SIZE, kernels.chunk_queries(HEADS // KV_HEADS)), device)
    tokens = 6

    x, weight = randn(tokens, HIDDEN), randn(HIDDEN)
    for got, expected in zip(
        kernels.add_rms_norm(x, 2 * x, weight, 1e-5), add_rms_norm(x, 2 * x, weight, 1e-5), strict=True
    ):
        yield "add_rms_norm", got, expected
    yield "swiglu", kernels.swiglu(x), swiglu(x)

    inv_freq = torch.rand(DIM // 2, device=device)
    rope = rotary(tables.positions, inv_freq, 1.0, x.dtype)
    for got, expected in zip(kernels.rotary(tables.positions, inv_freq, 1.0, x.dtype), rope, strict=True):
        yield "rotary", got, expected
    shape = 6, KV_HEADS, BLOCK_SIZE, DIM
    qkv, weights = randn(tokens, (HEADS + 2 * KV_HEADS) * DIM), (randn(DIM), randn(DIM))
    for kind in (x.dtype, torch.int8):
        keys, values = (make_blocks(shape, kind, device) for _ in range(2))
        for cache in (keys, values):
            every = torch.arange(shape[0] * shape[1] * shape[2], device=device)
            write_rows(cache, every, randn(len(every), 1, DIM))
        q = kernels.norm_rotate(qkv, HEADS, *weights, rope, 1e-5, tables.slots, keys, values)
        yield "norm_rotate", q, norm_rotate(qkv, HEADS, *weights, rope, 1e-5)[0]
        block_ids = [torch.tensor(s.block_table, device=device) for s in sequences]
        expected = paged_attention(q, keys, values, [0, 5, 6], [19, 21], block_ids, DIM**-0.5)
        yield "attention", kernels.attend(q, keys, values, tables, DIM**-0.5), expected

    bcx, conv_weight, states = randn(tokens, 3 * HIDDEN), randn(HIDDEN, 1, 3), randn(4, 2, HIDDEN)
    ours = states.clone()
    got = kernels.short_conv(bcx, ours, conv_weight, None, tables)
    # Of all states with the packed inputs behind them: rows 0 to 3, and 4 to 9.
    taps = torch.tensor([[0, 1, 4, 5, 6, 2], [1, 4, 5, 6, 7, 3], [4, 5, 6, 7, 8, 9]], device=device)
    read, written, windows = (
        torch.tensor(rows, device=device) for rows in ([1, 2], [1, 3, 2], [[7, 8], [4, 5], [3, 9]])
    )
    yield "short_conv", got, gated_short_conv(bcx, states, read, taps, conv_weight, None, written, windows)[0]
    yield "short_conv", ours, states

    logits = randn(3, 50)
    drawn = [Choice(), Choice(0.7, 5, 0.9, 0.0, 0.4), Choice(1.5, 0, 0.8, 0.05, 0.9)]
    expected_tokens = [_draw(row.double().cpu().numpy(), choice) for row, choice in zip(logits, drawn, strict=True)]
    tokens_chosen = kernels.choose(logits, kernels.pack_choices(drawn, device))
    yield "choose", tokens_chosen, torch.tensor(expected_tokens, device=device)


def _draw(logits: np.ndarray, choice: Choice) -> int:
    """What `choose` says of a row, plainly. (No two logits are the same.)"""
    if choice.uniform < 0:
        return int(logits.argmax())
    shares = np.exp((logits - logits.max()) / choice.temperature)
    order = np.argsort(-shares)
    shares[order[choice.top_k or len(order) :]] = 0
    before = shares[order].cumsum() - shares[order]  # of those that are likelier
    shares[order[before >= choice.top_p * shares.sum()]] = 0
    shares[shares < choice.min_p] = 0
    return int(np.searchsorted(shares.cumsum(), choice.uniform * shares.sum(), side="right"))
