"""The valid values of each generation option, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _at_least(low: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and value >= low


def _is_limit(value: Any) -> bool:  # one a prompt, or one for all; a list's entries are checked with its length
    return isinstance(value, (list, tuple)) or (is_whole(value) and value >= 1)


def _is_ids(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and value.ndim <= 1
    return is_whole(value) or (isinstance(value, (list, tuple)) and all(map(is_whole, value)))


def _is_strings(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)


def _is_callables(value: Any) -> bool:
    return isinstance(value, Iterable) and all(map(callable, value))


_CHECKS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a positive integer": (_at_least(1), ("max_length", "num_return_sequences", "num_beams")),
    "a positive integer, or a list of them": (_is_limit, ("max_new_tokens",)),
    "an integer, 0 or more": (
        _at_least(0),
        ("min_length", "min_new_tokens", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    ),
    "a number": (
        is_number,
        ("max_time", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "length_penalty"),
    ),
    # Stock looks at the ranges of these where it samples only.
    "a number, 0 or more": (lambda value: is_number(value) and value >= 0, ("temperature",)),
    "a number from 0 to 1": (lambda value: is_number(value) and 0 <= value <= 1, ("top_p", "min_p")),
    "a number above 0, 1 at most": (lambda value: is_number(value) and 0 < value <= 1, ("typical_p", "top_h")),
    "a number from 0 to below 1": (
        lambda value: is_number(value) and 0 <= value < 1,
        ("epsilon_cutoff", "eta_cutoff"),
    ),
    "True or False": (
        lambda value: isinstance(value, bool),
        (
            "do_sample",
            "renormalize_logits",
            "remove_invalid_values",
            "output_scores",
            "output_logits",
            "output_attentions",
            "output_hidden_states",
        ),
    ),
    "a token id or a list of them": (
        _is_ids,
        (
            *("eos_token_id", "bos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id"),
            *("suppress_tokens", "begin_suppress_tokens"),
        ),
    ),
    "a non-empty string or a list of them": (_is_strings, ("stop_strings",)),
    "an integer": (is_whole, ("seed",)),
    "a list of callables": (_is_callables, ("logits_processor", "stopping_criteria")),
    "a callable": (callable, ("prefix_allowed_tokens_fn",)),
    "a tokenizer": (lambda value: hasattr(value, "decode") and not isinstance(value, bytes), ("tokenizer",)),
}
_BY_NAME = {name: (check, what) for what, (check, names) in _CHECKS.items() for name in names}


def check_types(options: Mapping[str, Any]) -> None:
    """Look at each option that is set; ranges that stock checks are left to stock.

    Raises: ValueError: an option's value is of another kind, with its name.
    """
    for name, value in options.items():
        check, what = _BY_NAME.get(name, (None, ""))
        if check is not None and value is not None and not check(value):
            raise ValueError(f"{name} must be {what}, got {value!r}")
