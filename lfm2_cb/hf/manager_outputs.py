"""The manager's outputs, in stock's types, and how they are delivered."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..engine.engine import Engine
from ..engine.sampler import TokenLogprobs, Trace
from ..scheduling.request import FinishReason, Request
from ..scheduling.request import RequestStatus as EngineStatus

Handler = Callable[[Any], None]


@dataclass
class CbGenerationOutput(GenerationOutput):
    """Stock's output, and what stock does not tell.

    Attributes:
        finish_reason: "stop", "length", "cancelled" or "error"; None while the request runs.
        top_logprobs: one entry a token, where the request asked with `logprobs=k`.
        num_cached_tokens: of the prompt, not computed, as the prefix cache held them.
    """

    finish_reason: FinishReason | None = None
    top_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


class ProcessedLogprobs(Trace):
    """Keeps each token's log-probability under the processed scores, which is what stock's `return_logprobs` means."""

    def __init__(self, num_logprobs: int | None = None) -> None:
        super().__init__(num_logprobs=num_logprobs)
        self.processed: list[float] = []

    def add(self, token: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        super().add(token, logits, scores)
        self.processed.append(float(scores.float().log_softmax(-1)[token]))


@dataclass
class LiveRequest:
    """An unfinished request of the manager: the engine's, under the name its user knows."""

    request_id: str
    request: Request
    streaming: bool
    timestamps: list[float] | None

    def output(self) -> CbGenerationOutput:
        request, trace = self.request, self.request.params.trace
        metrics = request.metrics
        failed = request.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)
        return CbGenerationOutput(
            request_id=self.request_id,
            prompt_ids=request.prompt_token_ids,
            generated_tokens=request.output_token_ids,
            logprobs=list(trace.processed) if isinstance(trace, ProcessedLogprobs) else [],
            error=None if not failed else str(request.error or request.finish_reason),
            status=status_of(request),
            created_time=metrics.arrival_time,
            lifespan=(metrics.first_scheduled_time or -1, metrics.finish_time or -1),
            timestamps=None if self.timestamps is None else list(self.timestamps),
            finish_reason=request.finish_reason,
            top_logprobs=None if trace is None or trace.num_logprobs is None else list(trace.logprobs),
            num_cached_tokens=metrics.num_cached_tokens,
        )


def status_of(request: Request) -> RequestStatus:
    """Stock's status. A cancelled request has failed, with the error "cancelled"."""
    if request.is_finished:
        ended_well = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return RequestStatus.FINISHED if ended_well else RequestStatus.FAILED
    if request.status is EngineStatus.WAITING:
        return RequestStatus.PENDING
    return RequestStatus.DECODING if request.num_output_tokens else RequestStatus.PREFILLING


@dataclass
class SchedulerView:
    """What others look at in stock's scheduler: requests by their names."""

    engine: Engine
    live: dict[str, LiveRequest]

    def _those(self, is_wanted: Callable[[Request], bool]) -> dict[str, Request]:
        return {name: entry.request for name, entry in list(self.live.items()) if is_wanted(entry.request)}

    @property
    def active_requests(self) -> dict[str, Request]:
        return self._those(lambda request: request.status is EngineStatus.RUNNING)

    @property
    def waiting_requests(self) -> dict[str, Request]:
        return self._those(lambda request: request.status is EngineStatus.WAITING)

    def has_pending_requests(self) -> bool:
        return self.engine.has_unfinished


@dataclass
class BatchProcessor:
    """What others look at in stock's batch processor."""

    engine: Engine
    scheduler: SchedulerView = field(repr=False)


class OutputRouter:
    """Delivers outputs: to a handler on an event loop, or to `get`.

    Args: changed: guards everything here, and is notified of every output.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self._undelivered: dict[str, deque[CbGenerationOutput]] = {}  # by request
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}

    def deliver_batch(self, outputs: Sequence[CbGenerationOutput]) -> None:
        """Give outputs to their handlers, or keep them for `get`. Called with `changed` held."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Handler, CbGenerationOutput]]] = {}
        for output in outputs:
            name = output.request_id
            callback, loop = self._handlers.get(name, (None, None))
            if output.is_finished():
                self._handlers.pop(name, None)
            if callback is None or loop is None:
                self._undelivered.setdefault(name, deque()).append(output)
            else:
                calls.setdefault(loop, []).append((callback, output))
        for loop, batch in calls.items():
            with suppress(RuntimeError):  # the handlers' event loop is closed, so there is no reader
                loop.call_soon_threadsafe(_call_all, loop, batch)

    def register(self, name: str, callback: Handler) -> None:
        """Have `callback(output)` called on the running event loop for every output, early ones included."""
        loop = asyncio.get_running_loop()
        with self.changed:
            early = self._undelivered.pop(name, deque())
            if not (early and early[-1].is_finished()):
                self._handlers[name] = (callback, loop)
            for output in early:
                loop.call_soon_threadsafe(callback, output)

    def get(self, name: str | None, is_over: Callable[[], bool], timeout: float | None) -> CbGenerationOutput | None:
        """Wait for the next output of one request, or of any; None after `timeout` seconds or once `is_over()`."""

        def is_there() -> bool:
            return bool(self._undelivered) if name is None else name in self._undelivered

        with self.changed:
            self.changed.wait_for(lambda: is_there() or is_over(), timeout)
            if not is_there():
                return None
            key = next(iter(self._undelivered)) if name is None else name
            output = self._undelivered[key].popleft()
            if not self._undelivered[key]:
                del self._undelivered[key]
            return output


def _call_all(loop: asyncio.AbstractEventLoop, batch: list[tuple[Handler, CbGenerationOutput]]) -> None:
    """One wake-up of the event loop for all of a step; a handler that raises does so alone."""
    for callback, output in batch:
        try:
            callback(output)
        except Exception as error:
            loop.call_exception_handler({"message": "lfm2_cb: a result handler failed", "exception": error})
