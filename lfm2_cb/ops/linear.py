"""Matrix products of few rows, which is what decoding is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .native import NativeKernels, load

#: rows of a packed batch that the native kernel takes, by the weights' dtype: it reads each weight once from memory,
#: where `F.linear` falls to a fraction of the bandwidth (measured in fp32 on AVX2: 2 to 3 × at 1 to 16 rows)
NATIVE_ROWS = {torch.float32: range(1, 33), torch.bfloat16: range(1, 17)}
#: rows for which `weight @ x.T` beats `x @ weight.T` in fp32 on CPU (measured: 2.5 × at 5 rows, 1.5 × at 64, 1.1 × at
#: 256, slower beyond; equal at 1)
TRANSPOSED_ROWS = range(2, 257)


def few_rows_linear(
    native: NativeKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`F.linear` with the weights read once, from where they are; sums in fp32.

    Args: x `[rows, in]`; weight `[out, in]`, fp32 or bf16, contiguous; bias `[out]`, of the same dtype.
    Returns: `[rows, out]` in x's dtype.
    """
    rows, out = x.to(torch.float32).contiguous(), x.new_empty(len(x), len(weight), dtype=torch.float32)
    name = "few_rows_linear_f32" if weight.dtype == torch.float32 else "few_rows_linear_bf16"
    native.call(name, rows, weight, bias, out, *rows.shape, len(weight))
    return out.to(x.dtype)


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` as `(weight @ x.T).T`: the library then splits the work over the many outputs, not the few rows.

    Args: x `[rows, in]`; weight `[out, in]`; bias `[out]`. Returns: `[rows, out]`, contiguous.
    """
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


class PackedLinear(nn.Linear):
    """`nn.Linear` that takes the quicker product for a packed batch `[tokens, in]` of few rows on CPU.

    Attributes:
        native: whether few rows go to the native kernel; the engine that runs the model says so.
        transposed: False, on an instance or the class, goes back to `F.linear` where the native kernel is not used.
    """

    native = False
    transposed = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if input.ndim != 2 or input.device.type != "cpu" or torch.is_grad_enabled() or input.dtype != weight.dtype:
            return F.linear(input, weight, bias)
        if self.native and len(input) in NATIVE_ROWS.get(weight.dtype, ()) and weight.is_contiguous():
            return few_rows_linear(load(), input, weight, bias)
        if self.transposed and len(input) in TRANSPOSED_ROWS and input.dtype == torch.float32:
            return transposed_linear(input, weight, bias)
        return F.linear(input, weight, bias)
