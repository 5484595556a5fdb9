"""Causal attention over the paged cache: where keys and values lie, the torch reference, the native kernels."""

from .cascade import SharedPrefix, cascade_attention, shared_blocks
from .decode import decode_attention
from .kv_blocks import Int8Blocks, KVBlocks, copy_block, gather, make_blocks
from .packed import PackedSequences
from .reference import causal_attention, paged_attention

__all__ = [
    "Int8Blocks",
    "KVBlocks",
    "PackedSequences",
    "SharedPrefix",
    "cascade_attention",
    "causal_attention",
    "copy_block",
    "decode_attention",
    "gather",
    "make_blocks",
    "paged_attention",
    "shared_blocks",
]
