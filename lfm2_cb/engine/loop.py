"""EngineLoop: lets any number of threads share one engine; it starts its own thread only if none of them waits.

A waiting thread runs the engine's steps itself until its result is there; if another thread is already running them,
it sleeps until that thread has finished a step. So `generate()` runs in the caller's thread, and no thread is left at
exit. `submit()` without waiting starts a thread that ends with the work; at interpreter exit its unfinished requests
are cancelled first, because a thread that dies inside a step would crash the process.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from transformers.utils import logging

from ..scheduling.request import FinishReason, Request
from .engine import Engine, StepOutput

logger = logging.get_logger("transformers.lfm2_cb")

#: how long the interpreter's exit waits for a step under way
EXIT_SECONDS = 30.0


class ClosedError(RuntimeError):
    """The generator was closed."""


class ForkedError(RuntimeError):
    """The generator belongs to the process that this one was forked from, with its threads and locks."""


class BrokenError(RuntimeError):
    """A step failed and may have left the cache inconsistent: the generator accepts no more requests."""


class ReentrantError(RuntimeError):
    """Something that runs inside a step (a logits processor, a stopping criterion) waited for the engine."""


class Submission:
    """Requests submitted together, and their outputs that have not been read yet.

    Some may have ended before they were submitted, with an error.
    """

    def __init__(self, requests: list[Request], keep_outputs: bool = True) -> None:
        self.requests, self.keep_outputs = requests, keep_outputs
        self.members = [r for request in requests for r in (request, *request.forks)]
        self.outputs = deque(StepOutput(member, [], True) for member in self.members if member.is_finished)
        self.num_unfinished = len(self.members) - len(self.outputs)

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0


class EngineLoop:
    """Thread-safe access to an engine: submit, wait, cancel, close.

    An error that a step raises, and that the engine could not attribute to one request, ends all running requests with
    that error; waiting requests continue. If some blocks or slots are not free after that, or nothing was running, all
    requests end with the error and later calls raise `BrokenError`, so that no caller waits for ever.
    In a forked child calls raise `ForkedError` at once, and `close` does nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._driver: int | None = None  # ident of the thread that runs a step now
        self._submissions: dict[int, Submission] = {}  # by request id, of the unfinished
        self._background: threading.Thread | None = None
        self._closed = False
        self._broken_by: BaseException | None = None
        self._process_id = os.getpid()
        _loops.add(self)

    @property
    def broken_by(self) -> BaseException | None:
        """What has made the engine unusable."""
        return self._broken_by

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._broken_by is None and self.engine.has_unfinished

    def submit(self, requests: list[Request], keep_outputs: bool = True) -> Submission:
        """Queue requests (and their forks) all together.

        Args: keep_outputs: for callers that read the submission's `outputs`; a driver gets them from its steps.
        Raises: ClosedError; BrokenError; ForkedError; ModelChanged.
        """
        self.check_process()
        self.engine.check_model()
        submission = Submission(requests, keep_outputs)
        with self._changed:
            if self._closed:
                raise ClosedError("this ContinuousBatchingGenerator is closed")
            if self._broken_by is not None:
                message = f"a failed step left this generator unusable ({self._broken_by!r}): make a new one"
                raise BrokenError(message) from self._broken_by
            for member in submission.members:
                if not member.is_finished:
                    self._submissions[member.request_id] = submission
            self.engine.add_all([request for request in requests if not request.is_finished])
            self._changed.notify_all()
        return submission

    def cancel(self, requests: list[Request]) -> None:
        """End requests before the next step, wherever they are. They then finish as "cancelled"."""
        for request in requests:
            if not request.is_finished:
                self.engine.cancel(request)

    def abandon(self, submission: Submission) -> None:
        """Cancel what is unfinished of a submission and wait for that, where this thread can wait."""
        self.cancel(submission.members)
        if self._process_id == os.getpid() and self._driver != threading.get_ident():
            self.wait(lambda: submission.is_finished)

    def wait(self, done: Callable[[], bool], timeout: float | None = None) -> bool:
        """Drive, or sleep while another drives, until `done()`.

        Returns: whether it is done; False after `timeout` seconds (a step under way is finished first).
        Raises: ForkedError; ReentrantError. What `done` raises.
        """
        self.check_process()
        self.check_reentrance()
        deadline = None if timeout is None else time.monotonic() + timeout

        def may_drive() -> bool:
            while self._driver is not None and not done():
                if not self._changed.wait(_left(deadline)):
                    return False
            return not done() and _left(deadline) != 0 and self.has_work  # without work it will not happen

        while self._drive(may_drive) is not None:
            pass
        return done()

    def drive_once(self, before_step: Callable[[], None] | None = None) -> list[StepOutput]:
        """Run one step in this thread, once no other thread drives; other waiters and readers are notified as usual.

        Args:
            before_step: called between two steps, also where there is nothing to do. It may take its time (others
                wait); what it raises is a fault of the step.
        Returns: what the step did, to whomever.
        Raises: ForkedError; ReentrantError.
        """
        self.check_process()
        self.check_reentrance()

        def may_drive() -> bool:
            while self._driver is not None:
                self._changed.wait()
            return True

        return self._drive(may_drive, before_step) or []

    def _drive(
        self, may_drive: Callable[[], bool], before_step: Callable[[], None] | None = None
    ) -> list[StepOutput] | None:
        """Run a step where `may_drive()`, which is asked under the lock. None: it may not."""
        me = threading.get_ident()
        outputs: list[StepOutput] = []
        try:
            with self._changed:
                if not may_drive():
                    return None
                self._driver = me
            if before_step is not None:
                before_step()
            if self.has_work:
                outputs = self.engine.step() if before_step is None else self.engine.step(may_overlap=False)
        except BaseException as error:
            if self._driver != me:
                raise  # no step was under way
            with self._changed:
                outputs = self._fail_step(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self._driver == me:
                with self._changed:
                    self._driver = None  # first; others can see it only once the lock is free
                    self._changed.notify_all()
                    self._dispatch(outputs)
        return outputs

    def run_in_background(self) -> None:
        """Make sure that a thread drives until all work is done; it then ends."""
        with self._changed:
            if self._closed or (self._background is not None and self._background.is_alive()):
                return
            self._background = threading.Thread(target=self._drive_until_idle, name="lfm2_cb-engine", daemon=True)
            self._background.start()

    def close(self, timeout: float | None = None) -> None:
        """Cancel all that is unfinished, and wait (`timeout` seconds at most) for it to have ended.

        Raises: ReentrantError: called from inside a step.
        """
        if self._process_id != os.getpid():
            return
        with self._changed:
            self._closed = True
            unfinished = [m for s in set(self._submissions.values()) for m in s.members]
        self.cancel(unfinished)
        self.wait(lambda: not self._submissions, timeout)
        background = self._background
        if background is not None and background is not threading.current_thread():
            background.join(timeout)
        self.engine.end_trace()

    def _drive_until_idle(self) -> None:
        while True:
            self.wait(lambda: not self.has_work)
            with self._changed:  # nothing can be submitted between looking and leaving
                if not self.has_work:
                    self._background = None
                    return

    def _fail_step(self, error: BaseException) -> list[StepOutput]:
        """End what was running with `error`; waiting ones continue, unless the engine may be inconsistent."""
        scheduler = self.engine.scheduler
        running, doubt = list(scheduler.running), None
        try:
            for request in running:
                scheduler.finish(request, FinishReason.ERROR)
                self.engine.speculation.forget(request)
            scheduler.check_integrity()
        except Exception as found:
            doubt = found
        members = [m for s in set(self._submissions.values()) for m in s.members if m.request_id in self._submissions]
        if doubt is not None or not running:  # nothing running: it was not the step's rows, and would happen again
            self._broken_by = doubt or error
        else:  # also those that ended in this step, whose last tokens were not reported
            members = [member for member in members if member.is_finished]
        logger.error(f"lfm2_cb: a step failed outside the network, ending {len(members)} requests: {error!r}")
        for member in members:
            member.fail(error)
        return [StepOutput(member, [], True) for member in members]

    def check_reentrance(self) -> None:
        """Raises: ReentrantError: this thread is inside a step."""
        if self._driver == threading.get_ident():
            raise ReentrantError("called inside a step of the generator that it waits for: this would deadlock")

    def check_process(self) -> None:
        """Raises: ForkedError: this process is not the one that made the loop."""
        if self._process_id != os.getpid():
            raise ForkedError(
                f"this ContinuousBatchingGenerator was made in process {self._process_id}, before a fork: start "
                'processes with the "spawn" method, and make a generator in each'
            )

    def _dispatch(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            submission = self._submissions[output.request.request_id]
            if submission.keep_outputs:
                submission.outputs.append(output)
            if output.finished:
                submission.num_unfinished -= 1
                del self._submissions[output.request.request_id]


#: every loop of this process that is alive
_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for loop in list(_loops):
        loop.close(EXIT_SECONDS)


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
