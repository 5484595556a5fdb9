"""Linear layers over low-bit weights (`int8.py`, `int4.py`): by the native kernels or the torch reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ..native import NativeKernels, resolve_kernels
from .int4 import Int4Weights
from .int8 import PANEL, Int8Weights, quantize_inputs
from .table import INT4, INT8, mlp_product, product, swiglu_product

#: output features that the torch reference dequantises at once, so that they stay in the processor's cache
OUTPUT_CHUNK = 512

Weights = Int8Weights | Int4Weights


def split(weights: Weights) -> Iterator[Weights]:
    """The same matrix, `OUTPUT_CHUNK` output features after another."""
    per_panel = OUTPUT_CHUNK // PANEL
    sizes = (per_panel, OUTPUT_CHUNK, per_panel) if isinstance(weights, Int8Weights) else (OUTPUT_CHUNK, OUTPUT_CHUNK)
    parts = zip(*(tensor.split(size) for tensor, size in zip(weights, sizes, strict=True)), strict=True)
    return (type(weights)(*part) for part in parts)


def reference_linear(x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The torch reference: `x @ weights.T + bias`, some output features at a time; 8 bits take x in 8 bits too.

    Args: x `[..., in]`; bias `[out]`. Returns: `[..., out]` in x's dtype.
    """
    inputs = quantize_inputs(x) if isinstance(weights, Int8Weights) else x
    parts = [F.linear(inputs, part.dequantize(x.shape[-1], x.dtype)) for part in split(weights)]
    out = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
    return out if bias is None else out + bias


def native_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `reference_linear` computes, for fp32 or bf16 x, summed in integers, by the table's kernel; and to it, once
    rounded, a residual `[..., out]`, contiguous and of x's dtype."""
    weights_format = INT8 if isinstance(weights, Int8Weights) else INT4
    kernel = product(weights_format, x.dtype, native.isa, x.numel() // x.shape[-1])
    return kernel(native, x, weights, bias, residual)


def quantized_linear(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None = None,
    native: NativeKernels | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the native kernels for any number of rows, so that no row depends on how many there are; by the torch
    reference without them, and for gradients."""
    if native is None or not _can_run(x):
        product = reference_linear(x, weights, bias)
        return product if residual is None else product + residual
    return native_linear(native, x, weights, bias, residual)


def fused_swiglu(native: NativeKernels, x: torch.Tensor, weights: Weights) -> torch.Tensor | None:
    """`swiglu(quantized_linear(x, weights))`, to the bit, by a kernel that does not store gates and values.

    None: there is none for these.

    Args: x `[rows, in]`. Returns: `[rows, out / 2]`.
    """
    if not isinstance(weights, Int8Weights) or len(weights.scale) % (2 * PANEL) or not _can_run(x):
        return None
    kernel = swiglu_product(INT8, x.dtype, native.isa, len(x))
    return None if kernel is None else kernel(native, x, weights, None)


def fused_mlp(
    native: NativeKernels, x: torch.Tensor, weights13: Weights, weights2: Weights, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`quantized_linear` by weights2 of `fused_swiglu` by weights13, with a residual or without, to the bit, by one
    kernel.

    None: there is none for these.

    Args: x `[rows, in]`. Returns: `[rows, out]`.
    """
    if not isinstance(weights13, Int8Weights) or not isinstance(weights2, Int8Weights):
        return None
    if len(weights13.scale) % (2 * PANEL) or not _can_run(x):
        return None
    kernel = mlp_product(x.dtype, native.isa, len(x))
    return None if kernel is None else kernel(native, x, weights13, weights2, residual)


def _can_run(x: torch.Tensor) -> bool:
    """Whether the kernels can run: there is something to compute, and no gradients are needed."""
    return x.numel() > 0 and not (torch.is_grad_enabled() and x.requires_grad)


class _Quantized(nn.Module):
    """Holds a quantised matrix `[out, in]`: `weight` (its values), `weight_scale` and, of 8 bits, `weight_sums`.

    These train nothing.
    """

    def __init__(self, out_features: int, in_features: int, bits: int) -> None:
        super().__init__()
        self.out_features, self.in_features, self.bits = out_features, in_features, bits
        self._kind = Int8Weights if bits == 8 else Int4Weights
        self.put(self._kind.empty(out_features, in_features))

    @property
    def weights(self) -> Weights:
        return self._kind(*(getattr(self, _name(field)) for field in self._kind._fields))

    def put(self, weights: Weights) -> None:
        """Hold these."""
        for name, tensor in self.named(weights).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @staticmethod
    def named(weights: Weights) -> dict[str, torch.Tensor]:
        """By the names of the parameters that hold them."""
        return {_name(field): tensor for field, tensor in weights._asdict().items()}

    def quantize(self, weight: torch.Tensor) -> Weights:
        """A matrix as this layer holds it. Raises: ValueError: a weight is not finite."""
        whole = self._empty(weight.device)
        self._quantize_into(whole, weight)
        return whole

    def _empty(self, device: torch.device) -> Weights:
        return self._kind(*(torch.empty_like(tensor, device=device) for tensor in self.weights))

    def _quantize_into(self, whole: Weights, weight: torch.Tensor) -> None:
        # Some at a time, so that little else is in memory.
        for to, rows in zip(split(whole), weight.split(OUTPUT_CHUNK), strict=True):
            if not rows.isfinite().all():
                raise ValueError("weights that are not finite cannot be quantised")
            for target, tensor in zip(to, self._kind.quantize(rows), strict=True):
                target.copy_(tensor)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]` in `dtype`."""
        return self.weights.dequantize(self.in_features, dtype)

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}, bits={self.bits}"


def _name(field: str) -> str:
    return "weight" if field == "values" else f"weight_{field}"


class QuantizedLinear(_Quantized):
    """`nn.Linear` over a quantised weight; the bias, where there is one, is in full precision.

    Called as a module it takes the native kernels where they can be had; the engine says which (`KernelSet.linear`).
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int) -> None:
        super().__init__(out_features, in_features, bits)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quantized_linear(input, self.weights, self.bias, resolve_kernels("auto", input.device, input.dtype))


class QuantizedEmbedding(_Quantized):
    """`nn.Embedding` over 8-bit rows, which a tied head multiplies by. Gives the dtype of its `weight_scale`."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim, bits=8)

    @property
    def weights(self) -> Int8Weights:
        weights = super().weights
        assert isinstance(weights, Int8Weights)
        return weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weights.rows(input, self.in_features)


class QuantizedStack(_Quantized):
    """Several quantised matrices of one shape: its tensors have a first dimension for them."""

    def __init__(self, num_matrices: int, out_features: int, in_features: int, bits: int) -> None:
        super().__init__(out_features, in_features, bits)
        self.num_matrices = num_matrices
        self.put(self._kind(*(tensor.new_empty(num_matrices, *tensor.shape) for tensor in self.weights)))

    def each(self) -> list[Weights]:
        """The matrices, where they lie."""
        return [self._kind(*tensors) for tensors in zip(*self.weights, strict=True)]

    def quantize(self, weight: Iterable[torch.Tensor]) -> Weights:  # type: ignore[override]
        """Of matrices `[out, in]`, as many, which are taken one after another; as there."""
        matrices = iter(weight)
        first = next(matrices)
        whole = self._empty(first.device)
        for tensors, matrix in zip(zip(*whole, strict=True), itertools.chain([first], matrices), strict=True):
            self._quantize_into(self._kind(*tensors), matrix)
        return whole

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """`[matrices, out, in]` in `dtype`."""
        return torch.stack([weights.dequantize(self.in_features, dtype) for weights in self.each()])
