"""DeviceBatch: a step's rows for the Triton kernels, in tables that one copy brings to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.attention.kv_blocks import KVBlocks, gather
from ..ops.attention.reference import attend_alone
from ..ops.kernel_set import REFERENCE, KernelSet
from ..ops.triton.tables import Packed, StepTables, lay_out
from .hybrid_cache import HybridCache
from .ragged_batch import RaggedBatch, Row
from .sequence_state import AttentionLayer, ConvLayer


class DeviceBatch(RaggedBatch):
    """As `RaggedBatch`; nothing that the layers ask of it waits for the device. Shared prefixes are read by every row
    (a card's cache has them then); rows that attend sparsely do so in torch.

    input_ids, position_ids: `[tokens]` int32. logits_index: `[sum of num_logits]` int32.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cache: HybridCache,
        kernel_size: int,
        shared: Sequence[tuple[Sequence[int], int]] = (),
        kernels: KernelSet = REFERENCE,
    ) -> None:
        assert kernels.triton is not None
        self._triton = kernels.triton
        super().__init__(rows, cache, kernel_size, shared, kernels)

    def _place(self, shared: Sequence[tuple[Sequence[int], int]]) -> None:
        self.tables = tables = StepTables(self._lay_out(), self.device)
        self.input_ids, self.position_ids, self.logits_index = tables.input_ids, tables.positions, tables.logits_index

    def _lay_out(self) -> dict:
        sequences = [
            Packed(
                row.token_ids,
                row.start,
                row.block_table,
                self._read_row(row),
                self._state_writes(row),
                row.num_logits,
                row.sparse is not None,
            )
            for row in self.rows
        ]
        group = self.cache.num_heads // self.cache.num_kv_heads
        queries = self._triton.chunk_queries(group)
        return lay_out(sequences, self.cache.plan.block_size, queries)

    # SequenceState

    def attend_packed(
        self, layer: AttentionLayer, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norms, caches = (layer.q_layernorm, layer.k_layernorm), self._caches(layer)
        q = self.kernels.norm_rotate_write(qkv, layer.num_heads, *norms, rope, self.tables.slots, *caches)
        return super().attend_packed(layer, qkv, rope) if q is None else (self._attend(layer, q), None)

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        self._triton.write_rows(k, v, self.tables.slots, *self._caches(layer))
        return self._attend(layer, q), None

    def _caches(self, layer: AttentionLayer) -> tuple[KVBlocks, KVBlocks]:
        return self.cache.keys[layer.layer_idx], self.cache.values[layer.layer_idx]

    def _attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        keys, values = self._caches(layer)
        mixed = self._triton.attend(q, keys, values, self.tables, layer.scaling)
        for i, row in enumerate(self.rows):
            if row.sparse is not None:
                tokens, blocks = slice(*self.cu_seqlens[i : i + 2]), self.tables.block_tables[i].long()
                k, v = (gather(cache, blocks, self.kv_lens[i]) for cache in (keys, values))
                mixed[tokens] = attend_alone(q[tokens], k, v, layer.scaling, row.sparse)
        return mixed.flatten(-2)

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        i, states, conv = layer.layer_idx, self.cache.conv_states[layer.layer_idx], layer.conv
        if self._drafted is not None:  # before the kernel overwrites a state
            b, _, x = bcx.chunk(3, dim=-1)
            self._drafted[i] = torch.cat((states[self.tables.read_rows].flatten(0, 1), b * x))
        return self._triton.short_conv(bcx, states, conv.weight, conv.bias, self.tables)


def make_batch(
    rows: Sequence[Row],
    cache: HybridCache,
    kernel_size: int,
    shared: Sequence[tuple[Sequence[int], int]],
    kernels: KernelSet,
) -> RaggedBatch:
    """The batch of a step, as the kernels want it."""
    kind = RaggedBatch if kernels.triton is None else DeviceBatch
    return kind(rows, cache, kernel_size, shared, kernels)
