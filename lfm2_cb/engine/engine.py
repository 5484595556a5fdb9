"""Engine: token ids in, token ids out, one step after another. Knows no tokenizer and no `generate()`."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging

from ..adapters.pool import MAX_PLACES, AdapterPool
from ..model.hybrid_cache import CachePlan
from ..model.modeling import Lfm2CbForCausalLM
from ..model.weight_bytes import WeightBytes
from ..scheduling.adapters import AdapterPlaces
from ..scheduling.cache_manager import CacheManager
from ..scheduling.policies import make_policy
from ..scheduling.request import FinishReason, Request
from ..scheduling.scheduler import ScheduledRow, Scheduler
from .assistant import AssistantModel
from .choices import TokenChoice, choose, choose_one, extend
from .chunks import ChunkStore
from .config import EngineConfig
from .drafting import Drafter, DraftTracker, PromptLookup, Speculation, StepTimes
from .memory_budget import cache_budget
from .overlap import LaunchedStep, Overlap
from .runner import ModelRunner
from .tracing import Trace

logger = logging.get_logger("transformers.lfm2_cb")


@dataclass(slots=True)
class StepOutput:
    """What one step did for one request: tokens it gained (maybe none), and whether it has ended."""

    request: Request
    new_token_ids: list[int]
    finished: bool


class Engine:
    """Runs requests to their end. One thread at a time may call `step`; `add` and `cancel` may come from any thread.

    A request that fails alone (a processor raises, its logits are NaN) ends with `FinishReason.ERROR` and its
    `error`; the others go on. A step that fails as a whole (the forward raises) ends all that were running so, and
    the engine serves the next.
    """

    def __init__(self, model: Lfm2CbForCausalLM, config: EngineConfig) -> None:
        config = replace(config, cache_memory=cache_budget(config.cache_memory, model.device))
        self.config = config
        self.plan = CachePlan.from_budget(
            model.config,
            config.cache_bytes,
            block_size=config.block_size,
            num_slots=min(config.max_sequences, config.max_batch_tokens),
            dtype=model.dtype,
            checkpoints=config.prefix_caching,
            cache_dtype=config.cache_dtype,
        )
        cache_manager = CacheManager(
            self.plan.num_blocks, config.block_size, self.plan.num_slots, config.prefix_caching
        )
        self.speculation = Speculation(StepTimes(WeightBytes(model)))
        self.scheduler = Scheduler(
            cache_manager,
            make_policy(config.policy),
            config.max_batch_tokens,
            config.max_sequences,
            decode_budget=self._decode_budget,
            adapters=AdapterPlaces(config.adapter_bytes, MAX_PLACES),
        )
        self.adapters = AdapterPool(model, MAX_PLACES)
        self.runner = ModelRunner(model, self.plan, config.kernels, self.adapters)
        self.overlap = Overlap(self.runner, self.scheduler)
        #: called by `check_model`; each raises where the model must not be run
        self.checks: list[Callable[[], None]] = []
        self._drafters: dict[object, Drafter] = {}
        self._inbox: deque[list[Request]] = deque()
        self._cancelled: deque[Request] = deque()
        self._chunks: ChunkStore | None = None
        self._trace: Trace | None = None
        self.step_started: float | None = None  # when the step under way began, for watchdogs
        if config.trace is not None:
            self.start_trace(config.trace)

    def start_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the steps from now on do to a file; an earlier trace ends. Raises: OSError."""
        trace = Trace(path, time.perf_counter())
        self.end_trace()
        self._trace = trace

    def end_trace(self) -> None:
        """Finish the trace's file, if one is written. From any thread."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.close(time.perf_counter())

    @property
    def has_unfinished(self) -> bool:
        return bool(self._inbox or self._cancelled or self.scheduler.has_unfinished)

    def prompt_lookup(self, max_ngram: int = 3) -> Drafter:
        """The drafter that guesses by prompt lookup. Raises: ValueError."""
        if max_ngram not in self._drafters:
            self._drafters[max_ngram] = PromptLookup(max_ngram)
        return self._drafters[max_ngram]

    def assistant(self, model: Lfm2CbForCausalLM) -> Drafter:
        """The drafter that uses this model, kept until a call names another. Its cache takes a quarter of
        `cache_memory` in addition. Raises: ValueError: another vocabulary than the engine's model has."""
        known = self._drafters.get("assistant")
        if not isinstance(known, AssistantModel) or known.model is not model:
            ours, theirs = self.runner.model.config.vocab_size, model.config.vocab_size
            if ours != theirs:
                raise ValueError(
                    f"assistant_model has a vocabulary of {theirs} tokens, but must have the model's {ours}"
                )
            config = self.config
            known = self._drafters["assistant"] = AssistantModel(
                model,
                max_sequences=self.scheduler.max_sequences,
                max_batch_tokens=config.max_batch_tokens,
                cache_memory=config.cache_bytes // 4,
                block_size=config.block_size,
                kernels=config.kernels,
                cache_dtype=config.cache_dtype,
            )
            logger.info("lfm2_cb: assistant model, cache %s", known.plan)
        return known

    def check_fits(self, request: Request) -> None:
        """Raises: RequestTooLarge: it could never run, with the numbers."""
        self.scheduler.check_fits(request)

    def add(self, request: Request) -> None:
        """Queue one request; see `add_all`. Raises: RequestTooLarge; ModelChanged."""
        self.check_model()
        self.check_fits(request)
        self.add_all([request])

    def add_all(self, requests: list[Request]) -> None:
        """Queue requests (whose `params` are `SamplingParams`) with their forks, known to come together.

        They have passed `check_fits` (as `RequestBuilder` makes them): one that does not fit would wait for ever. And
        `check_model` has been called for them: the changes that it found are applied before they run.
        """
        now = time.perf_counter()
        wanted = {request.adapter for request in requests if request.adapter is not None}
        self.adapters.prefetch([adapter for adapter in wanted if adapter not in self.scheduler.adapters])
        for request in requests:
            for r in (request, *request.forks):
                r.metrics.arrival_time = now
                if self.config.drafting == "auto" and r.draft_tracker is None:
                    r.draft_tracker = DraftTracker(self.prompt_lookup())
        self._inbox.append(requests)

    def load_adapter(self, name: str, source: Any) -> None:
        """As `AdapterPool.load`. Raises: AdapterError; AdapterTooLarge."""
        self.adapters.load(name, source, self.scheduler.adapters.check_fits)

    def check_model(self) -> None:
        """Raises: ModelChanged: what was done to the model (or the assistant) cannot be followed. And what `checks`
        raise."""
        for check in self.checks:
            check()
        for runner in self._runners():
            runner.check_model()

    def cancel(self, request: Request) -> None:
        """End a request at the start of the next step, which reports it as finished."""
        self._cancelled.append(request)

    def step(self, may_overlap: bool = True) -> list[StepOutput]:
        """Run one step and report every request that gained tokens or ended.

        Args: may_overlap: the next step may be launched before this one's tokens are read, where the device computes
            by itself; it then has the weights of now.
        """
        self.step_started = time.perf_counter()
        try:
            return self._step(may_overlap)
        finally:
            self.step_started = None

    def _step(self, may_overlap: bool) -> list[StepOutput]:
        outputs = self._drain_inbox()
        start, launched = time.perf_counter(), self.overlap.take()
        if launched is not None:
            outputs += self._settle(launched, may_overlap)
            self._note_step(launched.rows, start)
            return outputs
        self.speculation.draft(self.scheduler.running)
        rows = self.scheduler.schedule()
        if changes := self.scheduler.adapters.take_changes():
            outputs += self._exchange_adapters(changes)
            rows = [row for row in rows if not row.request.is_finished]
        if not rows:
            self.runner.release()
            return outputs
        start = time.perf_counter()
        try:
            logits = self.runner.run(rows)
        except Exception as error:
            return outputs + self._fail_all(list(dict.fromkeys(row.request for row in rows)), error)
        launched = self.overlap.begin(rows, logits) if may_overlap else None
        outputs += self._advance(rows, logits) if launched is None else self._settle(launched, may_overlap)
        self._note_step(rows, start)
        return outputs

    def _note_step(self, rows: list[ScheduledRow], start: float) -> None:
        end = time.perf_counter()
        num_tokens, num_drafts = sum(row.num_tokens for row in rows), sum(row.num_drafts for row in rows)
        self.speculation.timed(num_tokens, num_drafts, end - start)
        if (trace := self._trace) is not None:
            trace.add_step(rows, start, end, self.scheduler, self.speculation.num_accepted)

    def _exchange_adapters(self, changes: dict[int, Any]) -> list[StepOutput]:
        """Load adapters into the places that they were given, after those there before are unloaded. If one cannot be
        loaded, only its requests end."""
        outputs, missing = [], {place: adapter for place, adapter in changes.items() if adapter is not None}
        for place in changes:
            self.adapters.clear(place)
        try:
            for place, adapter in list(missing.items()):
                try:
                    self.adapters.fill(place, adapter, self.runner.native)
                    del missing[place]
                except Exception as error:
                    for request in [r for r in self.scheduler.running if r.adapter is adapter]:
                        request.error = error
                        outputs.append(self._finish(request, [], FinishReason.ERROR))
        finally:
            self.adapters.return_spares()
            for adapter in missing.values():
                self.scheduler.adapters.drop(adapter)
        return outputs

    def _decode_budget(self) -> int | None:
        limit = self.config.max_step_seconds
        return None if limit is None or limit == math.inf else self.speculation.times.tokens_within(limit)

    def _drain_inbox(self) -> list[StepOutput]:
        if self._inbox:
            self._follow_model()
        outputs: list[StepOutput] = []
        while self._inbox:
            requests = self._inbox.popleft()
            self.scheduler.add_all(requests)
            for request in requests:
                if request.segments:
                    outputs += self._plan_reuse(request)
        while self._cancelled:
            request = self._cancelled.popleft()
            if not request.is_finished:
                outputs.append(self._finish(request, [], FinishReason.CANCELLED))
        return outputs

    def _plan_reuse(self, request: Request) -> list[StepOutput]:
        """Have the segments of a request's prompt computed, those that are not known yet."""
        if self._chunks is None:
            config = self.config
            sizes = config.block_size, config.max_batch_tokens, config.cache_bytes // 4
            self._chunks = ChunkStore(self.runner.model, self.runner.kernels, *sizes)
        try:
            self._chunks.plan(request)
        except Exception as error:
            return self._fail_all([request, *request.forks], error)
        return []

    def _runners(self) -> list[ModelRunner]:
        drafters = self._drafters.values()
        return [self.runner, *(d.runner for d in drafters if isinstance(d, AssistantModel))]

    def _follow_model(self) -> None:
        changed = [runner.follow_model() for runner in self._runners()]
        if changed[0]:
            self.adapters.follow_model(self.runner.native)
            self.forget_cached()

    def forget_cached(self) -> None:
        """Let no request reuse what was computed so far: the weights may have changed. Between two steps only."""
        for request in self.scheduler.running:
            request.use_prefix_cache = False  # what it computes from now on rests on the old
        self.scheduler.cache.clear()
        if self._chunks is not None:
            self._chunks.clear()

    def _advance(self, rows: list[ScheduledRow], logits: torch.Tensor) -> list[StepOutput]:
        """Choose tokens for the rows that are complete, and record what all of them computed."""
        choices = choose([row for row in rows if row.samples], logits, self.runner.kernels)
        num_accepted: dict[int, int] = {}
        forked: list[tuple[TokenChoice, torch.Tensor]] = []
        for i, row in enumerate(rows):
            choice = choices.get(row.request.request_id) if row.samples else None
            self.scheduler.on_computed(row, choice.token_ids if choice else [])
            if row.num_drafts and choice:
                num_accepted[i] = len(choice.token_ids) - 1
                self.speculation.judged(row.request, row.num_drafts, num_accepted[i])
            if choice and row.request.forks:
                for child, fork in self.scheduler.fork(row.request):
                    self.runner.copy(fork)
                    forked.append((TokenChoice(child), logits[choice.logits_row]))
        if num_accepted:
            self.runner.commit_conv_state(num_accepted)
        if forked:
            choose_one([choice for choice, _ in forked], torch.stack([row for _, row in forked]), self.runner.kernels)
            for choice, _ in forked:
                choice.request.token_ids.extend(choice.token_ids)
        return [self._report(choice) for choice in (*choices.values(), *(choice for choice, _ in forked))]

    def _settle(self, step: LaunchedStep, may_overlap: bool) -> list[StepOutput]:
        """Launch the next step where that can be, then read the tokens of this one and record them."""
        if may_overlap and not self._inbox and not self._cancelled:
            self.overlap.follow(step)
        tokens = step.tokens()
        alive = [i for i, row in enumerate(step.rows) if not row.request.is_finished]
        choices = [TokenChoice(step.rows[i].request) for i in alive]
        extend(choices, [tokens[i] for i in alive])
        for i, choice in zip(alive, choices, strict=True):
            self.scheduler.on_computed(step.rows[i], choice.token_ids)
        return [self._report(choice) for choice in choices]

    def _report(self, choice: TokenChoice) -> StepOutput:
        request = choice.request
        if choice.token_ids and request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.perf_counter()
        if choice.reason is not None:
            request.error = choice.error
            return self._finish(request, choice.token_ids, choice.reason)
        return StepOutput(request, choice.token_ids, False)

    def _finish(self, request: Request, new_token_ids: list[int], reason: FinishReason) -> StepOutput:
        self.scheduler.finish(request, reason)
        self.speculation.forget(request)
        return StepOutput(request, new_token_ids, True)

    def _fail_all(self, requests: list[Request], error: Exception) -> list[StepOutput]:
        logger.error("lfm2_cb: a step failed, ending its %d requests: %r", len(requests), error)
        outputs = []
        for request in requests:
            request.error = error
            outputs.append(self._finish(request, [], FinishReason.ERROR))
        return outputs
