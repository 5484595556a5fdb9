"""What is computed for each token by itself, fused: residual and norm; rotary embeddings; norms of heads, rotation and
the write of keys and values; SwiGLU. Rounded where the torch reference (`ops/pointwise.py`) rounds, or less often."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.kv_blocks import KVBlocks
from .tables import power_of_two, tensors

#: heads of a program of `norm_rotate`, and values of one of `swiglu`. Untimed: no card was there.
HEAD_TILE, WIDTH_TILE = 8, 1024


@triton.jit
def _rms_norm(x, residual, weight, total, out, size, eps, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, SIZE)
    inside = place < size
    value = tl.load(x + row + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(total + row + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    scaled = scale * value.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row + place, scaled.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(positions, inv_freq, cos, sin, half, scale, HALF: tl.constexpr):
    token = tl.program_id(0)
    place = tl.arange(0, HALF)
    inside = place < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + place, mask=inside, other=0.0).to(
        tl.float32
    )
    row = token.to(tl.int64) * 2 * half + place
    c, s = (tl.cos(angle) * scale).to(cos.dtype.element_ty), (tl.sin(angle) * scale).to(cos.dtype.element_ty)
    tl.store(cos + row, c, mask=inside)
    tl.store(cos + row + half, c, mask=inside)
    tl.store(sin + row, s, mask=inside)
    tl.store(sin + row + half, s, mask=inside)


@triton.jit
def _norm_rotate(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    slots,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some heads of a token. slots: as `StepTables.slots`. Without weights keys and values are written as they come,
    and queries are not."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, PADDED_DIM)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_dim = dim < DIM
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM
    other = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)  # what rotation mixes a dimension with
    result = tl.load(row + dim[None, :], mask=inside, other=0.0)
    if q_weight is not None:
        exact = result.to(tl.float32)
        y = tl.load(row + other[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(exact * exact, 1) / DIM + eps)[:, None]
        wq = tl.load(q_weight + dim, mask=is_dim, other=0.0).to(tl.float32)
        wk = tl.load(k_weight + dim, mask=is_dim, other=0.0).to(tl.float32)
        wq_other = tl.load(q_weight + other, mask=is_dim, other=0.0).to(tl.float32)
        wk_other = tl.load(k_weight + other, mask=is_dim, other=0.0).to(tl.float32)
        w = tl.where(is_query[:, None], wq[None, :], wk[None, :])
        w_other = tl.where(is_query[:, None], wq_other[None, :], wk_other[None, :])
        normed = (w * (exact * inverse).to(q.dtype.element_ty).to(tl.float32)).to(q.dtype.element_ty)
        normed_other = (w_other * (y * inverse).to(q.dtype.element_ty).to(tl.float32)).to(q.dtype.element_ty)
        c = tl.load(cos + token * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + token * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        s *= tl.where(dim < DIM // 2, -1.0, 1.0)[None, :]
        rotated = normed.to(tl.float32) * c + normed_other.to(tl.float32) * s
        result = tl.where(is_value[:, None], exact, rotated).to(q.dtype.element_ty)
        tl.store(q + (token * HEADS + head[:, None]) * DIM + dim[None, :], result, mask=inside & is_query[:, None])

    slot = tl.load(slots + token)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    place = ((slot // BLOCK_SIZE).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    last = tl.where(slot >= 0, HEADS + 2 * KV_HEADS, 0)
    is_key, is_value = (head >= HEADS) & (head < last - KV_HEADS), is_value & (head < last)
    if key_scales is not None:
        # As `kv_blocks.round_rows`: a scale that bf16 holds, and ties to even.
        stored = result.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(stored), 1), 1e-30)
        scale = tl.div_rn(largest, tl.full((TILE,), 127.0, tl.float32)).to(tl.bfloat16)
        ratio = tl.div_rn(stored, tl.broadcast_to(scale.to(tl.float32)[:, None], (TILE, PADDED_DIM)))
        ratio = (ratio + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction
        result = tl.minimum(tl.maximum(ratio, -127.0), 127.0).to(tl.int8)
        tl.store(key_scales + place, scale, mask=is_key)
        tl.store(value_scales + place, scale, mask=is_value)
    tl.store(keys + place[:, None] * DIM + dim[None, :], result, mask=is_key[:, None] & is_dim[None, :])
    tl.store(values + place[:, None] * DIM + dim[None, :], result, mask=is_value[:, None] & is_dim[None, :])


@triton.jit
def _swiglu(x, out, width, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = place < width
    gate = tl.load(x + token * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + place, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `ops.pointwise.rms_norm`, of x `[tokens, size]`; weight in any dtype."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm[(len(x),)](x, None, weight, None, out, x.shape[1], eps, SIZE=power_of_two(x.shape[1]))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.pointwise.add_rms_norm`, of x and residual `[tokens, size]`."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _rms_norm[(len(x),)](x, residual, weight, total, out, x.shape[1], eps, SIZE=power_of_two(x.shape[1]))
    return total, out


def rotary(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.pointwise.rotary`, of positions `[tokens]`, int32 or int64."""
    shape = len(positions), 1, 2 * len(inv_freq)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    half = len(inv_freq)
    _rotary[(len(positions),)](positions, inv_freq.contiguous(), cos, sin, half, float(scale), HALF=power_of_two(half))
    return cos, sin


def norm_rotate(
    qkv: torch.Tensor,
    heads: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    slots: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
) -> torch.Tensor:
    """As `ops.pointwise.norm_rotate`, of qkv `[tokens, …]`; keys and values go to the cache, where `slots` says (see
    `StepTables`). Returns: q `[tokens, heads, head_dim]`."""
    q = torch.empty((len(qkv), heads, len(q_weight)), dtype=qkv.dtype, device=qkv.device)
    cos, sin = (part.contiguous() for part in rope)
    _run_norm_rotate(qkv.contiguous(), (q_weight, k_weight, cos, sin), slots, q, key_cache, value_cache, eps)
    return q


def write_rows(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, key_cache: KVBlocks, value_cache: KVBlocks
) -> None:
    """Keys and values `[tokens, kv_heads, head_dim]` to the cache, as `kv_blocks.write_rows`; slots as above."""
    kv = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    _run_norm_rotate(kv, (None,) * 4, slots, kv.new_empty(len(kv), 0, 1), key_cache, value_cache, 0.0)


def _run_norm_rotate(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    slots: torch.Tensor,
    q: torch.Tensor,
    key_cache: KVBlocks,
    value_cache: KVBlocks,
    eps: float,
) -> None:
    _, kv_heads, block_size, dim = key_cache.shape
    _norm_rotate[len(qkv), triton.cdiv(q.shape[1] + 2 * kv_heads, HEAD_TILE)](
        *(qkv, *weights, slots, q, *tensors(key_cache, value_cache), eps),
        HEADS=q.shape[1],
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED_DIM=power_of_two(dim),
        BLOCK_SIZE=block_size,
        TILE=HEAD_TILE,
    )


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """As `ops.pointwise.swiglu`, of x `[tokens, 2 * width]`."""
    x, width = x.contiguous(), x.shape[1] // 2
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    tile = min(power_of_two(width), WIDTH_TILE)
    _swiglu[len(x), triton.cdiv(width, tile)](x, out, width, TILE=tile)
    return out
