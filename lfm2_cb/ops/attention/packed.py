"""Causal attention over the paged cache by the native kernels (`csrc/attention`), which read blocks in place.

`paged_attention.cpp` computes in fp32, for any shape. Queries in bf16, over a cache in bf16 or 8 bits, have two more
kernels on processors that multiply bf16: `decode_attention.cpp` for single queries, and by tiles
`prefill_attention.cpp` for chunks of two and more. What a row gets depends on its sequence alone, and not on how its
prompt is cut into chunks (but where a chunk goes through SDPA, see below); but as the kernels round differently, a
chunk of one query gives, in its last bits, not what a longer chunk gives for the same row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..native import NativeKernels, empty
from ..native.instruction_sets import PAIR_ISAS, TILE_ISAS
from .kv_blocks import Int8Blocks, KVBlocks, gather
from .reference import causal_attention
from .sparse import SparsePrefill, block_mass, choose_blocks, is_worthwhile, last_block, num_blocks

#: without tiles, a sequence with more queries and more keys than these is gathered and goes through SDPA.
#: Measured with AVX2: with up to 1,024 keys the kernel is 1.0 to 2 × as fast, with 1,536 0.8 to 1.25 ×, with 2,048 and
#: more 0.7 to 0.9 ×. The kernel's result for a row does not depend on how a prompt is cut into chunks, SDPA's does, in
#: its last bits.
SDPA_QUERIES, SDPA_KEYS = 64, 1024
#: with more keys than these nothing is gathered, so that memory does not grow with the prompt
MOST_SDPA_KEYS = 16384
#: shapes that `decode_attention.cpp`, which is compiled for `PAIR_ISAS`, and `prefill_attention.cpp`, for `TILE_ISAS`,
#: take
HEAD_DIMS, MOST_HEADS, KEY_ALIGNMENT = (64, 128), 8, 16


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences whose first blocks are the same, none of whose queries lies in them.

    Attributes:
        rows: sequences by their place in the batch.
        block_ids: the blocks, int64 `[blocks]`.
        tokens: the sequences' packed queries, one after another, int64 `[queries]`.
    """

    rows: Sequence[int]
    block_ids: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class SparseSequence:
    """A sequence that attends sparsely: its queries, its keys, and where its blocks begin among all block ids."""

    how: SparsePrefill
    tokens: slice
    num_keys: int
    block_ids: torch.Tensor
    first_block: int

    @property
    def num_queries(self) -> int:
        return self.tokens.stop - self.tokens.start

    @property
    def num_blocks(self) -> tuple[int, int]:
        return num_blocks(self.num_queries, self.num_keys)

    @property
    def probe(self) -> SparseSequence:
        """Its last block of queries alone."""
        first = self.tokens.start + last_block(self.num_queries)
        return replace(self, tokens=slice(first, self.tokens.stop))


