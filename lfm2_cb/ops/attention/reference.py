"""Causal attention of packed queries over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_blocks import KVBlocks, gather


def paged_attention(
    q: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
    cu_seqlens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[torch.Tensor],
    scaling: float,
) -> torch.Tensor:
    """The torch reference: one SDPA a sequence, over its gathered blocks.

    Args:
        q: `[tokens, heads, head_dim]`, the sequences' queries one after another.
        key_cache, value_cache: `[num_blocks, kv_heads, block_size, head_dim]`, this step's keys included; in q's
            dtype or in 8 bits.
        cu_seqlens: `sequences + 1` offsets into q.
        kv_lens: keys of each sequence; its queries are the last of them.
        block_tables: for each sequence its block ids, int64 `[blocks]`.
    Returns:
        `[tokens, heads, head_dim]`.
    """
    out = torch.empty_like(q)
    for i, kv_len in enumerate(kv_lens):
        start, end = cu_seqlens[i], cu_seqlens[i + 1]
        k, v = (gather(cache, block_tables[i], kv_len) for cache in (key_cache, value_cache))
        out[start:end] = causal_attention(q[start:end], k, v, scaling)
    return out


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """One sequence: q `[queries, heads, head_dim]` are the last positions of k, v `[keys, kv_heads, head_dim]`.

    Computes in q's dtype, and returns that.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    mask = None
    if 1 < num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - num_queries)
    q, k, v = (x.to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=num_queries == num_keys > 1, scale=scaling, enable_gqa=True
    )
    return mixed.squeeze(0).transpose(0, 1)
