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


class ConvTables(NamedTuple):
    """Of `StepTables`, what the short convolution reads; int32 or int64."""

    first: torch.Tensor
    read_rows: torch.Tensor
    write_first: torch.Tensor
    write_rows: torch.Tensor
    write_ends: torch.Tensor
    conv_tiles: torch.Tensor


class StepTables:
    """Tables of a step.

    Attributes, all int32 on the device, for n sequences of t packed tokens:
        first: `[n + 1]`, packed tokens before each sequence. kv_lens: `[n]`, keys of each, its new ones included.
        block_tables: `[n, most blocks]`.
        decodes, chunks: `[…, 2]`, tiles of queries, of sequences with one query and with more: the sequence, and the
            first query's place in it.
        slots: `[t]`, where a token's key goes, block_id * block_size + offset; below 0: nowhere.
        read_rows: `[n]`, rows of the conv cache that the sequences begin from.
        write_first: `[n + 1]`, of each sequence the first of its `write_rows`, the rows of the conv cache that get a
            state, and `write_ends`, how many of its tokens are then seen. The row that it begins
            from, if it is among them, comes last: all else has been read from it then.
        conv_tiles: `[…, 2]`, tiles of tokens, as `chunks`.
        input_ids, positions: `[t]`. logits_index: `[logits]`, tokens that have any.
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
        host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=device.type == "cuda")
        on_device = torch.empty_like(host, device=device, pin_memory=False)
        start = 0
        for name, table in tables.items():
            place = slice(start, start + table.size)
            host.numpy()[place] = table.ravel()
            setattr(self, name, on_device[place].view(table.shape))
            start += sizes[name]
        on_device.copy_(host, non_blocking=True)  # pinned memory is not given to others before it is done


#: what attention takes
TablesOfAttention = StepTables | AttentionTables
#: what the short convolution takes
TablesOfConv = StepTables | ConvTables


def lay_out(sequences: Sequence[Packed], block_size: int, chunk_queries: int) -> dict[str, np.ndarray]:
    """The tables of a step, by the names that `StepTables` has.

    Args: chunk_queries: queries of a tile of `chunks`.
    """
    lengths = np.array([len(s.token_ids) for s in sequences])
    starts = np.array([s.start for s in sequences])
    first = np.concatenate(([0], np.cumsum(lengths)))
    kv_lens = starts + lengths
    block_tables = np.zeros((len(sequences), -(-int(kv_lens.max()) // block_size)), dtype=np.int64)
    for row, s, kv_len in zip(block_tables, sequences, kv_lens, strict=True):
        num_blocks = -(-kv_len // block_size)
        row[:num_blocks] = s.block_table[:num_blocks]

    every = np.arange(len(sequences))
    sequence = np.repeat(every, lengths)
    positions = starts[sequence] + np.arange(first[-1]) - first[sequence]

    # What a sequence begins from is the last that it writes.
    writes = [sorted(s.writes, key=lambda write: write[0] == s.read_row) for s in sequences]
    flat = np.array([write for own in writes for write in own], dtype=np.int64).reshape(-1, 2)
    logits = [np.arange(first[i + 1] - s.num_logits, first[i + 1]) for i, s in enumerate(sequences)]
    is_decode = lengths == 1
    is_chunk = ~is_decode & [not s.attends_elsewhere for s in sequences]
    return {
        "first": first,
        "kv_lens": kv_lens,
        "block_tables": block_tables,
        "decodes": _tiles(lengths[is_decode], every[is_decode], 1),
        "chunks": _tiles(lengths[is_chunk], every[is_chunk], chunk_queries),
        "slots": block_tables[sequence, positions // block_size] * block_size + positions % block_size,
        "read_rows": np.array([s.read_row for s in sequences]),
        "write_first": np.concatenate(([0], np.cumsum([len(own) for own in writes]))),
        "write_rows": flat[:, 0],
        "write_ends": flat[:, 1],
        "conv_tiles": _tiles(lengths, every, CONV_TOKENS),
        "input_ids": np.concatenate([np.asarray(s.token_ids) for s in sequences]),
        "positions": positions,
        "logits_index": np.concatenate(logits),
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
