"""Linear layers over low-bit weights: 8 bits a channel or 4 bits a group, activations in full precision.

Weights are symmetric and calibration-free. Decoding is bound by the bytes of the weights that a step reads, so what is
stored is what the kernels read, in place: rows of `int8`, or of `uint8` with two 4-bit values each. The scales are
numbers that bfloat16 holds exactly, so no cast between fp32 and bf16 changes what a model says.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import nn

from .native import NativeKernels, resolve_kernels

#: input features that share a scale in 4 bits
GROUP_SIZE = 32
#: output features that the torch reference dequantises at once, so that they stay in the processor's cache
OUTPUT_CHUNK = 512
#: how much narrower than the group's largest value the 4-bit grid may be (the best by squared error is taken)
INT4_SHRINKAGE = (1.0, 0.95, 0.9, 0.85, 0.8)

#: rows from which the matrix units are quicker than the other kernels (estimated, not measured): multiplying by 8 bits
#: as they are, or in bf16, dequantising included
AMX_INT8_ROWS, AMX_ROWS = 13, 32
_NATIVE_CHUNK = 1024  # inputs that the native kernels round together: CHUNK in csrc/quantized.cpp
_TINY = 1e-30  # keeps the scale of an all-zero row from being 0


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row, values −127 … 127.

    Args: weight `[out, in]`, floating point.
    Returns: values int8 `[out, in]`; scale `[out, 1]` in the weight's dtype, `weight ≈ values * scale`.
    """
    weight32 = weight.float()
    scale = _round_to_bf16(weight32.abs().amax(-1, keepdim=True).clamp_min(_TINY) / 127)
    values = (weight32 / scale).round_().clamp_(-127, 127).to(torch.int8)
    return values, scale.to(weight.dtype)


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each group of `GROUP_SIZE` inputs of a row, values −8 … 7.

    The group's largest value is put at −8, the longer end of the grid, or the grid is made narrower where that lowers
    the group's squared error.

    Args: weight `[out, in]`, floating point.
    Returns: values uint8 `[out, groups * GROUP_SIZE / 2]`, by `_pack`; scale bf16 `[out, groups]`. Zeros fill
        up an even number of groups.
    """
    groups = num_groups(weight.shape[-1])
    padded = F.pad(weight.float(), (0, groups * GROUP_SIZE - weight.shape[-1]))
    grouped = padded.unflatten(-1, (groups, GROUP_SIZE))
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    largest = torch.where(largest.abs() < _TINY, _TINY, largest)
    error = torch.full_like(largest, torch.inf)
    best_scale, best_values = largest, grouped
    for shrinkage in INT4_SHRINKAGE:
        scale = _round_to_bf16(largest * shrinkage / -8)
        values = (grouped / scale).round_().clamp_(-8, 7)
        new_error = (values * scale - grouped).square().sum(-1, keepdim=True)
        better = new_error < error
        error, best_scale = torch.where(better, new_error, error), torch.where(better, scale, best_scale)
        best_values = torch.where(better, values, best_values)
    return _pack(best_values.flatten(1)), best_scale.squeeze(-1).to(torch.bfloat16)


def dequantize(values: torch.Tensor, scale: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in_features]` in `dtype`, from what `quantize_int8` or `quantize_int4` made."""
    if values.dtype == torch.int8:
        return values.to(dtype) * scale.to(dtype)
    grouped = _unpack(values).to(dtype).unflatten(-1, (-1, GROUP_SIZE))
    return (grouped * scale.to(dtype).unsqueeze(-1)).flatten(1)[:, :in_features]


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


