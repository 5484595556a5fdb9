"""Attention over a prefix that many sequences share, read once for all of them.

Every query attends to the shared prefix in one product and to its own keys in another, and the two partial softmaxes
are merged by their log-sum-exp, which is exact: Juravsky et al., "Hydragen", arXiv 2402.05099; Ye et al., "Cascade
Inference" (FlashInfer, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_blocks import KVBlocks, gather
from .packed import PackedSequences, SharedPrefix
from .reference import attend_alone
from .sparse import SparsePrefill

#: queries that attend to a prefix at once, so that their scores stay small beside the cache
QUERY_CHUNK = 256


def cascade_attention(
    q: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
    cu_seqlens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[torch.Tensor],
    scaling: float,
    prefixes: Sequence[SharedPrefix],
    *,
    packed: PackedSequences | None = None,
    sparse: Sequence[SparsePrefill | None] | None = None,
) -> torch.Tensor:
    """What `paged_attention` computes, with each shared prefix read once. Arguments as there.

    Args: packed: the sequences for the native kernel, with the shared keys left out; None: the torch reference, which
        needs `sparse`: as in `paged_attention`, for sequences that share nothing.
    """
    num_shared = shared_blocks(prefixes, len(kv_lens))
    if packed is not None:
        near, lse = packed.attend_with_lse(q, key_cache, value_cache, scaling)
        mixed = packed.attend_shared(q, key_cache, value_cache, scaling, prefixes, (near, lse))
        if mixed is not None:
            return mixed
        out = near.to(q.dtype, copy=True)
    else:
        out = torch.empty_like(q)
        near = torch.empty(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        lse = near.new_empty(q.shape[:2])
        for i, kv_len in enumerate(kv_lens):
            start, end = cu_seqlens[i], cu_seqlens[i + 1]
            own, num_keys = block_tables[i][num_shared[i] :], kv_len - num_shared[i] * key_cache.shape[2]
            k, v = gather(key_cache, own, num_keys), gather(value_cache, own, num_keys)
            if num_shared[i]:
                before = num_keys - (end - start)
                for a in range(start, end, QUERY_CHUNK):
                    b = min(a + QUERY_CHUNK, end)
                    seen = before + b - start
                    near[a:b], lse[a:b] = attention_with_lse(q[a:b], k[:seen], v[:seen], scaling, causal=True)
            else:
                out[start:end] = attend_alone(q[start:end], k, v, scaling, sparse[i] if sparse else None)
    for prefix in prefixes:
        num_keys = len(prefix.block_ids) * key_cache.shape[2]
        k, v = gather(key_cache, prefix.block_ids, num_keys), gather(value_cache, prefix.block_ids, num_keys)
        for tokens in prefix.tokens.split(QUERY_CHUNK):
            far, far_lse = attention_with_lse(q[tokens], k, v, scaling, causal=False)
            # softmax over both = the two, each by its share of the exponentials
            far_share = torch.sigmoid(far_lse - lse[tokens]).unsqueeze(-1)
            out[tokens] = torch.lerp(near[tokens], far, far_share).to(q.dtype)
    return out


def shared_blocks(prefixes: Sequence[SharedPrefix], num_sequences: int) -> list[int]:
    """How many of each sequence's first blocks are read with others."""
    counts = [0] * num_sequences
    for prefix in prefixes:
        for row in prefix.rows:
            counts[row] = len(prefix.block_ids)
    return counts


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of its softmax's denominator.

    Args:
        q: `[queries, heads, head_dim]`. k, v: `[keys, kv_heads, head_dim]`.
        causal: the queries are the last positions of the keys; else each sees all of them.
    Returns:
        `[queries, heads, head_dim]`, and `[queries, heads]`, both in fp32 (fp64 for fp64).
    """
    num_queries, _, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    exact = torch.promote_types(q.dtype, torch.float32)  # two roundings to bf16 are more than stock's one
    q, k, v = q.to(exact), k.to(exact), v.to(exact)
    grouped = (
        q.view(num_queries, kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    )  # [kv_heads, queries × group, …]
    scores = torch.matmul(grouped, k.permute(1, 2, 0)).mul_(scaling)
    if causal and num_queries > 1:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu_(num_keys - num_queries + 1)
        scores.view(kv_heads, num_queries, -1, num_keys).masked_fill_(mask[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    mixed = torch.matmul(scores.sub_(lse.unsqueeze(-1)).exp_(), v.transpose(0, 1))

    def ungroup(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (num_queries, -1)).transpose(0, 1).flatten(1, 2)

    return ungroup(mixed), ungroup(lse)
