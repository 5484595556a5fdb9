"""What conversion and modeling share: linear layers that fuse several of stock's into one matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.linear.dense import PackedLinear


class FusedLinear(PackedLinear):
    """Several bias-free linears of one input, stacked: `parts` names each with its output width."""

    def __init__(self, in_features: int, parts: dict[str, int]) -> None:
        super().__init__(in_features, sum(parts.values()), bias=False)
        self.parts = parts

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, parts={self.parts}"


def fuse_stock_names(owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Stack `...q_proj.weight` and its fellows into `...qkv_proj.weight` before a state dict is loaded.

    A load-state-dict pre-hook of the module that *owns* the `FusedLinear`: a child never sees its siblings' keys.
    """
    for child_name, child in owner.named_children():
        if isinstance(child, FusedLinear):
            names = [f"{prefix}{part}.weight" for part in child.parts]
            if all(name in state_dict for name in names):
                state_dict[f"{prefix}{child_name}.weight"] = torch.cat([state_dict.pop(name) for name in names])
