"""Mixture of experts: which rows go to which experts, and the products of each expert with its rows.

Rows are sorted by expert once a layer; each touched expert's matrices are then multiplied with all of its rows, from
where they lie in the stack. A row's result is summed in the order of its own choices, so that it does not depend on
the rows beside it by more than the products do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .linear.quantized import QuantizedStack, quantized_linear
from .native import NativeKernels, resolve_kernels
from .pointwise import swiglu

#: (rows of one expert `[n, in]`, its matrix as the layer holds it) → `[n, out]`
ExpertProduct = Callable[[torch.Tensor, Any], torch.Tensor]


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, normalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, and how much each counts.

    Args:
        logits: `[rows, experts]` of the router.
        bias: `[experts]` fp32; it moves which experts are chosen, and not how much they count.
        normalize: divide a row's weights by their sum. scale: times all weights.
    Returns:
        `[rows, top_k]` each: int64 indices, and weights in the dtype of the logits.
    """
    scores = logits.sigmoid()
    selected = torch.topk(scores if bias is None else scores + bias, top_k, dim=-1).indices
    weights = scores.gather(-1, selected)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return selected, weights * scale


def mix_experts(
    x: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    product: ExpertProduct = F.linear,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """`sum over a row's experts of weight * down(silu(gate(x)) * up(x))`.

    Args:
        x: `[rows, hidden]`. selected, weights: `[rows, top_k]`, as of `route`.
        gate_up, down: by expert, `[2 * width, hidden]` (gates first) and `[hidden, width]`, or what `product` takes.
    Returns:
        `[rows, hidden]` in x's dtype.
    """
    chosen = selected.flatten()
    order = chosen.argsort(stable=True)  # places in `chosen`, sorted by expert
    counts = chosen.bincount(minlength=len(gate_up)).tolist()
    by_expert = x[order // selected.shape[-1]].split(counts)
    touched = [i for i, count in enumerate(counts) if count]
    if not touched:
        return torch.zeros_like(x)
    inner = activation(torch.cat([product(by_expert[i], gate_up[i]) for i in touched]))
    parts = inner.split([counts[i] for i in touched])
    mixed = torch.cat([product(rows, down[i]) for i, rows in zip(touched, parts, strict=True)])
    return (mixed[order.argsort()].unflatten(0, selected.shape) * weights.unsqueeze(-1)).sum(1)


class Experts(nn.Module):
    """The matrices of all experts of a layer, stacked under stock's names: `gate_up_proj` `[experts, 2 * width,
    hidden]` and `down_proj` `[experts, hidden, width]`."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `mix_experts`, in torch; gradients pass."""
        # By `unbind`, of which the backward pass makes one gradient of the stack, and not one for each expert.
        return mix_experts(x, selected, weights, self.gate_up_proj.unbind(), self.down_proj.unbind())

    def extra_repr(self) -> str:
        experts, hidden, width = self.down_proj.shape
        return f"{experts}, hidden={hidden}, width={width}"


class QuantizedExperts(nn.Module):
    """`Experts` of low-bit weights."""

    def __init__(self, num_experts: int, hidden: int, width: int, bits: int) -> None:
        super().__init__()
        self.gate_up_proj = QuantizedStack(num_experts, 2 * width, hidden, bits)
        self.down_proj = QuantizedStack(num_experts, hidden, width, bits)

    def forward(self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `mix_experts`, by the native kernels where they can be had."""
        product = quantized_product(resolve_kernels("auto", x.device, x.dtype))
        return mix_experts(x, selected, weights, self.gate_up_proj.each(), self.down_proj.each(), product)


def quantized_product(native: NativeKernels | None) -> ExpertProduct:
    """`quantized_linear` by these kernels, for `mix_experts`."""
    return lambda rows, weights: quantized_linear(rows, weights, None, native)
