"""What a layer does to each token by itself: a torch reference each, and the native kernel (`csrc/pointwise.cpp`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .native import NativeKernels, empty


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled in the input's dtype (as stock: the order matters in bf16)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, native: NativeKernels | None = None) -> torch.Tensor:
    """Root-mean-square norm in fp32, rounded to x's dtype before it is scaled (as stock: it matters in bf16).

    Args:
        x: `[..., size]`; for the kernel `[tokens, size]`.
        weight: `[size]`.
        native: what to run it with (x then is fp32 or bf16, on CPU); None: torch.
    """
    if native is None or weight.dtype != x.dtype:
        x32 = x.float()
        return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    out = empty(x.shape, x.dtype)
    bf16 = x.dtype == torch.bfloat16
    native.call("rms_norm", x.contiguous(), None, weight, None, out, *x.shape, bf16, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, native: NativeKernels | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual`, and `rms_norm` of it; arguments as there."""
    if native is None or weight.dtype != x.dtype:
        total = x + residual
        return total, rms_norm(total, weight, eps)
    total = empty(x.shape, x.dtype)
    out = empty(x.shape, x.dtype)
    bf16 = x.dtype == torch.bfloat16
    native.call("rms_norm", x.contiguous(), residual.contiguous(), weight, total, out, *x.shape, bf16, eps)
    return total, out


def gather_rows(
    table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, native: NativeKernels | None = None
) -> None:
    """`table[ids]` into out `[rows, size]`, of the table's dtype; all contiguous.

    (torch shares this work among OpenMP's threads, which then spin for up to 4 ms, in the way of those of our kernels.
    Where OMP_WAIT_POLICY kept them from it, a batch of 256 took 3 % less: a 350M model on 2 cores of a Xeon.)

    Args: table `[entries, size]`. ids: int64 `[rows]`, in range. native: as in `rms_norm`, but of any dtype.
    """
    if native is None:
        torch.index_select(table, 0, ids, out=out)
    else:
        native.call("gather_rows", table, ids, out, len(ids), table.shape[1] * table.itemsize)


def add(x: torch.Tensor, y: torch.Tensor, native: NativeKernels | None = None) -> torch.Tensor:
    """`x + y`, of one shape and dtype; native as in `rms_norm`."""
    if native is None:
        return x + y
    out = empty(x.shape, x.dtype)
    native.call("add", x.contiguous(), y.contiguous(), out, *x.shape, x.dtype == torch.bfloat16)
    return out


def rotary(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    native: NativeKernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin `[..., 1, 2 * half]` in `dtype`, times `scale`, for positions `[...]` int64 and inv_freq `[half]`,
    taken as fp32; the 1 broadcasts over heads. native: as in `rms_norm`, and positions `[tokens]`."""
    if native is None or inv_freq.dtype not in (torch.float32, torch.bfloat16):
        freqs = positions[..., None].float() * inv_freq.float()
        angles = torch.cat((freqs, freqs), dim=-1).unsqueeze(-2)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    shape = len(positions), 1, 2 * len(inv_freq)
    cos, sin = empty(shape, dtype), empty(shape, dtype)
    size = len(positions), len(inv_freq), inv_freq.dtype == torch.bfloat16, dtype == torch.bfloat16
    native.call("rotary", positions, inv_freq.contiguous(), cos, sin, *size, float(scale))
    return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x `[..., heads, head_dim]` (half-split layout, as Llama's)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_alike(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, native: NativeKernels | None = None
) -> torch.Tensor:
    """Apply RoPE to x `[tokens, heads, head_dim]`, to all by the same angles, in fp32, rounded once.

    Args: cos, sin: fp32 `[head_dim / 2]`. native: as in `rms_norm`.
    """
    if native is None or x.dtype not in (torch.float32, torch.bfloat16):
        return rotate(x.float(), torch.cat((cos, cos)), torch.cat((sin, sin))).to(x.dtype)
    out, dim = torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    native.call("rotate_alike", x.contiguous(), cos, sin, out, x.numel() // dim, dim, x.dtype == torch.bfloat16)
    return out


def norm_rotate(
    qkv: torch.Tensor,
    heads: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    native: NativeKernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of an attention layer: q and k RMS-normed per head, then rotated.

    Args:
        qkv: `[..., (heads + 2 * kv_heads) * head_dim]`: all queries, then keys, then values; for the kernel a matrix.
        q_weight, k_weight: `[head_dim]`, of the norms. eps: theirs.
        rope: cos, sin `[..., 1, head_dim]` in qkv's dtype.
        native: as in `rms_norm`.
    Returns:
        q `[..., heads, head_dim]`; k, v `[..., kv_heads, head_dim]`.
    """
    dim = len(q_weight)
    kv_heads = (qkv.shape[-1] // dim - heads) // 2
    if native is None or not q_weight.dtype == k_weight.dtype == qkv.dtype:
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=-2)
        return rotate(rms_norm(q, q_weight, eps), *rope), rotate(rms_norm(k, k_weight, eps), *rope), v
    qkv = qkv.contiguous()
    tokens, width = qkv.shape
    q, k = empty((tokens, heads, dim), qkv.dtype), empty((tokens, kv_heads, dim), qkv.dtype)
    shape = tokens, width, heads, kv_heads, dim, qkv.dtype == torch.bfloat16
    native.call("norm_rotate", qkv, q_weight, k_weight, *rope, q, k, *shape, eps)
    return q, k, qkv[:, (heads + kv_heads) * dim :].view(tokens, kv_heads, dim)


def swiglu(x: torch.Tensor, native: NativeKernels | None = None) -> torch.Tensor:
    """`silu(gate) * value` of x `[..., 2 * width]`, gates first; with `native`, as in `rms_norm`, x is a matrix."""
    if native is None:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    tokens, width = x.shape[0], x.shape[1] // 2
    out = empty((tokens, width), x.dtype)
    native.call("swiglu", x.contiguous(), out, tokens, width, x.dtype == torch.bfloat16)
    return out
