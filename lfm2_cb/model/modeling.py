"""LFM2 from scratch: gated short convolutions and a few grouped-query attention layers.

Every layer is pointwise over tokens but for its operator, and the operators ask the *sequence state* they were handed
(`state.attend`, `state.convolve`) to mix tokens. So one set of layers serves the engine's packed batch (a
`RaggedBatch`, hidden states `[tokens, hidden]`), stock `generate()` and training (a `PaddedState`, hidden states
`[batch, length, hidden]`).

Source of the arithmetic: LFM2 technical report (arXiv 2511.23404) and transformers' `models/lfm2/modeling_lfm2.py`,
which this equals to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, Lfm2MoeConfig, PreTrainedConfig, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..ops.experts import Experts
from ..ops.kernel_set import MODULE_CALLS, KernelSet, is_plain, mlp
from ..ops.linear.dense import PackedLinear
from ..ops.pointwise import RMSNorm
from .configuration import Lfm2CbConfig, ffn_width, first_expert_layer, head_dim, layers_of_type, rope_theta, rope_type
from .experts import Lfm2CbSparseMLP
from .layers import FusedLinear, fuse_stock_names
from .padded_state import PaddedState
from .sequence_state import SequenceState

logger = logging.get_logger("transformers.lfm2_cb")


class Lfm2CbRMSNorm(RMSNorm):
    """`ops.pointwise.RMSNorm`, under a name that transformers' initialisation knows."""


