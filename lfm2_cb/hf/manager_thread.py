"""The manager's thread: drives the engine's loop, between pauses, over weights that may change, until told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn
from transformers.utils import logging

from ..engine.engine import Engine, StepOutput
from ..engine.loop import EngineLoop
from .stock_manager import ThreadStatus

logger = logging.get_logger("transformers.lfm2_cb")


class GenerationThread(threading.Thread):
    """Drives a loop while there is work, and sleeps while there is none.

    Args:
        loop: whose engine it runs, as any other driver would.
        model: whose weights their owner may change in place; the engine's own, or a stock model that shares them.
        status: by which others ask for a pause or the end.
        changed: held while requests are added, so that none comes between its last look and its end.
        wake_up: set by whoever has something for it.
        deliver: called with what each step did.
        on_end: called at the end, with what ended it, if nobody asked for it.
    """

    def __init__(
        self,
        loop: EngineLoop,
        model: nn.Module,
        status: ThreadStatus,
        changed: threading.Condition,
        wake_up: threading.Event,
        deliver: Callable[[list[StepOutput]], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(name="lfm2_cb", daemon=True)
        self._loop, self._model, self._status = loop, model, status
        self._changed, self._wake_up, self._deliver, self._on_end = changed, wake_up, deliver, on_end
        self._version, self._was_idle = -1, True  # of the weights when the engine last ran; whether it is idle

    def run(self) -> None:
        model = self._loop.engine.runner.model
        if model.device.type == "cuda" and model.device.index is not None:
            torch.cuda.set_device(model.device)
        in_training = [module for module in model.modules() if module.training]
        model.eval()
        error: BaseException | None = None
        try:
            while self._has_something_to_do():
                outputs = self._loop.drive_once(self._before_step)
                self._was_idle = not self._loop.has_work  # before anybody hears of it, and changes weights
                self._deliver(outputs)
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
        """Hold while somebody pauses, and see whether weights have changed since the engine was last idle."""
        engine = self._loop.engine
        if self._status.is_pause_requested():
            self._status.pause_and_wait()
            forget_cached(engine)
        if self._was_idle and (version := weights_version(self._model, engine.runner.model)) != self._version:
            forget_cached(engine)
            self._version = version


def weights_version(*models: nn.Module) -> int:
    """A number that changes with every in-place write to a parameter of these models.

    (Writes through `.data` leave no trace: `pause()` and a new session drop what is cached in any case.)
    """
    return sum(parameter._version for model in set(models) for parameter in model.parameters())


def forget_cached(engine: Engine) -> None:
    """Let no request reuse what was computed so far: the weights may have changed. Call between two steps."""
    for request in engine.scheduler.running:
        request.use_prefix_cache = False  # what it computes from now on rests on the old
    engine.scheduler.cache.clear()
