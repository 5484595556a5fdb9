"""Trace: what an engine does, as Chrome trace events (Perfetto and chrome://tracing open them; `lfm2-cb plot` draws).

Source of the format: "Trace Event Format", in its array form. There the closing bracket may be missing, so a file that
a killed process left can still be opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from ..scheduling.request import Request, RequestStatus
from ..scheduling.scheduler import ScheduledRow, Scheduler

logger = logging.get_logger("transformers.lfm2_cb")

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

#: the two tracks of events
ENGINE, REQUESTS = 1, 2

#: seconds between two flushes at most while there is work, so that a trace can be looked at while it is written
FLUSH_SECONDS = 1.0


@dataclass(slots=True)
class _Span:
    """What a request has been doing since `start`: decoding, or waiting after it was preempted."""

    request: Request
    name: str
    start: float
    num_steps: int = 0
    num_tokens: int = 0  # the request's, at the start


def is_prefill(row: ScheduledRow) -> bool:
    """Whether a row computes tokens of a prompt, or again those that a preemption took, and not just the last one."""
    return row.start < row.request.num_prompt_tokens or row.num_tokens - row.num_drafts > 1 or not row.samples


class Trace:
    """Writes the steps of one engine to a file. Any thread may close it; what comes after is ignored.

    A step is one event on the engine's track, with counters of the cache and the queue. Each request has a line of its
    own: "waiting", "prefill" for each chunk, "decode" from its first decode step to its end or preemption in one
    event, "preempted". Memory is one entry a running or preempted request. Times are microseconds since the start.

    Args: path: of the file, made anew; "{pid}" in it becomes the process's id.
    Raises: OSError: it cannot be written. (A disk that is full later ends the trace with a warning, not the step.)
    """

    def __init__(self, path: str | os.PathLike[str], clock_start: float) -> None:
        self.path = os.fspath(path).replace("{pid}", str(os.getpid()))
        self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._lock = threading.Lock()
        self._start, self._flushed = clock_start, clock_start
        self._spans: dict[int, _Span] = {}
        self._num_accepted = 0
        self._file.write("[\n")
        for track, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
            self._write({"ph": "M", "pid": track, "name": "process_name", "args": {"name": name}})

    def add_step(
        self, rows: list[ScheduledRow], start: float, end: float, scheduler: Scheduler, num_accepted: int
    ) -> None:
        """Record a step that ran from `start` to `end` (`time.perf_counter()` seconds).

        Args: num_accepted: drafts accepted by the engine so far.
        """
        with self._lock:
            if self._file.closed:
                return
            try:
                prefills = [row for row in rows if is_prefill(row)]
                self._add_requests(rows, prefills, start, end)
                self._add_engine(rows, prefills, start, end, scheduler, num_accepted)
                if end - self._flushed > FLUSH_SECONDS or not scheduler.has_unfinished:
                    self._file.flush()
                    self._flushed = end
            except OSError as error:
                logger.warning(f"lfm2_cb: the trace ends here, {self.path} cannot be written: {error}")
                self._close_file()

    def close(self, now: float) -> None:
        """Write what is still open, and close the file."""
        with self._lock:
            if self._file.closed:
                return
            try:
                for span in self._spans.values():
                    self._end(span, now)
                self._write({"ph": "M", "pid": ENGINE, "name": "trace_end", "args": {}}, "\n]\n")
            except OSError as error:
                logger.warning(f"lfm2_cb: the end of the trace {self.path} cannot be written: {error}")
            self._close_file()

    def _add_requests(self, rows: list[ScheduledRow], prefills: list[ScheduledRow], start: float, end: float) -> None:
        spans, prefilled = self._spans, {row.request.request_id for row in prefills}
        for row in rows:
            request = row.request
            request_id, span = request.request_id, spans.get(request.request_id)
            if span is None:
                self._name(request)
                self._event(request, "waiting", request.metrics.arrival_time, start)
            elif request_id in prefilled or span.name == "preempted":
                self._end(span, start)
                span = None
            if request_id not in prefilled:
                if span is None:
                    span = spans[request_id] = _Span(request, "decode", start, 0, row.start + 1)
                span.num_steps += 1
        for row in prefills:
            self._event(row.request, "prefill", start, end, {"tokens": row.num_tokens, "from": row.start})
            spans[row.request.request_id] = _Span(row.request, "decode", end, 0, row.request.num_tokens)
        for span in [span for span in spans.values() if span.request.status is not RequestStatus.RUNNING]:
            if span.request.is_finished:
                self._end(span, end)
                del spans[span.request.request_id]
            elif span.name != "preempted":
                self._end(span, start)
                spans[span.request.request_id] = _Span(span.request, "preempted", start)

    def _add_engine(
        self,
        rows: list[ScheduledRow],
        prefills: list[ScheduledRow],
        start: float,
        end: float,
        scheduler: Scheduler,
        num_accepted: int,
    ) -> None:
        num_prefill = sum(row.num_tokens for row in prefills)
        args = {
            "rows": len(rows),
            "prefill_tokens": num_prefill,
            "decode_tokens": sum(row.num_tokens for row in rows) - num_prefill,
            "drafts": sum(row.num_drafts for row in rows),
            "accepted": num_accepted - self._num_accepted,
        }
        self._num_accepted = num_accepted
        self._write({"ph": "X", "pid": ENGINE, "tid": 0, "name": "step", **self._times(start, end), "args": args})
        pool, ts = scheduler.cache.pool, self._micros(start)
        blocks = {"in use": pool.num_blocks - pool.num_free, "cached": pool.num_cached}
        requests = {"running": len(scheduler.running), "waiting": scheduler.num_waiting}
        for name, counts in (("cache blocks", blocks), ("sequences", requests)):
            self._write({"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": ts, "args": counts})

    def _name(self, request: Request) -> None:
        args = {"name": f"request {request.request_id}"}
        self._write({"ph": "M", "pid": REQUESTS, "tid": request.request_id, "name": "thread_name", "args": args})

    def _end(self, span: _Span, now: float) -> None:
        """Write a span that ends now; one of a prompt that has not come to its first decode is none."""
        if span.name == "decode" and not span.num_steps:
            return
        args: dict[str, Any] = {}
        if span.name == "decode":
            args = {"steps": span.num_steps, "tokens": span.request.num_tokens - span.num_tokens}
            if span.request.is_finished:
                args["finish_reason"] = str(span.request.finish_reason)
        self._event(span.request, span.name, span.start, now, args)

    def _event(
        self, request: Request, name: str, start: float, end: float, args: dict[str, Any] | None = None
    ) -> None:
        ends = {"ph": "X", "pid": REQUESTS, "tid": request.request_id, "name": name, **self._times(start, end)}
        self._write({**ends, "args": args or {}})

    def _times(self, start: float, end: float) -> dict[str, float]:
        return {"ts": self._micros(start), "dur": round(max(0.0, end - start) * 1e6, 1)}

    def _micros(self, time: float) -> float:
        return round(max(0.0, time - self._start) * 1e6, 1)

    def _write(self, event: dict[str, Any], ending: str = ",\n") -> None:
        self._file.write(_encode(event) + ending)

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # what was buffered cannot be written either; it is closed all the same
            self._file.close()