class Lfm2CbRotaryEmbedding(nn.Module):
    """cos and sin of rotary position embeddings, computed in fp32 for any shape of positions."""

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: Lfm2CbConfig) -> None:
        super().__init__()
        self.config = config
        # The next four names are the ones that `dynamic_rope_update` and `_init_weights` work on.
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = rope_type(config)
        init = self.compute_default_rope_parameters
        if self.rope_type != "default":
            init = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: Lfm2CbConfig, **_: Any) -> tuple[torch.Tensor, float]:
        """Inverse frequencies `[head_dim / 2]` of plain RoPE, and the scale of cos and sin."""
        dim = head_dim(config)
        exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / rope_theta(config) ** exponent, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin `[..., 1, head_dim]` in x's dtype, for position_ids `[...]`; the 1 broadcasts over heads."""
        return self.at(position_ids, x, MODULE_CALLS)

    def at(self, position_ids: torch.Tensor, x: torch.Tensor, kernels: KernelSet) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with fixed frequencies, which do not depend on the length."""
        inv_freq = self.inv_freq.to(x.device)
        return kernels.rotary(position_ids, inv_freq, self.attention_scaling, x.dtype)


class Lfm2CbMLP(nn.Module):
    """SwiGLU, with the gate (w1) and the value (w3) in one matrix product."""

    def __init__(self, config: Lfm2CbConfig) -> None:
        super().__init__()
        width = ffn_width(config)
        self.w13 = FusedLinear(config.hidden_size, {"w1": width, "w3": width})
        self.w2 = PackedLinear(width, config.hidden_size, bias=False)
        self.register_load_state_dict_pre_hook(fuse_stock_names)

    def forward(self, x: torch.Tensor, kernels: KernelSet = MODULE_CALLS) -> torch.Tensor:
        return mlp(kernels, self.w13, self.w2, x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, kernels: KernelSet) -> torch.Tensor:
        """`residual + self(x)`."""
        return mlp(kernels, self.w13, self.w2, x, residual)


class Lfm2CbAttention(nn.Module):
    """Grouped-query attention; q and k are RMS-normed per head before RoPE."""

    def __init__(self, config: Lfm2CbConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim(config)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        # The names below are read by transformers' attention functions.
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = FusedLinear(config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        self.out_proj = PackedLinear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_layernorm = Lfm2CbRMSNorm(self.head_dim, config.norm_eps)
        self.k_layernorm = Lfm2CbRMSNorm(self.head_dim, config.norm_eps)
        self.register_load_state_dict_pre_hook(fuse_stock_names)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], state: SequenceState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed, probabilities = self._mix(x, rope, state)
        return state.kernels.linear(self.out_proj, mixed), probabilities

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], state: SequenceState
    ) -> torch.Tensor:
        """`residual + self(x, rope, state)[0]`."""
        mixed, _ = self._mix(x, rope, state)
        return state.kernels.linear(self.out_proj, mixed, residual)

    def _mix(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], state: SequenceState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return state.attend_packed(self, state.kernels.linear(self.qkv_proj, x), rope)


class Lfm2CbShortConv(nn.Module):
    """Gated short convolution: `out_proj(C * conv(B * x))`."""

    def __init__(self, config: Lfm2CbConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.kernel_size = config.conv_L_cache
        hidden, bias = config.hidden_size, config.conv_bias
        self.conv = nn.Conv1d(hidden, hidden, self.kernel_size, groups=hidden, bias=bias, padding=self.kernel_size - 1)
        self.in_proj = PackedLinear(hidden, 3 * hidden, bias=bias)
        self.out_proj = PackedLinear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor, state: SequenceState) -> torch.Tensor:
        return state.kernels.linear(self.out_proj, self._mix(x, state))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, state: SequenceState) -> torch.Tensor:
        """`residual + self(x, state)`."""
        return state.kernels.linear(self.out_proj, self._mix(x, state), residual)

    @force_accelerate_hooks("conv")
    def _mix(self, x: torch.Tensor, state: SequenceState) -> torch.Tensor:
        return state.convolve(self, state.kernels.linear(self.in_proj, state.mask_padding(x)))


class Lfm2CbDecoderLayer(GradientCheckpointingLayer):
    """norm → operator → residual; norm → SwiGLU, or a mixture of them → residual."""

    def __init__(self, config: Lfm2CbConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_attention_layer = layer_idx in layers_of_type(config, "full_attention")
        if self.is_attention_layer:
            self.self_attn = Lfm2CbAttention(config, layer_idx)
        else:
            self.conv = Lfm2CbShortConv(config, layer_idx)
        first_expert = first_expert_layer(config)
        is_dense = first_expert is None or layer_idx < first_expert
        self.feed_forward = Lfm2CbMLP(config) if is_dense else Lfm2CbSparseMLP(config)
        self.operator_norm = Lfm2CbRMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = Lfm2CbRMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], state: SequenceState
    ) -> torch.Tensor:
        kernels, feed_forward = state.kernels, self.feed_forward
        hidden_states, normed = self._operate(hidden_states, rope, state)
        if isinstance(feed_forward, Lfm2CbMLP) and _takes_residuals(feed_forward, Lfm2CbMLP.forward, kernels):
            return feed_forward.add_to(hidden_states, normed, kernels)
        return kernels.add(hidden_states, feed_forward(normed, kernels))

    def _operate(
        self, hidden_states: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], state: SequenceState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states after the operator, and the feed-forward's norm of them."""
        kernels = state.kernels
        normed = kernels.norm(self.operator_norm, hidden_states)
        if self.is_attention_layer:
            attention = self.self_attn
            if _takes_residuals(attention, Lfm2CbAttention.forward, kernels):
                hidden_states = attention.add_to(hidden_states, normed, rope, state)
                return hidden_states, kernels.norm(self.ffn_norm, hidden_states)
            mixed, _ = attention(normed, rope, state)
        else:
            conv = self.conv
            if _takes_residuals(conv, Lfm2CbShortConv.forward, kernels):
                hidden_states = conv.add_to(hidden_states, normed, state)
                return hidden_states, kernels.norm(self.ffn_norm, hidden_states)
            mixed = conv(normed, state)
        return kernels.add_norm(self.ffn_norm, mixed, hidden_states)


def _takes_residuals(module: nn.Module, forward: object, kernels: KernelSet) -> bool:
    """Whether a part of a layer may add its result to the hidden states itself: its last product does so by a kernel,
    and no user code on the module expects the result."""
    return kernels.native is not None and is_plain(module, forward)


class Lfm2CbPreTrainedModel(PreTrainedModel):
    config_class = Lfm2CbConfig
    config: Lfm2CbConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Lfm2CbDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "state"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True  # so that stock's generate() compiles over a static cache, as for its own class
    _can_record_outputs = {"hidden_states": Lfm2CbDecoderLayer, "attentions": Lfm2CbAttention}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers looks for the call in this file's text, and it is in padded_state.py

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # A live stock mixture's config names one. All give the same results, and our kernels run whichever it is.
        return issubclass(cls.config_class, Lfm2MoeConfig)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Experts):
            for parameter in module.parameters():
                initialization.normal_(parameter, std=self.config.initializer_range)
        elif isinstance(module, Lfm2CbSparseMLP) and module.expert_bias is not None:
            initialization.zeros_(module.expert_bias)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As stock's, in the stock layout; a quantised model is written as its layers hold it."""
        if getattr(self, "hf_quantizer", None) is not None:
            kwargs["save_original_format"] = False
        super().save_pretrained(*args, **kwargs)


