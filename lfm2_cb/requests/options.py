"""generate()'s options, resolved and checked. Each is honoured, left to stock, inert, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..engine.config import check_share
from .stock import (
    ResolvedConfig,
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

#: fields for other ways of decoding or internals of the network: stock `generate()` runs these, exactly
LEFT_TO_STOCK = {"num_beams", "guidance_scale", "output_attentions", "output_hidden_states"}

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
    sparse_prefill: float | Sequence[float | None] | None = None  # of attention's mass; None: as the engine; as above
    chunks: bool | str | Sequence[int] | None = None  # what separates prompts' segments; True: they are lists of them
    recompute: float = 0.15  # share of the tokens of known segments that is computed again
    structured: Any = None  # what answers look like: a compiled `Grammar`, or a list with one (or None) a prompt
    adapter: Any = None  # name of an adapter, or a list with one (None: the base) a prompt
    assistant_model: Any = None  # a smaller LFM2 of the same vocabulary, to guess tokens
    on_error: str = "raise"  # "return": a prompt that cannot be run has an output with its error, and others run

    def __post_init__(self) -> None:
        if self.logprobs is not None and (not isinstance(self.logprobs, int) or self.logprobs < 0):
            raise ValueError(f"logprobs must be a number of tokens, 0 or more, got {self.logprobs!r}")
        if self.on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {self.on_error!r}")
        for name, kind in (("priority", int), ("use_prefix_cache", bool)):
            value = getattr(self, name)
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(entry, kind):
                    raise TypeError(f"{name} must be {kind.__name__}, or a list with one a prompt, got {value!r}")
        if not isinstance(self.recompute, (int, float)) or not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute must be a number from 0 to 1, got {self.recompute!r}")
        if not (self.chunks in (None, True) or (isinstance(self.chunks, (str, list, tuple)) and self.chunks)):
            raise ValueError(f"chunks must be True, a separator (text or token ids) or None, got {self.chunks!r}")
        shares = self.sparse_prefill
        for share in shares if isinstance(shares, (list, tuple)) else [shares]:
            check_share("sparse_prefill", share)


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
    def left_to_stock(self) -> list[str]:
        """Names of the options that only stock `generate()` can do."""
        return sorted({name for r in self.resolved for name in options_set(r.config) if name in LEFT_TO_STOCK})


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
    for name in ("priority", "use_prefix_cache", "structured", "sparse_prefill", "adapter"):
        value = getattr(call, name)
        if isinstance(value, (list, tuple)) and len(value) != num_prompts:
            raise ValueError(f"{name} has {len(value)} entries for {num_prompts} prompts")
    # A config object given for many prompts is resolved once.
    known: dict[int, ResolvedConfig] = {}
    for config in configs or [None]:
        if id(config) not in known:
            known[id(config)] = _resolve(model, config, kwargs)
    if call.assistant_model is not None and any(r.config.prompt_lookup_num_tokens for r in known.values()):
        raise ValueError("assistant_model and prompt_lookup_num_tokens cannot be used together: pass one of them")
    for value in limits or []:
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"max_new_tokens must be a positive integer, got {value!r}")
    for resolved in known.values():
        _check_usable(model, resolved.config, call)
    return GenerateOptions([known[id(config)] for config in configs or [None]], limits, call)


def _check_usable(model: PreTrainedModel, config: GenerationConfig, call: CallOptions) -> None:
    """Build processors and criteria once, without a request: stock validates many options only there, and their errors
    must not be reported as a prompt's."""
    if not any(name in LEFT_TO_STOCK for name in options_set(config)):
        with understood(config):
            stock_logits_processors(model, config, [0], 1, 0, call.logits_processor, call.prefix_allowed_tokens_fn)
            stock_stopping_criteria(model, config, call.stopping_criteria, call.tokenizer)
        biases = config.sequence_bias or {}
        words = {"sequence_bias": biases if isinstance(biases, dict) else [ids for ids, _ in biases]}
        words["bad_words_ids"] = config.bad_words_ids or []
        for name, sequences in words.items():
            bad = next((token for ids in sequences for token in ids if token >= model.config.vocab_size), None)
            if bad is not None:
                raise ValueError(f"{name} has token id {bad}, outside the vocabulary of {model.config.vocab_size}")


def _resolve(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> ResolvedConfig:
    check_types({} if config is None else vars(config))
    check_types(kwargs)
    with understood(config, kwargs):
        resolved = resolve_generation_config(model, config, kwargs)
        given = options_set(resolved.config)
    insides = ("output_attentions", "output_hidden_states")  # stock moves these to the forward's arguments
    unknown = sorted(k for k, value in resolved.leftovers.items() if value is not None and k not in insides)
    if unknown:
        raise UnsupportedOptionError(f"unknown or unsupported option(s): {', '.join(unknown)}")
    for name, value in given.items():
        if name not in HONOURED | LEFT_TO_STOCK | INERT:
            raise UnsupportedOptionError(f"{name}={value!r} is not supported by the continuous-batching generator")
    for name in ("max_new_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
        limit = getattr(resolved.config, name)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name} must be a positive integer, got {limit!r}")
    return resolved


@contextmanager
def understood(config: GenerationConfig | None, kwargs: Iterable[str] = ()) -> Iterator[None]:
    """Stock fails on an option of a wrong type where it first uses it. Raises: ValueError, with the names."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        names = sorted({*kwargs, *({} if config is None else options_set(config))})
        raise ValueError(f"stock cannot use one of the options {', '.join(names)}: {error}") from error
