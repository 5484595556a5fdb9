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
    """One token of each of up to so many sequences; after `fill`, of others. Then a graph captured of a forward over
    it (`ops.native.CapturedGraph`) holds for them too: all that differs from step to step lies in its tensors.

    Places that are left over repeat the first sequence's token, see one key, and write nothing to the cache.

    inputs_embeds: `[num_rows, hidden]`, for the caller to fill.

    Args:
        rows: a first step's.
        num_rows: the most there may be.
        max_blocks: cache blocks that a row may have.
        shared: as in `RaggedBatch`, of the first step; none: no step's rows may share any.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cache: HybridCache,
        kernel_size: int,
        kernels: KernelSet,
        *,
        num_rows: int,
        max_blocks: int,
        inputs_embeds: torch.Tensor,
        shared: Sequence[tuple[Sequence[int], int]] = (),
    ) -> None:
        super().__init__([*rows, *[rows[0]] * (num_rows - len(rows))], cache, kernel_size, shared, kernels)
        self.num_rows, self.max_blocks, self.inputs_embeds = num_rows, max_blocks, inputs_embeds
        tables = [torch.zeros(max_blocks, dtype=torch.int64)] * num_rows
        left_out = [cache.plan.block_size] * num_rows if shared else None
        assert kernels.native is not None
        self._packed = PackedSequences(kernels.native, self.cu_seqlens, self.kv_lens, tables, left_out)
        # Each row writes its slot, and maybe a checkpoint: below 0 where it does not.
        every_row = [(i, 1) for i in range(num_rows)]
        self._write_rows, self._write_index = self._windows([-1] * 2 * num_rows, every_row * 2)
        filled = self.input_ids, self.position_ids, self.slot_mapping, self._packed.sequences, self._packed.block_ids
        self._filled = [tensor.numpy() for tensor in (*filled, self._read_rows, self._write_rows)]
        if shared:
            most = num_rows // 2  # groups
            sizes = (most, 6), (most * max_blocks,), (num_rows,)
            sequences, blocks, tokens = (torch.zeros(size, dtype=torch.int64) for size in sizes)
            self._packed.prefixes = sequences, blocks, tokens
        self.fill(rows, shared)

    @staticmethod
    def is_decode(row: Row) -> bool:
        """Whether it goes on, by one token, from where its last step left it."""
        return len(row.token_ids) == row.num_logits == 1 and row.restore_block is None and row.start > 0

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the rows, of which there are not too many, have room in the tensors."""
        size = self.cache.plan.block_size
        return all(row.start // size < self.max_blocks for row in rows)

    def fill(self, rows: Sequence[Row], shared: Sequence[tuple[Sequence[int], int]] = ()) -> None:
        """Put other rows in the place of those before. All must be decodes, and `holds` be true."""
        cache, size, heads = self.cache, self.cache.plan.block_size, self.cache.num_kv_heads
        token_ids, positions, slot_mapping, sequences, block_ids, read, written = self._filled
        count = len(rows)
        self.rows = rows = [*rows, *[rows[0]] * (self.num_rows - count)]
        starts = np.array([row.start for row in rows])
        blocks = np.array([row.block_table[row.start // size] for row in rows])
        token_ids[:] = [row.token_ids[0] for row in rows]
        positions[:] = starts
        slots = (blocks[:, None] * heads + np.arange(heads)) * size + (starts % size)[:, None]
        slots[count:] = -1
        slot_mapping[:] = slots.ravel()

        sequences[:, 2] = 0
        sequences[:, 3] = starts + 1
        sequences[count:, 3] = 1
        for table, row in zip(block_ids.reshape(self.num_rows, -1), rows, strict=True):
            num_blocks = row.start // size + 1
            table[:num_blocks] = row.block_table[:num_blocks]
        if shared:
            self._fill_shared(shared)

        read[:] = written[: self.num_rows] = [cache.slot_row(row.state_slot) for row in rows]
        if cache.plan.checkpoints:
            written[self.num_rows :] = np.where((starts + 1) % size == 0, cache.checkpoint_row(0) + blocks, -1)
        written.reshape(2, -1)[:, count:] = -1

    def _fill_shared(self, shared: Sequence[tuple[Sequence[int], int]]) -> None:
        assert self._packed is not None and self._packed.prefixes is not None
        sequences, block_ids, tokens = (tensor.numpy() for tensor in self._packed.prefixes)
        size, query, block = self.cache.plan.block_size, 0, 0
        sequences[:] = 0  # those left over have no queries
        for i, (group, num_blocks) in enumerate(shared):
            sequences[i] = query, len(group), 0, num_blocks * size, block, -1
            tokens[query : query + len(group)] = group
            block_ids[block : block + num_blocks] = self.rows[group[0]].block_table[:num_blocks]
            query, block = query + len(group), block + num_blocks
            self._filled[3][group, 2] = num_blocks * size
