"""Configuration of the LFM2 network, field for field that of `transformers.Lfm2Config`."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters


@strict
class Lfm2CbConfig(PreTrainedConfig):
    """Everything that `transformers.Lfm2Config` holds, under the model type `lfm2_cb`.

    Reads the `config.json` of a stock `lfm2` checkpoint unchanged, older spellings included (`full_attn_idxs`,
    `block_ff_dim`, `tie_embedding`, a bare `rope_theta`).

    Args:
        intermediate_size: FFN width before adjustment; see `ffn_width`.
        conv_L_cache: kernel size of the short convolution, in tokens (3 in every released model).
        conv_bias: whether the convolution and its two projections have a bias.
        layer_types: `"full_attention"` or `"conv"` for each layer; derived from `full_attn_idxs` when absent.
        rope_parameters: as in transformers; theta is 1e6 by default.
    """

    model_type = "lfm2_cb"
    keys_to_ignore_at_inference = ["past_key_values"]
    default_theta = 1000000.0

    vocab_size: int = 65536
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128_000
    initializer_range: float = 0.02
    norm_eps: float = 0.00001
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters | dict | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | int = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            if self.full_attn_idxs is None:
                self.full_attn_idxs = list(range(self.num_hidden_layers))
            attention = set(self.full_attn_idxs)
            self.layer_types = ["full_attention" if i in attention else "conv" for i in range(self.num_hidden_layers)]
        self.tie_word_embeddings = kwargs.pop("tie_embedding", self.tie_word_embeddings)
        self.intermediate_size = kwargs.pop("block_ff_dim", self.intermediate_size)
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a `config.json`; a stock `lfm2` one is ours under another name, so no mismatch is warned about."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if config_dict.get("model_type") == "lfm2_moe":
            raise TypeError(
                f"{pretrained_model_name_or_path} is a mixture of experts (lfm2_moe): load it with load_model or "
                "Lfm2CbMoeForCausalLM"
            )
        if config_dict.get("model_type") == "lfm2":
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs


def ffn_width(config: PreTrainedConfig) -> int:
    """Width of the dense SwiGLU, in values (rule of `transformers.models.lfm2.modeling_lfm2.Lfm2MLP`; mixtures of
    experts state it as it is)."""
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            multiple = config.block_multiple_of
            width = multiple * ((width + multiple - 1) // multiple)
    return width


def head_dim(config: PreTrainedConfig) -> int:
    """Values per attention head: `config.head_dim` where the checkpoint states one, else the even share."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_type(config: Any) -> str:
    """Kind of rotary embedding, e.g. "default" or "yarn"."""
    return config.rope_parameters["rope_type"]


def rope_theta(config: Any) -> float:
    """Base of the rotary frequencies."""
    return config.rope_parameters["rope_theta"]


def first_expert_layer(config: PreTrainedConfig) -> int | None:
    """The first layer whose feed-forward is a mixture of experts; None: the model has no experts."""
    return config.num_dense_layers if getattr(config, "num_experts", None) is not None else None


def layers_of_type(config: PreTrainedConfig, layer_type: str) -> list[int]:
    """Indices of the layers of one type, e.g. `layers_of_type(config, "conv")`."""
    return [i for i, kind in enumerate(config.layer_types) if kind == layer_type]