def reference_linear(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The torch reference: `x @ dequantize(values, scale).T + bias`, some output features at a time.

    Args: x `[..., in]`; values, scale of either kind; bias `[out]`. Returns: `[..., out]` in x's dtype.
    """
    chunks = zip(values.split(OUTPUT_CHUNK), scale.split(OUTPUT_CHUNK), strict=True)
    parts = [F.linear(x, dequantize(v, s, x.shape[-1], x.dtype)) for v, s in chunks]
    out = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return out if bias is None else out + bias


def _round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def native_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kernels: NativeKernels,
) -> torch.Tensor:
    """What `reference_linear` computes, for fp32 or bf16 x, summed in integers (csrc/quantized.cpp).

    A row's result does not depend on the rows beside it, nor on the instruction set (but for "plain").
    """
    out_features, in_features = values.shape[0], x.shape[-1]
    rows, chunks = x.numel() // in_features, -(-in_features // _NATIVE_CHUNK)
    is_int8 = values.dtype == torch.int8
    if is_int8 and kernels.isa == "amx" and rows >= AMX_INT8_ROWS:
        return matrix_linear_int8(x, values, scale, bias, kernels=kernels)
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype)
    kernels.call(
        "linear_int8" if is_int8 else "linear_int4",
        x.contiguous(),
        int(x.dtype == torch.bfloat16),
        values,
        scale.to(x.dtype if is_int8 else torch.bfloat16),  # which no scale loses anything by
        None if bias is None else bias.to(x.dtype),
        torch.empty(chunks * rows * _NATIVE_CHUNK, dtype=torch.int16),
        torch.empty(chunks * rows, dtype=torch.float32),
        out,
        rows,
        in_features,
        out_features,
    )
    return out


def matrix_linear_int8(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kernels: NativeKernels,
) -> torch.Tensor:
    """What `native_linear` computes of 8-bit weights, to the bit, by the processor's matrix units (csrc/amx.cpp).

    Args: as `native_linear`. Where the instruction set has no such units, they are emulated, for tests.
    """
    out = torch.empty((*x.shape[:-1], len(values)), dtype=x.dtype)
    kernels.call(
        "amx_linear_int8",
        x.contiguous(),
        int(x.dtype == torch.bfloat16),
        values,
        scale.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        out,
        x.numel() // x.shape[-1],
        x.shape[-1],
        len(values),
    )
    return out


_kernels: ContextVar[tuple[NativeKernels | None] | None] = ContextVar("lfm2_cb_linear_kernels", default=None)


@contextmanager
def linear_kernels(kernels: NativeKernels | None) -> Iterator[None]:
    """Within, this thread's quantised layers run by these kernels; None: by the torch reference."""
    token = _kernels.set((kernels,))
    try:
        yield
    finally:
        _kernels.reset(token)


def quantized_linear(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """By the native kernels, as `linear_kernels` says or where they can be had; else, and for gradients, by torch.

    Also by torch: many bf16 rows on a processor whose matrix units (AMX) the kernels do not use, being quicker so.
    """
    chosen = _kernels.get()
    kernels = resolve_kernels("auto", x.device, x.dtype) if chosen is None else chosen[0]
    rows = x.numel() // x.shape[-1]
    by_units = kernels is not None and kernels.isa == "amx" and values.dtype == torch.int8
    for_matrix_units = x.dtype == torch.bfloat16 and rows >= AMX_ROWS and _has_amx() and not by_units
    if kernels is None or for_matrix_units or rows == 0 or (torch.is_grad_enabled() and x.requires_grad):
        return reference_linear(x, values, scale, bias)
    return native_linear(x, values, scale, bias, kernels=kernels)


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


class _Quantized(nn.Module):
    """Holds a quantised matrix `[out, in]`: `weight` (its values) and `weight_scale`, which train nothing."""

    def __init__(self, out_features: int, in_features: int, bits: int) -> None:
        super().__init__()
        self.out_features, self.in_features, self.bits = out_features, in_features, bits
        if bits == 8:
            values = torch.empty(out_features, in_features, dtype=torch.int8)
            scale = torch.empty(out_features, 1)
        else:
            groups = num_groups(in_features)
            values = torch.empty(out_features, groups * GROUP_SIZE // 2, dtype=torch.uint8)
            scale = torch.empty(out_features, groups, dtype=torch.bfloat16)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """values and scale of a matrix, as this layer holds them. Raises: ValueError: a weight is not finite."""
        convert = quantize_int8 if self.bits == 8 else quantize_int4
        values = torch.empty_like(self.weight, device=weight.device)
        scale = torch.empty_like(self.weight_scale, device=weight.device)
        for rows in range(0, len(weight), OUTPUT_CHUNK):  # some at a time, so that little else is in memory
            part = slice(rows, rows + OUTPUT_CHUNK)
            if not weight[part].isfinite().all():
                raise ValueError("weights that are not finite cannot be quantised")
            values[part], scale[part] = convert(weight[part])
        return values, scale

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]` in `dtype`."""
        return dequantize(self.weight, self.weight_scale, self.in_features, dtype)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, bits={self.bits}"


class QuantizedLinear(_Quantized):
    """`nn.Linear` over a quantised weight; the bias, where there is one, is in full precision."""

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int) -> None:
        super().__init__(out_features, in_features, bits)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quantized_linear(input, self.weight, self.weight_scale, self.bias)


class QuantizedEmbedding(_Quantized):
    """`nn.Embedding` over 8-bit rows, which a tied head multiplies by. Gives the dtype of its `weight_scale`."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim, bits=8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, self.weight) * F.embedding(input, self.weight_scale)
