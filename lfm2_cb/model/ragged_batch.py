"""RaggedBatch: one step's rows packed end to end, and the sequence state that the layers ask during that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..ops.attention.cascade import SharedPrefix, cascade_attention, shared_blocks
from ..ops.attention.packed import PackedSequences
from ..ops.attention.reference import paged_attention
from ..ops.attention.sparse import SparsePrefill
from ..ops.kernel_set import REFERENCE, KernelSet
from ..ops.native import NativeKernels
from .hybrid_cache import HybridCache
from .sequence_state import AttentionLayer, ConvLayer, SequenceState


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: its tokens `start … start + len(token_ids) - 1`, and where its cache lies."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]  # block ids; covers all tokens up to the row's last
    state_slot: int
    restore_block: int | None = None  # begin from this block's conv checkpoint instead of the slot
    num_logits: int = 0  # how many of the last tokens need logits
    num_drafts: int = 0  # how many of the last tokens are guesses: their conv state is written by `commit_conv_state`
    keeps_state: bool = True  # its conv state goes to the slot; not where another row goes on with the same sequence
    sparse: SparsePrefill | None = None  # how its queries attend; None: to all keys
    adapter: int = -1  # place of its adapter; below 0: it has none


class RaggedBatch(SequenceState):
    """Packed tensors of one step, on the cache's device.

    input_ids, position_ids: `[tokens]` int64. logits_index: `[sum of num_logits]` int64, rows of the hidden states.
    Implements `SequenceState`: K/V go to the rows' blocks; conv states are read from where each row starts, and
    written to its slot and, at every block boundary that the row crosses, to that block's checkpoint. So chunks need
    no alignment, and a chunk shorter than the kernel keeps what it must of the state before it.

    Args:
        shared: groups of rows (by index) with the number of first blocks that they share, for attention to read
            once; no row is in two, all start beyond the shared blocks, and none attends sparsely.
        kernels: what the layers compute with.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        cache: HybridCache,
        kernel_size: int,
        shared: Sequence[tuple[Sequence[int], int]] = (),
        kernels: KernelSet = REFERENCE,
    ) -> None:
        self.cache, self.rows, self.kernel_size, self.kernels = cache, rows, kernel_size, kernels
        self.device = cache.device
        self._lengths = np.array([len(row.token_ids) for row in rows])
        self._starts = np.array([row.start for row in rows])
        self._offsets = np.concatenate(([0], np.cumsum(self._lengths)))
        self.cu_seqlens: list[int] = self._offsets.tolist()
        self.kv_lens: list[int] = (self._starts + self._lengths).tolist()
        self._sparse = [row.sparse for row in rows]
        self._drafted: dict[int, torch.Tensor] | None = {} if any(row.num_drafts for row in rows) else None
        self._place(shared)

    def _place(self, shared: Sequence[tuple[Sequence[int], int]]) -> None:
        """Make the tensors of the step."""
        rows, offsets = self.rows, self._offsets
        # For every packed token: its sequence, and its place in the chunk.
        sequence = np.repeat(np.arange(len(rows)), self._lengths)
        place = np.arange(offsets[-1]) - offsets[sequence]
        position = self._starts[sequence] + place

        self.input_ids = self._tensor(np.concatenate([np.asarray(row.token_ids) for row in rows]))
        self.position_ids = self._tensor(position)
        self.logits_index = self._tensor(
            np.concatenate([np.arange(end - row.num_logits, end) for row, end in zip(rows, offsets[1:], strict=True)])
        )
        self.slot_mapping = self._slot_mapping(sequence, position)
        self.block_tables = self._block_tables()
        self.shared_prefixes = [
            SharedPrefix(
                group,
                self._tensor(np.asarray(rows[group[0]].block_table[:num_blocks])),
                self._tensor(np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in group])),
            )
            for group, num_blocks in shared
        ]
        self._packed = self._pack(self.kernels.native) if self.kernels.native is not None else None
        self._plan_conv(sequence, place)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def _slot_mapping(self, sequence: np.ndarray, position: np.ndarray) -> torch.Tensor:
        size = self.cache.plan.block_size
        tables = np.zeros((len(self.rows), max(len(row.block_table) for row in self.rows)), dtype=np.int64)
        for i, row in enumerate(self.rows):
            tables[i, : len(row.block_table)] = row.block_table
        heads = np.arange(self.cache.num_kv_heads)
        blocks, offsets = tables[sequence, position // size], position % size
        return self._tensor(((blocks[:, None] * len(heads) + heads) * size + offsets[:, None]).ravel())

    def _block_tables(self) -> list[torch.Tensor]:
        size = self.cache.plan.block_size
        return [
            self._tensor(np.asarray(row.block_table[: -(-kv_len // size)]))
            for row, kv_len in zip(self.rows, self.kv_lens, strict=True)
        ]

    def _pack(self, native: NativeKernels) -> PackedSequences:
        size = self.cache.plan.block_size
        first_keys = [size * count for count in shared_blocks(self.shared_prefixes, len(self.rows))]
        return PackedSequences(native, self.cu_seqlens, self.kv_lens, self.block_tables, first_keys, self._sparse)

    def _plan_conv(self, sequence: np.ndarray, place: np.ndarray) -> None:
        """Work out, once for all layers, which rows of "all states, then the packed inputs" are read for what."""
        self._read_rows = self._tensor(np.array([self._read_row(row) for row in self.rows]))
        distance = np.arange(self.kernel_size - 1, -1, -1)[:, None]
        self._taps = self._tensor(self._extended_index(sequence, place - distance))
        writes = [self._state_writes(row) for row in self.rows]
        targets = [target for own in writes for target, _ in own]
        ends = [(i, end) for i, own in enumerate(writes) for _, end in own]
        self._write_rows, self._write_index = self._windows(targets, ends)

    def _state_writes(self, row: Row) -> list[tuple[int, int]]:
        """Conv state rows that are written after this step's inputs, and after how many of the row's tokens."""
        cache, size, length = self.cache, self.cache.plan.block_size, len(row.token_ids)
        writes = []
        if row.keeps_state and not row.num_drafts:
            writes.append((cache.slot_row(row.state_slot), length))
        if cache.plan.checkpoints:
            for boundary in range((row.start // size + 1) * size, row.start + length + 1, size):
                writes.append((cache.checkpoint_row(row.block_table[boundary // size - 1]), boundary - row.start))
        return writes

    def _read_row(self, row: Row) -> int:
        if row.start == 0:
            return HybridCache.ZERO_ROW
        if row.restore_block is not None:
            return self.cache.checkpoint_row(row.restore_block)
        return self.cache.slot_row(row.state_slot)

    def _extended_index(self, sequence: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Row in "all states, then the packed inputs" of a place in a sequence's chunk; below 0 lies its state."""
        window = self.kernel_size - 1
        in_state = sequence * window + window + place
        in_chunk = len(self.rows) * window + self._offsets[sequence] + place
        return np.where(place >= 0, in_chunk, in_state)

    def _windows(self, targets: list[int], ends: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """State rows to write `[n]`, and the rows of the extended inputs that make each state `[n, kernel - 1]`."""
        window = self.kernel_size - 1
        pairs = np.array(ends, dtype=np.int64).reshape(-1, 2)
        place = pairs[:, 1:] - window + np.arange(window)
        index = self._extended_index(np.broadcast_to(pairs[:, :1], place.shape), place)
        return self._tensor(np.array(targets)), self._tensor(index)

    # SequenceState

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        i = layer.layer_idx
        self.cache.write_kv(i, self.slot_mapping, k, v, self.kernels)
        keys, values = self.cache.keys[i], self.cache.values[i]
        whole = q, keys, values, self.cu_seqlens, self.kv_lens, self.block_tables, layer.scaling
        if self.shared_prefixes:
            mixed = cascade_attention(*whole, self.shared_prefixes, packed=self._packed, sparse=self._sparse)
        elif self._packed is not None:
            mixed = self._packed.attend(q, keys, values, layer.scaling)
        else:
            mixed = paged_attention(*whole, self._sparse)
        return mixed.flatten(-2), None

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        i, conv = layer.layer_idx, layer.conv
        mixed, extended = self.kernels.short_conv(
            bcx,
            self.cache.conv_states[i],
            self._read_rows,
            self._taps,
            conv.weight,
            conv.bias,
            self._write_rows,
            self._write_index,
            whole=self._drafted is not None,
        )
        if self._drafted is not None:
            self._drafted[i] = extended
        return mixed

    def mask_padding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states  # nothing is padded here

    def commit_conv_state(self, num_accepted: dict[int, int]) -> None:
        """Write the conv state of the rows that had drafts, after the tokens that turned out right.

        Args: num_accepted: row index → accepted drafts; one entry for every row with drafts.
        """
        if self._drafted is None:
            return
        targets = [self.cache.slot_row(self.rows[i].state_slot) for i in num_accepted]
        ends = [
            (i, len(self.rows[i].token_ids) - self.rows[i].num_drafts + accepted)
            for i, accepted in num_accepted.items()
        ]
        rows, index = self._windows(targets, ends)
        for layer_idx, extended in self._drafted.items():
            self.cache.conv_states[layer_idx][rows] = extended[index]
        self._drafted = None
