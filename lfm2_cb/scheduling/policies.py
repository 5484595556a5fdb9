"""Scheduling policies: one small class each, deciding who is admitted next, when, and how much it may prefill."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
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
        max_preemptions: a request preempted this often goes before all others from then on, waiting and running, so
            that no request is preempted for ever.
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

    def arrange(self, requests: Sequence[Request], cache: CacheManager) -> Sequence[Request]:
        """The order in which requests that come together arrive: those that may go on for longest first, if all fit in
        the cache together; else as given, as who starts early and takes long is then preempted more.

        A step of a few rows takes nearly as long as one of many, so the fewer steps follow after most have ended, the
        better: the rule of longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969).
        """
        needed = sum(cache.blocks_for(r.max_num_tokens) for request in requests for r in (request, *request.forks))
        if needed > cache.pool.num_blocks:
            return requests
        return sorted(requests, key=lambda request: -request.max_new_tokens)

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
        """What comes before any policy's order: those preempted too often, then priority."""
        return (request.metrics.num_preemptions < self.max_preemptions, -request.priority)

    def opens(self, running: Sequence[Request]) -> bool:
        """Whether waiting requests may be admitted in this step; asked once a step."""
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

    Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv 2507.10150 (LightLLM).

    Two things are done otherwise than in the paper. Where it draws a length for each request at every step and takes
    the peak of the memory they would hold, `Outlook` has the sum's expectation and standard deviation: the guesses
    that are too long and too short even out, the better the more run, so what is kept free for their errors follows
    from how many run and how much their lengths differ. And the distribution counts those still running as "longer
    than so far" (`survival`): the first to finish are the short ones, and taking them for typical would let far too
    many in.

    Args:
        window: finished requests remembered.
        margin: standard deviations of the memory expected that must be free beside it. More: fewer evictions, and
            fewer that run.
    """

    name = "past_future"

    def __init__(self, window: int = 1000, margin: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.window, self.margin = window, margin
        self._past: deque[int] = deque()  # output lengths, oldest first
        self._sorted: list[int] = []
        self._num_new = 0  # finished since the distribution was last worked out
        self._alive = [1.0]  # the distribution: see `survival`
        self._outlook: Outlook | None = None  # of the requests that run in this step
        self._most: int | None = None  # tokens that they can reach together
        self._refused: Request | None = None  # the head that did not fit; it will not until a request ends

    def opens(self, running: Sequence[Request]) -> bool:
        self._outlook = self._most = None
        return super().opens(running)

    def may_admit(self, request: Request, match: PrefixMatch, running: Sequence[Request], cache: CacheManager) -> bool:
        if request is self._refused:
            return False
        pool = cache.pool
        if self._most is None:
            self._most = sum([len(r.prompt_token_ids) + r.max_new_tokens for r in running])
        self._most += len(request.prompt_token_ids) + request.max_new_tokens
        if not running or cache.blocks_for(self._most) + len(running) <= pool.num_blocks:
            return True  # they fit whatever they do: nothing to work out
        if self._outlook is None:
            self._fit(running)
            self._outlook = Outlook(self._alive, (*running, request), cache.block_size)
            own = [num_own_blocks(r, cache) for r in running]
            self._outlook.shared = pool.num_blocks - pool.num_free - sum(own)
            self._outlook.add(running, own)
        revived = sum(pool.blocks[block_id].ref_count == 0 for block_id in match.block_ids)
        self._outlook.add([request], [cache.blocks_for(request.num_tokens) - len(match.block_ids) + revived])
        if self._outlook.peak(self.margin) <= pool.num_blocks:
            return True
        self._refused = request
        return False

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
            self._alive = survival(self._sorted, sorted(r.num_output_tokens for r in running))
            self._num_new = 0


class Outlook:
    """The cache blocks that requests will hold together, as expected for some points of time ahead.

    Args:
        alive: what `survival` returns.
        requests: those that it is for; they are added later.
        block_size: tokens a block.
    """

    NUM_TIMES = 8  # from half a block's tokens on, evenly on a logarithmic scale; 20 were no better

    def __init__(self, alive: list[float], requests: Sequence[Request], block_size: int) -> None:
        longest = max([r.max_new_tokens - len(r.token_ids) + len(r.prompt_token_ids) for r in requests])
        first, count = min(block_size / 2, longest), self.NUM_TIMES
        self.times = [round(first * (longest / first) ** (i / count)) for i in range(count)]  # in tokens each
        self.longest_known = len(alive) - 1
        self.alive = alive + alive[-1:] * self.times[-1]
        self.block_size = block_size
        self.expected = [0.0] * count
        self.variance = [0.0] * count
        self.shared = 0  # blocks that several hold; taken to stay

    def add(self, requests: Sequence[Request], num_blocks: Sequence[int]) -> None:
        """More requests, each of which holds so many blocks alone now."""
        alive, longest_known = self.alive, self.longest_known
        done = [len(r.token_ids) - len(r.prompt_token_ids) for r in requests]
        left = [r.max_new_tokens - n for r, n in zip(requests, done, strict=True)]
        done = [min(n, longest_known) for n in done]  # beyond, all lengths are alike
        known = list(zip(done, left, num_blocks, [alive[n] for n in done], strict=True))
        for i, time in enumerate(self.times):
            growth, expected, variance = time / self.block_size, 0.0, 0.0
            for so_far, most, own, share in known:
                if time < most:
                    there = own + growth
                    held = there * (alive[so_far + time] / share)
                    expected += held
                    variance += held * (there - held)
            self.expected[i] += expected
            self.variance[i] += variance

    def peak(self, margin: float) -> float:
        """The most blocks at any of these times, `margin` standard deviations above what is expected."""
        return self.shared + max(map(lambda mean, var: mean + margin * var**0.5, self.expected, self.variance))


def survival(lengths: Sequence[int], so_far: Sequence[int]) -> list[float]:
    """Share of all answers that are longer than n tokens, at index n; the last holds for all beyond.

    lengths: those of the answers that have ended, sorted. so_far: others are only known to be longer than these,
    sorted; and one that never ends is added, as the longest seen may not be the longest there is. The Kaplan-Meier
    estimate (JASA 53, 1958).
    """
    alive: list[float] = []
    share, num_shorter = 1.0, 0
    for i, length in enumerate(lengths):
        alive += [share] * (length - len(alive))
        while num_shorter < len(so_far) and so_far[num_shorter] < length:
            num_shorter += 1
        share *= 1 - 1 / (len(lengths) - i + len(so_far) - num_shorter + 1)
    return [*alive, share]


def num_own_blocks(request: Request, cache: CacheManager) -> int:
    """Blocks that will be free when the request ends: all after those that it shares, which are its first."""
    blocks, num_shared = cache.pool.blocks, 0
    for block_id in request.block_table:
        if blocks[block_id].ref_count == 1:
            break
        num_shared += 1
    return len(request.block_table) - num_shared


class Batch(Policy):
    """For lists known as a whole: prompts that begin alike run side by side, groups that decode most come first.

    Zheng et al., "BatchLLM", arXiv 2412.03594. The shared prefixes of a list are found ahead (`prefix_tree`), the
    first of a group computes its prefix and the others wait for that, and the next group takes its memory when the
    last of them is done, so that a prefix is never evicted before its last sharer and never computed twice.
    Lists are served in the order they came.
    """

    name = "batch"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._num_plans = 0

    def arrange(self, requests: Sequence[Request], cache: CacheManager) -> Sequence[Request]:
        return requests  # `plan` finds their order

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
        if waiting is None or waiting.queue_order > waiting.metrics.arrival_time:  # none, or a long one
            return budget
        is_long = request.num_tokens - request.num_computed_tokens > self.short
        return max(1, budget // 2) if is_long else budget


class ByAdapter(Policy):
    """Requests for the same adapter run side by side, so that it is loaded once for many of them.

    The first of them opens a group, which those that arrive among the next `window` requests join: they are served in
    its place. So at most `window` later requests overtake one that waits.

    Args: window: requests.
    """

    name = "by_adapter"

    def __init__(self, window: int = 256, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.window = window
        self._opened: dict[int, int] = {}  # by the adapter's id: arrival of the first of its group

    def arrange(self, requests: Sequence[Request], cache: CacheManager) -> Sequence[Request]:
        return requests  # in order, so that at most `window` others overtake one

    def plan(self, requests: Sequence[Request], cache: CacheManager) -> None:
        for r in (r for request in requests for r in (request, *request.forks)):
            key = 0 if r.adapter is None else r.adapter.adapter_id
            first = self._opened.get(key)
            if first is None or r.arrival_order > first + self.window:
                first = self._opened[key] = r.arrival_order
            r.queue_order = first, r.arrival_order
        oldest = requests[-1].arrival_order - self.window if requests else 0
        self._opened = {key: first for key, first in self._opened.items() if first >= oldest}

    def order(self, request: Request) -> Any:
        return request.queue_order


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Policy, Batch, PastFuture, LengthAware, ByAdapter)
}


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
