"""Rows whose columns are typed: Parquet files and `datasets`, read as they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .rows import ADAPTER_COLUMN, PROMPT_COLUMNS, BadRow, Content, InputError, Source


def open_parquet(path: Path, column: str | None, keep: Sequence[str], digest: str) -> Source:
    """A Parquet file; `digest` of its bytes. Raises: InputError."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            num_rows, names = file.metadata.num_rows, file.schema_arrow.names
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error
    columns = choose_columns(str(path), names, column, keep)

    def rows() -> Iterator[tuple[int, Content]]:
        index = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256, columns=columns):
                    for row in batch.to_pylist():
                        yield index, row
                        index += 1
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise InputError(f"{path} cannot be read beyond row {index}: {error}") from error

    def kept() -> Iterator[Any]:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=1024, columns=list(keep))

    return Source({"sha256": digest}, num_rows, rows, kept=kept)


def open_dataset(name: str, split: str | None, column: str | None, keep: Sequence[str]) -> Source:
    """A folder that `save_to_disk` wrote, a folder of data files, or an id; memory-mapped. No code of it is run.

    Raises: InputError.
    """
    import datasets

    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            data = datasets.load_from_disk(name)
        else:
            data = datasets.load_dataset(name)
    except Exception as error:  # `datasets` raises many kinds
        raise InputError(f"{name} is neither a file nor a dataset that loads: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if split is None and len(data) == 1:
            split = next(iter(data))
        if split not in data:
            raise InputError(f"{name} has the splits {', '.join(map(str, data))}; name one with --split")
        data = data[split]
    elif split is not None:
        raise InputError(f"{name} has no splits")
    selected = data.select_columns(choose_columns(name, data.column_names, column, keep))

    def rows() -> Iterator[tuple[int, Content]]:
        for index in range(len(selected)):
            try:
                row = selected[index]
            except Exception as error:  # it decodes as it reads
                row = BadRow(f"the dataset cannot read it: {error!r}")
            yield index, row

    identity = {"split": split, "num_rows": len(data), "columns": data.column_names, "sha256": _table_digest(selected)}
    return Source(identity, len(data), rows)


def choose_columns(name: str, there: Sequence[str], column: str | None, keep: Sequence[str]) -> list[str]:
    """Raises: InputError: a column is missing, or it is not clear which holds the prompts."""
    wanted = [column] if column is not None else [c for c in PROMPT_COLUMNS if c in there]
    missing = [c for c in (*wanted, *keep) if c not in there]
    if missing or not wanted:
        raise InputError(
            f"{name} has the columns {', '.join(there)}, but not {', '.join(missing) or 'prompt or messages'}"
        )
    return list(dict.fromkeys([*wanted, *keep, *(c for c in there if c == ADAPTER_COLUMN)]))


class _Hash:
    """A file that is hashed and not kept."""

    closed = False

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _table_digest(data: Any) -> str:
    """Of a dataset's values, a batch at a time: its own fingerprint is of how it was made, not of what is in it."""
    import pyarrow

    sink = _Hash()
    for batch in data.with_format("arrow").iter(batch_size=1000):
        table = batch.replace_schema_metadata(None).combine_chunks()
        with pyarrow.ipc.new_stream(pyarrow.PythonFile(sink, mode="w"), table.schema) as stream:
            stream.write_table(table)
    return sink.sha256.hexdigest()
