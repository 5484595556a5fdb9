"""Causal attention over the paged cache: single queries and chunks of prompts, any head size and group.

A program has the queries of a tile, those of all heads of a group together, and goes over the keys of its sequence
with an online softmax (FlashAttention, Dao et al., arXiv 2205.14135). Single queries are cut along their keys
(Flash-Decoding), always at the same keys: what a row gets does not depend on who shares its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.kv_blocks import KVBlocks
from .tables import TablesOfAttention, power_of_two, tensors

#: keys of a program for a single query. Untimed: no card was there.
SPLIT_KEYS = 512
#: keys of a step of a program's loop, and rows (queries × heads of a group) of a tile of chunks. Untimed.
KEY_TILE, CHUNK_ROWS = 64, 64
#: rows that the matrix units multiply at once
LEAST_ROWS = 16


@triton.jit
def _attention(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    lse,
    tiles,
    first,
    kv_lens,
    block_tables,
    table_width,
    q_stride,
    num_tokens,
    scaling,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """scaling: times log2(e). SPLIT: keys of a program, which then leaves fp32 `out` `[splits, tokens, heads, DIM]`
    and base-2 `lse`; 0: all keys."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, place = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    num_keys = tl.load(kv_lens + sequence)
    before = num_keys - (end - start)  # keys that its first query sees beside its own

    row = tl.arange(0, ROWS)
    query = place + row // GROUP
    is_row = (row < ROWS // GROUP * GROUP) & (start + query < end)
    q_head = head * GROUP + row % GROUP
    token = (start + query).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < DIM
    x = tl.load(
        q + token[:, None] * q_stride + q_head[:, None] * DIM + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    begin = split * SPLIT
    stop = tl.minimum(before + place + ROWS // GROUP, num_keys)
    if SPLIT > 0:
        stop = tl.minimum(stop, begin + SPLIT)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    for key_start in range(begin, stop, KEYS):
        key = key_start + tl.arange(0, KEYS)
        is_key = key < stop
        block = tl.load(block_tables + sequence * table_width + key // BLOCK_SIZE, mask=is_key, other=0)
        slot = (block.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + key % BLOCK_SIZE
        k = tl.load(keys + slot[None, :] * DIM + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0)
        scores = tl.dot(x, k.to(x.dtype), input_precision="ieee") * scaling
        if key_scales is not None:
            scores *= tl.load(key_scales + slot, mask=is_key, other=0.0).to(tl.float32)[None, :]
        seen = is_key[None, :] & (key[None, :] <= (before + query)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        total = total * shrink + tl.sum(weights, 1)
        if value_scales is not None:
            weights *= tl.load(value_scales + slot, mask=is_key, other=0.0).to(tl.float32)[None, :]
        v = tl.load(values + slot[:, None] * DIM + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0)
        mixed = tl.dot(weights.to(x.dtype), v.to(x.dtype), mixed * shrink[:, None], input_precision="ieee")
        best = new_best

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place_out = (split * num_tokens + token) * (KV_HEADS * GROUP) + q_head
    tl.store(
        out + place_out[:, None] * DIM + dim[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
    if SPLIT > 0:
        tl.store(lse + place_out, best + tl.log2(total), mask=is_row)


@triton.jit
def _merge_splits(
    parts,
    lse,
    out,
    decodes,
    first,
    kv_lens,
    num_tokens,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """What the splits of a single query found, each by its share of the exponentials."""
    sequence = tl.load(decodes + 2 * tl.program_id(0))
    token = tl.load(first + sequence).to(tl.int64)
    head, dim = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_DIM)
    is_head = head < HEADS
    is_place = is_head[:, None] & (dim < DIM)[None, :]
    best = tl.full((PADDED_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_HEADS,), tl.float32)
    mixed = tl.zeros((PADDED_HEADS, PADDED_DIM), tl.float32)
    for split in range(tl.cdiv(tl.load(kv_lens + sequence), SPLIT)):
        place = (split * num_tokens + token) * HEADS + head
        far = tl.load(lse + place, mask=is_head, other=0.0)
        new_best = tl.maximum(best, far)
        shrink, share = tl.exp2(best - new_best), tl.exp2(far - new_best)
        part = tl.load(parts + place[:, None] * DIM + dim[None, :], mask=is_place, other=0.0)
        mixed = mixed * shrink[:, None] + part * share[:, None]
        total = total * shrink + share
        best = new_best
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (token * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_place)


def chunk_queries(group: int) -> int:
    """Queries of a tile of `StepTables.chunks`, for so many heads a kv head."""
    return max(CHUNK_ROWS, power_of_two(group)) // group


def paged_attention(
    q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, tables: TablesOfAttention, scaling: float
) -> torch.Tensor:
    """As `attention.reference.paged_attention`: q `[tokens, heads, head_dim]`, and the same back; zeros where a query
    has no key. The caches are in q's dtype or in 8 bits."""
    q = q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_tokens, heads, dim = q.shape
    _, kv_heads, block_size, _ = key_cache.shape
    group = heads // kv_heads
    stored = tensors(key_cache, value_cache)
    width = tables.block_tables.shape[1]
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "PADDED_DIM": max(power_of_two(dim), LEAST_ROWS)}
    sizes |= {"BLOCK_SIZE": block_size, "KEYS": KEY_TILE if dim <= 128 else KEY_TILE // 2}

    def run(
        tiles: torch.Tensor, rows: int, split: int, num_splits: int, to: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        _attention[len(tiles), kv_heads, num_splits](
            *(q, *stored, to, lse, tiles, tables.first, tables.kv_lens, tables.block_tables),
            *(width, q.stride(0), num_tokens, scaling * _LOG2_E),
            **sizes,
            ROWS=rows,
            SPLIT=split,
            num_warps=4,
        )

    if len(tables.chunks):
        run(tables.chunks, max(CHUNK_ROWS, power_of_two(group)), 0, 1, out, None)
    if len(tables.decodes):
        num_splits = triton.cdiv(width * block_size, SPLIT_KEYS)
        rows = max(LEAST_ROWS, power_of_two(group))
        if num_splits == 1:
            run(tables.decodes, rows, 0, 1, out, None)
        else:
            parts = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
            lse = torch.empty((num_splits, num_tokens, heads), dtype=torch.float32, device=q.device)
            run(tables.decodes, rows, SPLIT_KEYS, num_splits, parts, lse)
            _merge_splits[(len(tables.decodes),)](
                *(parts, lse, out, tables.decodes, tables.first, tables.kv_lens, num_tokens),
                HEADS=heads,
                DIM=dim,
                PADDED_HEADS=power_of_two(heads),
                PADDED_DIM=sizes["PADDED_DIM"],
                SPLIT=SPLIT_KEYS,
            )
    return out


_LOG2_E = 1.4426950408889634