class Lfm2CbModel(Lfm2CbPreTrainedModel):
    """The LFM2 stack without its head."""

    def __init__(self, config: Lfm2CbConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Lfm2CbDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.rotary_emb = Lfm2CbRotaryEmbedding(config)
        self.embedding_norm = Lfm2CbRMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        state: SequenceState | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: `[batch, length]` int64; with `state`, the packed `[tokens]`.
            attention_mask: `[batch, seen + length]`, 1 for real tokens, padding on either side; or stock's 4D mask.
            position_ids: of input_ids' shape; counted from the cache's length when absent.
            past_key_values: a stock cache (`DynamicCache(config=...)` when absent and `use_cache`).
            state: the engine's `RaggedBatch`, which then is the cache and the mask; `position_ids` must be given.
        Returns:
            `last_hidden_state` `[batch, length, hidden]` (packed: `[tokens, hidden]`) after the final norm.
        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; `output_router_logits`.
        """
        if kwargs.get("output_router_logits", getattr(self.config, "output_router_logits", False)):
            raise ValueError("output_router_logits is not supported: use a stock Lfm2MoeForCausalLM")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if state is None:
            if self.gradient_checkpointing and self.training and (use_cache or past_key_values is not None):
                # A replayed layer would write the cache a second time.
                logger.warning_once("Caching is incompatible with gradient checkpointing. Setting `use_cache=False`.")
                use_cache, past_key_values = False, None
            if use_cache and past_key_values is None:
                past_key_values = DynamicCache(config=self.config)
            state = PaddedState(self.config, inputs_embeds, attention_mask, position_ids, past_key_values, kwargs)
            position_ids = state.position_ids

        hidden_states = inputs_embeds
        kernels, plain = state.kernels, is_plain(self.rotary_emb, Lfm2CbRotaryEmbedding.forward)
        if plain and not kernels.is_reference and position_ids is not None:
            rope = self.rotary_emb.at(position_ids, hidden_states, kernels)
        else:
            rope = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rope, state)
        return BaseModelOutputWithPast(
            last_hidden_state=kernels.norm(self.embedding_norm, hidden_states), past_key_values=past_key_values
        )


class Lfm2CbForCausalLM(Lfm2CbPreTrainedModel, GenerationMixin):
    """LFM2 with its (usually tied) language-modelling head. Loads stock LFM2 checkpoints; its saves load in stock."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    base_class = Lfm2CbModel

    def __init__(self, config: Lfm2CbConfig) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = PackedLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss where `labels` are given. Arguments as in `Lfm2CbModel.forward`.

        Args:
            labels: `[batch, length]` int64; -100 is ignored. The shift by one happens inside.
            logits_to_keep: as in transformers' `slice_logits_to_keep` (0: all positions).
        Returns:
            `logits` `[batch, kept, vocab_size]`, `loss`, `past_key_values`, and what `output_*` asks for.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class Lfm2CbMoeModel(Lfm2CbModel):
    """The stack of a mixture of experts: from `config.num_dense_layers` on, layers have experts."""

    config_class = Lfm2MoeConfig


class StockCheckpoints:
    """Of a model under stock's configuration: what it saves says that it is stock's, so that anyone can load it."""

    stock_class: str

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; `config.json` names the stock class."""
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        self.config.architectures = [self.stock_class]  # type: ignore[attr-defined]
        self.config.save_pretrained(args[0] if args else kwargs["save_directory"])  # type: ignore[attr-defined]


class Lfm2CbMoeForCausalLM(StockCheckpoints, Lfm2CbForCausalLM):
    """LFM2 as a mixture of experts. Loads stock `lfm2_moe` checkpoints, and saves such."""

    config_class = Lfm2MoeConfig
    base_class = Lfm2CbMoeModel
    stock_class = "Lfm2MoeForCausalLM"
    _can_compile_fullgraph = False  # how many rows an expert has is read from a tensor


def class_for(config: PreTrainedConfig) -> type[Lfm2CbForCausalLM]:
    """Which of our classes runs the model of a configuration, ours or stock's."""
    return Lfm2CbMoeForCausalLM if isinstance(config, Lfm2MoeConfig) else Lfm2CbForCausalLM
