"""Every touch of transformers' registries and private names, so that one file follows a transformers release.

`register()` runs at import and only adds: the `lfm2_cb` model type, its weight conversions, and the pipeline class
that steps aside unless it is asked for. `enable()` is what changes things for others, and `disable()` undoes it.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, Lfm2Config, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .model.configuration import Lfm2CbConfig
from .model.conversion import weight_conversions
from .model.modeling import Lfm2CbForCausalLM, Lfm2CbModel
from .model.quantization import QUANT_METHOD, Lfm2CbQuantizationConfig, Lfm2CbQuantizer

_stock_lfm2_class = transformers.Lfm2ForCausalLM

#: the methods of transformers' `ContinuousMixin`, which `protocol.py` has for our models
CONTINUOUS_BATCHING = (
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
    "continuous_batching_context_manager",
    "generate_batch",
)


class Lfm2CbForLfm2Checkpoints(Lfm2CbForCausalLM):
    """Our model under the stock configuration: what `enable()` puts in the place of `Lfm2ForCausalLM`.

    The Auto classes want a model whose `config_class` is the registered one. Saves as a stock checkpoint.
    """

    config_class = Lfm2Config

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; `config.json` names the stock class, so that anyone can load the result."""
        super().save_pretrained(*args, **kwargs)
        self.config.architectures = [_stock_lfm2_class.__name__]
        self.config.save_pretrained(args[0] if args else kwargs["save_directory"])


def register() -> None:
    """Add ours beside what transformers has. Called once at import; calling it again does nothing new."""
    AutoConfig.register(Lfm2CbConfig.model_type, Lfm2CbConfig, exist_ok=True)
    AutoModel.register(Lfm2CbConfig, Lfm2CbModel, exist_ok=True)
    AutoModelForCausalLM.register(Lfm2CbConfig, Lfm2CbForCausalLM, exist_ok=True)
    # Under the name of the class that holds the layers: whatever wraps it is converted, and no stock class ever is.
    # (A stock model that reads one of our saves takes over our model type, so that would not tell them apart.)
    register_checkpoint_conversion_mapping(Lfm2CbModel.__name__, weight_conversions(), overwrite=True)
    # (transformers' own decorators for this raise at the second call.)
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = Lfm2CbQuantizationConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = Lfm2CbQuantizer
    # A dotted string is resolved only when a text-generation pipeline is made; the class returns the stock pipeline
    # unless generator= is given. (`register_pipeline` would leave a mark in every saved config.)
    PIPELINE_REGISTRY.supported_tasks["text-generation"]["impl"] = "lfm2_cb.pipeline.ContinuousBatchingPipeline"
    for name in CONTINUOUS_BATCHING:
        setattr(Lfm2CbForCausalLM, name, _from_protocol(name))


def _from_protocol(name: str) -> Callable[..., Any]:
    """A method that looks up its body when it is called: `protocol.py` lies above the model that gets it."""

    @functools.wraps(getattr(_stock_lfm2_class, name))
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("lfm2_cb.protocol"), name)(self, *args, **kwargs)

    return method


def enable() -> None:
    """Make stock `lfm2` checkpoints resolve to our class: Auto classes, `pipeline(model=path)`, `transformers serve`.
    Live stock LFM2s get the continuous-batching methods too (`generate_batch`, ...), over their own weights.

    Process-wide, and undone by `disable()`. Calling it twice is the same as once.
    """
    AutoModelForCausalLM.register(Lfm2Config, Lfm2CbForLfm2Checkpoints, exist_ok=True)
    transformers.Lfm2ForCausalLM = Lfm2CbForLfm2Checkpoints  # what `transformers serve` looks up
    for name in CONTINUOUS_BATCHING:
        setattr(_stock_lfm2_class, name, _from_protocol(name))


def disable() -> None:
    """Put everything that `enable()` changed back. Models already loaded stay as they are."""
    AutoModelForCausalLM._model_mapping._extra_content.pop(Lfm2Config, None)
    transformers.Lfm2ForCausalLM = _stock_lfm2_class
    for name in CONTINUOUS_BATCHING:
        if name in vars(_stock_lfm2_class):
            delattr(_stock_lfm2_class, name)  # what it inherits shows again


@dataclass(frozen=True)
class ResolvedConfig:
    """A `GenerationConfig` as stock `generate()` would use it, and what stock derives from the call besides."""

    config: GenerationConfig
    leftovers: dict[str, Any]  # keyword arguments that are no generation options
    has_default_max_length: bool
    has_default_min_length: bool


def resolve_generation_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> ResolvedConfig:
    """Apply the model's and the global defaults, in stock's order (`GenerationMixin.generate`, steps 1 and 3)."""

    def is_default(name: str) -> bool:
        sources = (kwargs.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name))
        return all(value is None for value in sources)

    defaults = is_default("max_length"), is_default("min_length")
    config, leftovers = model._prepare_generation_config(generation_config, **kwargs)
    model._prepare_special_tokens(config, True, device=model.device)
    return ResolvedConfig(config, leftovers, *defaults)


def options_set(config: GenerationConfig) -> dict[str, Any]:
    """The fields that ask for something: set, and not to what they would be anyway."""
    defaults = config._get_default_generation_params()
    return {
        name: value
        for name, value in vars(config).items()
        if not name.startswith("_") and value and value != defaults.get(name)
    }


def eos_token_ids(config: GenerationConfig) -> frozenset[int]:
    """End-of-sequence tokens of a resolved config."""
    tensor = config._eos_token_tensor
    return frozenset() if tensor is None else frozenset(tensor.tolist())


def pad_token_id(config: GenerationConfig) -> int | None:
    """Padding token of a resolved config (an end-of-sequence token where none is set, as in stock)."""
    return None if config._pad_token_tensor is None else int(config._pad_token_tensor)


def infer_attention_mask(model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """The `[batch, length]` mask that stock assumes where the user gives none."""
    return model._prepare_attention_mask_for_generation(input_ids.to(model.device), config, {})


def stock_logits_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt_token_ids: Sequence[int],
    max_new_tokens: int,
    padding: int = 0,
    user_processors: Sequence[Any] = (),
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
) -> list[Any]:
    """The processors stock builds for one unpadded prompt, in its order, the warpers of `do_sample` included.

    Args: padding: tokens of padding that the prompt came with; stock counts them in `min_length`.
    """
    config = copy.copy(config)
    if config.min_new_tokens is None and config.min_length:
        config.min_length = max(0, config.min_length - padding)
    elif config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + len(prompt_token_ids)
    config.max_length = len(prompt_token_ids) + max_new_tokens  # what ForcedEOS looks at
    return list(
        model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt_token_ids),
            encoder_input_ids=torch.tensor([list(prompt_token_ids)], device=model.device),
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=list(user_processors),
            device=model.device,
        )
    )


def stock_stopping_criteria(
    model: PreTrainedModel, config: GenerationConfig, user_criteria: Sequence[Any], tokenizer: Any
) -> list[Any]:
    """The criteria stock builds, but for length and end of sequence, which the engine looks at itself.

    Raises: ValueError: stop strings without a tokenizer.
    """
    criteria = model._get_stopping_criteria(config, list(user_criteria), tokenizer=tokenizer)
    ours = (MaxLengthCriteria, EosTokenCriteria)
    return [c for c in criteria if not isinstance(c, ours) or any(c is given for given in user_criteria)]
