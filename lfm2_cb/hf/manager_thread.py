"""The manager's thread: drives the engine's loop, between pauses, until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from transformers.utils import logging

from ..engine.engine import StepOutput
from ..engine.loop import EngineLoop
from .stock_manager import ThreadStatus

logger = logging.get_logger("transformers.lfm2_cb")


class GenerationThread(threading.Thread):
    """Drives a loop while there is work, and sleeps while there is none.

    Args:
        loop: whose engine it runs, as any other driver would.
        status: by which others ask for a pause or the end.
        changed: held while requests are added, so that none comes between its last look and its end.
        wake_up: set to wake it when there is work, or a stop was requested.
        deliver: called with the outputs of each step.
        on_end: called at an end that was not requested, with the error that caused it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        status: ThreadStatus,
        changed: threading.Condition,
        wake_up: threading.Event,
        deliver: Callable[[list[StepOutput]], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(name="lfm2_cb", daemon=True)
        self._loop, self._status = loop, status
        self._changed, self._wake_up, self._deliver, self._on_end = changed, wake_up, deliver, on_end

    def run(self) -> None:
        model = self._loop.engine.runner.model
        if model.device.type == "cuda" and model.device.index is not None:
            torch.cuda.set_device(model.device)
        in_training = [module for module in model.modules() if module.training]
        model.eval()
        error: BaseException | None = None
        try:
            while self._has_something_to_do():
                self._deliver(self._loop.drive_once(self._before_step))
            error = self._loop.broken_by
        except Exception as caught:  # what a request or a step gets wrong, engine and loop deal with; this is a bug
            logger.error("lfm2_cb: the generation thread died", exc_info=True)
            error = caught
        finally:
            for module in in_training:
                module.training = True
            self._on_end(error)

    def _has_something_to_do(self) -> bool:
        """Wait for it. Returns: False once it is time to end."""
        status = self._status
        while self._loop.broken_by is None:
            if status.is_pause_requested():
                return True
            with self._changed:
                stop, busy = status.local_status, self._loop.has_work
            if stop == status.HARD_STOP or (stop == status.FLUSH_AND_STOP and not busy):
                return False
            if busy:
                return True
            self._wake_up.wait()
            self._wake_up.clear()
        return False

    def _before_step(self) -> None:
        """Wait while paused. (The engine notices other changes of weights when requests are added.)"""
        if self._status.is_pause_requested():
            self._status.pause_and_wait()
            self._loop.engine.forget_cached()  # a write through `.data` leaves no trace
