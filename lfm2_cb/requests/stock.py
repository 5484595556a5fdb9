"""Stock `generate()`'s defaults, processors and criteria. Its private names are used here only.

`hf/registration.py` is where transformers is changed; here it is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import EosTokenCriteria, MaxLengthCriteria


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
