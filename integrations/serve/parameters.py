"""Parameters of OpenAI's endpoints: each is honoured, inert, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

#: of every endpoint: read by stock's handlers or here. The last line is not OpenAI's.
COMMON = {
    *("model", "stream", "temperature", "top_p", "seed"),
    *("generation_config", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs"),
}
TEXT = COMMON | {"max_tokens", "frequency_penalty", "logit_bias", "logprobs", "n", "stop", "stream_options"}
CHAT = TEXT | {"messages", "max_completion_tokens", "top_logprobs", "tools"}
COMPLETION = (TEXT | {"prompt"}) - {"chat_template_kwargs"}
RESPONSE = COMMON | {"input", "instructions", "max_output_tokens", "tools"}

#: say nothing about the answer
INERT = {
    *("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("service_tier", "store", "parallel_tool_calls"),
}

#: values that ask for nothing (None never does)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "include": ([],),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

#: of the call that applies a chat template; a client may set the template's variables, and none of these
TEMPLATE_CALL = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()

#: most tokens reported beside each generated one
MAX_TOP_LOGPROBS = 20


class BadParameter(ValueError):
    """A parameter of a request that is wrong or not supported, by name."""


def check_names(body: Mapping[str, Any], honoured: Collection[str]) -> None:
    """Raises: BadParameter: one that would change the answer and is not honoured."""
    for name, value in body.items():
        if value is None or name in honoured or name in INERT or value in NEUTRAL.get(name, ()):
            continue
        raise BadParameter(f"{name} is not supported here")


def number(body: Mapping[str, Any], name: str, low: float, high: float, kind: type = float) -> Any:
    """A numeric parameter within its bounds, or None. Raises: BadParameter."""
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int) or (kind is float and isinstance(value, float))
    if not is_number or isinstance(value, bool) or not low <= value <= high:
        raise BadParameter(f"{name} must be {'a number' if kind is float else 'an integer'} from {low} to {high}")
    return kind(value)


def stop_strings(body: Mapping[str, Any]) -> list[str]:
    """Raises: BadParameter."""
    stops = body.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadParameter("stop must be a string or a list of strings")
    return stops


def check_forms(body: Mapping[str, Any]) -> None:
    """What stock's handlers take as it comes. Raises: BadParameter."""
    number(body, "frequency_penalty", -0.999, 2)  # stock's reading of it: a repetition_penalty, 1 more
    if not isinstance(body.get("generation_config") or "", str):
        raise BadParameter("generation_config must be JSON in a string")
    template_kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, dict) or template_kwargs.keys() & TEMPLATE_CALL:
        raise BadParameter("chat_template_kwargs must be an object with variables of the chat template")
    bias = body.get("logit_bias")
    if bias is not None:
        is_mapping = isinstance(bias, dict) and all(str(token).isdigit() for token in bias)
        if not is_mapping or not all(isinstance(value, (int, float)) for value in bias.values()):
            raise BadParameter("logit_bias must map token ids to numbers")


def apply_sampling(body: Mapping[str, Any], config: GenerationConfig) -> None:
    """Put the sampling parameters of a request into its configuration.

    A temperature above 0 or a top_p below 1 asks for sampling; temperature 0 for the likeliest tokens; neither of
    them for what the model's own generation configuration says.
    """
    temperature = number(body, "temperature", 0, 100)
    top_p = number(body, "top_p", 0, 1)
    for name, low, high, kind in (
        ("top_k", 0, 2**31, int),
        ("min_p", 0, 1, float),
        ("repetition_penalty", 1e-3, 100, float),
    ):
        if (value := number(body, name, low, high, kind)) is not None:
            setattr(config, name, value)
    if temperature == 0:
        config.do_sample, config.temperature, config.top_p = False, None, None
    elif temperature is not None or (top_p is not None and top_p < 1):
        config.do_sample = True
        config.temperature = config.temperature if temperature is None else temperature
        config.top_p = config.top_p if top_p is None else top_p
    seed = number(body, "seed", -(2**63), 2**64, int)
    if seed is not None:
        config.seed = seed  # the dispatcher takes it off again: stock's handlers pass nothing else on
