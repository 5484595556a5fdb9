"""Writes answers to files that survive a kill at any instant: appended lines, repaired and read back on resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .reader import parse_line
from .rows import BadRow

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two jobs from one file there
    fcntl = None  # type: ignore[assignment]

logger = logging.get_logger("transformers.lfm2_cb")

#: of a row that came in a stream: what tells it from another (`row_digest`)
DIGEST_FIELD = "row_digest"
#: lines, and seconds, between two fsyncs: what a power cut can cost (a kill costs one line at most)
SYNC_ROWS, SYNC_SECONDS = 64, 2.0


class JobError(ValueError):
    """The output files belong to another job, or another job is writing them."""


class OutputError(RuntimeError):
    """The output cannot be written any further (a full disk, a closed pipe). What is in it is whole."""


class RowSet:
    """A set of row indices, one bit each, in pages; and of those that came with one, their digests, 8 bytes each."""

    def __init__(self) -> None:
        self._pages: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(2**10))
        self._digests: defaultdict[int, array[int]] = defaultdict(lambda: array("Q", bytes(8 * 2**10)))
        self._count = 0

    def add(self, index: int, digest: str | None = None) -> None:
        if index not in self:
            self._pages[index >> 13][index >> 3 & 1023] |= 1 << (index & 7)
            self._count += 1
        if digest is not None:
            self._digests[index >> 10][index & 1023] = int(digest, 16)

    def has_digest(self, index: int, digest: str) -> bool:
        """Whether the row was added with this digest."""
        page = self._digests.get(index >> 10)
        return page is not None and page[index & 1023] == int(digest, 16)

    def __contains__(self, index: int) -> bool:
        page = self._pages.get(index >> 13)
        return page is not None and bool(page[index >> 3 & 1023] >> (index & 7) & 1)

    def __len__(self) -> int:
        return self._count


class LineFile:
    """JSON lines appended to one file, each in one piece or not at all.

    Raises: JobError: another process has it open as a LineFile. OutputError: it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error
        self._size = 0
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._fd)
                raise JobError(f"another job is writing {path}") from error

    def recover(self) -> Iterator[Mapping[str, Any]]:
        """The whole rows; then cut off what follows the last of them.

        A kill can only tear the last line. A power cut can leave more behind, all after the last fsync, so everything
        from the first line that is not whole is cut, and computed again.
        """
        with open(self.path, "rb") as file:
            for line in file:
                row = _whole_row(line)
                if row is None:
                    break
                self._size += len(line)
                yield row
        torn = os.fstat(self._fd).st_size - self._size
        if torn:
            logger.warning(f"{self.path}: {torn} bytes of unfinished rows are cut off")
            self.truncate()

    def has_rows(self) -> bool:
        """Whether there is a whole row in it."""
        with open(self.path, "rb") as file:
            return _whole_row(file.readline()) is not None

    def write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self.truncate()
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error
        self._size += len(line)

    def truncate(self) -> None:
        """Cut off what this object has neither recovered nor written."""
        os.ftruncate(self._fd, self._size)

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._fd)


def _whole_row(line: bytes) -> Mapping[str, Any] | None:
    row = parse_line(line) if line.endswith(b"\n") else BadRow("torn")
    index = None if isinstance(row, BadRow) else row.get("index")
    if isinstance(row, BadRow) or not isinstance(index, int) or isinstance(index, bool) or index < 0:
        return None
    digest = row.get(DIGEST_FIELD)
    return row if digest is None or (isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest)) else None


