"""What the manager's thread needs beside the engine: when to stop and pause, and weights that change under it."""

from __future__ import annotations

from torch import nn
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from ..engine.engine import Engine


class ThreadStatus(BackgroundThreadStatus):
    """Stock's, but a pause that was given up before it began does not park the thread for ever."""

    def pause_and_wait(self) -> None:
        with self._condition:
            self._paused = self._pauses_requested > 0
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._paused)


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
