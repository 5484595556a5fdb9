"""DecodeBatch: a step of one token a sequence, in tensors that stay where they are from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..ops.attention.packed import PackedSequences
from ..ops.kernel_set import KernelSet
from .hybrid_cache import HybridCache
from .ragged_batch import RaggedBatch, Row


class BlockTables:
    """Where the sequences of decode steps have their keys and values: the block ids of each state slot, in a tensor
    that stays where it is. What a step finds written is not written again.

    A sequence is known by its list of block ids, which may grow; those that a step has read stay what they are.

    Args: width: blocks that a sequence may have.
    Attributes: block_ids: int64 `[slots, width]`.
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self.block_ids = torch.zeros(num_slots, width, dtype=torch.int64)
        self._array = self.block_ids.numpy()
        self._lists: list[Sequence[int]] = [()] * num_slots
        self._num_written = [0] * num_slots

    def write(self, slot: int, block_ids: Sequence[int], count: int) -> None:
        """Have the first so many blocks of the slot's sequence there."""
        if self._lists[slot] is not block_ids:
            self._lists[slot], self._num_written[slot] = block_ids, 0
        if self._num_written[slot] < count:
            self._array[slot, :count] = block_ids[:count]
            self._num_written[slot] = count


class DecodeBatch(RaggedBatch):
    """One token of each of up to so many sequences; after `fill`, of others. Then a graph captured of a forward over
    it (`ops.native.CapturedGraph`) holds for them too: all that differs from step to step lies in its tensors, and in
    the tables.

    Places that are left over repeat the first sequence's token, see one key, and write nothing to the cache.

    inputs_embeds: `[num_rows, hidden]`, for the caller to fill.

    Args:
        rows: a first step's.
        num_rows: the most there may be.
        tables: where the rows' block ids are put; wide enough for all of them.
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
        tables: BlockTables,
        inputs_embeds: torch.Tensor,
        shared: Sequence[tuple[Sequence[int], int]] = (),
    ) -> None:
        super().__init__([*rows, *[rows[0]] * (num_rows - len(rows))], cache, kernel_size, shared, kernels)
        self.num_rows, self.inputs_embeds, self._tables = num_rows, inputs_embeds, tables
        left_out = [cache.plan.block_size] * num_rows if shared else None
        assert kernels.native is not None
        self._packed = PackedSequences(kernels.native, self.cu_seqlens, self.kv_lens, self.block_tables, left_out)
        self._packed.block_ids = tables.block_ids
        # Each row writes its slot, and maybe a checkpoint: below 0 where it does not.
        every_row = [(i, 1) for i in range(num_rows)]
        self._write_rows, self._write_index = self._windows([-1] * 2 * num_rows, every_row * 2)
        filled = self.input_ids, self.position_ids, self.slot_mapping, self._packed.sequences
        self._head_offsets = np.arange(cache.num_kv_heads) * cache.plan.block_size
        self._filled = [tensor.numpy() for tensor in (*filled, self._read_rows, self._write_rows)]
        if shared:
            most = num_rows // 2  # groups
            sizes = (most, 6), (most * tables.width,), (num_rows,)
            sequences, blocks, tokens = (torch.zeros(size, dtype=torch.int64) for size in sizes)
            self._packed.prefixes = sequences, blocks, tokens
        self.fill(rows, shared)

    @staticmethod
    def is_decode(row: Row) -> bool:
        """Whether it goes on, by one token, from where its last step left it."""
        return len(row.token_ids) == row.num_logits == 1 and row.restore_block is None and row.start > 0

    def fill(self, rows: Sequence[Row], shared: Sequence[tuple[Sequence[int], int]] = ()) -> None:
        """Put other rows in the place of those before: decodes, not too many of them nor too long."""
        cache, size, heads = self.cache, self.cache.plan.block_size, self.cache.num_kv_heads
        token_ids, positions, slot_mapping, sequences, read, written = self._filled
        count = len(rows)
        self.rows = rows = [*rows, *[rows[0]] * (self.num_rows - count)]
        for row in rows:
            self._tables.write(row.state_slot, row.block_table, row.start // size + 1)
        token_ids[:], positions[:], slots, blocks = np.array(
            (
                [row.token_ids[0] for row in rows],
                [row.start for row in rows],
                [row.state_slot for row in rows],
                [row.block_table[row.start // size] for row in rows],
            )
        )
        offsets = positions % size
        by_head = slot_mapping.reshape(-1, heads)
        by_head[:] = (blocks * (heads * size) + offsets)[:, None] + self._head_offsets
        by_head[count:] = -1

        sequences[:, 2] = 0
        sequences[:, 3] = positions + 1
        sequences[count:, 3] = 1
        sequences[:, 4] = slots * self._tables.width
        if shared:
            self._fill_shared(shared)

        read[:] = written[: self.num_rows] = cache.slot_row(0) + slots
        if cache.plan.checkpoints:
            written[self.num_rows :] = np.where(offsets == size - 1, cache.checkpoint_row(0) + blocks, -1)
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
