"""KernelSet: what the layers of one engine compute with.

Layers reach it through the sequence state that they are handed (`state.kernels`), so two engines on one model may use
different kernels at the same time. Our own modules, if unchanged, are run by kernels on their weights; any other
module (an adapter's wrapper, a module with hooks or with a patched `forward`) is called, with x only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .attention.decode import decode_attention
from .attention.kv_blocks import KVBlocks, write_rows
from .experts import Experts, QuantizedExperts, native_mix_experts, route
from .linear.dense import PackedLinear
from .linear.int8 import native_rows_int8
from .linear.quantized import QuantizedEmbedding, QuantizedLinear, fused_mlp, fused_swiglu, quantized_linear
from .linear.table import DENSE, SWIGLU_TABLE, Product, products
from .native import NativeKernels, resolve_kernels
from .pointwise import RMSNorm, add, add_rms_norm, gather_rows, norm_rotate, rms_norm, rotary, rotate, swiglu
from .short_conv import gated_short_conv
from .triton import resolve_triton

if TYPE_CHECKING:  # what imports Triton is imported where a device is for it
    from .triton.kernels import TritonKernels

_global_hooks, _global_pre_hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks


def is_plain(module: nn.Module, forward: object) -> bool:
    """Whether calling a module does nothing but its class's `forward`, and that is the given function."""
    own = module.__dict__
    return module.__class__.forward is forward and not (
        own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or _global_hooks or _global_pre_hooks
    )


