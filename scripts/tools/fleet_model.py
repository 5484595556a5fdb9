"""What simulate_fleet.py is made of: chats, and engines that answer their turns under a cost model.

Blocks are numbers. An engine's steps take what `simulate.CostModel` says, and those between two events are taken in
one go, so that a million requests take minutes.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from simulate import CostModel, lognormal, percentile

#: times an odd number no two numbers below 2**32 become one: stand-ins for hashes
_ODD = 2654435761


@dataclass(slots=True)
class Turn:
    """One request.

    Attributes:
        blocks: hashes of the prompt's whole blocks, from the first.
        known_after: of the prompt's and the answer's, which the cache has once it has run.
    """

    chat: Chat
    blocks: Sequence[int]
    known_after: Sequence[int]
    num_prompt_tokens: int
    num_output_tokens: int
    asked_at: float = 0.0
    ends_at_step: int = 0
    num_held: int = 0  # blocks


class Chat(Protocol):
    """A conversation, turn by turn."""

    def next_turn(self) -> Turn | None:
        """The next request; None: all is said."""


class MadeUpChat:
    """A system prompt, and questions and answers of lognormal lengths. What was said comes back token for token."""

    __slots__ = ("_args", "_blocks", "_first", "_num_tokens", "_rng", "_turns_left")

    def __init__(self, number: int, system: int, turns: int, rng: random.Random, args: argparse.Namespace) -> None:
        self._args, self._rng, self._turns_left = args, rng, turns
        self._num_tokens: int = args.system_tokens
        self._blocks = [(system << 12 | i) * _ODD % 2**32 for i in range(args.system_tokens // args.block_size)]
        self._first = args.system_prompts + number << 12

    def next_turn(self) -> Turn | None:
        if not self._turns_left:
            return None
        self._turns_left -= 1
        args, rng = self._args, self._rng
        num_prompt = self._num_tokens + lognormal(rng, args.question_tokens, args.spread, 2048)
        num_output = lognormal(rng, args.answer_tokens, args.spread, 1024)
        self._num_tokens = num_prompt + num_output
        known_after = self._blocks_of(self._num_tokens)
        return Turn(self, self._blocks_of(num_prompt), known_after, num_prompt, num_output)

    def _blocks_of(self, num_tokens: int) -> list[int]:
        """Whole ones of so many tokens, the last of which is not computed."""
        count, blocks = (num_tokens - 1) // self._args.block_size, self._blocks
        if len(blocks) < count:
            blocks += [(self._first | i) * _ODD % 2**32 for i in range(len(blocks), count)]
        return blocks[:count]


@dataclass(slots=True)
class RecordedChat:
    """One that was held: of each turn its blocks, and those known after it, and numbers of tokens."""

    turns: deque[tuple[Sequence[int], Sequence[int], int, int]]

    def next_turn(self) -> Turn | None:
        return Turn(self, *self.turns.popleft()) if self.turns else None


@dataclass
class Outcome:
    """What became of all requests under one policy."""

    policy: str
    num_replicas: int
    seconds: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    imbalance: float = 0.0  # of the busiest replica's time in steps over the mean
    cpu_seconds: float = 0.0
    ttft: array = field(default_factory=lambda: array("d"))

    def row(self) -> dict[str, float]:
        return {
            "requests": len(self.ttft),
            "output tok/s": self.output_tokens / self.seconds,
            "TTFT p50 s": percentile(self.ttft, 0.5),
            "TTFT p99 s": percentile(self.ttft, 0.99),
            "hit rate %": 100 * self.cached_tokens / self.prompt_tokens,
            "busiest / mean": self.imbalance,
            "CPU s": self.cpu_seconds,
        }


class Engine:
    """One replica: continuous batching over an LRU of blocks, in steps of the cost model."""

    def __init__(self, name: str, args: argparse.Namespace, cost: CostModel) -> None:
        self.name, self.args, self.cost = name, args, cost
        self.cache: dict[int, None] = {}  # blocks that are computed, the last used last
        self.promised: set[int] = set()  # those that are about to be
        self.waiting: deque[Turn] = deque()
        self.deferred: list[Turn] = []  # waiting for another to compute a prefix they share
        self.prefilling: list[list] = []  # [turn, tokens left to compute, blocks that were there]
        self.decoding: list[tuple[int, int, Turn]] = []  # heap, by the step that ends it
        self.num_steps, self.num_held, self.num_unshared, self.num_kv_tokens = 0, 0, 0, 0
        self.num_admitted, self.busy_seconds = 0, 0.0
        self.plan: tuple[float, float, int] | None = None  # began at, seconds a step, steps
        self.version, self.changed = 0, True

    def admit(self, outcome: Outcome) -> None:
        """Let waiting requests in, and see what the cache has of them."""
        args, cache, size = self.args, self.cache, self.args.block_size
        while self.waiting and (running := len(self.prefilling) + len(self.decoding)) < args.sequences:
            turn = self.waiting[0]
            needed = (turn.num_prompt_tokens + turn.num_output_tokens) // size + 1
            if self.num_held + needed > args.blocks and running:
                return
            self.waiting.popleft()
            matched = 0
            for block in turn.blocks:
                if block not in cache:
                    break
                matched += 1
            if matched < len(turn.blocks) and turn.blocks[matched] in self.promised:
                self.deferred.append(turn)
                continue
            turn.num_held = needed
            self.num_held += needed
            self.num_unshared += needed - matched
            self.promised.update(turn.blocks[matched:])
            self._touch(turn.blocks[:matched])
            outcome.prompt_tokens += turn.num_prompt_tokens
            outcome.cached_tokens += matched * size
            self.prefilling.append([turn, turn.num_prompt_tokens - matched * size, matched])
            self.num_kv_tokens += turn.num_prompt_tokens

    def _touch(self, blocks: Sequence[int]) -> None:
        """They are the last used, the first of them last of all, as the deepest goes first."""
        cache = self.cache
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        excess = len(cache) + self.num_unshared - self.args.blocks
        if excess > 0:
            for block in list(islice(cache, excess)):
                del cache[block]
        self.changed = True

    def begin(self, now: float) -> float | None:
        """Begin steps until something changes. Returns: when that is; None: nothing runs."""
        rows = len(self.decoding)
        if self.prefilling:
            budget = self.args.max_batch_tokens - rows
            computed = 0
            for entry in self.prefilling:
                part = min(entry[1], budget - computed)
                entry[1] -= part
                computed += part
            seconds, steps = self.cost.seconds_of(rows + computed, rows + 1, self.num_kv_tokens), 1
        elif rows:
            steps = self.decoding[0][0] - self.num_steps
            seconds = self.cost.seconds_of(rows, rows, self.num_kv_tokens + rows * steps // 2)
        else:
            self.plan = None
            return None
        self.plan = (now, seconds, steps)
        return now + seconds * steps

    def interrupt(self, now: float) -> float | None:
        """A request has come: end the run of steps with the one under way. Returns: when, if that is earlier."""
        assert self.plan is not None
        began, seconds, steps = self.plan
        fewer = max(1, math.ceil((now - began) / seconds))
        if fewer >= steps:
            return None
        self.plan = (began, seconds, fewer)
        return began + seconds * fewer

    def complete(self, first_token: Callable[[Turn], None]) -> list[Turn]:
        """The steps begun are done. Returns: turns that have ended."""
        assert self.plan is not None
        _, seconds, steps = self.plan
        self.num_steps += steps
        self.busy_seconds += seconds * steps
        self.num_kv_tokens += len(self.decoding) * steps
        if self.prefilling:
            self._complete_prefills(first_token)
        ended = []
        while self.decoding and self.decoding[0][0] <= self.num_steps:
            turn = heapq.heappop(self.decoding)[2]
            self.num_held -= turn.num_held
            self.num_unshared -= turn.num_held - len(turn.blocks)
            self.num_kv_tokens -= turn.num_prompt_tokens + turn.num_output_tokens - 1  # the last was never computed
            self._touch(turn.known_after)
            ended.append(turn)
        return ended

    def _complete_prefills(self, first_token: Callable[[Turn], None]) -> None:
        still = []
        for entry in self.prefilling:
            turn, left, matched = entry
            if left > 0:
                still.append(entry)
                continue
            first_token(turn)
            self.num_admitted += 1
            turn.ends_at_step = self.num_steps + turn.num_output_tokens - 1
            heapq.heappush(self.decoding, (turn.ends_at_step, self.num_admitted, turn))
            computed = turn.blocks[matched:]
            self.promised.difference_update(computed)
            self.num_unshared -= len(computed)
            self._touch(computed)
        if self.deferred and len(still) < len(self.prefilling):
            self.waiting.extendleft(reversed(self.deferred))
            self.deferred.clear()
        self.prefilling = still
