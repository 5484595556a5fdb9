"""The sequence state of an ordinary forward: a padded batch over one of transformers' own caches."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.kernel_set import MODULE_CALLS
from .configuration import Lfm2CbConfig
from .sequence_state import AttentionLayer, ConvLayer, SequenceState


class PaddedState(SequenceState):
    """`[batch, length]` tokens, left or right padded, with or without a stock `Cache`.

    Masks are stock's: attention through the backend that `config._attn_implementation` names, and padding zeroed
    before the convolution's projection (so results equal stock's to the bit of its masking, `conv_bias` included).
    """

    kernels = MODULE_CALLS  # gradients may be wanted

    def __init__(
        self,
        config: Lfm2CbConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        attention_kwargs: dict[str, Any],
    ) -> None:
        self.config, self.cache, self.attention_kwargs = config, cache, attention_kwargs
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
        self.position_ids = position_ids
        if not isinstance(attention_mask, dict):  # generate() may hand over the masks ready made
            arguments = {
                "config": config,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "past_key_values": cache,
                "position_ids": position_ids,
            }
            attention_mask = {
                "full_attention": create_causal_mask(**arguments),
                "conv": create_recurrent_attention_mask(**arguments),
            }
        self.causal_mask, self.padding_mask = attention_mask["full_attention"], attention_mask["conv"]

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, length, head_dim]
        if self.cache is not None:
            k, v = self.cache.update(k, v, layer.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        mixed, weights = attention(
            layer,
            q,
            k,
            v,
            self.causal_mask,
            dropout=0.0,
            scaling=layer.scaling,
            position_ids=self.position_ids,
            **self.attention_kwargs,
        )
        return mixed.flatten(-2).contiguous(), weights

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        length = bcx.shape[1]
        b, c, x = bcx.chunk(3, dim=-1)
        x = (b * x).transpose(1, 2)  # [batch, hidden, length]
        if self.cache is not None:
            x = self.cache.update_conv_state(x, layer.layer_idx, conv_kernel_size=layer.kernel_size)
        # The convolution pads kernel - 1 zeros on both sides: drop the tail, then whatever stood before this chunk.
        mixed = layer.conv(x.to(layer.conv.weight.dtype))[..., : x.shape[-1]][..., -length:]
        return c * mixed.transpose(1, 2)

    def mask_padding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.padding_mask is None:
            return hidden_states
        return (hidden_states * self.padding_mask[:, :, None]).to(hidden_states.dtype)


def eager_attention(
    module: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention spelled out, for `attn_implementation="eager"` (the one backend that returns its weights).

    Args: query `[batch, heads, queries, head_dim]`; key, value `[batch, kv_heads, keys, head_dim]`; an additive mask.
    Returns: `[batch, queries, heads, head_dim]`, weights `[batch, heads, queries, keys]`.
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
