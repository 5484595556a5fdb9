"""Matrix products of few rows, which is what decoding is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

#: rows of a packed batch for which `weight @ x.T` beats `x @ weight.T` in fp32 on CPU (measured: 2.5 × at 5 rows,
#: 1.5 × at 64, 1.1 × at 256, slower beyond; equal at 1)
TRANSPOSED_ROWS = range(2, 257)


def transposed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` as `(weight @ x.T).T`: the library then splits the work over the many outputs, not the few rows.

    Args: x `[rows, in]`; weight `[out, in]`; bias `[out]`. Returns: `[rows, out]`, contiguous.
    """
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), weight, x.t())
    return product.t().contiguous()


class PackedLinear(nn.Linear):
    """`nn.Linear` that takes the quicker product for a packed batch `[tokens, in]` of few fp32 rows on CPU.

    `transposed = False`, on an instance or the class, goes back to `F.linear` throughout.
    """

    transposed = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (
            self.transposed
            and input.ndim == 2
            and len(input) in TRANSPOSED_ROWS
            and input.dtype == torch.float32
            and input.device.type == "cpu"
            and not torch.is_grad_enabled()
        ):
            return transposed_linear(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)
