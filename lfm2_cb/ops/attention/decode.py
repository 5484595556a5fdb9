"""Attention of one query a sequence, in tensors whose shapes do not depend on the sequences' lengths: what a device
graph can hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kv_blocks import Int8Blocks, KVBlocks


def decode_attention(
    q: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
    kv_lens: torch.Tensor,
    block_table: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The torch reference, which reads whole rows of the table, and gives keys beyond a sequence's end no weight.

    Args:
        q: `[sequences, heads, head_dim]`.
        key_cache, value_cache: as in `paged_attention`, this step's keys included.
        kv_lens: int32 `[sequences]`, from 1 on.
        block_table: int32 `[sequences, blocks]`: each sequence's block ids, and beyond its last any that there are.
    Returns:
        `[sequences, heads, head_dim]`.
    """
    place = torch.arange(block_table.shape[1] * key_cache.shape[2], device=q.device)
    seen = (place < kv_lens[:, None])[:, None, :]  # [sequences, 1, keys]
    k, v = (  # what is not finite beyond the end must not come in, by a score or by 0 × v
        _gather(blocks, block_table).to(q.dtype).masked_fill(~seen.unsqueeze(-1), 0)
        for blocks in (key_cache, value_cache)
    )
    mixed = F.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=seen.unsqueeze(2), scale=scaling, enable_gqa=True
    )
    return mixed.squeeze(2)


def _gather(blocks: KVBlocks, block_table: torch.Tensor) -> torch.Tensor:
    """`[sequences, kv_heads, keys, head_dim]`; 8 bits are dequantised, to fp32."""
    if isinstance(blocks, Int8Blocks):
        return _gather(blocks.values, block_table).float() * _gather(blocks.scale, block_table).float()
    return blocks[block_table].transpose(1, 2).flatten(2, 3)
