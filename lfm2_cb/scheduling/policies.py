"""Scheduling policies: one small class each, deciding who is admitted next, when, and how much it may prefill."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

from .cache_manager import CacheManager, PrefixMatch
from .prefix_tree import sharing_order
from .request import FinishReason, Request, RequestStatus


class Policy:
    """The waiting queue and its order. Subclasses change `order`; costs O(log n) a request, whatever waits.

    By itself: first come, first served within a priority (Orca's iteration-level scheduling: Yu et al., OSDI 2022).

    Args:
        waiting_served_ratio: let new requests in only once there are this many waiting for each one running, so that
            decoding is interrupted by few large prefills and not by many small ones (Text Generation Inference's knob
            of this name; it advises 0.3 to 1.2). 0: as soon as there is room.
        max_waiting_steps: let them in after so many steps all the same (TGI's `max_waiting_tokens`).
        max_preemptions: a request thrown out this often goes before all others from then on, waiting and running, so
            that nobody is thrown out for ever.
    """

    name = "fcfs"

    def __init__(
        self, waiting_served_ratio: float = 0.0, max_waiting_steps: int = 20, max_preemptions: int = 3
    ) -> None:
        self.waiting_served_ratio, self.max_waiting_steps = waiting_served_ratio, max_waiting_steps
        self.max_preemptions = max_preemptions
        self._heap: list[tuple[Any, int, Request]] = []
        self._num_waiting = 0
        self._steps_closed = 0

    # What a policy may decide

    def order(self, request: Request) -> Any:
        """Sort key among requests of one rank: the smallest is the next. Must not change while it waits."""
        return request.arrival_order

    def plan(self, requests: Sequence[Request], cache: CacheManager) -> None:
        """See requests that come together, before they are queued."""

    def may_admit(self, request: Request, match: PrefixMatch, running: Sequence[Request], cache: CacheManager) -> bool:
        """Whether to admit the request at the head now, where the cache has room for it."""
        return True

    def chunk_limit(self, request: Request, budget: int) -> int:
        """How many of the `budget` tokens left in a step a prefill under way may take; at least 1."""
        return budget

    def on_finish(self, request: Request) -> None:
        """Learn from a request that has ended."""

    # The queue, the same for all

    def rank(self, request: Request) -> tuple[bool, int]:
        """What comes before any policy's order: those thrown out too often, then priority."""
        return (request.metrics.num_preemptions < self.max_preemptions, -request.priority)

    def opens(self, running: Sequence[Request]) -> bool:
        """Whether anybody may be let in in this step; asked once a step."""
        if running and len(self) < self.waiting_served_ratio * len(running):
            self._steps_closed += 1
            if self._steps_closed < self.max_waiting_steps:
                return False
        self._steps_closed = 0
        return True

    def push(self, request: Request) -> None:
        """Add a new request, or one that was preempted (which keeps its place by its arrival)."""
        entry = ((*self.rank(request), self.order(request)), request.arrival_order, request)
        heapq.heappush(self._heap, entry)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """The request that should be admitted next, or None."""
        while self._heap and self._heap[0][2].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)  # cancelled while it waited
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Remove and return what `peek` showed."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)[2]

    def discard(self, request: Request) -> None:
        """Forget a waiting request whose status the caller has changed. Its entry leaves the heap when it surfaces,
        or when such entries are half of the heap."""
        self._num_waiting -= 1
        if len(self._heap) > 64 and len(self._heap) > 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry[2].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._num_waiting


class PastFuture(Policy):
    """Admit only what will fit at every future point, judged by how long past answers were.

    Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv 2507.10150 (LightLLM). Each
    running request is given a length from the distribution of past ones, conditional on what it has produced; the
    peak of the memory they will hold together is then reached when one of them ends, so one pass over them finds it.

    Two things are done otherwise than in the paper. Where it draws a length at every step, ours is the request's own
    fixed quantile (a golden-ratio sequence over arrivals): no random state, and neighbours cover the distribution
    evenly. And the distribution counts those still running as "longer than so far" (`ended_by`): the first to
    finish are the short ones, and taking them for typical would let far too many in.

    Args:
        window: finished requests remembered.
        reserve: share of the cache kept out of the plan, for guesses that were too short.
    """

    name = "past_future"

    def __init__(self, window: int = 1000, reserve: float = 0.05, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.window, self.reserve = window, reserve
        self._past: deque[int] = deque()  # output lengths, oldest first
        self._sorted: list[int] = []
        self._lengths: list[int] = []  # as they were when the distribution was last worked out
        self._ended: list[float] = []  # share of requests that have ended by each of these
        self._num_new = 0  # finished since then
        self._futures: list[tuple[int, int]] | None = None  # this step's (-tokens left, own blocks), sorted
        self._shared = 0  # blocks in use that several hold
        self._refused: Request | None = None  # the head that did not fit; nothing changes until somebody ends

    def opens(self, running: Sequence[Request]) -> bool:
        self._futures = None
        return super().opens(running)

    def may_admit(self, request: Request, match: PrefixMatch, running: Sequence[Request], cache: CacheManager) -> bool:
        if request is self._refused:
            return False
        room = cache.pool.num_blocks * (1 - self.reserve)
        most = sum([len(r.prompt_token_ids) + r.max_new_tokens for r in (*running, request)])
        if not running or cache.blocks_for(most) + len(running) <= room:
            return True  # they fit whatever they do: nothing to work out
        if self._futures is None:
            self._fit(running)
            futures = [(-self.tokens_left(r), self._own_blocks(r, cache)) for r in running]
            self._shared = cache.pool.num_blocks - cache.pool.num_free - sum(own for _, own in futures)
            self._futures = sorted(futures)
        revived = sum(cache.pool.blocks[block_id].ref_count == 0 for block_id in match.block_ids)
        own = cache.blocks_for(request.num_tokens) - len(match.block_ids) + revived
        futures = self._futures.copy()
        insort(futures, (-self.tokens_left(request), own))
        fits = self._shared + peak_blocks(futures, cache.block_size) <= room
        if fits:
            self._futures = futures
        else:
            self._refused = request
        return fits

    def tokens_left(self, request: Request) -> int:
        """How many more tokens the request is expected to produce; at least 1."""
        done, most = len(request.token_ids) - len(request.prompt_token_ids), request.max_new_tokens
        first_longer = bisect_right(self._lengths, done)
        ended = self._ended[first_longer - 1] if first_longer else 0.0
        quantile = request.arrival_order * 0.6180339887498949 % 1.0
        place = bisect_left(self._ended, ended + (1 - ended) * quantile, lo=first_longer)
        # Beyond all that ended so far: its limit is all there is to go by.
        return (min(self._lengths[place], most) if place < len(self._lengths) else most) - done

    def on_finish(self, request: Request) -> None:
        self._refused = None
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if len(self._past) == self.window:
            del self._sorted[bisect_left(self._sorted, self._past.popleft())]
        self._past.append(request.num_output_tokens)
        insort(self._sorted, request.num_output_tokens)
        self._num_new += 1

    def _fit(self, running: Sequence[Request]) -> None:
        """Work out the distribution again where it may have changed by a fiftieth."""
        if self._num_new * 50 > len(self._past):
            self._lengths = self._sorted.copy()
            self._ended = ended_by(self._lengths, sorted(r.num_output_tokens for r in running))
            self._num_new = 0

    @staticmethod
    def _own_blocks(request: Request, cache: CacheManager) -> int:
        """Blocks that will be free when the request ends."""
        blocks = cache.pool.blocks
        return [blocks[block_id].ref_count for block_id in request.block_table].count(1)


def ended_by(lengths: Sequence[int], so_far: Sequence[int]) -> list[float]:
    """Share of all requests that end by each of `lengths`, the sorted lengths of those that have ended, where others
    are only known to be longer than `so_far` (sorted): the Kaplan-Meier estimate (JASA 53, 1958)."""
    ended, surviving, num_shorter = [], 1.0, 0
    for i, length in enumerate(lengths):
        while num_shorter < len(so_far) and so_far[num_shorter] < length:
            num_shorter += 1
        surviving *= 1 - 1 / (len(lengths) - i + len(so_far) - num_shorter)
        ended.append(1 - surviving)
    return ended


def peak_blocks(futures: Sequence[tuple[int, int]], block_size: int) -> float:
    """The most blocks that requests will own together.

    Args: futures: (-tokens left, blocks owned now) of each, sorted, so that who ends last comes first. When the i-th
        ends, it and those before it are all that is left, and each has grown by the i-th's tokens.
    """
    peak, owned = 0.0, 0
    for i, (negative_left, own) in enumerate(futures, 1):
        owned += own
        peak = max(peak, owned - negative_left * i / block_size)
    return peak


class Batch(Policy):
    """For lists known as a whole: prompts that begin alike run side by side, groups that decode most come first.

    Zheng et al., "BatchLLM", arXiv 2412.03594. The shared prefixes of a list are found ahead (`prefix_tree`), the
    first of a group computes its prefix and the others wait for that, and the next group takes its memory when the
    last of them is done, so that a prefix is never thrown out before its last sharer and never computed twice.
    Lists are served in the order they came.
    """

    name = "batch"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._num_plans = 0

    def plan(self, requests: Sequence[Request], cache: CacheManager) -> None:
        self._num_plans += 1
        prompts = [request.prompt_token_ids for request in requests]
        order = sharing_order(prompts, [request.max_new_tokens for request in requests], cache.block_size)
        for place, index in enumerate(order):
            for request in (requests[index], *requests[index].forks):
                request.queue_order = (self._num_plans, place)

    def order(self, request: Request) -> Any:
        return request.queue_order


class LengthAware(Policy):
    """Short prefills are not held up behind long ones.

    She et al., "LAPS: A Length-Aware-Prefill LLM Serving System", arXiv 2601.11589: short and long prefills as two
    queues; a long conversation whose history is cached is a short one. Here a long prefill stands `window` seconds
    further back than its arrival, which is then also the longest that short ones which came later keep it waiting;
    and while short ones wait, a long prefill under way takes at most half of a step. (LAPS's own window gathers short
    prefills into shapes captured as CUDA graphs, which packed steps have no need of.)

    Args:
        short: prefills of up to so many tokens are short.
        window: seconds that a long prefill lets short ones pass.
    """

    name = "length_aware"

    def __init__(self, short: int = 256, window: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.short, self.window = short, window

    def plan(self, requests: Sequence[Request], cache: CacheManager) -> None:
        for request in requests:
            num_cached = len(cache.match_prefix(request).block_ids) * cache.block_size
            is_long = request.num_tokens - num_cached > self.short
            for r in (request, *request.forks):
                r.queue_order = r.metrics.arrival_time + is_long * self.window

    def order(self, request: Request) -> Any:
        return request.queue_order

    def chunk_limit(self, request: Request, budget: int) -> int:
        waiting = self.peek()
        if waiting is None or waiting.queue_order > waiting.metrics.arrival_time:  # nobody, or a long one
            return budget
        is_long = request.num_tokens - request.num_computed_tokens > self.short
        return max(1, budget // 2) if is_long else budget


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Policy, Batch, PastFuture, LengthAware)}


def make_policy(policy: str | Policy) -> Policy:
    """A policy by name, or as it was made. Raises: ValueError: unknown name; TypeError."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(f"policy must be a name or a Policy, got {type(policy).__name__}")
    try:
        return POLICIES[policy]()
    except KeyError:
        raise ValueError(f"unknown scheduling policy {policy!r}; known: {', '.join(POLICIES)}") from None
