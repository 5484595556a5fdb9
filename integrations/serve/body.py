"""Parses the bytes of a request into a JSON object of valid Unicode text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from .errors import RequestError

#: half of a UTF-16 pair may be written in JSON, and is no text
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes | str, what: str = "the request", param: str | None = None) -> dict[str, Any]:
    """A JSON object. `what` is it called in messages. Raises: RequestError."""

    def refuse(problem: str) -> NoReturn:
        raise RequestError(f"{what} {problem}", param, code="invalid_json")

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        value = json.loads(text, parse_constant=constant)
        if not isinstance(value, dict):
            refuse("must be a JSON object")
        if _SURROGATE.search(text):
            _check_text(value, param)
    except UnicodeDecodeError:
        refuse("is not UTF-8")
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError as error:
        refuse(f"is not valid JSON: {str(error)[:100]}")
    return value


def _check_text(value: dict[str, Any], param: str | None) -> None:
    for name, field in value.items():
        for text in [name, *_texts(field)]:
            if not _is_text(text):
                place = param or ascii(name)[1:-1]
                raise RequestError(f"{place} is not valid text: it has half of a surrogate pair", place)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from _texts(entry)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
