"""The fields of each endpoint's requests: what each may hold, and whether it is honoured, inert or refused.

README.md beside this file is the same for readers; a test compares them.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from .errors import RequestError

#: most tokens reported beside each generated one
MAX_TOP_LOGPROBS = 20

#: of the call that applies a chat template; a client may set the template's variables, and none of these
TEMPLATE_CALL = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()


class Reading(StrEnum):
    HONOURED = "honoured"
    INERT = "inert"  # says nothing about the answer: its form is checked, and that is all
    REFUSED = "refused"


@dataclass(frozen=True)
class Field:
    """One field. `null` is always the same as leaving it out.

    Attributes:
        what: it must be, for the error message.
        fits: whether a value is that.
        neutral: of a refused field, the values that ask for nothing.
    """

    reading: Reading
    what: str = "null"
    fits: Callable[[Any], bool] = lambda value: True
    neutral: tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises: RequestError."""
        if self.reading is Reading.REFUSED:
            if not any(type(value) is type(neutral) and value == neutral for neutral in self.neutral):
                raise RequestError(f"{name} is not supported here", name, code="unsupported_parameter")
        elif not self.fits(value):
            raise RequestError(f"{name} must be {self.what}, got {shown(value)}", name, code="invalid_value")


def shown(value: Any) -> str:
    """A client's value in a message: short, and of characters that any log can take."""
    text = ascii(value) if not isinstance(value, (list, dict)) or len(value) < 20 else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Field], required: str | None = None) -> None:
    """Raises: RequestError: the first field that is unknown, not supported, or of a wrong kind; or none `required`."""
    for name, value in body.items():
        if name not in fields:
            name = shown(name).strip("'")
            raise RequestError(f"{name} is not a field of this request", name, code="unknown_parameter")
        if value is not None:
            fields[name].check(name, value)
    if required is not None and body.get(required) is None:
        raise RequestError(f"{required} is missing", required, code="missing_parameter")


# Kinds of values


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def _honoured(what: str, fits: Callable[[Any], bool]) -> Field:
    return Field(Reading.HONOURED, what, fits)


def _inert(what: str, fits: Callable[[Any], bool]) -> Field:
    return Field(Reading.INERT, what, fits)


def _refused(*neutral: Any) -> Field:
    return Field(Reading.REFUSED, neutral=neutral)


def _number(low: float, high: float) -> Field:
    return _honoured(f"a number from {low:g} to {high:g}", lambda value: is_number(value) and low <= value <= high)


def _integer(low: int, high: int | None = None) -> Field:
    what = f"an integer, {low} or more" if high is None else f"an integer from {low} to {high}"
    most = 2**31 if high is None else high
    return _honoured(what, lambda value: is_integer(value) and low <= value <= most)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        re.fullmatch(r"[0-9]{1,10}", token) and is_number(bias) and -100 <= bias <= 100
        for token, bias in value.items()
    )


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list) and value:
        of_ids = all(is_integer(token) for token in value)
        return of_ids or all(isinstance(one, (str, list)) and _is_prompt(one) and not _nests(one) for one in value)
    return isinstance(value, str) and bool(value)


def _nests(value: Any) -> bool:
    return isinstance(value, list) and not all(is_integer(token) for token in value)


def _is_separator(value: Any) -> bool:
    return bool(value) and (is_text(value) or (isinstance(value, list) and all(is_integer(token) for token in value)))


def _is_template_kwargs(value: Any) -> bool:
    return isinstance(value, dict) and not value.keys() & TEMPLATE_CALL


def _is_tool_choice(value: Any) -> bool:
    """A function is named as in chats (within "function") or as in responses."""
    if not isinstance(value, dict):
        return value in ("auto", "none", "required")
    function = value.get("function", value)
    return value.get("type") == "function" and isinstance(function, dict) and is_text(function.get("name"))


def _is_stream_options(value: Any) -> bool:
    allowed: dict[str, tuple[Any, ...]] = {
        "include_usage": (True, False, None),
        "include_obfuscation": (False, None),
    }
    return isinstance(value, dict) and all(
        name in allowed and any(v is one for one in allowed[name]) for name, v in value.items()
    )


BOOLEAN = _honoured("true or false", lambda value: isinstance(value, bool))
TEXT = _honoured("a string", is_text)
LIMIT = _integer(1)
#: the user or labels for stored answers; nothing is stored here
LABEL = _inert("a string", is_text)
LABELS = _inert(
    "an object of strings", lambda value: isinstance(value, dict) and all(is_text(v) for v in value.values())
)
STREAM_OPTIONS = _honoured("an object: include_usage true or false, include_obfuscation false", _is_stream_options)
TOOLS = _honoured("a list of tools", lambda value: isinstance(value, list))
TOOL_CHOICE = _honoured('"auto", "none", "required", or a function with its name', _is_tool_choice)
TEMPLATE_KWARGS = _honoured("an object with variables of the chat template", _is_template_kwargs)

