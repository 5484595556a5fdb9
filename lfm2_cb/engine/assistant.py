"""AssistantModel: drafts by a small LFM2 of the same vocabulary, by the same packed forward over its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model.hybrid_cache import CachePlan
from ..model.modeling import Lfm2CbForCausalLM
from ..model.ragged_batch import Row
from ..scheduling.cache_manager import CacheManager
from ..scheduling.request import Request
from .drafting import Drafter
from .runner import ModelRunner


@dataclass
class DraftState:
    """What the assistant holds of a request: its cache, after the tokens it has seen confirmed."""

    cache: Request  # the blocks and the slot of the confirmed state
    scratch: Request  # a second slot, in which guesses are continued

    @property
    def num_seen(self) -> int:
        return self.cache.num_computed_tokens


class AssistantModel(Drafter):
    """Greedy guesses of a small model.

    A request has two conv slots: one holds the state after its confirmed tokens, the other is where guesses go on
    from a copy of it. Wrong guesses then need no roll-back: the K/V they left are overwritten, and the next round
    starts by reading the tokens that turned out right, in one chunk.

    Args:
        model: the assistant. Its vocabulary must be the target's.
        max_sequences, max_batch_tokens, cache_memory, block_size: as the engine's, for the assistant's own cache.
        kernels, cache_dtype: as the engine's.
    """

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        *,
        max_sequences: int,
        max_batch_tokens: int,
        cache_memory: int,
        block_size: int = 64,
        kernels: str = "auto",
        cache_dtype: str | None = None,
    ) -> None:
        self.model, self.max_batch_tokens = model, max_batch_tokens
        self.plan = CachePlan.from_budget(
            model.config,
            cache_memory,
            block_size=block_size,
            num_slots=2 * max_sequences,
            dtype=model.dtype,
            checkpoints=False,
            cache_dtype=cache_dtype,
        )
        self.runner = ModelRunner(model, self.plan, kernels)
        self._cache = CacheManager(self.plan.num_blocks, block_size, self.plan.num_slots, prefix_caching=False)
        self._states: dict[int, DraftState] = {}

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in requests]
        budget, active = self.max_batch_tokens, []
        rows: list[Row] = []
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            state = self._state_of(request)
            if state is None or not self._cache.append(state.cache, request.num_tokens + length - state.num_seen):
                continue  # no room: no guess
            unseen = request.token_ids[state.num_seen :][:budget]
            if not unseen:
                continue
            caught_up = state.num_seen + len(unseen) == request.num_tokens
            rows.append(self._row(state.cache, state.num_seen, unseen, caught_up))
            state.cache.num_computed_tokens += len(unseen)
            budget -= len(unseen)
            if caught_up:
                self._start_scratch(state)
                active.append(i)
        logits = self.runner.forward(rows) if rows else None
        for i in active:
            state = self._states[requests[i].request_id]
            self.runner.cache.copy_slot(state.cache.state_slot, state.scratch.state_slot)  # type: ignore[arg-type]
        while active and logits is not None:
            for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
                guesses[i].append(token)
            active = [i for i in active if len(guesses[i]) < lengths[i]]
            rows = [self._next(requests[i], guesses[i]) for i in active]
            logits = self.runner.forward(rows) if rows else None
        return guesses

    def _next(self, request: Request, guesses: Sequence[int]) -> Row:
        scratch = self._states[request.request_id].scratch
        return self._row(scratch, request.num_tokens + len(guesses) - 1, guesses[-1:], True)

    @staticmethod
    def _row(owner: Request, start: int, token_ids: Sequence[int], wants_logits: bool) -> Row:
        return Row(token_ids, start, owner.block_table, owner.state_slot, None, int(wants_logits))  # type: ignore[arg-type]

    def _start_scratch(self, state: DraftState) -> None:
        state.scratch.block_table = state.cache.block_table  # the same blocks: what guesses write is overwritten

    def _state_of(self, request: Request) -> DraftState | None:
        """The request's draft state, made on first sight; None where there is no room for one."""
        state = self._states.get(request.request_id)
        if state is None:
            cache, scratch = Request(request.request_id, [0], 1), Request(request.request_id, [], 1)
            for owner in (cache, scratch):
                if not self._cache.admit(owner, self._cache.match_prefix(owner)):
                    self._cache.free(cache)
                    return None
            state = self._states[request.request_id] = DraftState(cache, scratch)
        return state

    def forget(self, request: Request) -> None:
        state = self._states.pop(request.request_id, None)
        if state is not None:
            state.scratch.block_table = []  # they are the other's
            self._cache.free(state.scratch)
            self._cache.free(state.cache)

    def check_idle(self) -> None:
        """Assert that nothing is kept for any request."""
        assert not self._states
        self._cache.check_integrity([])
