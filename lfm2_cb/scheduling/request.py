"""A request: its tokens, its counters, and the cache it owns."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .adapters import Adapter
from .block_pool import ROOT, ContentId


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, or a stopping criterion
    LENGTH = "length"  # the request's own token limit
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass
class RequestMetrics:
    """Times are `time.perf_counter()` seconds; None until the event has happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens not computed, because the prefix cache held them
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT: seconds from submission to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


def root_content_id(sparse_prefill: float | None, adapter: Adapter | None) -> ContentId:
    """Of the empty prefix of what is computed in this way."""
    how: tuple[object, ...] = () if sparse_prefill is None else ("sparse_prefill", sparse_prefill)
    return how + (() if adapter is None else ("adapter", adapter.adapter_id)) or ROOT


@dataclass(eq=False, slots=True)
class Request:
    """What the scheduler and the cache manager know of one sequence.

    There is no prefill phase and no decode phase: a running request chases `num_tokens` with `num_computed_tokens`.
    """

    request_id: int
    prompt_token_ids: list[int]
    max_new_tokens: int
    priority: int = 0  # higher runs first
    params: Any = None  # the engine's; opaque here
    use_prefix_cache: bool = True
    segments: Sequence[int] = ()  # where each of the prompt's segments ends but the last, which is the question
    recompute: float = 1.0  # share of the segments' tokens that is computed, though they are known from elsewhere
    sparse_prefill: float | None = None  # share of attention's mass that its prompt's queries cover; None: all
    adapter: Adapter | None = None

    forks: list[Request] = field(init=False, default_factory=list)  # siblings that start from this one's prompt
    fork_of: Request | None = field(init=False, default=None)
    num_siblings: int = field(init=False, default=0)  # how many forks there were
    token_ids: list[int] = field(init=False)  # prompt, then output
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    draft_tracker: Any = None  # how its tokens are guessed; the engine's, opaque here
    draft_token_ids: list[int] = field(default_factory=list)  # guesses at the next tokens, to verify in the next step
    num_computed_tokens: int = 0  # tokens whose K/V and conv state the cache holds
    block_table: list[int] = field(default_factory=list)  # block_id of each block_size tokens
    state_slot: int | None = None
    adapter_place: int = -1  # of its adapter, while it runs; below 0: it has none
    num_hashed_blocks: int = 0  # leading blocks the prefix cache knows
    last_content_id: ContentId = ROOT  # content id of the last of those
    gaps: Sequence[tuple[int, int]] = ()  # tokens of the prompt whose K/V are reused from segments: starts and ends
    reuse: Any = None  # from where; the engine's, opaque here
    restore_block: int | None = None  # block whose conv checkpoint the next step starts from
    arrival_order: int = 0
    queue_order: Any = None  # the policy's

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    def adopt_forks(self, children: list[Request]) -> None:
        """Let requests for the same prompt start from this one's computed prompt. Before either is queued."""
        self.forks, self.num_siblings = list(children), len(children)
        for child in children:
            child.fork_of = self

    def fail(self, error: BaseException) -> None:
        """End with an error, outside the scheduler: it never came there, or is gone from it."""
        self.status, self.finish_reason, self.error = RequestStatus.FINISHED, FinishReason.ERROR, error

    @property
    def root_content_id(self) -> ContentId:
        """Of its empty prefix: what is computed sparsely, or with an adapter, is for those alone that compute so."""
        return root_content_id(self.sparse_prefill, self.adapter)

    def run_from(self, position: int) -> tuple[int, int]:
        """The next tokens to be computed from a position on: start and end, which are its end or a gap's start."""
        for start, end in self.gaps:
            if start > position:
                return position, start
            position = max(position, end)
        return position, len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def max_num_tokens(self) -> int:
        """Tokens it holds at most. The last one is never computed, so the cache needs room for one less."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
