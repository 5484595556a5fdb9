"""Scheduler: who runs in the next step, under a token budget and a memory budget.

Decodes first, then prefills in progress, then new requests (Sarathi-Serve, arXiv 2403.02310), all in one batch.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .adapters import AdapterPlaces
from .block_pool import Block
from .cache_manager import CacheManager, Fork
from .policies import Policy
from .request import FinishReason, Request, RequestStatus

#: tokens of prefill that a step with decodes takes at least, however slow steps are, so that prompts make progress
MIN_CHUNK = 16


@dataclass(slots=True)
class ScheduledRow:
    """One request's part of a step: tokens `start … start + num_tokens - 1` of it, the last `num_drafts` guessed."""

    request: Request
    start: int
    num_tokens: int
    num_drafts: int
    restore_block: int | None  # take the conv state from this block's checkpoint, not from the request's slot
    samples: bool  # it reaches the request's last known token, so that a new one can be sampled


class RequestTooLarge(ValueError):
    """The request would not fit in the cache even alone."""


class Scheduler:
    """Moves requests from waiting to running to finished.

    Args:
        cache: the blocks and slots.
        policy: the order of the waiting.
        max_batch_tokens: tokens a step, prefill chunks and decodes together.
        max_sequences: requests running at once.
        clock: seconds, for the requests' metrics; a simulator has its own.
        decode_budget: how many tokens a step that decodes may have, asked at each such step; None: as any other.
            A prefill chunk is what is left of it, but not less than `MIN_CHUNK` tokens: decodes then wait no longer
            for their next token than it takes to compute so many (Sarathi-Serve's bound on mixed batches).
        adapters: the places of requests' adapters; None: no request has one.
    """

    def __init__(
        self,
        cache: CacheManager,
        policy: Policy,
        max_batch_tokens: int,
        max_sequences: int,
        clock: Callable[[], float] = time.perf_counter,
        decode_budget: Callable[[], int | None] = lambda: None,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        self.adapters = adapters if adapters is not None else AdapterPlaces(0, 0)
        self.cache, self.policy, self._clock, self._decode_budget = cache, policy, clock, decode_budget
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = min(max_sequences, max_batch_tokens, cache.num_slots)
        self.running: list[Request] = []  # by the policy's rank, then arrival; the last gives way first
        self._deferred: list[tuple[Block, Request]] = []  # waiting for another to compute a prefix they share
        self._num_arrived = 0

    @property
    def num_waiting(self) -> int:
        return len(self.policy) + len(self._deferred)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Queue one request. Raises: RequestTooLarge: it could never run, with the numbers."""
        self.check_fits(request)
        self.add_all([request])

    def add_all(self, requests: Sequence[Request]) -> None:
        """Queue requests and their forks, known to come together, that have passed `check_fits`."""
        now = self._clock()
        requests = self.policy.arrange(requests, self.cache)
        for request in requests:
            for r in (request, *request.forks):
                self._num_arrived += 1
                r.arrival_order = self._num_arrived
                r.metrics.arrival_time = r.metrics.arrival_time or now
        self.policy.plan(requests, self.cache)
        for request in requests:
            self.policy.push(request)

    def check_fits(self, request: Request) -> None:
        """Raises: RequestTooLarge."""
        needed, there = self.cache.blocks_for(request.max_num_tokens - 1), self.cache.pool.num_blocks
        if needed > there:
            size = self.cache.block_size
            raise RequestTooLarge(
                f"prompt of {request.num_prompt_tokens} tokens + max_new_tokens={request.max_new_tokens} needs "
                f"{needed} cache blocks of {size} tokens, and cache_memory holds {there} ({there * size} tokens): "
                "shorten the request or raise cache_memory"
            )

    def schedule(self) -> list[ScheduledRow]:
        """Choose the rows of the next step and give each the blocks it writes. `[]`: nothing to do."""
        budget = self.max_batch_tokens
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            (decodes if _num_pending(request) == 1 else prefills).append(request)
        rows, preempted = self._schedule_decodes(decodes, budget)
        num_decoding = sum(row.num_tokens for row in rows)
        limit = self._decode_budget() if rows else None
        budget -= num_decoding
        if limit is not None:
            budget = min(budget, max(limit - num_decoding, MIN_CHUNK))
        for request in prefills:
            if budget and request.status is RequestStatus.RUNNING:
                limit = self.policy.chunk_limit(request, budget)
                rows += (chunk := self._prefill_rows(request, limit))
                budget -= sum(row.num_tokens for row in chunk)
        if not preempted:
            self._admit(rows, budget)
        return rows

    def _schedule_decodes(self, decodes: list[Request], budget: int) -> tuple[list[ScheduledRow], bool]:
        """One row for each running request that has one known token to compute, preempting the youngest for room."""
        rows: list[ScheduledRow] = []
        preempted = False
        for i, request in enumerate(decodes):
            if request.status is not RequestStatus.RUNNING:
                continue  # it has just given way to another
            num_drafts = 0
            if request.draft_token_ids:
                spare = budget - (len(decodes) - i)  # tokens beyond one for each
                num_drafts = self._fitting_drafts(request, spare)
            while not self.cache.append(request, 1):
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                rows.append(self._row(request, 1 + num_drafts, num_drafts))
                budget -= 1 + num_drafts
        return rows, preempted

    def _fitting_drafts(self, request: Request, spare: int) -> int:
        """How many of a request's guesses there is room for, in the step and in the cache; it keeps no others."""
        # Forks start from exactly the prompt, so nothing may be guessed beyond it in the step that completes it.
        num_drafts = 0 if request.forks else min(len(request.draft_token_ids), spare)
        if num_drafts and not self.cache.append(request, 1 + num_drafts):
            num_drafts = 0  # a guess is not worth anyone's place
        del request.draft_token_ids[num_drafts:]
        return num_drafts

    def _admit(self, rows: list[ScheduledRow], budget: int) -> None:
        """Let waiting requests in while tokens, sequences and memory last."""
        self._wake_deferred()
        if not self.policy.opens(self.running):
            return
        while budget and len(self.running) < self.max_sequences and (request := self.policy.peek()) is not None:
            match = self.cache.match_prefix(request)
            if match.pending is not None:
                if len(self._deferred) >= self.max_sequences:
                    break  # as many as could run have stepped aside: enough looking for one step
                self._deferred.append((match.pending, self.policy.pop()))
                continue
            if not self.policy.may_admit(request, match, self.running, self.cache):
                break
            if request.adapter is not None and not self.adapters.has_room(request.adapter):
                break
            # Keep a block free for each running request, or the next step may have to throw this one out again.
            if not self.cache.admit(request, match, num_reserved=len(self.running)):
                break
            self.policy.pop()
            self._start(request)
            if request.metrics.num_preemptions == 0:
                taken_up = sum(end - start for start, end in request.gaps)
                request.metrics.num_cached_tokens = request.num_computed_tokens + taken_up
            rows += (chunk := self._prefill_rows(request, budget))
            budget -= sum(row.num_tokens for row in chunk)

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        if request.adapter is not None:
            request.adapter_place = self.adapters.acquire(request.adapter)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
        insort(self.running, request, key=lambda r: (*self.policy.rank(r), r.arrival_order))

    def _prefill_rows(self, request: Request, budget: int) -> list[ScheduledRow]:
        """What is to be computed of a request, as far as the budget goes: a row for each run of tokens between those
        that are reused from segments."""
        if not request.gaps:
            return [self._row(request, min(budget, _num_pending(request)))]
        rows: list[ScheduledRow] = []
        position = request.num_computed_tokens
        while budget and position < request.num_tokens:
            start, end = request.run_from(position)
            end = min(end, start + budget)
            block = request.block_table[start // self.cache.block_size]  # its checkpoint is the state after the gap
            restore_block = block if start > position else None
            rows.append(ScheduledRow(request, start, end - start, 0, restore_block, end == request.num_tokens))
            budget -= end - start
            position = end
        return rows

    def _row(self, request: Request, num_tokens: int, num_drafts: int = 0) -> ScheduledRow:
        start, restore_block = request.num_computed_tokens, request.restore_block
        request.restore_block = None
        samples = start + num_tokens - num_drafts == request.num_tokens
        return ScheduledRow(request, start, num_tokens, num_drafts, restore_block, samples)

    def _wake_deferred(self) -> None:
        """Requeue those whose shared prefix is computed by now, or whose computer has gone."""
        still: list[tuple[Block, Request]] = []
        for block, request in self._deferred:
            if block.key is not None and not block.ready:
                still.append((block, request))
            else:
                self.policy.push(request)
        self._deferred = still

    def on_computed(self, row: ScheduledRow, new_token_ids: list[int]) -> None:
        """Record a row's outcome: its tokens are computed, and `new_token_ids` follow (none if it does not sample).

        Of a row with drafts, all but the last new token are accepted drafts.
        """
        request = row.request
        request.num_computed_tokens = row.start + row.num_tokens
        if request.draft_token_ids:
            request.draft_token_ids = []
        request.token_ids.extend(new_token_ids)
        if row.num_drafts:
            self.cache.roll_back(request, request.num_tokens - 1)
        self.cache.commit(request)

    def fork(self, parent: Request) -> list[tuple[Request, Fork]]:
        """Start the forks of a request whose prompt has just been computed. Those that find no room are queued."""
        started = []
        for child in parent.forks:
            room = len(self.running) < self.max_sequences
            fork = self.cache.fork(parent, child) if room else None
            if fork is None:
                self.policy.push(child)
            else:
                self._start(child)
                child.metrics.num_cached_tokens = child.num_computed_tokens
                started.append((child, fork))
        parent.forks = []
        return started

    def preempt(self, request: Request) -> None:
        """Take a running request's memory; it waits again, in its old place, and recomputes what is not cached."""
        self._stop(request)
        request.status = RequestStatus.WAITING
        request.draft_token_ids = []
        request.metrics.num_preemptions += 1
        self.policy.push(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, wherever it is. Its memory is free for the next step."""
        if request.is_finished:
            return
        was_running = request.status is RequestStatus.RUNNING
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        request.metrics.finish_time = self._clock()
        if was_running:
            self._stop(request)
        elif request.fork_of is not None and request in request.fork_of.forks:
            request.fork_of.forks.remove(request)
        elif any(r is request for _, r in self._deferred):
            self._deferred = [(b, r) for b, r in self._deferred if r is not request]
        else:
            self.policy.discard(request)
        self.policy.on_finish(request)
        for child in request.forks:  # its prompt was never computed: they fend for themselves
            self.policy.push(child)
        request.forks = []

    def _stop(self, request: Request) -> None:
        """Take all that a running request has."""
        self.running.remove(request)
        self.cache.free(request)
        if request.adapter is not None:
            self.adapters.release(request.adapter)
            request.adapter_place = -1

    def check_integrity(self) -> None:
        """Assert that the cache and the adapters' places belong to exactly the running requests."""
        assert len(self.running) <= self.max_sequences
        self.cache.check_integrity(self.running)
        self.adapters.check_integrity([r.adapter for r in self.running if r.adapter is not None])


def _num_pending(request: Request) -> int:
    """Known tokens not yet computed."""
    return len(request.token_ids) - request.num_computed_tokens
