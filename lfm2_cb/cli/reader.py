"""Rows from JSONL, Parquet or `datasets`, one after another, so that memory does not grow with the input."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

#: bytes of one JSONL line; a longer one is a bad row (and is not held in memory)
MAX_LINE_BYTES = 64 * 2**20
#: where a row's prompt is looked for, if no column is named
PROMPT_COLUMNS = ("prompt", "messages")


class InputError(ValueError):
    """The input as a whole cannot be read."""


class BadRow(ValueError):
    """One row cannot be used; the message says why."""


@dataclass(frozen=True)
class Source:
    """An input.

    Attributes:
        identity: what tells this input from another, for the job's record.
        num_rows: None where it is not known beforehand.
        rows: call to iterate, from the start, over (index, row or what is wrong with it). Indices rise, and are
            those of lines in JSONL (from 0; blank lines are no rows), of rows in anything else.
    """

    identity: dict[str, Any]
    num_rows: int | None
    rows: Callable[[], Iterator[tuple[int, Mapping[str, Any] | BadRow]]]


def open_source(name: str, split: str | None = None, column: str | None = None, keep: Sequence[str] = ()) -> Source:
    """Find out what `name` is: "-" or a named pipe (JSONL), a `.parquet` file, any other file (JSONL), or what
    `datasets` loads: a folder, or an id.

    Args:
        split: of a dataset.
        column: of the prompts. None: "prompt" or "messages".
        keep: columns to carry over.
    Raises: InputError: not there, not readable, no such column or split.
    """
    path = Path(name)
    try:
        if name == "-" or path.is_fifo():
            return Source({"path": name}, None, lambda: _stream_rows(name))
        if path.is_file():
            if split is not None:
                raise InputError(f"{name} is a file; a split goes with a dataset")
            return _parquet(path, column, keep) if path.suffix == ".parquet" else _jsonl(path)
        if not path.exists() and (path.suffix in (".jsonl", ".json", ".parquet") or path.is_absolute()):
            raise InputError(f"no such file: {name}")
        return _dataset(name, split, column, keep)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error}") from error


def take_prompt(row: Mapping[str, Any], column: str | None) -> Any:
    """The prompt of a row: text, a chat or token ids. Raises: BadRow."""
    names = [column] if column is not None else [name for name in PROMPT_COLUMNS if row.get(name) is not None]
    if len(names) > 1:
        raise BadRow("it has a prompt and messages; name one with --column")
    if not names or row.get(names[0]) is None:
        raise BadRow(f"it has no {column!r}" if column is not None else "it has neither a prompt nor messages")
    prompt = row[names[0]]
    if not isinstance(prompt, (str, list)):
        raise BadRow(f"its {names[0]} is neither text, nor a chat, nor token ids, but {type(prompt).__name__}")
    return prompt


def take_kept(row: Mapping[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    """The columns to carry over, None where a row lacks one. What JSON does not know becomes text.

    Raises: BadRow: a number that JSON cannot write (NaN, infinity).
    """
    kept = {name: row.get(name) for name in keep}
    try:
        return json.loads(json.dumps(kept, allow_nan=False, default=str))
    except (ValueError, RecursionError) as error:
        raise BadRow(f"a column to keep cannot be written as JSON: {error}") from error


def _jsonl(path: Path) -> Source:
    digest, num_rows = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            num_rows += chunk.count(b"\n")

    def rows() -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
        with path.open("rb") as file:
            yield from _jsonl_rows(file)

    return Source({"sha256": digest.hexdigest()}, num_rows, rows)


def _stream_rows(name: str) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    if name == "-":
        yield from _jsonl_rows(sys.stdin.buffer)
        return
    with open(name, "rb") as file:
        yield from _jsonl_rows(file)


def _jsonl_rows(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    index = 0
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield index, BadRow(f"it has more than {MAX_LINE_BYTES:,} bytes")
        elif line.strip():
            yield index, parse_line(line)
        index += 1


def parse_line(line: bytes) -> Mapping[str, Any] | BadRow:
    """One line of JSONL as an object, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, or too deep
        return BadRow(f"not JSON: {error}")
    return row if isinstance(row, dict) else BadRow(f"not a JSON object, but {type(row).__name__}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _parquet(path: Path, column: str | None, keep: Sequence[str]) -> Source:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            num_rows, names = file.metadata.num_rows, file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error
    columns = _choose_columns(str(path), names, column, keep)

    def rows() -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
        index = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256, columns=columns):
                    for row in batch.to_pylist():
                        yield index, row
                        index += 1
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise InputError(f"{path} cannot be read beyond row {index}: {error}") from error

    return Source({"bytes": path.stat().st_size, "num_rows": num_rows, "columns": names}, num_rows, rows)


def _dataset(name: str, split: str | None, column: str | None, keep: Sequence[str]) -> Source:
    """A folder that `save_to_disk` wrote, a folder of data files, or an id; memory-mapped. No code of it is run."""
    import datasets

    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            data = datasets.load_from_disk(name)
        else:
            data = datasets.load_dataset(name)
    except Exception as error:  # it has many of its own
        raise InputError(f"{name} is neither a file nor a dataset that loads: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            raise InputError(f"{name} has the splits {', '.join(map(str, data))}; name one with --split")
        data = data[split]
    elif split is not None:
        raise InputError(f"{name} has no splits")
    columns = _choose_columns(name, data.column_names, column, keep)
    selected = data.select_columns(columns)

    def rows() -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
        for index in range(len(selected)):
            try:
                row = selected[index]
            except Exception as error:  # it decodes as it reads
                row = BadRow(f"the dataset cannot read it: {error!r}")
            yield index, row

    identity = {"split": split, "num_rows": len(data), "columns": data.column_names}
    return Source(identity, len(data), rows)


def _choose_columns(name: str, there: Sequence[str], column: str | None, keep: Sequence[str]) -> list[str]:
    """Raises: InputError: a column is missing, or it is not clear which holds the prompts."""
    wanted = [column] if column is not None else [c for c in PROMPT_COLUMNS if c in there]
    missing = [c for c in (*wanted, *keep) if c not in there]
    if missing or not wanted:
        raise InputError(
            f"{name} has the columns {', '.join(there)}, and not {', '.join(missing) or 'prompt or messages'}"
        )
    return list(dict.fromkeys([*wanted, *keep]))
