"""generate()'s options → `Request`s. Every option is honoured, handed to stock, inert, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..engine.sampler import SamplingParams, Trace
from ..scheduling.request import Request
from .stock import (
    ResolvedConfig,
    eos_token_ids,
    options_set,
    resolve_generation_config,
    stock_logits_processors,
    stock_stopping_criteria,
)
from .validation import check_types

#: fields of GenerationConfig that the engine follows, request by request
HONOURED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_h",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "renormalize_logits",
    "remove_invalid_values",
    "watermarking_config",
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "max_time",
    "stop_strings",
    "num_return_sequences",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "num_assistant_tokens",
}

#: fields that ask for another way of decoding or for the network's insides: stock `generate()` does these, exactly
HANDED_TO_STOCK = {"num_beams", "guidance_scale", "output_attentions", "output_hidden_states"}

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
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "transformers_version",
}


class UnsupportedOptionError(ValueError):
    """An option that this engine cannot honour, by name."""


@dataclass(frozen=True)
class CallOptions:
    """What `generate()` takes besides a GenerationConfig, for a whole call.

    Processors and criteria are called as stock calls them for one prompt: `[1, length]` history, `[1, vocab]` scores.
    """

    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    prefix_allowed_tokens_fn: Callable[[int, Any], list[int]] | None = None
    tokenizer: Any = None  # for stop strings
    logprobs: int | None = None  # how many of the likeliest tokens to report beside each generated one
    seed: int = 0
    priority: int | Sequence[int] = 0  # higher runs first; one for the call, or one a prompt
    use_prefix_cache: bool | Sequence[bool] = True  # whether to reuse, and to leave, cached prefixes; as above
    assistant_model: Any = None  # a smaller LFM2 of the same vocabulary, to guess tokens

    def __post_init__(self) -> None:
        if self.logprobs is not None and (not isinstance(self.logprobs, int) or self.logprobs < 0):
            raise ValueError(f"logprobs must be a number of tokens, 0 or more, got {self.logprobs!r}")
        for name, kind in (("priority", int), ("use_prefix_cache", bool)):
            value = getattr(self, name)
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(entry, kind):
                    raise TypeError(f"{name} must be {kind.__name__}, or a list with one a prompt, got {value!r}")


@dataclass(frozen=True)
class GenerateOptions:
    """One call's options, resolved as stock `generate()` resolves them.

    Attributes:
        resolved: one for the whole call, or one a prompt.
        max_new_tokens: one a prompt, where the caller gave a list.
    """

    resolved: Sequence[ResolvedConfig]
    max_new_tokens: Sequence[int] | None
    call: CallOptions

    def of_prompt(self, index: int) -> ResolvedConfig:
        return self.resolved[index if len(self.resolved) > 1 else 0]

    @property
    def config(self) -> GenerationConfig:
        """The call's config (the first prompt's, where each has its own)."""
        return self.resolved[0].config

    @property
    def num_return_sequences(self) -> int:
        return self.config.num_return_sequences or 1

    @property
    def handed_over(self) -> list[str]:
        """Names of the options that only stock `generate()` can do."""
        return sorted({name for r in self.resolved for name in options_set(r.config) if name in HANDED_TO_STOCK})


def resolve_options(
    model: PreTrainedModel,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    num_prompts: int,
    call: CallOptions,
    kwargs: dict[str, Any],
) -> GenerateOptions:
    """Resolve and check one call's options.

    Raises: UnsupportedOptionError; TypeError; ValueError: a list with not one entry a prompt, a limit below 1.
    """
    configs = list(generation_config) if isinstance(generation_config, (list, tuple)) else [generation_config]
    for config in configs:
        if config is not None and not isinstance(config, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, got {type(config).__name__}")
    if isinstance(generation_config, (list, tuple)) and len(configs) != num_prompts:
        raise ValueError(f"generation_config has {len(configs)} entries for {num_prompts} prompts")
    check_types(vars(call))
    if call.logprobs is not None and call.logprobs > model.config.vocab_size:
        raise ValueError(f"logprobs={call.logprobs} is more than the vocabulary's {model.config.vocab_size}")
    kwargs, limits = dict(kwargs), None
    if isinstance(kwargs.get("max_new_tokens"), (list, tuple)):
        limits = list(kwargs.pop("max_new_tokens"))
        if len(limits) != num_prompts:
            raise ValueError(f"max_new_tokens has {len(limits)} entries for {num_prompts} prompts")
        kwargs["max_new_tokens"] = max(limits, default=1)
    for name in ("priority", "use_prefix_cache"):
        value = getattr(call, name)
        if isinstance(value, (list, tuple)) and len(value) != num_prompts:
            raise ValueError(f"{name} has {len(value)} entries for {num_prompts} prompts")
    # A config object given for many prompts is resolved once.
    known: dict[int, ResolvedConfig] = {}
    for config in configs or [None]:
        if id(config) not in known:
            known[id(config)] = _resolve(model, config, kwargs)
    for value in limits or []:
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"max_new_tokens must be a positive integer, got {value!r}")
    return GenerateOptions([known[id(config)] for config in configs or [None]], limits, call)


def _resolve(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> ResolvedConfig:
    check_types({} if config is None else vars(config))
    check_types(kwargs)
    with _understood(config, kwargs):
        resolved = resolve_generation_config(model, config, kwargs)
        given = options_set(resolved.config)
    insides = ("output_attentions", "output_hidden_states")  # stock moves these to the forward's arguments
    unknown = sorted(k for k, value in resolved.leftovers.items() if value is not None and k not in insides)
    if unknown:
        raise UnsupportedOptionError(f"unknown or unsupported option(s): {', '.join(unknown)}")
    for name, value in given.items():
        if name not in HONOURED | HANDED_TO_STOCK | INERT:
            raise UnsupportedOptionError(f"{name}={value!r} is not supported by the continuous-batching generator")
    for name in ("max_new_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
        limit = getattr(resolved.config, name)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name} must be a positive integer, got {limit!r}")
    return resolved


@contextmanager
def _understood(config: GenerationConfig | None, kwargs: Iterable[str] = ()) -> Iterator[None]:
    """Stock stumbles over an option of a wrong kind wherever it first uses it. Raises: ValueError, with the names."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        names = sorted({*kwargs, *({} if config is None else options_set(config))})
        raise ValueError(f"stock cannot use one of the options {', '.join(names)}: {error}") from error


