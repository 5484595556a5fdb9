"""Reads rows of JSONL, text, CSV, Parquet or `datasets` one at a time: memory does not grow with the input."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .rows import BadRow, Content, InputError, Source, check_first_rows, row_digest, take_kept, take_prompt
from .tabular import choose_columns, open_dataset, open_parquet

#: bytes of one line, or of one CSV field; a longer one is a bad row (and is not held in memory)
MAX_LINE_BYTES = 64 * 2**20
#: suffix → what stands between two fields
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def open_source(name: str, split: str | None = None, column: str | None = None, keep: Sequence[str] = ()) -> Source:
    """Find out what `name` is: "-" or a named pipe (JSONL), a file (Parquet, CSV or text by its suffix, else JSONL),
    or what `datasets` loads: a folder, or an id.

    Args:
        split: of a dataset.
        column: of the prompts. None: "prompt" or "messages".
        keep: columns to carry over.
    Raises: InputError: not there, not readable, no such column or split.
    """
    path = Path(name)
    is_stream = name == "-" or path.is_fifo()
    if split is not None and (is_stream or path.is_file()):
        raise InputError(f"{name} is a file; only a dataset has splits")
    try:
        if is_stream:
            return Source({"stream": name}, None, lambda: _stream_rows(name), is_stream=True)
        if path.is_file():
            return _open_file(path, column, keep)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error}") from error
    if not path.exists() and (
        path.suffix in (".jsonl", ".json", ".parquet", ".txt", *DELIMITERS) or path.is_absolute()
    ):
        raise InputError(f"no such file: {name}")
    return open_dataset(name, split, column, keep)


def _open_file(path: Path, column: str | None, keep: Sequence[str]) -> Source:
    digest, num_lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            num_lines += chunk.count(b"\n")
    if path.suffix == ".parquet":
        return open_parquet(path, column, keep, digest.hexdigest())
    identity = {"sha256": digest.hexdigest()}
    if path.suffix in DELIMITERS:
        return _csv(path, column, keep, identity)
    if path.suffix == ".txt":
        choose_columns(str(path), ["prompt"], column, keep)
        return Source(identity, num_lines, lambda: _text_rows(path))
    return Source(identity, num_lines, lambda: _stream_rows(str(path)))


def _stream_rows(name: str) -> Iterator[tuple[int, Content]]:
    if name == "-":
        yield from _jsonl_rows(sys.stdin.buffer)
        return
    with open(name, "rb") as file:
        yield from _jsonl_rows(file)


def _jsonl_rows(file: BinaryIO) -> Iterator[tuple[int, Content]]:
    for index, line in _lines(file):
        yield index, parse_line(line) if isinstance(line, bytes) else line


def _text_rows(path: Path) -> Iterator[tuple[int, Content]]:
    with path.open("rb") as file:
        for index, line in _lines(file):
            try:
                text = line if isinstance(line, BadRow) else line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                text = BadRow(f"not UTF-8: {error}")
            yield index, text if isinstance(text, BadRow) else {"prompt": text}


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | BadRow]]:
    """Lines with their numbers, but for blank ones."""
    index = 0
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield index, BadRow(f"it has more than {MAX_LINE_BYTES:,} bytes")
        elif line.strip():
            yield index, line
        index += 1


def parse_line(line: bytes) -> Content:
    """One line of JSONL as an object, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, or too deep
        return BadRow(f"not JSON: {error}")
    return row if isinstance(row, dict) else BadRow(f"not a JSON object, but {type(row).__name__}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _csv(path: Path, column: str | None, keep: Sequence[str], identity: dict[str, Any]) -> Source:
    """A file of which the first line names the columns. All values are text."""
    names = next((values for _, values in _csv_values(path)), [])
    if isinstance(names, BadRow) or len({*names}) < len(names):
        raise InputError(f"{path}: its first line must name the columns, each name once, got {names}")
    columns = choose_columns(str(path), names, column, keep)

    def rows() -> Iterator[tuple[int, Content]]:
        for place, values in _csv_values(path):
            if place > 0:
                yield place - 1, _csv_row(names, columns, values)

    return Source(identity, None, rows)


def _csv_values(path: Path) -> Iterator[tuple[int, list[str] | BadRow]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader, place = csv.reader(file, delimiter=DELIMITERS[path.suffix], strict=True), 0
        while True:
            try:
                values: list[str] | BadRow | None = next(reader, None)
            except csv.Error as error:
                values = BadRow(f"not CSV: {error}")
            if values is None:
                return
            if values != []:  # a blank line
                yield place, values
                place += 1


def _csv_row(names: list[str], columns: list[str], values: list[str] | BadRow) -> Content:
    if isinstance(values, BadRow):
        return values
    if len(values) != len(names):
        return BadRow(f"it has {len(values)} fields where the first line has {len(names)}")
    row = {name: value for name, value in zip(names, values, strict=True) if name in columns}
    try:
        "".join(row.values()).encode()
    except UnicodeEncodeError:
        return BadRow("not UTF-8")
    return row


__all__ = [
    "BadRow",
    "InputError",
    "Source",
    "check_first_rows",
    "open_source",
    "parse_line",
    "row_digest",
    "take_kept",
    "take_prompt",
]
