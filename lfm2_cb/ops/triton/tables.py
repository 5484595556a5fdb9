"""StepTables: where the sequences of a step lie, in one int32 tensor on the device that one copy fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..attention.kv_blocks import Int8Blocks, KVBlocks

#: int32 values: tables begin at multiples of it, so that kernels read them in vectors
ALIGNMENT = 4
#: tokens of a tile of the short convolution, at most; no window may be longer
CONV_TOKENS = 16


@dataclass(slots=True)
class Packed:
    """A sequence of a step.

    Attributes:
        token_ids: its tokens. start: the first one's position.
        block_table: block ids, for all its tokens up to the last.
        read_row: row of the conv cache that it begins from.
        writes: rows of the conv cache that get a state, and after how many of its tokens.
        num_logits: how many of its last tokens need logits.
        attends_elsewhere: its queries are in no tile.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    read_row: int
    writes: Sequence[tuple[int, int]]
    num_logits: int
    attends_elsewhere: bool = False


class AttentionTables(NamedTuple):
    """Of `StepTables`, what attention reads."""

    first: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    decodes: torch.Tensor
    chunks: torch.Tensor


class StepTables:
    """Tables of a step at addresses that stay, so that a CUDA graph captured over them holds for other rows.

    Attributes, all int32 on the device, for n sequences of t packed tokens:
        first: `[n + 1]`, packed tokens before each sequence. kv_lens: `[n]`, keys of each, its new ones included.
        block_tables: `[n, most blocks]`.
        decodes, chunks: `[…, 2]`, tiles of queries, of sequences with one query and with more: the sequence, and the
            first query's place in it.
        slots: `[t]`, where a token's key goes, block_id * block_size + offset; below 0: nowhere.
        read_rows: `[n]`, rows of the conv cache that the sequences begin from.
        write_first: `[n + 1]`, of each sequence the first of its `write_rows`, the rows of the conv cache that get a
            state (below 0: none does), and `write_ends`, how many of its tokens are then seen. The row that it begins
            from, if it is among them, comes last: all else has been read from it then.
        conv_tiles: `[…, 2]`, tiles of tokens, as `chunks`.
        input_ids, positions: `[t]`. logits_index: `[logits]`, tokens that have any.

    host: the tensor that is copied from, pinned where the device is CUDA.
    """

    first: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    decodes: torch.Tensor
    chunks: torch.Tensor
    slots: torch.Tensor
    read_rows: torch.Tensor
    write_first: torch.Tensor
    write_rows: torch.Tensor
    write_ends: torch.Tensor
    conv_tiles: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor

    def __init__(self, tables: Mapping[str, np.ndarray], device: torch.device) -> None:
        sizes = {name: -(-table.size // ALIGNMENT) * ALIGNMENT for name, table in tables.items()}
        self.host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.zeros_like(self.host, device=device, pin_memory=False)
        self._places: dict[str, np.ndarray] = {}
        start = 0
        for name, table in tables.items():
            place = slice(start, start + table.size)
            self._places[name] = self.host.numpy()[place].reshape(table.shape)
            setattr(self, name, self.device[place].view(table.shape))
            start += sizes[name]
        self.put(tables)

    def put(self, tables: Mapping[str, np.ndarray]) -> None:
        """Other tables of the same shapes, in one copy that nobody waits for: `host` must not change before it is
        done."""
        for name, table in tables.items():
            self._places[name][...] = table
        self.device.copy_(self.host, non_blocking=True)


#: what attention takes
TablesOfAttention = StepTables | AttentionTables


def lay_out(
    sequences: Sequence[Packed], block_size: int, chunk_queries: int, num_rows: int = 0, width: int = 0
) -> dict[str, np.ndarray]:
    """The tables of a step, by the names that `StepTables` has.

    Args:
        chunk_queries: queries of a tile of `chunks`.
        num_rows: of decodes, for shapes that no step changes: sequences of one token are filled up to so many with
            ones that have no key, no logits that anyone reads and two states that go nowhere; 0: as many as there are.
        width: of `block_tables`, at least.
    """
    count, total = len(sequences), max(len(sequences), num_rows)
    lengths = np.ones(total, dtype=np.int64)
    starts, read_rows = np.zeros((2, total), dtype=np.int64)
    lengths[:count] = [len(s.token_ids) for s in sequences]
    starts[:count] = [s.start for s in sequences]
    read_rows[:count] = [s.read_row for s in sequences]
    first = np.concatenate(([0], np.cumsum(lengths)))
    kv_lens = starts + lengths
    kv_lens[count:] = 0
    block_tables = np.zeros((total, max(width, -(-int(kv_lens.max()) // block_size))), dtype=np.int64)
    for row, s, kv_len in zip(block_tables, sequences, kv_lens, strict=False):
        num_blocks = -(-kv_len // block_size)
        row[:num_blocks] = s.block_table[:num_blocks]

    sequence = np.repeat(np.arange(total), lengths)
    positions = starts[sequence] + np.arange(first[-1]) - first[sequence]
    slots = block_tables[sequence, positions // block_size] * block_size + positions % block_size
    slots[first[count] :] = -1
    input_ids = np.zeros(first[-1], dtype=np.int64)
    input_ids[: first[count]] = np.concatenate([np.asarray(s.token_ids) for s in sequences])

    # What a sequence begins from is the last that it writes.
    writes = [sorted(s.writes, key=lambda write: write[0] == s.read_row) for s in sequences]
    if num_rows:
        writes = [[(-1, 1)] * (2 - len(own)) + own for own in writes] + [[(-1, 1)] * 2] * (total - count)
    flat = np.array([write for own in writes for write in own], dtype=np.int64).reshape(-1, 2)
    logits = [np.arange(first[i + 1] - s.num_logits, first[i + 1]) for i, s in enumerate(sequences)]
    is_decode, every = lengths == 1, np.arange(total)
    is_chunk = ~is_decode
    is_chunk[:count] &= [not s.attends_elsewhere for s in sequences]
    return {
        "first": first,
        "kv_lens": kv_lens,
        "block_tables": block_tables,
        "decodes": _tiles(lengths[is_decode], every[is_decode], 1),
        "chunks": _tiles(lengths[is_chunk], every[is_chunk], chunk_queries),
        "slots": slots,
        "read_rows": read_rows,
        "write_first": np.concatenate(([0], np.cumsum([len(own) for own in writes]))),
        "write_rows": flat[:, 0],
        "write_ends": flat[:, 1],
        "conv_tiles": _tiles(lengths, every, CONV_TOKENS),
        "input_ids": input_ids,
        "positions": positions,
        "logits_index": np.arange(total) if num_rows else np.concatenate(logits),
    }


def _tiles(lengths: np.ndarray, sequences: np.ndarray, size: int) -> np.ndarray:
    """Cut sequences of these lengths, `size` of each at a time: `[tiles, 2]`, the sequence and the place."""
    counts = -(-lengths // size)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((np.repeat(sequences, counts), place * size), axis=1)


def power_of_two(number: int) -> int:
    """The least that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def tensors(keys: KVBlocks, values: KVBlocks) -> tuple[torch.Tensor | None, ...]:
    """Keys, values and their scales, as kernels take them."""
    if isinstance(keys, Int8Blocks) and isinstance(values, Int8Blocks):
        return keys.values, values.values, keys.scale, values.scale
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    return keys, values, None, None
