"""8 bits a weight and a scale a channel; inputs in 8 bits too, with a scale for every 512 of a row.

Both are symmetric and calibration-free. Decoding is bound by the bytes of the weights that a step reads, and batches
by how many products a processor makes: so weights are stored as the kernels read them, in place, and inputs are
rounded to what the processors' instructions multiply (csrc/linear/int8.h). Scales of weights are numbers that bfloat16
holds exactly, so no cast between fp32 and bf16 changes what a model says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..native import NativeKernels, empty

#: output features whose weights lie together, four inputs of each after another; inputs that share a scale; and what
#: inputs are padded to. PANEL and GROUP in csrc/linear/int8.h
PANEL, GROUP, PADDED = 16, 512, 64
#: the most that the sum of the positive weights of four inputs may be, and that of the negative ones. Such sums of
#: products are of 16 bits on processors without VNNI, and inputs are stored as 1 ... 255: 128 * 255 < 2^15.
MOST = 128
_TINY = 1e-30  # keeps the scale of an all-zero row from being 0


class Int8Weights(NamedTuple):
    """A matrix `[out, in]`, `values * scale`.

    values: int8 `[panels, inputs / 4, 16, 4]`: of 16 outputs each, four inputs after another; zeros fill up both.
        (What AMX and VNNI multiply as it lies.)
    scale: `[out, 1]` in the model's dtype.
    sums: int16 `[panels, groups, 16]`, of each group's values.
    """

    values: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, out_features: int, in_features: int) -> Int8Weights:
        panels, padded = -(-out_features // PANEL), -(-in_features // PADDED) * PADDED
        return cls(
            torch.empty(panels, padded // 4, PANEL, 4, dtype=torch.int8),
            torch.empty(out_features, 1),
            torch.empty(panels, -(-in_features // GROUP), PANEL, dtype=torch.int16),
        )

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> Int8Weights:
        """Of `[out, in]`, floating point."""
        values, scale = quantize_int8(weight)
        values = F.pad(values, (0, -values.shape[1] % PADDED, 0, -len(values) % PANEL))
        grouped = F.pad(values, (0, -values.shape[1] % GROUP)).view(-1, PANEL, -(-values.shape[1] // GROUP), GROUP)
        sums = grouped.sum(-1, dtype=torch.int16).transpose(1, 2)
        packed = values.view(-1, PANEL, values.shape[1] // 4, 4).transpose(1, 2)
        return cls(packed.contiguous(), scale.to(weight.dtype), sums.contiguous())

    def dequantize(self, in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]` in `dtype`."""
        rows = self.values.transpose(1, 2).reshape(-1, self.values.shape[1] * 4)
        return rows[: len(self.scale), :in_features].to(dtype) * self.scale.to(dtype)

    def rows(self, indices: torch.Tensor, in_features: int) -> torch.Tensor:
        """Of the matrix, in the scale's dtype: `[*indices.shape, in]`."""
        fours = self.values.view(torch.int32).squeeze(-1)  # which take less time to collect than bytes
        values = fours[indices // PANEL, :, indices % PANEL].view(torch.int8)[..., :in_features]
        return values * F.embedding(indices, self.scale)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row, and values whose sums are at most `MOST`, see there; for that the grid is made wider.

    Args: weight `[out, in]`, floating point.
    Returns: values int8 `[out, in]`, −127 ... 127; scale fp32 `[out, 1]`, `weight ≈ values * scale`.
    """
    weight = weight.float()
    largest = weight.abs().amax(-1, keepdim=True)
    summed = F.pad(weight, (0, -weight.shape[1] % 8)).view(len(weight), -1, 2, 2, 2)
    sums = [part.clamp_min(0).sum((2, 4)).flatten(1).amax(-1, keepdim=True) for part in (summed, -summed)]
    widest = torch.stack((largest / 127, *(s / (MOST - 2) for s in sums))).amax(0)  # rounding four adds 2 at most
    scale = round_to_bf16(widest.clamp_min(_TINY))
    return (weight / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def quantize_inputs(x: torch.Tensor) -> torch.Tensor:
    """x `[..., in]` as the kernels round it: every `GROUP` by its largest value to −127 ... 127. Gradients pass."""
    grouped = F.pad(x.detach().float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1, keepdim=True)
    rounded = (grouped * (127 / largest.clamp_min(_TINY))).round_() * (largest / 127)
    return x + (rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype) - x).detach()


def native_linear_int8(
    native: NativeKernels,
    x: torch.Tensor,
    weights: Int8Weights,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quantize_inputs(x) @ weights.T + bias` for fp32 or bf16 x, summed in integers (csrc/linear/int8_vectors.h).

    A row's result does not depend on the rows beside it, nor on the instruction set (but for "plain").

    Args: residual: `[..., out]`, contiguous and of x's dtype, which is added to the rounded result.
    """
    return _call("linear_int8", native, x, weights, bias, residual)


def tile_linear_int8(
    native: NativeKernels,
    x: torch.Tensor,
    weights: Int8Weights,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same, to the bit, by the processor's matrix units (csrc/linear/tile_int8.h); without them, emulated."""
    return _call("tile_linear_int8", native, x, weights, bias, residual)


def tile_swiglu_int8(
    native: NativeKernels, x: torch.Tensor, weights: Int8Weights, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`swiglu(tile_linear_int8(x, weights))`, to the bit: gates and values are not stored.

    Args: as there; the first half of the outputs, a multiple of `PANEL`, are gates. bias: none.
    Returns: `[..., out / 2]`.
    """
    x, out = x.contiguous(), empty((*x.shape[:-1], len(weights.scale) // 2), x.dtype)
    native.call("tile_swiglu_int8", x, *_weights_for(x, weights), *_scratch_for(x, weights), out, *_sizes(x, weights))
    return out


def tile_mlp_int8(
    native: NativeKernels,
    x: torch.Tensor,
    weights13: Int8Weights,
    weights2: Int8Weights,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tile_linear_int8(tile_swiglu_int8(x, weights13), weights2, None, residual)`, to the bit: gated results are
    rounded where they are made, and not stored otherwise.

    Args: as there. Returns: `[..., out]` of weights2.
    """
    x, gated = x.contiguous(), len(weights13.scale) // 2
    rows, width, outputs = x.numel() // x.shape[-1], x.shape[-1], len(weights2.scale)
    out = empty((*x.shape[:-1], outputs), x.dtype)
    is_bf16, values13, _, scale13 = _weights_for(x, weights13)
    scratch = *_scratch(rows, weights13), *_scratch(rows, weights2)
    scale2 = weights2.scale.to(x.dtype)
    sizes = rows, width, gated, outputs
    matrices = values13, scale13, weights2.values, scale2
    native.call("tile_mlp_int8", x, is_bf16, *matrices, residual, *scratch, out, *sizes)
    return out


def _call(
    name: str,
    native: NativeKernels,
    x: torch.Tensor,
    weights: Int8Weights,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    x, out = x.contiguous(), empty((*x.shape[:-1], len(weights.scale)), x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    added = bias, residual
    native.call(name, x, *_weights_for(x, weights), *added, *_scratch_for(x, weights), out, *_sizes(x, weights))
    return out


def _weights_for(x: torch.Tensor, weights: Int8Weights) -> tuple[int | torch.Tensor, ...]:
    """Whether x is in bf16, and the weights, as the kernels take them."""
    scale = weights.scale.to(x.dtype)  # which no scale loses anything by
    return int(x.dtype == torch.bfloat16), weights.values, weights.sums, scale


def _scratch_for(x: torch.Tensor, weights: Int8Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """For x in 8 bits, and its scales."""
    return _scratch(x.numel() // x.shape[-1], weights)


def _scratch(rows: int, weights: Int8Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise for so many rows."""
    in_tiles = -(-rows // 32) * 32
    padded, groups = weights.values.shape[1] * 4, weights.sums.shape[1]
    return empty((in_tiles * padded,), torch.uint8), torch.empty(in_tiles * groups, dtype=torch.float32)


def _sizes(x: torch.Tensor, weights: Int8Weights) -> tuple[int, int, int]:
    """Rows, inputs, outputs."""
    return x.numel() // x.shape[-1], x.shape[-1], len(weights.scale)


def native_rows_int8(native: NativeKernels, weights: Int8Weights, indices: torch.Tensor, out: torch.Tensor) -> None:
    """`Int8Weights.rows` into out `[n, in]`, fp32 or bf16. indices: int64 `[n]`, which must be in range."""
    fours, is_bf16 = weights.values.shape[1], int(out.dtype == torch.bfloat16)
    native.call("rows_int8", indices, weights.values, weights.scale.to(out.dtype), is_bf16, out, *out.shape, fours)


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers that bf16 holds, in fp32."""
    return x.to(torch.bfloat16).float()