class KernelSet:
    """The native kernels, the Triton kernels, or the torch reference where both are None. For inference: no gradients
    pass through kernels.

    x is `[tokens, size]` throughout, on the device that the kernels are for.
    """

    def __init__(self, native: NativeKernels | None, triton: TritonKernels | None = None) -> None:
        self.native, self.triton = native, triton
        dtypes = (torch.float32, torch.bfloat16)
        self._dense = {} if native is None else {dtype: products(DENSE, dtype, native.isa) for dtype in dtypes}
        self._swiglu = {}
        if native is not None:
            self._swiglu = {dtype: SWIGLU_TABLE.get((DENSE, dtype, native.isa), ()) for dtype in dtypes}

    @classmethod
    def resolve(cls, kernels: str, device: torch.device, dtype: torch.dtype) -> KernelSet:
        """What a model on this device and in this dtype runs with.

        Args: kernels: "auto": native on a CPU and Triton on CUDA where available, with one log line where not;
            "native"; "triton"; "torch".
        Raises: ValueError: another name. NativeUnavailable, TritonUnavailable: the named kernels are not available.
        """
        return cls(resolve_kernels(kernels, device, dtype), resolve_triton(kernels, device, dtype))

    @property
    def is_reference(self) -> bool:
        """Whether everything runs in torch."""
        return self.native is None and self.triton is None

    def linear(self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """`module(x)` of a linear layer, `[tokens, out]`; and to it, once rounded, a residual `[tokens, out]`."""
        residual = None if residual is None else residual.contiguous()
        if (kernel := self._dense_product(module, x)) is not None:
            # By the dictionary: a product of one row takes some 100 µs, and every attribute asked of a module one.
            parameters = module._parameters
            return kernel(self.native, x, parameters["weight"], parameters["bias"], residual)
        if is_plain(module, QuantizedLinear.forward):
            return quantized_linear(x, module.weights, module.bias, self.native, residual)  # type: ignore[arg-type]
        return module(x) if residual is None else self.add(module(x), residual)

    def _dense_product(self, module: nn.Module, x: torch.Tensor) -> Product | None:
        """What `linear` multiplies by the weights of a dense layer of ours; None: it runs another way."""
        return _kernel_for(module, x, self._dense) if is_plain(module, PackedLinear.forward) else None

    def linear_swiglu(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """`swiglu(linear(module, x))`, of a layer that makes gates and values."""
        fused = None
        if self.native is not None and module._parameters.get("bias") is None:
            if is_plain(module, PackedLinear.forward):
                if (kernel := _kernel_for(module, x, self._swiglu)) is not None:
                    fused = kernel(self.native, x, module._parameters["weight"], None)
            elif is_plain(module, QuantizedLinear.forward):
                fused = fused_swiglu(self.native, x, module.weights)  # type: ignore[arg-type]
        return self._gate(self.linear(module, x)) if fused is None else fused

    def _fused_mlp(
        self, w13: nn.Module, w2: nn.Module, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What `mlp` gives, by one kernel, where there is one."""
        if self.native is None or not (_is_quantized_without_bias(w13) and _is_quantized_without_bias(w2)):
            return None
        residual = None if residual is None else residual.contiguous()
        return fused_mlp(self.native, x, w13.weights, w2.weights, residual)  # type: ignore[arg-type]

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, normalize: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `experts.route`."""
        return route(logits, bias, top_k, normalize, scale, self.native)

    def experts(
        self, module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`module(x, selected, weights)` of a layer's experts, as `mix_experts`: `[tokens, size]`."""
        if self.native is not None and isinstance(module, Experts) and is_plain(module, Experts.forward):
            gate_up, down = module.gate_up_proj, module.down_proj
            if gate_up.is_contiguous() and down.is_contiguous() and gate_up.dtype == down.dtype == x.dtype:
                return native_mix_experts(self.native, x, selected, weights, gate_up, down)
        if isinstance(module, QuantizedExperts) and is_plain(module, QuantizedExperts.forward):
            return module.mix(x, selected, weights, self.native)
        return module(x, selected, weights)

    def embed(self, module: nn.Module, ids: torch.Tensor, out: torch.Tensor) -> None:
        """`module(ids)` of an embedding into out `[tokens, size]`. ids: int64 `[tokens]`, which must be in range."""
        if self.native is not None and is_plain(module, QuantizedEmbedding.forward):
            native_rows_int8(self.native, module.weights, ids, out)  # type: ignore[arg-type]
        elif _is_table(module) and module.weight.dtype == out.dtype:
            gather_rows(module.weight, ids, out, self.native)  # type: ignore[arg-type]
        else:
            out.copy_(module(ids))

    def norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """`module(x)` of a norm."""
        weight = _norm_weight(module)
        if weight is None:
            return module(x)
        if self.triton is not None and weight.dtype == x.dtype:
            return self.triton.rms_norm(x, weight, module.eps)  # type: ignore[arg-type]
        return rms_norm(x, weight, module.eps, self.native)  # type: ignore[arg-type]

    def add_norm(
        self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + residual`, and the norm of it."""
        weight = _norm_weight(module)
        if weight is not None:
            if self.triton is not None and weight.dtype == x.dtype == residual.dtype:
                return self.triton.add_rms_norm(x, residual, weight, module.eps)  # type: ignore[arg-type]
            return add_rms_norm(x, residual, weight, module.eps, self.native)  # type: ignore[arg-type]
        total = self.add(x, residual)
        return total, module(total)

    def norm_rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        q_norm: nn.Module,
        k_norm: nn.Module,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `pointwise.norm_rotate`: queries, keys and values, q and k normed by these modules, then rotated."""
        q_weight, k_weight = _norm_weight(q_norm), _norm_weight(k_norm)
        if q_weight is not None and k_weight is not None and q_norm.eps == k_norm.eps:
            return norm_rotate(qkv, heads, q_weight, k_weight, rope, q_norm.eps, self.native)  # type: ignore[arg-type]
        return _norm_rotate(qkv, heads, q_norm, k_norm, rope)

    def norm_rotate_write(
        self,
        qkv: torch.Tensor,
        heads: int,
        q_norm: nn.Module,
        k_norm: nn.Module,
        rope: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        keys: KVBlocks,
        values: KVBlocks,
    ) -> torch.Tensor | None:
        """The same, with keys and values written to the cache at once, as `triton.pointwise.norm_rotate` says: the
        queries; None: there is no kernel for it, and nothing was done."""
        q_weight, k_weight = _norm_weight(q_norm), _norm_weight(k_norm)
        if self.triton is None or q_weight is None or k_weight is None or q_norm.eps != k_norm.eps:
            return None
        if not q_weight.dtype == k_weight.dtype == qkv.dtype:
            return None
        return self.triton.norm_rotate(qkv, heads, q_weight, k_weight, rope, q_norm.eps, slots, keys, values)  # type: ignore[arg-type]

    def rotary(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `pointwise.rotary`."""
        if self.triton is not None:
            return self.triton.rotary(positions, inv_freq, scale, dtype)
        return rotary(positions, inv_freq, scale, dtype, self.native)

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        """As `pointwise.swiglu`."""
        if self.triton is not None:
            return self.triton.swiglu(x)
        return swiglu(x, self.native)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x + y`."""
        return add(x, y, self.native)

    def short_conv(
        self,
        bcx: torch.Tensor,
        cache: torch.Tensor,
        read_rows: torch.Tensor,
        taps: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        write_rows: torch.Tensor,
        write_index: torch.Tensor,
        whole: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `short_conv.gated_short_conv`."""
        written = write_rows, write_index
        return gated_short_conv(bcx, cache, read_rows, taps, weight, bias, *written, self.native, whole)

    def decode_attention(
        self,
        q: torch.Tensor,
        key_cache: KVBlocks,
        value_cache: KVBlocks,
        kv_lens: torch.Tensor,
        block_table: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """As `decode.decode_attention`, which is what device graphs have."""
        if self.triton is not None:
            return self.triton.decode_attention(q, key_cache, value_cache, kv_lens, block_table, scaling)
        return decode_attention(q, key_cache, value_cache, kv_lens, block_table, scaling)

    def write_rows(self, blocks: KVBlocks, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
        """As `kv_blocks.write_rows`."""
        write_rows(blocks, slot_mapping, rows, self.native)


class ModuleCalls(KernelSet):
    """Torch, with every module called: for training and stock's `generate()`, where gradients, hooks and compilers
    must see each of them. x is `[..., size]`."""

    def __init__(self) -> None:
        super().__init__(None)

    def linear(self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return module(x) if residual is None else module(x) + residual

    def experts(
        self, module: nn.Module, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return module(x, selected, weights)

    def norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    def add_norm(
        self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, module(total)

    def norm_rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        q_norm: nn.Module,
        k_norm: nn.Module,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _norm_rotate(qkv, heads, q_norm, k_norm, rope)


def mlp(
    kernels: KernelSet, w13: nn.Module, w2: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear(w2, linear_swiglu(w13, x), residual)`."""
    fused = kernels._fused_mlp(w13, w2, x, residual)
    return kernels.linear(w2, kernels.linear_swiglu(w13, x), residual) if fused is None else fused


#: the torch reference
REFERENCE = KernelSet(None)
#: for every forward that no engine runs
MODULE_CALLS = ModuleCalls()


def _kernel_for(
    module: nn.Module, x: torch.Tensor, kernels: Mapping[torch.dtype, Sequence[tuple[float, Product | None]]]
) -> Product | None:
    """The kernel for these inputs of one of our dense linears, from a table by dtype and rows; None: there is none."""
    parameters, by_rows, rows = module._parameters, kernels.get(x.dtype), x.shape[0]
    weight = parameters.get("weight")
    if weight is None or "bias" not in parameters:
        return None  # a parametrization computes it at every access
    if by_rows and rows and weight.dtype == x.dtype and weight.is_contiguous():
        for most, kernel in by_rows:
            if rows <= most:
                return kernel
    return None


def _is_quantized_without_bias(module: nn.Module) -> bool:
    """Whether a layer does nothing but multiply by a low-bit matrix."""
    return is_plain(module, QuantizedLinear.forward) and module._parameters.get("bias") is None


def _is_table(module: nn.Module) -> bool:
    """Whether an embedding does nothing but look up rows of a contiguous matrix."""
    plain = is_plain(module, nn.Embedding.forward) and module.max_norm is None
    return plain and module.weight.is_contiguous()  # type: ignore[union-attr, operator]


def _norm_weight(module: nn.Module) -> torch.Tensor | None:
    """The weight of a norm that is our own, and unchanged; None: it must be called."""
    return module._parameters.get("weight") if is_plain(module, RMSNorm.forward) else None


def _norm_rotate(
    qkv: torch.Tensor,
    heads: int,
    q_norm: nn.Module,
    k_norm: nn.Module,
    rope: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms called as modules."""
    dim = rope[0].shape[-1]
    kv_heads = (qkv.shape[-1] // dim - heads) // 2
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=-2)
    return rotate(q_norm(q), *rope), rotate(k_norm(k), *rope), v
