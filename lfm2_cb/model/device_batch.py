"""DeviceBatch: a step's rows for the Triton kernels, in tables that one copy brings to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..ops.attention.kv_blocks import gather
from ..ops.attention.reference import attend_alone
from ..ops.kernel_set import KernelSet
from ..ops.triton.tables import Packed, StepTables, lay_out
from .hybrid_cache import HybridCache
from .paged_state import PagedState
from .ragged_batch import RaggedBatch, Row
from .sequence_state import AttentionLayer, ConvLayer

if TYPE_CHECKING:  # what imports Triton is imported where a device is for it
    from ..ops.triton.kernels import TritonKernels


class DeviceBatch(PagedState, RaggedBatch):
    """As `RaggedBatch`; nothing that the layers ask of it waits for the device. Shared prefixes are read by every row
    (a card's cache has them then); rows that attend sparsely do so in torch.

    input_ids, position_ids, slots: `[tokens]` int32. logits_index: `[sum of num_logits]` int32.
    """

    @property
    def _triton(self) -> TritonKernels:
        assert self.kernels.triton is not None
        return self.kernels.triton

    def _place(self, shared: Sequence[tuple[Sequence[int], int]]) -> None:
        self.tables = tables = StepTables(self._lay_out(), self.device)
        self.input_ids, self.position_ids, self.logits_index = tables.input_ids, tables.positions, tables.logits_index
        self.slots = tables.slots

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
        # As where segments of a prompt are reused: its rows of one step read and write the same slot.
        writer_of = {row: i for i, s in enumerate(sequences) for row, _ in s.writes}
        self._begins_from_written = any(writer_of.get(s.read_row, i) != i for i, s in enumerate(sequences))
        group = self.cache.num_heads // self.cache.num_kv_heads
        queries = self._triton.chunk_queries(group)
        return lay_out(sequences, self.cache.plan.block_size, queries)

    # SequenceState

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        self._triton.write_rows(k, v, self.slots, *self.caches(layer))
        return self.attend_queries(layer, q), None

    def attend_queries(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.caches(layer)
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
        source = states.clone() if self._begins_from_written else None
        return self._triton.short_conv(bcx, states, conv.weight, conv.bias, self.tables, source)


def make_batch(
    rows: Sequence[Row],
    cache: HybridCache,
    kernel_size: int,
    shared: Sequence[tuple[Sequence[int], int]],
    kernels: KernelSet,
) -> RaggedBatch:
    """The batch of a step, in the layout that the kernels take."""
    kind = RaggedBatch if kernels.triton is None else DeviceBatch
    return kind(rows, cache, kernel_size, shared, kernels)
