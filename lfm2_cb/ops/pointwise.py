"""What a layer does to each token by itself: a torch reference each, and the native kernel (`csrc/pointwise.cpp`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .native import NativeKernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, native: NativeKernels | None = None) -> torch.Tensor:
    """Root-mean-square norm in fp32, rounded to x's dtype before it is scaled (as stock: it matters in bf16).

    Args:
        x: `[..., size]`; for the kernel `[tokens, size]` or `[tokens, heads, size]` with whole tokens.
        weight: `[size]`.
        native: what to run it with (x then is fp32 or bf16, on CPU); None: torch.
    """
    if native is None or weight.dtype != x.dtype:
        x32 = x.float()
        return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    size = x.shape[-1]
    tokens = x.unsqueeze(1) if x.ndim == 2 else x
    if tokens.stride()[1:] != (size, 1):
        tokens = tokens.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    native.call("rms_norm", tokens, weight, out, *tokens.shape, tokens.stride(0), int(x.dtype == torch.bfloat16), eps)
    return out


def swiglu(x: torch.Tensor, native: NativeKernels | None = None) -> torch.Tensor:
    """`silu(gate) * value` of x `[..., 2 * width]`, gates first; with `native`, as in `rms_norm`, x is a matrix."""
    if native is None:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, width)
    native.call("swiglu", x.contiguous(), out, tokens, width, int(x.dtype == torch.bfloat16))
    return out
