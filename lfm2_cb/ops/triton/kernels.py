"""TritonKernels: the Triton kernels, as the kernel set calls them."""

from __future__ import annotations

import functools

import torch
from triton.runtime import JITFunction

from ..attention.kv_blocks import KVBlocks
from . import attention, pointwise, sampling, short_conv, varlen
from .tables import AttentionTables, ConvTables, TablesOfAttention


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, by Triton's interpreter (`TRITON_INTERPRET=1` when it was imported)."""
    return not isinstance(pointwise._swiglu, JITFunction)


class TritonKernels:
    """Every kernel there is, for tensors on one device. None waits for the device, or needs a shape that it computes:
    a CUDA graph can be captured of any of them (after a first call, which compiles)."""

    rms_norm = staticmethod(pointwise.rms_norm)
    add_rms_norm = staticmethod(pointwise.add_rms_norm)
    rotary = staticmethod(pointwise.rotary)
    norm_rotate = staticmethod(pointwise.norm_rotate)
    write_rows = staticmethod(pointwise.write_rows)
    swiglu = staticmethod(pointwise.swiglu)
    short_conv = staticmethod(short_conv.short_conv)
    choose = staticmethod(sampling.choose)
    pack_choices = staticmethod(sampling.pack_choices)
    chunk_queries = staticmethod(attention.chunk_queries)

    def decode_attention(
        self,
        q: torch.Tensor,
        key_cache: KVBlocks,
        value_cache: KVBlocks,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """As `ops.attention.decode.decode_attention`."""
        first, decodes = _one_token_each(len(q), q.device)
        tables = AttentionTables(first, kv_lens, block_table, decodes, decodes[:0])
        return self.attend(q, key_cache, value_cache, tables, scaling)

    def decode_short_conv(
        self,
        bcx: torch.Tensor,
        cache: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        read_rows: torch.Tensor,
        write_rows: torch.Tensor,
    ) -> torch.Tensor:
        """`short_conv`, of one token a sequence. read_rows: `[sequences]`. write_rows: `[sequences, n]`, what a
        sequence begins from last. Both are rows of the cache, int32 or int64."""
        first, tiles = _one_token_each(len(bcx), bcx.device)
        write_first, write_ends = _writes_of_each(*write_rows.shape, bcx.device)
        tables = ConvTables(first, read_rows, write_first, write_rows, write_ends, tiles)
        return self.short_conv(bcx, cache, weight, bias, tables)

    def attend(
        self, q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, tables: TablesOfAttention, scaling: float
    ) -> torch.Tensor:
        """As `attention.paged_attention`, by torch's own kernel where it takes these."""
        if (
            isinstance(key_cache, torch.Tensor)
            and isinstance(value_cache, torch.Tensor)
            and varlen.can_attend(q, key_cache)
        ):
            return varlen.paged_attention(q, key_cache, value_cache, tables, scaling)
        return attention.paged_attention(q, key_cache, value_cache, tables, scaling)


# Tables that are the same for every step of so many sequences; kept, as a CUDA graph reads them where they were.


@functools.cache
def _one_token_each(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`StepTables.first`, and tiles: `decodes` or `conv_tiles`."""
    first = torch.arange(count + 1, dtype=torch.int32, device=device)
    return first, torch.stack((first[:-1], torch.zeros_like(first[:-1])), dim=1)


@functools.cache
def _writes_of_each(count: int, each: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`StepTables.write_first` and `write_ends`, of so many states a sequence."""
    first = each * torch.arange(count + 1, dtype=torch.int32, device=device)
    return first, torch.ones(count * each, dtype=torch.int32, device=device)