class PackedSequences:
    """Where the sequences of a step lie, as the kernel reads it: made once, for all layers.

    Args:
        cu_seqlens, kv_lens, block_tables: as in `paged_attention`.
        first_keys: for each sequence how many of its first keys to leave out; none where absent.
        sparse: for each sequence how its queries attend to its keys, none of which is left out; None: to all.

    Attributes:
        sequences: int64 `[sequences, 6]`, each's first query, queries, first key, keys, first of its block ids, and
            where its lists of blocks begin (-1: none). Those of one query come first, in the order given, then the
            others; without those that go through SDPA.
        block_ids: int64, of all sequences, one after another.
        prefixes: int64 tensors that say the same of shared prefixes, whose queries see all keys: `[prefixes, 6]`,
            block ids, and the queries' tokens; made when first asked for.
    """

    def __init__(
        self,
        native: NativeKernels,
        cu_seqlens: Sequence[int],
        kv_lens: Sequence[int],
        block_tables: Sequence[torch.Tensor],
        first_keys: Sequence[int] | None = None,
        sparse: Sequence[SparsePrefill | None] | None = None,
    ) -> None:
        self._native = native
        self.prefixes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.block_ids = torch.cat(list(block_tables))
        self._long: list[tuple[slice, torch.Tensor, int]] = []
        decodes: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        long: list[tuple[int, ...]] = []
        self._sparse: list[SparseSequence] = []
        first_block, num_listed = 0, 0
        for i, (kv_len, blocks) in enumerate(zip(kv_lens, block_tables, strict=True)):
            start, end, first = cu_seqlens[i], cu_seqlens[i + 1], first_keys[i] if first_keys else 0
            group, lists = decodes if end - start == 1 else chunks, -1
            if sparse and (how := sparse[i]) is not None:
                lists = num_listed
                self._sparse.append(SparseSequence(how, slice(start, end), kv_len, blocks, first_block))
                num_listed += math.prod(num_blocks(end - start, kv_len))
            elif end - start > SDPA_QUERIES and SDPA_KEYS < kv_len <= MOST_SDPA_KEYS and not first:
                self._long.append((slice(start, end), blocks, kv_len))
                group = long
            group.append((start, end - start, first, kv_len, first_block, lists))
            first_block += len(blocks)
        self._aligned = not first_keys or not any(first % KEY_ALIGNMENT for first in first_keys)
        table = torch.tensor(decodes + chunks + long, dtype=torch.int64).reshape(-1, 6)
        self.sequences = table[: len(decodes) + len(chunks)]
        self._decodes, self._chunks = self.sequences.split((len(decodes), len(chunks)))
        self._all_chunks = table[len(decodes) :]

    def attend(self, q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, scaling: float) -> torch.Tensor:
        """As `paged_attention`: q `[tokens, heads, head_dim]` fp32 or bf16, as the cache is unless that is in 8 bits.
        The same back."""
        out = empty(q.shape, q.dtype)
        self._run(q, key_cache, value_cache, scaling, out, None)
        return out

    def attend_with_lse(
        self, q: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp32, and `[tokens, heads]` the logarithms of the softmax's denominators, fp32: those of
        sequences that have keys left out, others maybe."""
        out = empty(q.shape, torch.float32)
        lse = empty(q.shape[:2], torch.float32)
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
        sizes = heads, keys.shape[1], head_dim, keys.shape[2], q.stride(0)
        taken = self._choose_blocks(q, keys, scaling) if self._sparse else None
        in_bf16, to_fp32 = int(q.dtype == torch.bfloat16), int(out.dtype == torch.float32)

        def run(kernel: str, sequences: torch.Tensor, *args: torch.Tensor | int | float | None) -> None:
            if len(sequences):
                self._native.call(kernel, q, *stored, sequences, self.block_ids, *args)

        def run_paged(sequences: torch.Tensor) -> None:
            run("paged_attention", sequences, taken, out, lse, len(sequences), *sizes, in_bf16, to_fp32, scaling)

        decodes, all_chunks = self._decodes, self._all_chunks
        if not self._suits_bf16_kernels(q, keys, PAIR_ISAS):
            run_paged(self.sequences)
        else:
            run("decode_attention", decodes, out, lse, len(decodes), *sizes, to_fp32, scaling)
            if self._native.isa in TILE_ISAS:
                tensors, causal = (taken, None, None, None, out, lse), 1
                run("prefill_attention", all_chunks, *tensors, len(all_chunks), *sizes, to_fp32, causal, scaling)
                return
            run_paged(self._chunks)
        for tokens, blocks, kv_len in self._long:
            k, v = gather(keys, blocks, kv_len), gather(values, blocks, kv_len)
            out[tokens] = causal_attention(q[tokens], k, v, scaling)

    def _choose_blocks(self, q: torch.Tensor, keys: KVBlocks, scaling: float) -> torch.Tensor | None:
        """The lists of the sequences that have some, as `csrc/attention/sequence.h` says: uint8, 1 where a block is
        attended to. None: all attend to all blocks, as no list would pay."""
        probes = self._block_masses([row.probe for row in self._sparse], q, keys, scaling)
        pays = [is_worthwhile(mass, row.how, row.num_keys) for row, mass in zip(self._sparse, probes, strict=True)]
        if not any(pays):
            return None
        listed = [row for row, does in zip(self._sparse, pays, strict=True) if does]
        masses = iter(self._block_masses(listed, q, keys, scaling))
        lists = [
            choose_blocks(next(masses), row.how, row.num_queries, row.num_keys)
            if does
            else torch.ones(keys.shape[1], *row.num_blocks, dtype=torch.bool)
            for row, does in zip(self._sparse, pays, strict=True)
        ]
        return torch.cat([chosen.flatten() for chosen in lists]).view(torch.uint8)

    def _block_masses(
        self, rows: Sequence[SparseSequence], q: torch.Tensor, keys: KVBlocks, scaling: float
    ) -> list[torch.Tensor]:
        """`block_mass` of each."""
        _, heads, head_dim = q.shape
        _, kv_heads, block_size, _ = keys.shape
        if not self._suits_bf16_kernels(q, keys, TILE_ISAS):
            return [block_mass(q[row.tokens], gather(keys, row.block_ids, row.num_keys), scaling) for row in rows]
        sizes = [math.prod(row.num_blocks) for row in rows]
        table = torch.tensor(
            [
                (row.tokens.start, row.num_queries, 0, row.num_keys, row.first_block, sum(sizes[:i]))
                for i, row in enumerate(rows)
            ]
        )
        mass = torch.zeros(2, kv_heads * sum(sizes))
        stored = (keys.values, keys.scale) if isinstance(keys, Int8Blocks) else (keys, None)
        shape = heads, kv_heads, head_dim, block_size, q.stride(0)
        self._native.call(
            "block_mass", q, *stored, table, self.block_ids, mass, len(rows), *shape, mass.shape[1], scaling
        )
        parts = mass.split([kv_heads * size for size in sizes], dim=1)
        return [part.view(2, kv_heads, *row.num_blocks) for part, row in zip(parts, rows, strict=True)]

    def attend_shared(
        self,
        q: torch.Tensor,
        key_cache: KVBlocks,
        value_cache: KVBlocks,
        scaling: float,
        prefixes: Sequence[SharedPrefix],
        near: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor | None:
        """Attention of the prefixes' queries to their prefix, all queries of a prefix together, merged with what
        `attend_with_lse` found of the other keys, `near`.

        Args: prefixes: the same at every call.
        Returns: bf16 `[tokens, heads, head_dim]`, of the tokens that share nothing what is near; None: there is no
            kernel for it.
        """
        if not self._suits_bf16_kernels(q, key_cache, TILE_ISAS):
            return None
        stored = _tensors(key_cache, value_cache, q.dtype)
        _, heads, head_dim = q.shape
        _, kv_heads, block_size, _ = key_cache.shape
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        if self.prefixes is None:
            rows, query, block = [], 0, 0
            for prefix in prefixes:
                num_queries, num_blocks = len(prefix.tokens), len(prefix.block_ids)
                rows.append((query, num_queries, 0, num_blocks * block_size, block, -1))
                query, block = query + num_queries, block + num_blocks
            block_ids, tokens = (torch.cat([getattr(p, name) for p in prefixes]) for name in ("block_ids", "tokens"))
            self.prefixes = torch.tensor(rows, dtype=torch.int64), block_ids, tokens
        sequences, block_ids, tokens = self.prefixes
        out = empty(q.shape, q.dtype)
        self._native.call("to_bf16", near[0], out, len(q), heads * head_dim)
        self._native.call(
            "prefill_attention",
            *(q, *stored, sequences, block_ids, None, tokens, *near, out, None),
            *(len(sequences), heads, kv_heads, head_dim, block_size, q.stride(0), 0, 0, scaling),
        )
        return out

    def _suits_bf16_kernels(self, q: torch.Tensor, keys: KVBlocks, isas: frozenset[str]) -> bool:
        """Whether the kernels that some instruction sets have for bf16 take these."""
        _, kv_heads, block_size, head_dim = keys.shape
        return (
            self._native.isa in isas
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
        dtypes = f"{dtype}, {keys.dtype} and {values.dtype}"
        raise ValueError(f"q, keys and values must have one dtype and the caches be contiguous, got {dtypes}")
    return tensors
