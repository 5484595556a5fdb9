"""The matrices of all experts of a layer, in full precision and in low bits."""

from __future__ import annotations

import torch
from torch import nn

from ..linear.quantized import QuantizedStack, quantized_linear
from ..native import NativeKernels, resolve_kernels
from .native import native_mix_experts
from .reference import mix_experts


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
        """As `mix_experts`, by the native kernels where they are available."""
        return self.mix(x, selected, weights, resolve_kernels("auto", x.device, x.dtype))

    def mix(
        self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, native: NativeKernels | None
    ) -> torch.Tensor:
        """The same by these kernels; by the torch reference without them, and for gradients."""
        if native is not None and not (torch.is_grad_enabled() and x.requires_grad):
            return native_mix_experts(native, x, selected, weights, self.gate_up_proj.weights, self.down_proj.weights)
        return mix_experts(x, selected, weights, self.gate_up_proj.each(), self.down_proj.each(), quantized_linear)
