"""generate()'s options → per-request `Request`s. Every option is honoured, inert, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from .engine.sampler import SamplingParams
from .registration import (
    ResolvedConfig,
    eos_token_ids,
    options_set,
    resolve_generation_config,
    stock_logits_processors,
)
from .scheduling.request import Request

#: fields of GenerationConfig that the engine follows
HONOURED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "num_return_sequences",
}

#: fields that do not change which tokens come out: they say how stock computes, or belong to another option
INERT = {
    "use_cache",
    "compile_config",
    "disable_compile",
    "low_memory",
    "continuous_batching_config",
    "early_stopping",
    "length_penalty",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "transformers_version",
}


class UnsupportedOptionError(ValueError):
    """An option that this engine cannot honour, by name."""


@dataclass(frozen=True)
class GenerateOptions:
    """One call's options, resolved as stock `generate()` resolves them."""

    resolved: ResolvedConfig
    max_new_tokens: Sequence[int] | None  # one a prompt, where the caller gave a list
    seed: int

    @property
    def config(self) -> GenerationConfig:
        return self.resolved.config

    @property
    def num_return_sequences(self) -> int:
        return self.config.num_return_sequences or 1


def resolve_options(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    num_prompts: int,
    seed: int,
    kwargs: dict[str, Any],
) -> GenerateOptions:
    """Resolve and check one call's options.

    Raises: UnsupportedOptionError; ValueError: `max_new_tokens` of the wrong length or not positive.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise TypeError(f"generation_config must be a GenerationConfig, got {type(generation_config).__name__}")
    kwargs = dict(kwargs)
    per_prompt = None
    if isinstance(kwargs.get("max_new_tokens"), (list, tuple)):
        per_prompt = list(kwargs.pop("max_new_tokens"))
        if len(per_prompt) != num_prompts:
            raise ValueError(f"max_new_tokens has {len(per_prompt)} entries for {num_prompts} prompts")
        kwargs["max_new_tokens"] = max(per_prompt, default=1)
    resolved = resolve_generation_config(model, generation_config, kwargs)
    unknown = sorted(name for name, value in resolved.leftovers.items() if value is not None)
    if unknown:
        raise UnsupportedOptionError(f"unknown or unsupported option(s): {', '.join(unknown)}")
    _check_fields(resolved.config)
    for value in per_prompt or [resolved.config.max_new_tokens]:
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"max_new_tokens must be a positive integer, got {value!r}")
    return GenerateOptions(resolved, per_prompt, seed)


def _check_fields(config: GenerationConfig) -> None:
    for name, value in options_set(config).items():
        if name not in HONOURED and name not in INERT:
            raise UnsupportedOptionError(f"{name}={value!r} is not supported by the continuous-batching generator")


def make_requests(
    model: PreTrainedModel,
    token_ids: Sequence[Sequence[int]],
    options: GenerateOptions,
    next_id: Callable[[], int],
    first_index: int = 0,
    width: int | None = None,
) -> list[Request]:
    """One request a prompt, with a fork for each further returned sequence.

    Args: width: padded length of a tensor of prompts, which is what stock's total lengths then count from.
    """
    requests = []
    for index, ids in enumerate(token_ids, first_index):
        padding = 0 if width is None else width - len(ids)
        limit = max_new_tokens(options, index, len(ids), padding, model.config.max_position_embeddings)
        family = []
        for i in range(options.num_return_sequences):
            seed = sequence_seed(options.seed, index, i)
            processors = stock_logits_processors(model, options.config, ids, limit, padding)
            params = SamplingParams(bool(options.config.do_sample), seed, eos_token_ids(options.config), processors)
            family.append(Request(next_id(), list(ids), limit, params=params))
        first, *rest = family
        first.adopt_forks(rest)
        requests.append(first)
    return requests


def max_new_tokens(
    options: GenerateOptions, index: int, prompt_length: int, padding: int, max_position_embeddings: int
) -> int:
    """The request's token limit, by stock's precedence of `max_new_tokens` over `max_length`.

    Raises: ValueError: nothing may be generated, or the model's positions do not suffice; with the numbers.
    """
    config = options.config
    if options.max_new_tokens is not None:
        limit = options.max_new_tokens[index]
    elif config.max_new_tokens is not None:
        limit = config.max_new_tokens
    elif options.resolved.has_default_max_length:
        limit = min(config.max_length, max_position_embeddings - prompt_length)
    else:
        limit = config.max_length - prompt_length - padding
        if limit < 1:
            raise ValueError(f"prompt {index} has {prompt_length} tokens, and max_length={config.max_length}")
    if prompt_length + limit > max_position_embeddings:
        raise ValueError(
            f"prompt {index} has {prompt_length} tokens; with max_new_tokens={limit} it exceeds the model's "
            f"{max_position_embeddings} positions (max_position_embeddings)"
        )
    return limit


def sequence_seed(seed: int, index: int, sequence: int) -> int:
    """A request's own seed: depends on the call's seed and its place in the call, and on nothing else."""
    return random.Random(f"{seed}/{index}/{sequence}").getrandbits(63)
