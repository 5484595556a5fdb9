"""4 bits a weight and a scale for every 32 inputs; inputs in 15 bits.

For decoding, which is bound by the bytes of the weights that a step reads; symmetric and calibration-free.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..native import NativeKernels, empty
from .int8 import round_to_bf16

#: input features that share a scale
GROUP_SIZE = 32
#: how much narrower than the group's largest value the grid may be (the best by squared error is taken)
SHRINKAGE = (1.0, 0.95, 0.9, 0.85, 0.8)
_CHUNK = 1024  # inputs that the native kernels round together: CHUNK in csrc/linear/int4.h
_TINY = 1e-30  # keeps the scale of an all-zero group from being 0


class Int4Weights(NamedTuple):
    """A matrix `[out, in]`, `values * scale`.

    values: uint8 `[out, groups * GROUP_SIZE / 2]`, by `_pack`; zeros fill up an even number of groups.
    scale: bf16 `[out, groups]`.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, out_features: int, in_features: int) -> Int4Weights:
        groups = num_groups(in_features)
        values = torch.empty(out_features, groups * GROUP_SIZE // 2, dtype=torch.uint8)
        return cls(values, torch.empty(out_features, groups, dtype=torch.bfloat16))

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> Int4Weights:
        """Values −8 ... 7 of `[out, in]`, floating point.

        The group's largest value is put at −8, the longer end of the grid, or the grid is made narrower where that
        lowers the group's squared error.
        """
        groups = num_groups(weight.shape[-1])
        padded = F.pad(weight.float(), (0, groups * GROUP_SIZE - weight.shape[-1]))
        grouped = padded.unflatten(-1, (groups, GROUP_SIZE))
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
        largest = torch.where(largest.abs() < _TINY, _TINY, largest)
        error = torch.full_like(largest, torch.inf)
        best_scale, best_values = largest, grouped
        for shrinkage in SHRINKAGE:
            scale = round_to_bf16(largest * shrinkage / -8)
            values = (grouped / scale).round_().clamp_(-8, 7)
            new_error = (values * scale - grouped).square().sum(-1, keepdim=True)
            better = new_error < error
            error, best_scale = torch.where(better, new_error, error), torch.where(better, scale, best_scale)
            best_values = torch.where(better, values, best_values)
        return cls(_pack(best_values.flatten(1)), best_scale.squeeze(-1).to(torch.bfloat16))

    def dequantize(self, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]` in `dtype`."""
        grouped = _unpack(self.values).to(dtype).unflatten(-1, (-1, GROUP_SIZE))
        return (grouped * self.scale.to(dtype).unsqueeze(-1)).flatten(1)[:, :in_features]


def num_groups(in_features: int) -> int:
    """Groups of 4-bit weights that a row is stored in: an even number."""
    return -(-in_features // (2 * GROUP_SIZE)) * 2


def _pack(values: torch.Tensor) -> torch.Tensor:
    """64 values −8 … 7 as 16 little-endian words of 16 bits; word i holds values i, i + 16, i + 32 and i + 48, from
    its lowest four bits to its highest: what a processor takes apart by shifts alone."""
    nibbles = values.to(torch.int32).bitwise_and_(15).unflatten(-1, (-1, 4, 16))
    words = sum(nibbles[..., i, :] << 4 * i for i in range(4))
    return torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).flatten(1)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """int8 `[out, 2 × bytes]`, from what `_pack` made."""
    low, high = packed.unflatten(-1, (-1, 16, 2)).unbind(-1)
    parts = torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=-2).to(torch.int8)
    return parts.bitwise_xor_(8).sub_(8).flatten(1)  # from 4 bits' two's complement


def native_linear_int4(
    native: NativeKernels,
    x: torch.Tensor,
    weights: Int4Weights,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weights.T + bias` for fp32 or bf16 x, summed in integers (csrc/linear/int4.h).

    A row's result does not depend on the rows beside it, nor on the instruction set (but for "plain").

    Args: residual: `[..., out]`, contiguous and of x's dtype, which is added to the rounded result.
    """
    out_features, in_features = len(weights.values), x.shape[-1]
    rows, chunks = x.numel() // in_features, -(-in_features // _CHUNK)
    out = empty((*x.shape[:-1], out_features), x.dtype)
    native.call(
        "linear_int4",
        x.contiguous(),
        int(x.dtype == torch.bfloat16),
        weights.values,
        weights.scale.to(torch.bfloat16),
        None if bias is None else bias.to(x.dtype),
        residual,
        torch.empty(chunks * rows * _CHUNK, dtype=torch.int16),
        torch.empty(chunks * rows, dtype=torch.float32),
        out,
        rows,
        in_features,
        out_features,
    )
    return out
