"""EngineLoop: lets any number of threads share one engine, with no thread of its own while nobody asks for one.

Whoever waits, drives: a waiting thread runs steps until what it waits for has happened, and if another thread is
already driving, it sleeps until that one has done a step. So `generate()` runs in the caller's thread, nothing is left
over at exit, and a process can fork while nobody waits. `submit()` without waiting starts a thread that ends when the
work does.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..scheduling.request import Request
from .engine import Engine, StepOutput


class ClosedError(RuntimeError):
    """The generator was closed."""


class Submission:
    """Requests submitted together, and what has happened to them that nobody has taken note of yet."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.members = [r for request in requests for r in (request, *request.forks)]
        self.outputs: deque[StepOutput] = deque()
        self.num_unfinished = len(self.members)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0


class EngineLoop:
    """Thread-safe door to an engine: submit, wait, cancel, close."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._is_driven = False
        self._submissions: dict[int, Submission] = {}  # by request id, of the unfinished
        self._background: threading.Thread | None = None
        self._closed = False

    def submit(self, requests: list[Request]) -> Submission:
        """Queue requests (and their forks) all together.

        Raises: ClosedError; RequestTooLarge: one could never run, and then none is queued.
        """
        for request in requests:
            self.engine.check_fits(request)
        submission = Submission(requests)
        with self._changed:
            if self._closed:
                raise ClosedError("this ContinuousBatchingGenerator is closed")
            for member in submission.members:
                self._submissions[member.request_id] = submission
            self.engine.add_all(requests)
            self._changed.notify_all()
        return submission

    def cancel(self, requests: list[Request]) -> None:
        """End requests before the next step, wherever they are. They then finish as "cancelled"."""
        for request in requests:
            self.engine.cancel(request)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Drive, or sleep while another drives, until `done()`.

        Returns: whether it is done; False after `timeout` seconds (a step under way is finished first).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                while self._is_driven and not done():
                    if not self._changed.wait(_left(deadline)):
                        return done()
                if done():
                    return True
                if _left(deadline) == 0:
                    return False
                if not self.engine.has_unfinished:
                    return False  # nobody will make it happen
                self._is_driven = True
            outputs: list[StepOutput] = []
            try:
                outputs = self.engine.step()
            finally:
                with self._changed:
                    self._dispatch(outputs)
                    self._is_driven = False
                    self._changed.notify_all()

    def run_in_background(self) -> None:
        """Make sure that a thread drives until all work is done; it then ends."""
        with self._changed:
            if self._closed or (self._background is not None and self._background.is_alive()):
                return
            self._background = threading.Thread(target=self._drive_until_idle, name="lfm2_cb-engine", daemon=True)
            self._background.start()

    def close(self) -> None:
        """Cancel all that is unfinished, and wait for it to have ended."""
        with self._changed:
            self._closed = True
            unfinished = [m for s in set(self._submissions.values()) for m in s.members if not m.is_finished]
        self.cancel(unfinished)
        self.wait(lambda: not self._submissions)
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join()

    def _drive_until_idle(self) -> None:
        while True:
            self.wait(lambda: not self._submissions)
            with self._changed:  # nothing can be submitted between looking and leaving
                if not self.engine.has_unfinished:
                    self._background = None
                    return

    def _dispatch(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            submission = self._submissions[output.request.request_id]
            submission.outputs.append(output)
            if output.finished:
                submission.num_unfinished -= 1
                del self._submissions[output.request.request_id]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C take effect only where the yielded function is called, so that no step is torn in the middle.

    Only in the main thread, and only where the handler is Python's own; a second Ctrl-C interrupts at once.
    """
    pending = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
