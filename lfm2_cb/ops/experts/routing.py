"""Which experts each row goes to, and how much each counts."""

from __future__ import annotations

import torch

from ..native import NativeKernels

#: of the native kernel: MOST_EXPERTS in csrc/experts/routing.cpp
MOST_EXPERTS = 1024


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    normalize: bool,
    scale: float,
    native: NativeKernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, and how much each counts.

    Args:
        logits: `[rows, experts]` of the router.
        bias: `[experts]` fp32; it moves which experts are chosen, and not how much they count.
        normalize: divide a row's weights by their sum. scale: times all weights.
        native: the kernel, for fp32 and bf16 logits; None: torch.
    Returns:
        `[rows, top_k]` each: int64 indices, and weights in the dtype of the logits.
    """
    if native is not None and logits.shape[1] <= MOST_EXPERTS:
        rows, experts = logits.shape
        selected = torch.empty(rows, top_k, dtype=torch.int64)
        weights = logits.new_empty(rows, top_k)
        sizes = rows, experts, top_k, int(normalize), int(logits.dtype == torch.bfloat16)
        native.call("route", logits.contiguous(), bias, selected, weights, *sizes, float(scale))
        return selected, weights
    scores = logits.sigmoid()
    selected = torch.topk(scores if bias is None else scores + bias, top_k, dim=-1).indices
    weights = scores.gather(-1, selected)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
    return selected, weights * scale


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """How many experts of a layer so many tokens touch, on average, when all are chosen alike.

    (Measured of 32, 4 at a time, by random nets in bf16, `scripts/benchmarks/experts.py`: 2 tokens 6.9, 4 tokens 13.9,
    8 tokens 20.6, 16 tokens 26.2, 32 tokens 30.7; by this 7.5, 13.2, 21.0, 28.2 and 31.6.)
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
