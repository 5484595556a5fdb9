"""Matrix products of a packed batch, from the weights as they lie in the module: nothing is packed or kept twice.

So there is one copy of the weights, an optimiser's step is seen at once, and the module is a plain `nn.Linear`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from ..native import NativeKernels, empty


@functools.cache
def has_bf16_units() -> bool:
    """Whether the processor multiplies bf16 by itself, in which case torch does so for many rows."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


#: rows for which `weight @ x.T` beats `x @ weight.T` in fp32 on CPU (measured: 2.5 × at 5 rows, 1.5 × at 64, 1.1 × at
#: 256, slower beyond; equal at 1)
TRANSPOSED_ROWS = range(2, 257)


#: bytes of x that the second-level cache holds beside weights that pass by, and rows up to which more of them, which
#: are taken in chunks, are still better in place. (Measured on two cores of a Xeon with AMX and 2 MB of it each, all
#: linears of a step of a 350M model in turn, ms, in place and packed: 4,608 inputs and 1,024 outputs, 128 rows 11.8
#: and 14.0, 192 rows 15.7 and 17.8, 256 rows 19.6 and 21.4; on one core 384 rows 57 and 53.)
IN_PLACE, IN_PLACE_ROWS = 1 << 20, 256


def is_in_place(x: torch.Tensor) -> bool:
    """Whether products of x by tiles take the weights as they lie."""
    return len(x) <= IN_PLACE_ROWS or x.numel() * x.itemsize <= IN_PLACE


def few_rows_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear` with the weights read once, from where they are; sums in fp32.

    Args: x `[rows, in]`; weight `[out, in]`, contiguous; bias `[out]`; residual `[rows, out]`, contiguous, which is
        added to the rounded result; all fp32 or all bf16.
    Returns: `[rows, out]` in the same dtype.
    """
    (rows, inner), outputs = x.shape, weight.shape[0]
    out = empty((rows, outputs), x.dtype)
    name = "few_rows_linear_f32" if weight.dtype == torch.float32 else "few_rows_linear_bf16"
    native.call(name, x.contiguous(), weight, bias, residual, out, rows, inner, outputs)
    return out


def many_rows_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear` at the processor's fp32 rate in either dtype: sums in fp32, rounded once. As `few_rows_linear`."""
    out = empty((len(x), len(weight)), x.dtype)
    name = "many_rows_linear_f32" if weight.dtype == torch.float32 else "many_rows_linear_bf16"
    native.call(name, x.contiguous(), weight, bias, residual, out, *x.shape, len(weight))
    return out


def tile_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear` in bf16 by tiles, which the processor's matrix units multiply (AMX) or its vectors (Zen 4): sums in
    fp32, rounded once.

    Which of the next two computes it makes no difference to the result.
    """
    product = in_place_tile_linear if is_in_place(x) else packed_tile_linear
    return product(native, x, weight, bias, residual)


def in_place_tile_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tile_linear` with the weights multiplied as they lie.

    Args: as `few_rows_linear`, bf16. A kernel of that name is there for every instruction set, but emulates the units
        where there are none, so that it can be tested.
    """
    return _by_matrix_units("tile_in_place_linear_bf16", native, x, weight, bias, residual)


def packed_tile_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with blocks of the weights laid out for the units on their way."""
    return _by_matrix_units("tile_packed_linear_bf16", native, x, weight, bias, residual)


def tile_swiglu(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`swiglu(tile_linear(x, weight))`, rounded once: gates and values are not stored, which of 2,048 tokens of a
    350M model are 38 MB a layer.

    Args: as `tile_linear`; the first half of the weight's rows makes gates. bias: none.
    Returns: `[rows, out / 2]`; as there, it makes no difference which of the next two computes it.
    """
    product = in_place_tile_swiglu if is_in_place(x) else packed_tile_swiglu
    return product(native, x, weight)


def in_place_tile_swiglu(native: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`tile_swiglu` as `in_place_tile_linear` multiplies."""
    return _swiglu_by_matrix_units("tile_in_place_swiglu_bf16", native, x, weight)


def packed_tile_swiglu(native: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`tile_swiglu` as `packed_tile_linear` multiplies."""
    return _swiglu_by_matrix_units("tile_packed_swiglu_bf16", native, x, weight)


def _swiglu_by_matrix_units(name: str, native: NativeKernels, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    width = len(weight) // 2
    out = empty((len(x), width), x.dtype)
    native.call(name, x.contiguous(), weight, out, *x.shape, width)
    return out


def _by_matrix_units(
    name: str,
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    out = empty((len(x), len(weight)), x.dtype)
    native.call(name, x.contiguous(), weight, bias, residual, out, *x.shape, len(weight))
    return out


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` as `(weight @ x.T).T`: the library then splits the work over the many outputs, not the few rows.

    Args: x `[rows, in]`; weight `[out, in]`; bias `[out]`. Returns: `[rows, out]`, contiguous.
    """
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


def torch_linear(
    native: NativeKernels | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear`, and the residual added, as an entry of the table of products (`native` is not used)."""
    product = F.linear(x, weight, bias)
    return product if residual is None else product + residual


class PackedLinear(nn.Linear):
    """`nn.Linear`, which the engine runs by its own kernels (`KernelSet.linear`) from the weight as it lies here.

    Called as a module it computes in torch.

    Attributes:
        transposed: False, on an instance or the class, makes it `F.linear` for any number of rows.
    """

    transposed = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self.transposed:
            return F.linear(input, self.weight, self.bias)
        fits = input.ndim == 2 and len(input) in TRANSPOSED_ROWS and input.dtype == torch.float32
        product = transposed_linear if fits and input.device.type == "cpu" else F.linear
        return product(input, self.weight, self.bias)
