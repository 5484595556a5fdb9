"""Attention by torch's own kernels over the paged cache, where the card and the version have them."""

from __future__ import annotations

import torch

from ..attention.kv_blocks import Int8Blocks, KVBlocks
from .tables import TablesOfAttention

try:
    from torch.nn.attention import varlen
except ImportError:  # before torch 2.10
    varlen = None  # type: ignore[assignment]

#: FlashAttention-3's largest head, and what its sizes are multiples of
MOST_DIM, DIM_ALIGNMENT = 256, 8


def can_attend(q: torch.Tensor, key_cache: KVBlocks) -> bool:
    """Whether `varlen_attn` takes these over a paged cache.

    That is FlashAttention-3, on cards of compute capability 9, in 16 bits, once the user has activated it:
    `torch.nn.attention.activate_flash_attention_impl("FA3")`, which we do not call, as it changes the whole process.
    (FlashAttention-2, which torch has by itself, has no block tables there.)
    """
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return (
        varlen is not None
        and q.device.type == "cuda"
        and activated() == "FA3"
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.float16, torch.bfloat16)
        and not isinstance(key_cache, Int8Blocks)
        and q.shape[2] <= MOST_DIM
        and q.shape[2] % DIM_ALIGNMENT == 0
    )


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: TablesOfAttention, scaling: float
) -> torch.Tensor:
    """As `attention.paged_attention`. The longest are given as what the tables have room for, as a graph must."""
    most_keys = tables.block_tables.shape[1] * key_cache.shape[2]
    return varlen.varlen_attn(  # type: ignore[return-value]  # the output alone, by default
        q,
        key_cache.transpose(1, 2),  # [blocks, block_size, kv_heads, head_dim]
        value_cache.transpose(1, 2),
        tables.first,
        None,
        1 if not len(tables.chunks) else len(q),
        most_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=tables.kv_lens,
        block_table=tables.block_tables,
    )
