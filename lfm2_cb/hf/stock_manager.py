"""What the manager inherits from stock's. All private names of stock's continuous batching are used here only."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus


class ThreadStatus(BackgroundThreadStatus):
    """Stock's, but a pause that was cancelled before it began does not block the thread for ever."""

    def pause_and_wait(self) -> None:
        with self._condition:
            self._paused = self._pauses_requested > 0
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._paused)


def kept_manager(model: PreTrainedModel) -> Any:
    """The manager that a model keeps between calls, where stock's looks for it; None: none."""
    return getattr(model, "_cached_continuous_batching_manager", None)


def keep_manager(model: PreTrainedModel, manager: Any) -> None:
    """Keep this manager on the model; None: keep none."""
    if manager is not None:
        model._cached_continuous_batching_manager = manager
    elif kept_manager(model) is not None:
        del model._cached_continuous_batching_manager
