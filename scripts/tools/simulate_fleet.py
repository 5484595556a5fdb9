"""Chats on a fleet of engines behind one router, far beyond what this machine could run.

    python scripts/tools/simulate_fleet.py --replicas 8 --requests 100000
    python scripts/tools/simulate_fleet.py --replicas 1 8 64 1000 --requests 1000000

The prefix-aware policy is the router's own code (`lfm2_cb.scheduling.routing`). Engines are coarser than those of
simulate.py, so that a million requests take minutes: blocks are numbers, a step takes what `simulate.CostModel` says,
and steps between two events are taken in one go. A chat begins with one of a few system prompts; its next turn comes
after its answer and some time to think, with all that was said.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from simulate import CostModel, lognormal, percentile

from lfm2_cb.scheduling.routing import PrefixRouter

POLICIES = ("round_robin", "least_loaded", "prefix")


@dataclass(slots=True)
class Chat:
    """A conversation: how long it is by now, and what is still to come."""

    number: int
    system: int
    num_tokens: int  # computed or said so far
    turns_left: int


@dataclass(slots=True)
class Turn:
    """One request."""

    chat: Chat
    asked_at: float
    blocks: list[int]  # hashes of the prompt's, from the first
    num_prompt_tokens: int
    num_output_tokens: int
    ends_at_step: int = 0
    num_held: int = 0  # blocks


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
        self.cache: dict[int, None] = {}  # the last used last
        self.waiting: deque[Turn] = deque()
        self.prefilling: list[list] = []  # [turn, tokens left to compute]
        self.decoding: list[tuple[int, int, Turn]] = []  # heap, by the step that ends it
        self.num_steps, self.num_held, self.num_kv_tokens, self.busy_seconds = 0, 0, 0, 0.0
        self.plan: tuple[float, float, int] | None = None  # began at, seconds a step, steps
        self.version, self.changed = 0, True

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def admit(self, outcome: Outcome) -> None:
        """Let waiting requests in, and see what the cache has of them."""
        while self.waiting and self.num_running < self.args.sequences:
            turn = self.waiting[0]
            needed = (turn.num_prompt_tokens + turn.num_output_tokens) // self.args.block_size + 1
            if self.num_held + needed > self.args.blocks and self.num_running:
                return
            self.waiting.popleft()
            matched = 0
            for block in turn.blocks:
                if block not in self.cache:
                    break
                matched += 1
            turn.num_held = needed
            self.num_held += needed
            cached = matched * self.args.block_size
            outcome.prompt_tokens += turn.num_prompt_tokens
            outcome.cached_tokens += cached
            self.touch(turn.blocks)
            self.prefilling.append([turn, turn.num_prompt_tokens - cached])
            self.num_kv_tokens += turn.num_prompt_tokens

    def touch(self, blocks: list[int]) -> None:
        """They are the last used, the first of them last of all, as the deepest goes first."""
        cache = self.cache
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        for block in list(islice(cache, max(0, len(cache) - self.args.blocks))):
            del cache[block]
        self.changed = True

    def begin(self, now: float) -> float | None:
        """Begin steps until something changes. Returns: when that is; None: nothing runs."""
        if not self.num_running:
            self.plan = None
            return None
        rows = len(self.decoding)
        if self.prefilling:
            budget = self.args.max_batch_tokens - rows
            computed = 0
            for entry in self.prefilling:
                part = min(entry[1], budget - computed)
                entry[1] -= part
                computed += part
            seconds, steps = self.cost.seconds_of(rows + computed, rows + 1, self.num_kv_tokens), 1
        else:
            steps = self.decoding[0][0] - self.num_steps
            seconds = self.cost.seconds_of(rows, rows, self.num_kv_tokens + rows * steps // 2)
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

    def complete(self, now: float, first_token: Callable[[Turn], None]) -> list[Turn]:
        """The steps begun are done. Returns: those that have ended."""
        assert self.plan is not None
        _, seconds, steps = self.plan
        self.num_steps += steps
        self.busy_seconds += seconds * steps
        self.num_kv_tokens += len(self.decoding) * steps
        still = []
        for entry in self.prefilling:
            if entry[1] > 0:
                still.append(entry)
                continue
            turn = entry[0]
            first_token(turn)
            turn.ends_at_step = self.num_steps + turn.num_output_tokens - 1
            heapq.heappush(self.decoding, (turn.ends_at_step, turn.chat.number, turn))
        self.prefilling = still
        ended = []
        while self.decoding and self.decoding[0][0] <= self.num_steps:
            turn = heapq.heappop(self.decoding)[2]
            self.num_held -= turn.num_held
            self.num_kv_tokens -= turn.num_prompt_tokens + turn.num_output_tokens
            ended.append(turn)
        return ended


class Fleet:
    """Engines, their router, and the clients: events in the order of simulated time."""

    def __init__(self, policy: str, num_replicas: int, args: argparse.Namespace, cost: CostModel) -> None:
        self.args, self.policy = args, policy
        self.rng = random.Random(args.seed)
        self.engines = {f"{i}": Engine(f"{i}", args, cost) for i in range(num_replicas)}
        self.names = list(self.engines)
        self.loads = dict.fromkeys(self.names, 0)  # requests sent and not heard of since, as the router knows it
        self.router = PrefixRouter(args.seed)
        self.router.keep(self.names)
        self.outcome = Outcome(policy, num_replicas)
        self.events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self.now, self.num_events, self.num_asked, self.num_chats, self.num_routed = 0.0, 0, 0, 0, 0
        weights = [1 / rank for rank in range(1, args.system_prompts + 1)]
        self.popularity = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]

    def run(self) -> Outcome:
        began = time.process_time()
        if self.args.chats is None:
            self._at(0.0, self._open_chat)
        for _ in range(self.args.chats or 0):
            self._at(0.0, self._begin_chat, round(self.args.turns))
        if self.policy == "prefix":
            for name in self.names:  # each in its own time
                self._at(self.rng.random() * self.args.staleness, self._report, name)
        while self.events:
            self.now, _, act, given = heapq.heappop(self.events)
            act(*given)
            if len(self.outcome.ttft) == self.args.requests:
                break
        busy = [engine.busy_seconds for engine in self.engines.values()]
        self.outcome.imbalance = max(busy) * len(busy) / sum(busy)
        self.outcome.seconds, self.outcome.cpu_seconds = self.now, time.process_time() - began
        return self.outcome

    def _at(self, when: float, act: Callable[..., None], *given: object) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, act, given))

    # Clients

    def _open_chat(self) -> None:
        args = self.args
        self._begin_chat(max(1, round(self.rng.expovariate(1 / args.turns))))
        if self.num_asked < args.requests:
            rate = args.rate * len(self.names) / args.turns
            self._at(self.now + self.rng.expovariate(rate), self._open_chat)

    def _begin_chat(self, turns: int) -> None:
        draw = self.rng.random()
        system = next(i for i, share in enumerate(self.popularity) if draw <= share)
        self.num_chats += 1
        self._ask(Chat(self.num_chats, system, self.args.system_tokens, turns))

    def _ask(self, chat: Chat) -> None:
        args = self.args
        if self.num_asked >= args.requests:
            return
        self.num_asked += 1
        chat.num_tokens += lognormal(self.rng, args.question_tokens, args.spread, 2048)
        chat.turns_left -= 1
        turn = Turn(chat, self.now, [], chat.num_tokens, lognormal(self.rng, args.answer_tokens, args.spread, 1024))
        turn.blocks = self._blocks(chat, chat.num_tokens)
        name = self._route(turn)
        self.loads[name] += 1
        self._at(self.now + args.delay, self._arrive, name, turn)

    def _blocks(self, chat: Chat, num_tokens: int) -> list[int]:
        """Stand-ins for hashes: of the system prompt alone, then of the chat."""
        shared = self.args.system_tokens // self.args.block_size
        count = (num_tokens - 1) // self.args.block_size
        odd = 2654435761  # times an odd number no two below 2**32 become one
        head = [(chat.system << 12 | i) * odd % 2**32 for i in range(min(count, shared))]
        first = self.args.system_prompts + chat.number
        return head + [(first << 12 | i) * odd % 2**32 for i in range(shared, count)]

    # The router

    def _route(self, turn: Turn) -> str:
        self.num_routed += 1
        if self.policy == "round_robin":
            return self.names[self.num_routed % len(self.names)]
        if self.policy == "least_loaded":
            two = self.rng.sample(self.names, 2) if len(self.names) > 2 else self.names
            return min(two, key=self.loads.__getitem__)
        name = self.router.choose(turn.blocks, self.loads.__getitem__)
        self.router.sent(name, turn.blocks)
        return name

    def _report(self, name: str) -> None:
        engine = self.engines[name]
        if engine.changed:
            engine.changed = False
            self._at(self.now + self.args.delay, self.router.report, name, list(engine.cache))
        self._at(self.now + self.args.staleness, self._report, name)

    # Engines

    def _arrive(self, name: str, turn: Turn) -> None:
        engine = self.engines[name]
        engine.waiting.append(turn)
        if engine.plan is None:
            self._go_on(engine)
        elif not engine.prefilling and (when := engine.interrupt(self.now)) is not None:
            engine.version += 1
            self._at(when, self._stepped, engine, engine.version)

    def _go_on(self, engine: Engine) -> None:
        engine.admit(self.outcome)
        when = engine.begin(self.now)
        if when is not None:
            engine.version += 1
            self._at(when, self._stepped, engine, engine.version)

    def _stepped(self, engine: Engine, version: int) -> None:
        if version != engine.version:
            return
        for turn in engine.complete(self.now, self._first_token):
            chat = turn.chat
            chat.num_tokens += turn.num_output_tokens
            engine.touch(self._blocks(chat, chat.num_tokens))
            self.outcome.output_tokens += turn.num_output_tokens
            self._at(self.now + self.args.delay, self._heard, engine.name)
            if chat.turns_left:
                think = self.rng.expovariate(1 / self.args.think_seconds)
                self._at(self.now + self.args.delay + think, self._ask, chat)
        self._go_on(engine)

    def _heard(self, name: str) -> None:
        self.loads[name] -= 1

    def _first_token(self, turn: Turn) -> None:
        self.outcome.ttft.append(self.now + self.args.delay - turn.asked_at)


def print_table(outcomes: list[Outcome]) -> None:
    names = list(outcomes[0].row())
    print("| replicas | policy | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 2) + "|")
    for outcome in outcomes:
        values = " | ".join(f"{value:,.4g}" for value in outcome.row().values())
        print(f"| {outcome.num_replicas} | {outcome.policy} | {values} |")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", nargs="+", type=int, default=[1, 8, 64])
    add("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    add("--requests", type=int, default=100_000)
    add("--rate", type=float, default=0.5, help="requests a second for each replica, as Poisson arrivals of chats")
    add("--turns", type=float, default=6, help="of a chat, mean of an exponential distribution")
    add("--chats", type=int, help="as many, all from the start and each of exactly --turns; default: by --rate")
    add("--think-seconds", type=float, default=20.0, help="between an answer and the next turn, mean")
    add("--system-prompts", type=int, default=20, help="the k-th is asked with as often as 1/k says")
    add("--system-tokens", type=int, default=512)
    add("--question-tokens", type=float, default=60, help="median of a lognormal")
    add("--answer-tokens", type=float, default=100, help="likewise")
    add("--spread", type=float, default=0.8, help="sigma of both")
    add("--delay", type=float, default=0.005, help="seconds between router and replica, one way")
    add("--staleness", type=float, default=5.0, help="seconds between two reports of a replica")
    add("--sequences", type=int, default=256)
    add("--max-batch-tokens", type=int, default=2048)
    add("--blocks", type=int, default=1500, help="cache blocks of each replica")
    add("--block-size", type=int, default=64)
    add("--cost-model", help="JSON file of CostModel's constants")
    add("--seed", type=int, default=0)
    add("--json", help="file for the table's numbers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Outcome]:
    args = parse(argv)
    cost = CostModel()
    if args.cost_model:
        with open(args.cost_model, encoding="utf-8") as file:
            cost = CostModel(**json.load(file))
    outcomes = [Fleet(policy, n, args, cost).run() for n in args.replicas for policy in args.policies]
    print_table(outcomes)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            rows = [{"replicas": o.num_replicas, "policy": o.policy, **o.row()} for o in outcomes]
            json.dump(rows, file, indent=1)
    return outcomes


if __name__ == "__main__":
    main()
