"""Keys and values in the blocks of a paged cache: as the model computes them, or in 8 bits with a scale a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..linear.int8 import round_to_bf16
from ..memory import zeros
from ..native import NativeKernels


@dataclass(frozen=True)
class Int8Blocks:
    """Keys (or values) of a layer in 8 bits: `x ≈ values * scale`, with a scale for every token and kv head.

    A row is rounded once, when it is written, and by itself: what is stored depends on nothing but the row.

    Attributes:
        values: int8 `[num_blocks, kv_heads, block_size, head_dim]`, −127 … 127.
        scale: bf16 `[num_blocks, kv_heads, block_size, 1]`.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


#: keys (or values) of a layer `[num_blocks, kv_heads, block_size, head_dim]`
KVBlocks = torch.Tensor | Int8Blocks


def make_blocks(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVBlocks:
    """Zeros of the shape above. dtype: torch.int8 makes `Int8Blocks`."""
    if dtype != torch.int8:
        return zeros(shape, dtype, device)
    return Int8Blocks(zeros(shape, dtype, device), zeros((*shape[:-1], 1), torch.bfloat16, device))


def bytes_per_row(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys (or values) of one head."""
    return head_dim * dtype.itemsize + (torch.bfloat16.itemsize if dtype == torch.int8 else 0)


def write_rows(
    blocks: KVBlocks, slot_mapping: torch.Tensor, rows: torch.Tensor, native: NativeKernels | None = None
) -> None:
    """Store rows `[tokens, kv_heads, head_dim]`.

    Args:
        slot_mapping: int64 `[tokens * kv_heads]`, (block_id * kv_heads + head) * block_size + offset; natively, rows
            of slots below 0 are not stored.
        native: writes by the native kernels (`csrc/attention/kv_blocks.cpp`; rows then are fp32 or bf16, on CPU), the
            same bits as torch.
    """
    if native is not None:
        if rows.stride()[1:] != (rows.shape[2], 1):
            rows = rows.contiguous()
        tokens, heads, dim = rows.shape
        if isinstance(blocks, Int8Blocks):
            size = tokens, heads, dim, rows.stride(0), int(rows.dtype == torch.bfloat16)
            native.call("write_int8_rows", rows, slot_mapping, blocks.values, blocks.scale, *size)
        else:
            width = rows.dtype.itemsize
            native.call("write_rows", rows, slot_mapping, blocks, tokens, heads, dim * width, rows.stride(0) * width)
        return
    rows = rows.flatten(0, 1)
    if isinstance(blocks, Int8Blocks):
        values, scale = round_rows(rows.float())
        blocks.values.flatten(0, 2).index_copy_(0, slot_mapping, values)
        blocks.scale.flatten(0, 2).index_copy_(0, slot_mapping, scale.bfloat16())  # (exact: it was rounded to that)
    else:
        blocks.flatten(0, 2).index_copy_(0, slot_mapping, rows)


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[rows, dim]` in values −127 … 127, int8, and a scale each, `[rows, 1]`: `rows ≈ values * scale`."""
    scale = round_to_bf16(rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127)
    return (rows / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def copy_block(blocks: KVBlocks, source: int, target: int) -> None:
    """Copy one block over another, scales included."""
    for tensor in (blocks.values, blocks.scale) if isinstance(blocks, Int8Blocks) else (blocks,):
        tensor[target] = tensor[source]


def gather(blocks: KVBlocks, block_ids: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The first keys (or values) of the blocks as `[keys, kv_heads, head_dim]`, a head's keys lying together.

    In the blocks' dtype; 8 bits are dequantised, to fp32, which holds them exactly.
    """
    if isinstance(blocks, Int8Blocks):
        values, scale = (gather(tensor, block_ids, num_keys).float() for tensor in (blocks.values, blocks.scale))
        return values.mul_(scale)
    return blocks.transpose(0, 1)[:, block_ids].flatten(1, 2)[:, :num_keys].transpose(0, 1)
