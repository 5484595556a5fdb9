"""Causal attention of packed queries over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_blocks import KVBlocks, gather
from .sparse import KEY_BLOCK, QUERY_BLOCK, SparsePrefill, choose_lists

#: entries of a mask at most: a long prompt's queries go over its keys a part at a time
MASK_ENTRIES = 2**24


def paged_attention(
    q: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
    cu_seqlens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[torch.Tensor],
    scaling: float,
    sparse: Sequence[SparsePrefill | None] | None = None,
) -> torch.Tensor:
    """The torch reference: one SDPA a sequence, over its gathered blocks.

    Args:
        q: `[tokens, heads, head_dim]`, the sequences' queries one after another.
        key_cache, value_cache: `[num_blocks, kv_heads, block_size, head_dim]`, this step's keys included; in q's
            dtype or in 8 bits.
        cu_seqlens: `sequences + 1` offsets into q.
        kv_lens: keys of each sequence; its queries are the last of them.
        block_tables: for each sequence its block ids, int64 `[blocks]`.
        sparse: for each sequence how its queries attend; None: to all their keys.
    Returns:
        `[tokens, heads, head_dim]`.
    """
    out = torch.empty_like(q)
    for i, kv_len in enumerate(kv_lens):
        start, end = cu_seqlens[i], cu_seqlens[i + 1]
        k, v = (gather(cache, block_tables[i], kv_len) for cache in (key_cache, value_cache))
        out[start:end] = attend_alone(q[start:end], k, v, scaling, sparse[i] if sparse else None)
    return out


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """One sequence: q `[queries, heads, head_dim]` are the last positions of k, v `[keys, kv_heads, head_dim]`.

    Computes in q's dtype, and returns that.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    most = max(MASK_ENTRIES // num_keys, 1)
    if 1 < num_queries < num_keys and num_queries > most:
        before = num_keys - num_queries
        parts = [(start, min(start + most, num_queries)) for start in range(0, num_queries, most)]
        return torch.cat([causal_attention(q[a:b], k[: before + b], v[: before + b], scaling) for a, b in parts])
    mask = None
    if 1 < num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - num_queries)
    q, k, v = (x.to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=num_queries == num_keys > 1, scale=scaling, enable_gqa=True
    )
    return mixed.squeeze(0).transpose(0, 1)


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, taken: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The torch reference: as `causal_attention`, over the blocks that each block of queries takes.

    Args: taken: bool `[kv_heads, query blocks, key blocks]`.
    """
    num_queries, num_keys, kv_heads = len(q), len(k), k.shape[1]
    group, out = q.shape[1] // kv_heads, torch.empty_like(q)
    key = torch.arange(num_keys, device=q.device)
    for block in range(taken.shape[1]):
        queries = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, num_queries))
        before = num_keys - num_queries + queries.start  # keys before the block's first query: all see them
        for head in range(kv_heads):
            mine = key[taken[head, block][key // KEY_BLOCK] & (key < before)]
            mine = torch.cat([mine, key[before : before + queries.stop - queries.start]])
            heads = slice(head * group, (head + 1) * group)
            out[queries, heads] = causal_attention(
                q[queries, heads], k[mine, head : head + 1], v[mine, head : head + 1], scaling
            )
    return out


def attend_alone(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, sparse: SparsePrefill | None
) -> torch.Tensor:
    """One sequence, whose queries attend to all keys or to the blocks that are chosen. Arguments as above."""
    taken = None if sparse is None else choose_lists(q, k, scaling, sparse)
    return causal_attention(q, k, v, scaling) if taken is None else sparse_attention(q, k, v, taken, scaling)