def make_requests(
    model: PreTrainedModel,
    token_ids: Sequence[Sequence[int]],
    options: GenerateOptions,
    next_id: Callable[[], int],
    first_index: int = 0,
    number_offset: int = 0,
    width: int | None = None,
) -> list[Request]:
    """One request a prompt, with a fork for each further returned sequence.

    Args:
        first_index: place of the first prompt in the call, whose options may have one entry a prompt.
        number_offset: added to a prompt's place for what it counts as in seeds and `prefix_allowed_tokens_fn`.
        width: padded length of a tensor of prompts, which is what stock's total lengths then count from.
    """
    requests = []
    for index, ids in enumerate(token_ids, first_index):
        resolved = options.of_prompt(index)
        padding = 0 if width is None else width - len(ids)
        limit = max_new_tokens(options, index, len(ids), padding, model.config.max_position_embeddings)
        first, *rest = (
            Request(
                next_id(),
                list(ids),
                limit,
                priority=_of_prompt(options.call.priority, index),
                params=_params(model, options, index, index + number_offset, i, ids, limit, padding),
                use_prefix_cache=_of_prompt(options.call.use_prefix_cache, index),
            )
            for i in range(resolved.config.num_return_sequences or 1)
        )
        first.adopt_forks(rest)
        requests.append(first)
    return requests


def _params(
    model: PreTrainedModel,
    options: GenerateOptions,
    index: int,
    number: int,
    sequence: int,
    ids: Sequence[int],
    limit: int,
    padding: int,
) -> SamplingParams:
    config, call = options.of_prompt(index).config, options.call
    allowed = call.prefix_allowed_tokens_fn
    if allowed is not None:  # it asks for the prompt's number; a processor that sees one row would always say 0
        allowed = _numbered(allowed, number)
    with _understood(config):
        processors = stock_logits_processors(model, config, ids, limit, padding, call.logits_processor, allowed)
        criteria = stock_stopping_criteria(model, config, call.stopping_criteria, call.tokenizer)
    in_dict = bool(config.return_dict_in_generate)
    trace = Trace(in_dict and bool(config.output_scores), in_dict and bool(config.output_logits), call.logprobs)
    keeps = trace.keep_scores or trace.keep_logits or trace.num_logprobs is not None
    seed = sequence_seed(call.seed, number, sequence)
    return SamplingParams(
        bool(config.do_sample), seed, eos_token_ids(config), processors, criteria, trace if keeps else None
    )


def _of_prompt(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) else value


def _numbered(allowed: Callable[[int, Any], list[int]], index: int) -> Callable[[int, Any], list[int]]:
    return lambda _, ids: allowed(index, ids)


def max_new_tokens(
    options: GenerateOptions, index: int, prompt_length: int, padding: int, max_position_embeddings: int
) -> int:
    """The request's token limit, by stock's precedence of `max_new_tokens` over `max_length`.

    Raises: ValueError: nothing may be generated, or the model's positions do not suffice; with the numbers.
    """
    resolved = options.of_prompt(index)
    config = resolved.config
    if options.max_new_tokens is not None:
        limit = options.max_new_tokens[index]
    elif config.max_new_tokens is not None:
        limit = config.max_new_tokens
    elif resolved.has_default_max_length:
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
