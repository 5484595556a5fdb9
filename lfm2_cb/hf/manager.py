"""Stock's continuous-batching manager over our engine. Models create one through the methods in `methods.py`."""

from __future__ import annotations

import copy
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils import logging

from ..adapters.live import active_adapter, adapters_of, is_peft, merge_check, stock_within, wrapped_stock
from ..engine.engine import StepOutput
from ..generator import ContinuousBatchingGenerator
from ..loading import as_lfm2_cb
from ..requests.builder import sequence_seed
from ..requests.options import GenerateOptions
from ..requests.prompts import PromptError, read_prompts
from .manager_config import check_config, engine_config
from .manager_outputs import (
    BatchProcessor,
    CbGenerationOutput,
    LiveRequest,
    OutputRouter,
    ProcessedLogprobs,
    SchedulerView,
)
from .manager_thread import GenerationThread
from .stock_manager import ThreadStatus, keep_manager

logger = logging.get_logger("transformers.lfm2_cb")

#: seconds that `add_request` waits for a place in a full queue, as in stock
QUEUE_TIMEOUT = 10


class Lfm2CbManager(ContinuousBatchingManager):
    """Stock's manager in name, type and behaviour; our engine does the work, driven through its loop by a thread.

    Beyond stock: each request may have any option of `generate()`; a cancelled request gets a last output; the results
    of one request can be waited for without reading those of others; what is refused raises an error.

    Args:
        model: one of ours or a live stock LFM2, whose weights are shared; or one with PEFT's adapters, in a
            `PeftModel` or by itself: these are copied at each start, and a call without `adapter=` runs
            with the one that is active, as the model's own `generate()` does.
        generation_config: defaults of requests; resolved as `generate()` does, with the model's
            defaults (stock's manager leaves these out).
        continuous_batching_config: see `manager_config`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> None:
        self._peft = model if is_peft(model) else None
        self.keeper = model if self._peft is None else wrapped_stock(model)  # which keeps this manager between calls
        self.model = model if self._peft is None else stock_within(model)
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config or ContinuousBatchingConfig()
        check_config(self.continuous_batching_config)
        seed = self.continuous_batching_config.seed
        self._seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.background_thread_status = ThreadStatus()
        self.batch_processor: BatchProcessor | None = None
        self.warmed_up, self.is_tp_driver = False, True
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self._generator: ContinuousBatchingGenerator | None = None
        self._placed: tuple[torch.dtype, torch.device] | None = None  # where the generator's cache is
        self._generation_thread: GenerationThread | None = None
        self._is_destroyed = False
        self._wake_up_loop = threading.Event()
        self._changed = threading.Condition()  # guards all below; notified of every output and every end
        self.output_router = OutputRouter(self._changed)
        self._live: dict[str, LiveRequest] = {}
        self._names: dict[int, str] = {}  # engine's request id → its user's
        self._num_named, self._num_calls = itertools.count(), itertools.count()

    # The engine

    def _prepare(self) -> ContinuousBatchingGenerator:
        """Our generator over the model: a new one if the model was moved or replaced."""
        with self._changed:
            ours = as_lfm2_cb(self.model)
            known = self._generator
            if known is not None:
                if known.model is ours and self._placed == (ours.dtype, ours.device):
                    return known
                if self._live or self.is_running():
                    raise RuntimeError("the model was moved or replaced while the manager runs: stop it first")
            options = engine_config(self.continuous_batching_config, ours)
            self._generator = ContinuousBatchingGenerator(ours, **vars(options), adapters=self._given_adapters)
            self._take_live_adapters(self._generator)
            self._placed = (ours.dtype, ours.device)
            engine = self._generator.engine
            self.batch_processor = BatchProcessor(engine, SchedulerView(engine, self._live))
            return self._generator

    @property
    def _given_adapters(self) -> dict[str, Any]:
        """Those of the configuration, where it is one of ours."""
        return getattr(self.continuous_batching_config, "adapters", None) or {}

    def _take_live_adapters(self, generator: ContinuousBatchingGenerator) -> None:
        """Copy the model's own adapters, except those whose names the configuration gives to others."""
        if self._peft is not None:
            generator.engine.checks[:] = [merge_check(self._peft)]
            for name, source in adapters_of(self._peft).items():
                if name not in self._given_adapters:
                    generator.engine.load_adapter(name, source)

    @property
    def generator(self) -> ContinuousBatchingGenerator:
        """The generator, for what stock's manager has no methods for: adapters."""
        return self._prepare()

    def warmup(self) -> None:
        """Build the engine and run a token through it: whatever is built on first use is then there."""
        generator = self._prepare()
        if not self.is_running() and not generator.engine.has_unfinished:
            generator.generate([[0]], max_new_tokens=1, do_sample=False, num_return_sequences=1, seed=0)
        self.warmed_up = True

    # Start, stop, pause

    def is_running(self) -> bool:
        return self._generation_thread is not None and self._generation_thread.is_alive()

    def start(self) -> None:
        """Start the thread that runs the engine. Weights may have changed since it last ran.

        Raises: RuntimeError: destroyed.
        """
        if self._is_destroyed:
            raise RuntimeError("this manager was destroyed; make a new one")
        if self.is_running():
            logger.warning("Manager thread is already running.")
            return
        self.background_thread_status.clear()
        known, generator = self._generator, self._prepare()
        if generator is known:  # a new one has just taken them
            self._take_live_adapters(generator)
        loop = generator.loop
        loop.engine.forget_cached()
        self._generation_thread = GenerationThread(
            loop,
            self.background_thread_status,
            self._changed,
            self._wake_up_loop,
            deliver=self._deliver,
            on_end=self._end,
        )
        self._generation_thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread once all requests are done, or with `hard_stop` after the present step, failing the rest.

        Args:
            block: wait for it, at most `timeout` seconds.
            keep_for_next_session: keep the engine and its memory, and this manager on the model.
        Raises: RuntimeError: from inside `pause()`.
        """
        if self._generation_thread is None:
            logger.warning("Manager not started.")
            return
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise RuntimeError("Cannot stop the manager from inside a pause: leave the `pause` context first.")
        if status.local_status != status.STOPPED:
            status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP, global_rank=0)
        self._wake_up_loop.set()
        if block:
            self.join(perf_counter(), timeout)
        if keep_for_next_session:
            keep_manager(self.keeper, self)
        elif self._generation_thread is None:
            self._generator = self.batch_processor = None
            self.warmed_up = False

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        if self._generation_thread is None:
            return
        self._generation_thread.join(timeout)
        if self._generation_thread.is_alive():
            logger.warning(f"Generation thread did not exit after join timeout ({timeout}).")
        else:
            self._generation_thread = None

    def destroy(self) -> None:
        """Stop for good. Calling it again does nothing."""
        if self.is_running():
            self.stop(block=True)
        self._is_destroyed = True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the engine between two steps, to change the weights in place. Requests under way go on afterwards,
        on what they have computed; nothing computed before is reused for others.

        Raises: RuntimeError: not running.
        """
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        self.background_thread_status.acquire_pause(self._wake_up_loop)
        try:
            yield
        finally:
            self.background_thread_status.release_pause()

    # Requests in

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **generate_kwargs: Any,
    ) -> str:
        """Queue one prompt.

        Args:
            request_id: made up where absent. Further returned sequences are called `f"{request_id}__child#{i}"`.
            streaming: give an output after every step (all tokens so far in each), not at the end only.
            record_timestamps: note `time.perf_counter()` of each token.
            generate_kwargs: any option of `generate()`, for this request; `seed`, `logprobs=k`, `tokenizer` (for
                stop strings) and a `generation_config` of its own among them.
        Returns: its id.
        Raises:
            PromptError, UnsupportedOptionError, RequestTooLarge. ValueError: the id is taken.
            queue.Full: `max_queue_size` requests are waiting, and still were 10 s later.
            RuntimeError: stopping or dead.
        """
        kwargs = {**generate_kwargs, "max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        token_ids = read_prompts([input_ids], None)
        names = [self._new_name() if request_id is None else request_id]
        return self._add(names, token_ids, kwargs, streaming, record_timestamps)[0][-1]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **generate_kwargs: Any,
    ) -> list[str]:
        """Queue prompts all together; arguments as in `add_request`. Returns: their ids, in order."""
        groups = self.add_groups(inputs, max_new_tokens, streaming, record_timestamps, **generate_kwargs)
        return [group[-1] for group in groups]

    def add_groups(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **generate_kwargs: Any,
    ) -> list[list[str]]:
        """As `add_requests`. Returns: the ids of every sequence of each prompt, its own id last."""
        token_ids = read_prompts(inputs, None)
        kwargs = {**generate_kwargs, "max_new_tokens": max_new_tokens}
        return self._add([self._new_name() for _ in token_ids], token_ids, kwargs, streaming, record_timestamps)

    def _new_name(self) -> str:
        return f"req_{next(self._num_named)}"

    def _add(
        self,
        names: list[str],
        token_ids: list[list[int] | PromptError],
        kwargs: dict[str, Any],
        streaming: bool,
        timestamps: bool,
    ) -> list[list[str]]:
        self._check_open()
        generator = self._prepare()
        options = self._resolve(generator, kwargs, len(token_ids))
        requests = generator.builder.build(token_ids, options)
        groups = [
            {f"{name}__child#{i}": child for i, child in enumerate(request.forks)} | {name: request}
            for name, request in zip(names, requests, strict=True)
        ]
        live = {}
        for name, request in (member for group in groups for member in group.items()):
            if self.continuous_batching_config.return_logprobs:
                request.params.trace = ProcessedLogprobs(options.call.logprobs)
            live[name] = LiveRequest(name, request, streaming, [] if timestamps else None)
        with self._changed:
            self._wait_for_place()
            self._check_open()
            if taken := live.keys() & self._live.keys():
                raise ValueError(f"these request ids are already in use: {', '.join(sorted(taken))}")
            generator.loop.submit(requests, keep_outputs=False)
            self._live.update(live)
            self._names.update({entry.request.request_id: name for name, entry in live.items()})
            self._deliver([StepOutput(e.request, [], True) for e in live.values() if e.request.is_finished])
        self._wake_up_loop.set()
        return [list(group) for group in groups]

    def _check_open(self) -> None:
        if self._generator is not None:
            self._generator.loop.check_process()
        if denial := self.background_thread_status.can_accept_new_requests():
            raise RuntimeError(denial) from self.background_thread_status.fatal_error

    def _resolve(
        self, generator: ContinuousBatchingGenerator, kwargs: dict[str, Any], num_prompts: int
    ) -> GenerateOptions:
        given = {name: value for name, value in kwargs.items() if value is not None}
        if self._peft is not None and "adapter" not in kwargs and (active := active_adapter(self._peft)) is not None:
            given["adapter"] = active
        config = copy.copy(given.pop("generation_config", self.generation_config))
        config.cache_implementation = None  # "paged" is how generate() is asked to come here, and the cache is ours
        given.pop("cache_implementation", None)
        seed = sequence_seed(self._seed, next(self._num_calls), 0)  # unless the request has one of its own
        return generator.resolve(config, {"seed": seed, **given}, num_prompts, interface="continuous batching")

    def _wait_for_place(self) -> None:
        size, scheduler = self.continuous_batching_config.max_queue_size, self.batch_processor.scheduler  # type: ignore[union-attr]
        if size and not self._changed.wait_for(lambda: len(scheduler.waiting_requests) < size, QUEUE_TIMEOUT):
            raise queue.Full(f"{size} requests are waiting (max_queue_size)")

    def cancel_request(self, request_id: str) -> None:
        """End a request after the present step; its last output then has the error "cancelled"."""
        with self._changed:
            entry = self._live.get(request_id)
            if entry is not None and self._generator is not None:
                self._generator.loop.cancel([entry.request])
        self._wake_up_loop.set()

    # Outputs out

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> CbGenerationOutput | None:
        """Wait for the next output, of one request or of any.

        Returns: None after `timeout` seconds, or where none will come: not running, or no such request.
        Raises: ReentrantError: called inside a step, by a logits processor or stopping criterion. ForkedError.
        """
        if self._generator is not None:
            self._generator.loop.check_process()
            self._generator.loop.check_reentrance()

        def is_over() -> bool:
            return self._is_silent() or (request_id is not None and request_id not in self._live)

        return self.output_router.get(request_id, is_over, timeout)

    def _is_silent(self) -> bool:
        status = self.background_thread_status
        return self._generation_thread is None or status.local_status == status.STOPPED

    def __iter__(self) -> Iterator[CbGenerationOutput]:
        """Outputs as they come, until the manager is stopped and all are out."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[CbGenerationOutput]:
        """Outputs of one request until its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Have `callback(output)` called on the running event loop for every output, early ones included."""
        self.output_router.register(request_id, callback)

    # What the thread calls

    def _deliver(self, steps: list[StepOutput]) -> None:
        with self._changed:
            now, outputs = perf_counter(), []
            for step in steps:
                name = self._names.get(step.request.request_id)
                if name is None:  # of the warm-up
                    continue
                entry = self._live[name]
                if entry.timestamps is not None:
                    entry.timestamps += [now] * len(step.new_token_ids)
                if step.finished:
                    del self._live[entry.request_id], self._names[step.request.request_id]
                if step.finished or entry.streaming:
                    outputs.append(entry.output())
            self.output_router.deliver_batch(outputs)
            self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        """Fail the requests that are left, and mark the thread as ended."""
        status, loop = self.background_thread_status, self._generator.loop  # type: ignore[union-attr]
        with self._changed:
            left = [entry.request for entry in self._live.values()]
        reason = error or RuntimeError("the manager was stopped before this request was done")
        for request in left:
            request.error = request.error or reason
        loop.cancel(left)
        self._deliver(loop.drive_once())
        with self._changed:
            for entry in list(self._live.values()):  # the engine is broken, or the thread was torn out of a step
                entry.request.fail(entry.request.error or reason)
                self._deliver([StepOutput(entry.request, [], True)])
            if isinstance(error, Exception):
                status.record_fatal_error(error)
            status.mark_as_stopped()
            self._changed.notify_all()
