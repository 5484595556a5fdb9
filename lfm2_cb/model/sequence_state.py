"""SequenceState: the interface between a layer and the batch that it runs on."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ..ops.kernel_set import KernelSet


class AttentionLayer(Protocol):
    """What a state reads of an attention layer. (transformers' attention functions read more of it.)"""

    layer_idx: int
    num_heads: int
    scaling: float
    num_key_value_groups: int
    training: bool

    @property
    def q_layernorm(self) -> nn.Module:
        """The norm of each head's queries."""

    @property
    def k_layernorm(self) -> nn.Module:
        """The norm of each head's keys."""


class ConvLayer(Protocol):
    """What a state reads of a short convolution."""

    layer_idx: int
    kernel_size: int
    conv: nn.Conv1d


class SequenceState(Protocol):
    """Mixes tokens for the layers, within each sequence. Shapes: `...` is `[tokens]` or `[batch, length]`.

    kernels: what everything else in the layers is computed with.
    """

    kernels: KernelSet

    def attend_packed(
        self, layer: AttentionLayer, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`attend`, of queries, keys and values as `KernelSet.norm_rotate` takes them, normed and rotated here."""
        q, k, v = self.kernels.norm_rotate(qkv, layer.num_heads, layer.q_layernorm, layer.k_layernorm, rope)
        return self.attend(layer, q, k, v)

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention within each sequence, remembering k and v.

        Args: q `[..., heads, head_dim]`; k, v `[..., kv_heads, head_dim]`, all after norm and RoPE.
        Returns: `[..., heads * head_dim]`, and the weights where the backend makes them.
        """
        ...

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        """`C * conv(B * x)`: a causal depthwise convolution within each sequence, remembering its last
        `conv_L_cache - 1` inputs.

        Args: bcx `[..., 3 * hidden]`, B, C and x side by side. Returns: `[..., hidden]`.
        """
        ...

    def mask_padding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Zero the rows that are padding, where there are any, so that none reaches the convolution's window."""
        ...
