"""Causal attention over the paged cache by the native kernels, which read blocks in place.

`csrc/attention/paged_attention.cpp` computes in fp32, for any shape. On processors that multiply pairs of bf16, single
queries in bf16 have a kernel of their own, over a cache in bf16 or 8 bits: `csrc/attention/decode_attention.cpp`. What
a row gets depends on its sequence alone; but as the two round differently, a chunk of one query gives, in its last
bits, not what a longer chunk gives for the same row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..native import NativeKernels
from .kv_blocks import Int8Blocks, KVBlocks, gather
from .reference import causal_attention

#: a sequence with more queries and more keys than these is gathered and goes through SDPA. Measured with AVX2: with up
#: to 1,024 keys the kernel is 1.0 to 2 × as fast, with 1,536 0.8 to 1.25 ×, with 2,048 and more 0.7 to 0.9 ×. Where
#: SDPA has matrix units for bf16 the balance should tip earlier; that is not measured. The kernel's result for a row
#: does not depend on how a prompt is cut into chunks, SDPA's does, in its last bits.
SDPA_QUERIES, SDPA_KEYS = 64, 1024
#: instruction sets for which `decode_attention.cpp` is compiled, and the shapes that it takes
PAIR_ISAS = frozenset(("avx512bf16", "amx"))
HEAD_DIMS, MOST_HEADS, KEY_ALIGNMENT = (64, 128), 8, 16


class PackedSequences:
    """Where the sequences of a step lie, as the kernel reads it: made once, for all layers.

    Args:
        cu_seqlens, kv_lens, block_tables: as in `paged_attention`.
        first_keys: for each sequence how many of its first keys to leave out; none where absent.

    Attributes:
        sequences: int64 `[sequences, 5]`, each's first query, queries, first key, keys, first of its block ids. Those
            of one query come first, in the order given, then the others.
        block_ids: int64, of all sequences, one after another.
    """

    def __init__(
        self,
        native: NativeKernels,
        cu_seqlens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[torch.Tensor],
        first_keys: Sequence[int] | None = None,
    ) -> None:
        self._native = native
        self.block_ids = torch.cat(list(block_tables))
        self._long: list[tuple[slice, torch.Tensor, int]] = []
        decodes: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        table = 0
        for i, (kv_len, blocks) in enumerate(zip(kv_lens, block_tables, strict=True)):
            start, end, first = cu_seqlens[i], cu_seqlens[i + 1], first_keys[i] if first_keys else 0
            if end - start > SDPA_QUERIES and kv_len > SDPA_KEYS and not first:
                self._long.append((slice(start, end), blocks, kv_len))
            else:
                (decodes if end - start == 1 else chunks).append((start, end - start, first, kv_len, table))
            table += len(blocks)
        self._aligned = not first_keys or not any(first % KEY_ALIGNMENT for first in first_keys)
        self.sequences = torch.tensor(decodes + chunks, dtype=torch.int64).reshape(-1, 5)
        self._decodes, self._chunks = self.sequences[: len(decodes)], self.sequences[len(decodes) :]

    def attend(self, q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, scaling: float) -> torch.Tensor:
        """As `paged_attention`: q `[tokens, heads, head_dim]` fp32 or bf16, as the cache is unless that is in 8 bits.
        The same back."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._run(q, key_cache, value_cache, scaling, out, None)
        return out

    def attend_with_lse(
        self, q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp32, and `[tokens, heads]` the logarithms of the softmax's denominators, fp32: those of
        sequences that have keys left out, others maybe."""
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        self._run(q, key_cache, value_cache, scaling, out, lse)
        return out, lse

    def _run(
        self,
        q: torch.Tensor,
        keys: KVBlocks,
        values: KVBlocks,
        scaling: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        stored = _tensors(keys, values, q.dtype)
        _, heads, head_dim = q.shape
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()

        def run(kernel: str, sequences: torch.Tensor, *dtype: int) -> None:
            if len(sequences):
                self._native.call(
                    kernel,
                    *(q, *stored, sequences, self.block_ids, out, lse),
                    *(len(sequences), heads, keys.shape[1], head_dim, keys.shape[2], q.stride(0)),
                    *(*dtype, int(out.dtype == torch.float32), scaling),
                )

        if self._multiplies_pairs(q, keys):
            run("decode_attention", self._decodes)
            run("paged_attention", self._chunks, 1)
        else:
            run("paged_attention", self.sequences, int(q.dtype == torch.bfloat16))
        for tokens, blocks, kv_len in self._long:
            k, v = gather(keys, blocks, kv_len), gather(values, blocks, kv_len)
            out[tokens] = causal_attention(q[tokens], k, v, scaling)

    def _multiplies_pairs(self, q: torch.Tensor, keys: KVBlocks) -> bool:
        """Whether the kernel for single queries takes them."""
        _, kv_heads, block_size, head_dim = keys.shape
        return (
            self._native.isa in PAIR_ISAS
            and q.dtype == torch.bfloat16
            and head_dim in HEAD_DIMS
            and q.shape[1] <= MOST_HEADS * kv_heads
            and block_size % KEY_ALIGNMENT == 0
            and self._aligned
        )


def _tensors(keys: KVBlocks, values: KVBlocks, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    """Keys, values and their scales, as the kernel takes them. Raises: ValueError: not for queries of this dtype."""
    if isinstance(keys, Int8Blocks) and isinstance(values, Int8Blocks):
        tensors = keys.values, values.values, keys.scale, values.scale
        whole = all(tensor.is_contiguous() for tensor in tensors)
    elif isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and dtype == keys.dtype == values.dtype:
        tensors = keys, values, None, None  # type: ignore[assignment]
        whole = keys.is_contiguous() and values.is_contiguous()
    else:
        whole = False
    if not whole:
        raise ValueError(f"one dtype and whole caches, not q {dtype}, keys {keys.dtype}, values {values.dtype}")
    return tensors
