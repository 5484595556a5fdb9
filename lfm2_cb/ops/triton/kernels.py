"""TritonKernels: the Triton kernels, as the kernel set calls them."""

from __future__ import annotations

import functools

import torch
from triton.runtime import JITFunction

from ..attention.kv_blocks import KVBlocks
from . import attention, pointwise, sampling, short_conv, varlen
from .tables import AttentionTables, TablesOfAttention


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
        first, decodes = _one_query_each(len(q), q.device)
        tables = AttentionTables(first, kv_lens, block_table, decodes, decodes[:0])
        return self.attend(q, key_cache, value_cache, tables, scaling)

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


@functools.cache
def _one_query_each(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`StepTables.first` and `decodes` of so many sequences; kept, as a CUDA graph reads them where they were."""
    first = torch.arange(count + 1, dtype=torch.int32, device=device)
    return first, torch.stack((first[:-1], torch.zeros_like(first[:-1])), dim=1)
