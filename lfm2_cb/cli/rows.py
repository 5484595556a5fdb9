"""Rows: the form into which every kind of input is read."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers.utils import logging

logger = logging.get_logger("transformers.lfm2_cb")

#: where a row's prompt is looked for, if no column is named
PROMPT_COLUMNS = ("prompt", "messages")
#: which adapter a row is for, where --adapter names any
ADAPTER_COLUMN = "adapter"
#: rows that are looked at before anything is loaded: if none has a prompt, none is expected to
FIRST_ROWS = 100


class InputError(ValueError):
    """The input as a whole cannot be read, or has nothing to run."""


class BadRow(ValueError):
    """One row cannot be used; the message says why."""


#: a row, or what is wrong with it
Content = Mapping[str, Any] | BadRow


@dataclasses.dataclass(frozen=True)
class Source:
    """An input.

    Attributes:
        identity: what tells this input from another, for the job's record.
        num_rows: None where it is not known beforehand.
        rows: call to iterate, from the start, over (index, row or what is wrong with it). Indices rise, and are
            those of lines in JSONL and text (from 0; blank lines are no rows), of rows in anything else.
        is_stream: it can be read once only, so that nothing tells it from another but its rows.
        kept: call to iterate over all rows as Arrow record batches of the columns to carry over; None where these
            have no types of their own.
    """

    identity: dict[str, Any]
    num_rows: int | None
    rows: Callable[[], Iterator[tuple[int, Content]]]
    is_stream: bool = False
    kept: Callable[[], Iterator[Any]] | None = None


def take_prompt(row: Mapping[str, Any], column: str | None) -> Any:
    """The prompt of a row: text, a chat or token ids. Raises: BadRow."""
    names = [column] if column is not None else [name for name in PROMPT_COLUMNS if row.get(name) is not None]
    if len(names) > 1:
        raise BadRow("it has a prompt and messages; name one with --column")
    if not names or row.get(names[0]) is None:
        raise BadRow(f"it has no {column!r}" if column is not None else "it has neither a prompt nor messages")
    prompt = row[names[0]]
    if not isinstance(prompt, (str, list)):
        raise BadRow(f"its {names[0]} must be text, a chat or token ids, not {type(prompt).__name__}")
    if column is None and names[0] == "messages" and isinstance(prompt, str):
        raise BadRow("its messages are text, not a chat; --column messages runs them as text")
    return prompt


def take_adapter(row: Mapping[str, Any]) -> str | None:
    """The name of a row's adapter; None, and nothing at all, is the base. Raises: BadRow."""
    name = row.get(ADAPTER_COLUMN)
    if name is not None and not isinstance(name, str):
        raise BadRow(f"its {ADAPTER_COLUMN} must be a name, not {type(name).__name__}")
    return name or None


def take_kept(row: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    """The columns to carry over, None where a row lacks one. What JSON does not know becomes text.

    Raises: BadRow: a number that JSON cannot write (NaN, infinity).
    """
    kept = {name: row.get(name) for name in keep}
    try:
        return json.loads(json.dumps(kept, allow_nan=False, default=str))
    except (ValueError, RecursionError) as error:
        raise BadRow(f"a column to keep cannot be written as JSON: {error}") from error


def row_digest(content: Content) -> str:
    """16 hexadecimal digits that tell a row of a stream from another."""
    text = str(content) if isinstance(content, BadRow) else json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def check_first_rows(source: Source, column: str | None, keep: Sequence[str]) -> Source:
    """Look at the first `FIRST_ROWS` before anything is loaded; returns the source, as it was.

    Raises: InputError: there are rows, and none of these could be run; with the first one's reason.
    """
    rows, seen, missing = source.rows(), [], {*keep}
    reason, is_runnable = "", False
    for index, content in itertools.islice(rows, FIRST_ROWS):
        seen.append((index, content))
        why_not = _why_not(content, column)
        reason = reason or f"row {index}: {why_not}"
        is_runnable |= why_not is None
        missing -= content.keys() if isinstance(content, Mapping) else set()
        if is_runnable and not missing:
            break
    if seen and not is_runnable:
        raise InputError(f"none of the first {len(seen)} rows of the input can be run; {reason}")
    if seen and missing:
        logger.warning(f"none of the first {len(seen)} rows has a column {', '.join(sorted(missing))} to keep")
    if source.is_stream:
        return dataclasses.replace(source, rows=lambda: itertools.chain(seen, rows))
    return source


def _why_not(content: Content, column: str | None) -> str | None:
    if isinstance(content, BadRow):
        return str(content)
    try:
        take_prompt(content, column)
    except BadRow as error:
        return f"{error} (it has {', '.join(map(repr, content)) or 'no columns'})"
    return None
