"""Converts a finished job's JSON lines to Parquet, in one step at the end, so that a killed job loses nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .rows import Source
from .writer import OutputError, sync_folder

#: rows of a row group
BATCH_ROWS = 1024
#: the column of parsed answers
JSON = "json"
ANSWERS = ("index", "text", "finish_reason", "prompt_tokens", "output_tokens")


def write_parquet(journal: Path, target: Path, source: Source, keep: Sequence[str], with_json: bool = False) -> None:
    """Write the answers in `journal` to `target`, in the input's order.

    The columns are those of the records. A column that was kept has its input's type where that is Parquet; else the
    type of its JSON, or JSON text where its rows have none in common.

    Args: with_json: add a column `json` of what the answers are as JSON, by the same rule; null where one is none, as
        where it was cut.
    Raises: OutputError: it cannot be written; what was there is there.
    """
    import pyarrow
    from pyarrow import parquet

    temporary = target.with_name(f"{target.name}.tmp")  # one: a job's files are locked, and the next run replaces it
    try:
        with journal.open("rb") as lines:
            records = _Records(lines, with_json)
            json_type = _common_type(records, JSON) if with_json else None
            kept = _typed(records, source, keep) if source.kept is not None and keep else _inferred(records, keep)
            answers = _answer_types(records)

            def as_table(batch: list[dict[str, Any]], columns: dict[str, Any]) -> Any:
                own = {name: pyarrow.array([record[name] for record in batch], t) for name, t in answers.items()}
                parsed = {JSON: _column([record[JSON] for record in batch], json_type)} if with_json else {}
                return pyarrow.table({**own, **parsed, **columns})

            tables = (as_table(batch, columns) for batch, columns in kept)
            first = next(tables)
            with open(temporary, "wb") as file:
                with parquet.ParquetWriter(file, first.schema) as writer:
                    for table in itertools.chain([first], tables):
                        writer.write_table(table)
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except (OSError, pyarrow.ArrowException) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"{target} cannot be written: {error}") from error


class _Records:
    """The records of a file of JSON lines, by their indices: a line is read when it is asked for.

    Args: with_json: records get a field `JSON`, of their text.
    """

    def __init__(self, lines: Any, with_json: bool = False) -> None:
        self._lines, self._with_json = lines, with_json
        indices, offsets, offset = array("q"), array("q"), 0
        for line in lines:
            indices.append(json.loads(line)["index"])
            offsets.append(offset)
            offset += len(line)
        order = sorted(range(len(indices)), key=indices.__getitem__)
        self.indices = array("q", (indices[i] for i in order))
        self._offsets = array("q", (offsets[i] for i in order))

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        """From one place in the order of indices to another."""
        records = []
        for offset in self._offsets[start:stop]:
            self._lines.seek(offset)
            record = json.loads(self._lines.readline())
            records.append({**record, JSON: _parsed(record["text"])} if self._with_json else record)
        return records

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """All of them, and at least one batch."""
        for start in range(0, max(1, len(self.indices)), BATCH_ROWS):
            yield self.read(start, start + BATCH_ROWS)


def _answer_types(records: _Records) -> dict[str, Any]:
    import pyarrow as pa

    types = dict(zip(ANSWERS, (pa.int64(), pa.string(), pa.string(), pa.int64(), pa.int64()), strict=True))
    many = any(isinstance(record["text"], list) for record in records.read(0, 1))  # num_return_sequences
    listed = ("text", "finish_reason", "output_tokens") if many else ()
    return {name: pa.list_(kind) if name in listed else kind for name, kind in types.items()}


def _typed(records: _Records, source: Source, keep: Sequence[str]) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Records, with the columns that were kept out of the input itself."""
    import pyarrow as pa

    place = base = 0
    for batch in source.kept():  # type: ignore[misc]  # where there is one
        start = place
        while place < len(records.indices) and records.indices[place] < base + batch.num_rows:
            place += 1
        rows = batch.take(pa.array([index - base for index in records.indices[start:place]], pa.int64()))
        yield records.read(start, place), {name: rows.column(name) for name in keep}
        base += batch.num_rows


def _inferred(records: _Records, keep: Sequence[str]) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Records, with the columns that were kept in types that all their rows go into."""
    types = {name: _common_type(records, name) for name in keep}
    for batch in records.batches():
        yield batch, {name: _column([record[name] for record in batch], kind) for name, kind in types.items()}


def _column(values: list[Any], kind: Any) -> Any:
    """Args: kind: their type; None: they have none in common, and are written as JSON."""
    import pyarrow as pa

    if kind is not None:
        return pa.array(values, kind)
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def _parsed(text: str | list[str]) -> Any:
    """What an answer (or each of several) is as JSON; None where it is none."""
    if isinstance(text, list):
        return [_parsed(one) for one in text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _common_type(records: _Records, name: str) -> Any:
    """None: there is none."""
    import pyarrow as pa

    schema = pa.schema([(name, pa.null())])
    try:
        for batch in records.batches():
            found = pa.schema([(name, pa.array([record[name] for record in batch]).type)])
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # mixed kinds, half a surrogate, a large number
        return None
    return None if _has_empty_struct(schema.field(0).type) else schema.field(0).type


def _has_empty_struct(kind: Any) -> bool:
    """Whether there is one in a type: Parquet has no such thing."""
    import pyarrow as pa

    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(map(_has_empty_struct, inner))
