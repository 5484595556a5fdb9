"""Mixture of experts in torch: which rows go to which experts, and the products of each expert with its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..pointwise import swiglu

#: (rows of one expert `[n, in]`, its matrix as the layer holds it) → `[n, out]`
ExpertProduct = Callable[[torch.Tensor, Any], torch.Tensor]


def mix_experts(
    x: torch.Tensor,
    selected: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Sequence[Any],
    down: Sequence[Any],
    product: ExpertProduct = F.linear,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """`sum over a row's experts of weight * down(silu(gate(x)) * up(x))`, which is summed in the order of its choices.

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
