"""Sampling options: a request's fields as options of the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from .body import parse_object
from .errors import RequestError
from .fields import is_integer, shown

#: options that `generation_config` must not have, and the fields of a request that set them
NOT_IN_GENERATION_CONFIG = {
    **{"num_return_sequences": "n", "max_length": "max_tokens", "seed": "seed"},
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), "logprobs"),
    "is_assistant": "prompt_lookup_num_tokens",
}

#: options of `generation_config` that hold token ids
_OF_IDS = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
)


#: options of the call itself, by the same names
OF_THE_CALL = ("sparse_prefill", "chunks", "recompute")

#: temperatures below are 0: scores divided by less may leave fp32 (vLLM draws the line here too)
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """A request's options.

    Attributes:
        max_new_tokens: None: as many as there is room for.
        limit_field: the field that set it.
        min_tokens: before which no stop string is looked for.
        penalties: (presence, frequency), where either is not 0.
        has_own_config: whether the request came with a `generation_config`.
        call: how the prompt is computed, as options of the engine.
    """

    config: GenerationConfig
    max_new_tokens: int | None
    limit_field: str | None
    seed: int | None
    stops: list[str]
    min_tokens: int
    penalties: tuple[float, float] | None
    has_own_config: bool
    call: dict[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any], model: PreTrainedModel, limit_fields: Iterable[str]) -> Sampling:
        """Read a body whose fields are of their kinds.

        Args: limit_fields: the names of the length limit.
        Raises: RequestError.
        """
        limits = {name: body[name] for name in limit_fields if body.get(name) is not None}
        if len({*limits.values()}) > 1:
            raise RequestError(f"{' and '.join(limits)} contradict each other: give one of them", next(iter(limits)))
        config = _base_config(body, model)
        _choose(body, config)
        _bias(body, config, model.config.vocab_size)
        has_own_config = body.get("generation_config") is not None
        if not limits and has_own_config and config.max_new_tokens is not None:
            limits = {"generation_config": config.max_new_tokens}  # (a model's own does not know what room there is)
        limit_field, max_new_tokens = next(iter(limits.items()), (None, None))
        min_tokens = body.get("min_tokens") or 0
        if max_new_tokens is not None and not (is_integer(max_new_tokens) and max_new_tokens >= 1):
            raise RequestError(
                f"max_new_tokens of generation_config must be a positive integer, got {shown(max_new_tokens)}",
                "generation_config",
            )
        if max_new_tokens is not None and min_tokens > max_new_tokens:
            raise RequestError(f"min_tokens={min_tokens} is more than the {max_new_tokens} there may be", "min_tokens")
        if body.get("ignore_eos"):
            config.eos_token_id = model.config.vocab_size  # which no token is
        elif min_tokens:
            config.min_new_tokens = min_tokens
        stop = body.get("stop") or []
        penalties = (body.get("presence_penalty") or 0.0, body.get("frequency_penalty") or 0.0)
        return cls(
            config,
            max_new_tokens,
            limit_field,
            body.get("seed"),
            [stop] if isinstance(stop, str) else stop,
            min_tokens,
            penalties if any(penalties) else None,
            has_own_config,
            {name: body[name] for name in OF_THE_CALL if body.get(name) is not None},
        )


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties: taken off the scores of tokens that the answer has already.

    Args: prompt_length: tokens that do not count.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[1, length]`, `scores` `[1, vocab]` → `[1, vocab]`."""
        ids, counts = input_ids[0, self.prompt_length :].to(scores.device).unique(return_counts=True)
        penalised = scores.clone()
        penalised[0, ids] -= self.presence + self.frequency * counts.to(scores.dtype)
        return penalised


def _base_config(body: Mapping[str, Any], model: PreTrainedModel) -> GenerationConfig:
    """The request's own `generation_config` (the engine fills it up with the model's), or the model's."""
    text, name = body.get("generation_config"), "generation_config"
    if text is None:
        return copy.deepcopy(model.generation_config)
    options = parse_object(text, name, name)
    for option, instead in NOT_IN_GENERATION_CONFIG.items():
        if options.get(option) is not None:
            raise RequestError(f"{option} is not taken in generation_config here: see {instead}", name)
    for option in _OF_IDS:
        for token in filter(is_integer, _leaves(options.get(option))):
            if not 0 <= token < model.config.vocab_size:
                raise RequestError(
                    f"{option} of generation_config has token id {shown(token)}, "
                    f"outside the vocabulary of {model.config.vocab_size}",
                    name,
                )
    if any(isinstance(leaf, float) and abs(leaf) > 1e30 for value in options.values() for leaf in _leaves(value)):
        raise RequestError("generation_config has a number that is out of the range of fp32 scores", name)
    if len({*_leaves(options.get("suppress_tokens"))}) >= model.config.vocab_size:
        raise RequestError("suppress_tokens of generation_config leaves no token to choose", name)
    size, most = options.get("encoder_no_repeat_ngram_size"), model.config.max_position_embeddings
    if size is not None and not (is_integer(size) and 0 <= size <= most):  # stock goes through a list that long
        message = f"encoder_no_repeat_ngram_size of generation_config must be an integer from 0 to {most}"
        raise RequestError(message, name)
    try:
        return GenerationConfig(**options)
    except Exception as error:  # whatever it makes of a value of a wrong kind
        raise RequestError(f"generation_config cannot be used: {error}", name) from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for entry in value:
            yield from _leaves(entry)
    elif value is not None:
        yield value if not isinstance(value, dict) else str(value)


def _choose(body: Mapping[str, Any], config: GenerationConfig) -> None:
    """A temperature above 0 or a top_p below 1 asks for sampling; temperature 0 for the likeliest tokens; neither of
    them for what the model's own generation configuration says."""
    if (top_k := body.get("top_k")) is not None:
        config.top_k = max(0, top_k)  # -1: no limit, as in vLLM
    for name in ("min_p", "repetition_penalty"):
        if (value := body.get(name)) is not None:
            setattr(config, name, float(value))
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature is not None and temperature < LOWEST_TEMPERATURE:
        config.do_sample, config.temperature, config.top_p = False, None, None
    elif temperature is not None or (top_p is not None and top_p < 1):
        config.do_sample = True
        config.temperature = config.temperature if temperature is None else float(temperature)
        config.top_p = config.top_p if top_p is None else float(top_p)


def _bias(body: Mapping[str, Any], config: GenerationConfig, vocab_size: int) -> None:
    bias = {int(token): float(value) for token, value in (body.get("logit_bias") or {}).items()}
    for token in bias:
        if token >= vocab_size:
            raise RequestError(
                f"logit_bias has token id {token}, outside the vocabulary of {vocab_size}", "logit_bias"
            )
    if bias and config.sequence_bias:
        raise RequestError("logit_bias cannot be combined with the sequence_bias of generation_config", "logit_bias")
    if bias:
        config.sequence_bias = {(token,): value for token, value in bias.items()}
