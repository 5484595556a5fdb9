"""DecodeBatch: a step of one token a sequence, in tensors that stay where they are from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..ops.attention.packed import PackedSequences
from ..ops.kernel_set import KernelSet
from .hybrid_cache import HybridCache
from .ragged_batch import RaggedBatch, Row


class DecodeBatch(RaggedBatch):
    """One token of each of so many sequences; after `fill`, of others. Then a graph captured of a forward over
    it (`ops.native.CapturedGraph`) holds for them too: all that differs from step to step lies in its tensors.

    inputs_embeds: `[rows, hidden]`, for the caller to fill.

    Args:
        rows: a first step's.
        max_blocks: cache blocks that a row may have.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cache: HybridCache,
        kernel_size: int,
        kernels: KernelSet,
        *,
        max_blocks: int,
        inputs_embeds: torch.Tensor,
    ) -> None:
        super().__init__(rows, cache, kernel_size, kernels=kernels)
        self.max_blocks, self.inputs_embeds = max_blocks, inputs_embeds
        num_rows = len(rows)
        tables = [torch.zeros(max_blocks, dtype=torch.int64)] * num_rows
        assert kernels.native is not None
        self._packed = PackedSequences(kernels.native, self.cu_seqlens, self.kv_lens, tables)
        # Each row writes its slot, and maybe a checkpoint: below 0 where it does not.
        every_row = [(i, 1) for i in range(num_rows)]
        self._write_rows, self._write_index = self._windows([-1] * 2 * num_rows, every_row * 2)
        filled = self.input_ids, self.position_ids, self.slot_mapping, self._packed.sequences, self._packed.block_ids
        self._filled = [tensor.numpy() for tensor in (*filled, self._read_rows, self._write_rows)]
        self.fill(rows)

    @staticmethod
    def is_decode(row: Row) -> bool:
        """Whether it goes on, by one token, from where its last step left it."""
        return len(row.token_ids) == row.num_logits == 1 and row.restore_block is None and row.start > 0

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the rows, as many as there were, have room in the tensors."""
        size = self.cache.plan.block_size
        return all(row.start // size < self.max_blocks for row in rows)

    def fill(self, rows: Sequence[Row]) -> None:
        """Put other rows in the place of those before. All must be decodes, and `holds` be true."""
        cache, size, heads = self.cache, self.cache.plan.block_size, self.cache.num_kv_heads
        token_ids, positions, slot_mapping, sequences, block_ids, read, written = self._filled
        self.rows = rows
        starts = np.array([row.start for row in rows])
        blocks = np.array([row.block_table[row.start // size] for row in rows])
        token_ids[:] = [row.token_ids[0] for row in rows]
        positions[:] = starts
        slots = (blocks[:, None] * heads + np.arange(heads)) * size + (starts % size)[:, None]
        slot_mapping[:] = slots.ravel()

        sequences[:, 3] = starts + 1
        for table, row in zip(block_ids.reshape(len(rows), -1), rows, strict=True):
            num_blocks = row.start // size + 1
            table[:num_blocks] = row.block_table[:num_blocks]

        read[:] = written[: len(rows)] = [cache.slot_row(row.state_slot) for row in rows]
        if cache.plan.checkpoints:
            written[len(rows) :] = np.where((starts + 1) % size == 0, cache.checkpoint_row(0) + blocks, -1)