#: how tokens are chosen, on every endpoint; from `top_k` on they are not OpenAI's
SAMPLING: dict[str, Field] = {
    "model": TEXT,
    "stream": BOOLEAN,
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "logit_bias": _honoured("an object of token ids and numbers from -100 to 100", _is_bias),
    "seed": _integer(-(2**63), 2**64),
    "stop": _honoured("a string or a list of strings, none of them empty", _is_stop),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.001, 100),
    "min_tokens": _integer(0),
    "ignore_eos": BOOLEAN,
    "generation_config": _honoured("a JSON object in a string", is_text),
    "sparse_prefill": _honoured("a number above 0, up to 1", lambda value: is_number(value) and 0 < value <= 1),
    "chunks": _honoured("a separator: a string or a list of token ids, not empty", _is_separator),
    "recompute": _number(0, 1),
}

#: OpenAI's labels, which change nothing about an answer
LABELLING: dict[str, Field] = {
    "metadata": LABELS,
    "user": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "service_tier": _refused("auto", "default"),
    "store": _refused(False),
    "moderation": _refused(),
    "prompt_cache_options": _refused(),
    "prompt_cache_retention": _refused("in_memory", "in-memory"),
    "parallel_tool_calls": BOOLEAN,
}

CHAT: dict[str, Field] = {
    **SAMPLING,
    **LABELLING,
    "messages": _honoured("a list of at least one message", lambda value: isinstance(value, list) and bool(value)),
    "max_tokens": LIMIT,
    "max_completion_tokens": LIMIT,
    "n": _integer(1, 2**16),
    "logprobs": BOOLEAN,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "stream_options": STREAM_OPTIONS,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "chat_template_kwargs": TEMPLATE_KWARGS,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "audio": _refused(),
    "function_call": _refused("auto", "none"),
    "functions": _refused([]),
    "modalities": _refused(["text"]),
    "prediction": _refused(),
    "reasoning_effort": _refused(),
    "response_format": _honoured("an object with a type", lambda value: isinstance(value, dict)),
    "verbosity": _refused("medium"),
    "web_search_options": _refused(),
}

COMPLETION: dict[str, Field] = {
    **SAMPLING,
    "prompt": _honoured("a string, a list of token ids, or a list of these; none of them empty", _is_prompt),
    "max_tokens": LIMIT,
    "n": _integer(1, 2**16),
    "best_of": _integer(1, 2**16),
    "logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "echo": BOOLEAN,
    "stream_options": STREAM_OPTIONS,
    "user": LABEL,
    "suffix": _refused(""),
}

RESPONSE: dict[str, Field] = {
    **SAMPLING,
    **LABELLING,
    "input": _honoured("a string or a list of items, not empty", lambda v: isinstance(v, (str, list)) and bool(v)),
    "instructions": TEXT,
    "max_output_tokens": LIMIT,
    "stream_options": _honoured(
        "an object: include_obfuscation false", lambda v: _is_stream_options(v) and "include_usage" not in v
    ),
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "chat_template_kwargs": TEMPLATE_KWARGS,
    "access_programs": _refused(),
    "background": _refused(False),
    "background_options": _refused(),
    "context_management": _refused([]),
    "conversation": _refused(),
    "image": _refused(),
    "include": _refused([]),
    "max_tool_calls": _refused(),
    "previous_response_id": _refused(),
    "prompt": _refused(),
    "reasoning": _refused({}),
    "text": _honoured("an object with a format", lambda value: isinstance(value, dict)),
    "top_logprobs": _refused(0),
    "truncation": _honoured('"auto" or "disabled"', lambda value: value in ("auto", "disabled")),
}

TOKENIZE: dict[str, Field] = {
    "model": TEXT,
    "prompt": TEXT,
    "add_special_tokens": BOOLEAN,
    **{name: CHAT[name] for name in ("messages", "tools", "chat_template_kwargs")},
    **{name: CHAT[name] for name in ("add_generation_prompt", "continue_final_message")},
}

DETOKENIZE: dict[str, Field] = {
    "model": TEXT,
    "tokens": _honoured("a list of token ids", lambda v: isinstance(v, list) and all(is_integer(t) for t in v)),
}
