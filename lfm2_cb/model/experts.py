"""The feed-forward of a mixture-of-experts layer: a router, and the experts that it chooses for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Lfm2MoeConfig

from ..ops.experts import Experts
from ..ops.kernel_set import MODULE_CALLS, KernelSet
from ..ops.linear.dense import PackedLinear


class Lfm2CbSparseMLP(nn.Module):
    """Sigmoid scores choose `num_experts_per_tok` SwiGLUs for each token, whose outputs are summed by them.

    `expert_bias` (fp32 `[experts]`, a buffer) is added to the scores for the choice alone. It stays in fp32 whatever
    the model is cast to, as training balances the experts by steps that bf16 would lose.
    """

    expert_bias: torch.Tensor | None

    def __init__(self, config: Lfm2MoeConfig) -> None:
        super().__init__()
        self.top_k, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.scale = config.routed_scaling_factor
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.gate = PackedLinear(config.hidden_size, config.num_experts, bias=False)
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.use_expert_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x: torch.Tensor, kernels: KernelSet = MODULE_CALLS) -> torch.Tensor:
        rows = x.flatten(0, -2)
        logits = kernels.linear(self.gate, rows)
        selected, weights = kernels.route(logits, self.expert_bias, self.top_k, self.normalize, self.scale)
        return kernels.experts(self.experts, rows, selected, weights).view_as(x)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self
