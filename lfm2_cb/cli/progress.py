"""How a job shows its progress: a plain bar, or `--live`, a view of the engine in the terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers.utils import logging

from ..engine.engine import Engine
from .flags import UsageError

#: seconds over which the live view's rate is taken
WINDOW_SECONDS = 5.0
REFRESHES_PER_SECOND = 4


@dataclass
class Summary:
    """What one run of a job did (not what earlier runs of it had done)."""

    num_rows: int = 0
    num_errors: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0


class Progress(Protocol):
    """Shows a job while it is run inside `with progress.shown():`."""

    def shown(self) -> AbstractContextManager[Any]: ...

    def update(self, summary: Summary) -> None:
        """One more row is written. Raises: BrokenPipeError: the reader of stderr is gone."""


class NoProgress:
    """Shows nothing."""

    def shown(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def update(self, summary: Summary) -> None: ...


class Bar:
    """One line on stderr. Args: num_rows: None: not known. num_done: by earlier runs."""

    def __init__(self, num_rows: int | None, num_done: int) -> None:
        self._bar = logging.tqdm(total=num_rows, initial=num_done, unit="row")

    def shown(self) -> AbstractContextManager[Any]:
        return self._bar

    def update(self, summary: Summary) -> None:
        rate = summary.num_output_tokens / max(summary.seconds, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s, {summary.num_errors} errors", refresh=False)
        self._bar.update(1)


@dataclass
class LiveView:
    """The engine, looked at four times a second: rows, sequences running and waiting, cache, tokens a second.

    Args as of `Bar`; and the engine.
    Raises: UsageError: rich is not installed (it comes with transformers).
    """

    engine: Engine
    num_rows: int | None
    num_done: int
    summary: Summary = field(default_factory=Summary)
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        try:
            import rich  # noqa: F401
        except ImportError as error:
            raise UsageError("--live needs rich: pip install rich") from error
        self._samples: deque[tuple[float, int]] = deque()

    def shown(self) -> AbstractContextManager[Any]:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True)
        return Live(get_renderable=self.render, console=console, refresh_per_second=REFRESHES_PER_SECOND)

    def update(self, summary: Summary) -> None:
        self.summary = summary

    def render(self) -> Any:
        """The view as a table of rich's."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        scheduler, pool = self.engine.scheduler, self.engine.scheduler.cache.pool
        num_rows, used = self.num_done + self.summary.num_rows, pool.num_blocks - pool.num_free
        now, speculation = time.monotonic(), self.engine.speculation
        table = Table.grid(padding=(0, 2))
        total = "" if self.num_rows is None else f" of {self.num_rows:,}"
        table.add_row(
            "rows",
            ProgressBar(self.num_rows, num_rows, width=30, pulse=self.num_rows is None),
            f"{num_rows:,}{total}, {self.summary.num_errors:,} errors, {self._time_left(now)}",
        )
        table.add_row(
            "cache",
            ProgressBar(pool.num_blocks, used, width=30),
            f"{used / pool.num_blocks:.0%} in use, {pool.num_cached / pool.num_blocks:.0%} kept for prefixes",
        )
        table.add_row(
            "sequences",
            ProgressBar(scheduler.max_sequences, len(scheduler.running), width=30),
            f"{len(scheduler.running):,} running, {scheduler.num_waiting:,} waiting",
        )
        accepted = f", {speculation.num_accepted:,} drafts accepted" if speculation.num_drafted else ""
        table.add_row("speed", f"{self._rate(now):,.0f} tokens/s", f"{self._num_tokens():,} tokens{accepted}")
        return table

    def _num_tokens(self) -> int:
        """Generated so far, by sequences that are not finished too."""
        return self.summary.num_output_tokens + sum(r.num_output_tokens for r in list(self.engine.scheduler.running))

    def _rate(self, now: float) -> float:
        self._samples.append((now, self._num_tokens()))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        (earlier, before), (later, after) = self._samples[0], self._samples[-1]
        return max(0, after - before) / max(later - earlier, 1e-9)

    def _time_left(self, now: float) -> str:
        """By the rows done so far, in which one that runs counts as far as it may have come at least."""
        running = list(self.engine.scheduler.running)
        done = self.summary.num_rows + sum(r.num_output_tokens / max(1, r.max_new_tokens) for r in running)
        if self.num_rows is None or not done:
            return "time left unknown"
        per_row = (now - self.start) / done
        minutes, seconds = divmod(round(max(0.0, per_row * (self.num_rows - self.num_done - done))), 60)
        return f"{minutes}:{seconds:02} left"


def make_progress(engine: Engine, num_rows: int | None, num_done: int, *, quiet: bool, live: bool) -> Progress:
    """No progress if `quiet`; the live view if `live` and stderr is a terminal; else the bar.

    Raises: UsageError: see `LiveView`.
    """
    if quiet:
        return NoProgress()
    if live and sys.stderr.isatty():
        return LiveView(engine, num_rows, num_done)
    return Bar(num_rows, num_done)