class JobFiles:
    """The three files of a job: `out.jsonl`, `out.errors.jsonl`, and `out.job.json`, which says what made them.

    Every row ends as one line of one of the first two. `done` holds those that are there already.

    Args:
        output: path of the first.
        record: what the rows depend on (model, input, options): a job goes on only where it is the same, and is begun
            anew where it is not and no row has an answer yet.
        overwrite: remove what is there, and start anew.
        retry_errors: forget the rows in the errors file, so that they are run again.
        result: a file that is made of the first at the end; another's is not replaced, and `overwrite` removes it.
    Raises: JobError; OutputError.
    """

    resumes = True

    def __init__(
        self,
        output: Path,
        record: dict[str, Any],
        overwrite: bool = False,
        retry_errors: bool = False,
        result: Path | None = None,
    ) -> None:
        self.result = result
        self.output, self.errors = output, output.with_suffix(".errors.jsonl")
        self.job = output.with_suffix(".job.json")
        self.done, self.num_errors = RowSet(), 0
        self._num_unsynced, self._synced_at = 0, time.monotonic()
        with contextlib.ExitStack() as on_failure:
            self._answers = on_failure.enter_context(contextlib.closing(LineFile(self.output)))
            self._failures = on_failure.enter_context(contextlib.closing(LineFile(self.errors)))
            if overwrite:  # only now that the lock is held, so that no other job writes them
                self._answers.truncate()
                self._failures.truncate()
                for path in (self.job, result):
                    if path is not None:
                        path.unlink(missing_ok=True)
            self._check_record(json.loads(json.dumps(record)))
            if retry_errors:
                self._failures.truncate()
            for row in self._answers.recover():
                self.done.add(row["index"], row.get(DIGEST_FIELD))
            for row in self._failures.recover():
                self.done.add(row["index"], row.get(DIGEST_FIELD))
                self.num_errors += 1
            on_failure.pop_all()

    def _check_record(self, record: dict[str, Any]) -> None:
        try:
            known = json.loads(self.job.read_text("utf-8"))
        except FileNotFoundError:
            known = None
        except ValueError as error:
            raise JobError(f"{self.job} is not a job's record; --overwrite starts a new job") from error
        if known is None:
            for path in filter(None, (self.output, self.errors, self.result)):
                if path.exists() and path.stat().st_size:
                    raise JobError(f"{path} exists without {self.job.name} beside it; --overwrite removes it")
        elif known != record and not self._answers.has_rows():
            logger.warning(f"{self.output}: the job before had other options and no answers; begun anew")
            self._answers.truncate()
            self._failures.truncate()
        elif known != record:
            changed = sorted(k for k in {*known, *record} if known.get(k) != record.get(k))
            details = "; ".join(f"{k} was {known.get(k)!r} and is {record.get(k)!r}" for k in changed)
            raise JobError(f"{self.output} belongs to another job: {details}. Name another output, or --overwrite")
        if known != record:
            write_atomically(self.job, json.dumps(record, indent=1).encode() + b"\n")

    def write(self, record: dict[str, Any], is_error: bool = False) -> None:
        """Append one row's record, to last after the next fsync."""
        (self._failures if is_error else self._answers).write(to_line(record))
        self.done.add(record["index"])
        self.num_errors += is_error
        self._num_unsynced += 1
        if self._num_unsynced >= SYNC_ROWS or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        self._answers.sync()
        self._failures.sync()
        self._num_unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Make everything last; remove an errors file without errors."""
        try:
            self.sync()
            if not self.num_errors:
                self.errors.unlink(missing_ok=True)
        finally:
            self._answers.close()
            self._failures.close()


class PipeFiles:
    """The same for a job whose answers go to a pipe, and its errors to the log: nothing is kept, nothing resumes."""

    resumes = False

    def __init__(self, fd: int) -> None:
        self._fd, self.done, self.num_errors = fd, RowSet(), 0

    def write(self, record: dict[str, Any], is_error: bool = False) -> None:
        self.num_errors += is_error
        if is_error:
            logger.error(f"row {record['index']}: {record['error']}")
            return
        rest = memoryview(to_line(record))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise OutputError(f"the output cannot be written: {error.strerror}") from error

    def close(self) -> None: ...


def to_line(record: dict[str, Any]) -> bytes:
    """A record as one line of JSON: as readable UTF-8 where that is possible."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, out of a kept column
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by one that is whole and on disk, or leave it. Raises: OutputError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error


def sync_folder(path: Path) -> None:
    """Make renamed and created names last, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
