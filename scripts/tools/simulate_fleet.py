"""Chats on a fleet of engines behind one router, far beyond what this machine could run.

    python scripts/tools/simulate_fleet.py --replicas 8 --requests 100000
    python scripts/tools/simulate_fleet.py --replicas 1 8 64 1000 --requests 1000000    # a quarter of an hour

The prefix-aware policy is the router's own code (`lfm2_cb.scheduling.routing`); engines are those of fleet_model.py. A
chat begins with one of a few system prompts; its next turn comes after its answer and some time to think, with all
that was said. So many users a replica ask, each beginning another chat after the last turn of one: where answers take
longer, less is asked. With `--rate` chats begin whatever becomes of those before.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from fleet_model import Chat, Engine, MadeUpChat, Outcome, Turn
from simulate import CostModel

from lfm2_cb.scheduling.routing import PrefixRouter

POLICIES = ("round_robin", "least_loaded", "prefix")


class Fleet:
    """Engines, their router, and the clients: events in the order of simulated time.

    Args: chats: that are all there from the start, instead of those that `args` asks for.
    """

    def __init__(
        self,
        policy: str,
        num_replicas: int,
        args: argparse.Namespace,
        cost: CostModel,
        chats: Sequence[Chat] | None = None,
    ) -> None:
        self.args, self.policy, self.chats = args, policy, chats
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
        self.popularity = [total / sum(weights) for total in accumulate(weights)]

    def run(self) -> Outcome:
        began = time.process_time()
        self._schedule_clients()
        if self.policy == "prefix":
            for name in self.names:  # each in its own time
                self._at(self.rng.random() * self.args.staleness, self._report, name)
        events, ttft, most = self.events, self.outcome.ttft, self.args.requests
        while events and len(ttft) < most:
            self.now, _, act, given = heapq.heappop(events)
            act(*given)
        busy = [engine.busy_seconds for engine in self.engines.values()]
        self.outcome.imbalance = max(busy) * len(busy) / sum(busy)
        self.outcome.seconds, self.outcome.cpu_seconds = self.now, time.process_time() - began
        return self.outcome

    def _at(self, when: float, act: Callable[..., None], *given: object) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, act, given))

    # Clients

    def _schedule_clients(self) -> None:
        if self.chats is not None:
            for chat in self.chats:
                self._at(0.0, self._ask, chat)
        elif self.args.rate is not None:
            self._at(0.0, self._open_chat)
        else:
            for _ in range(self.args.users * len(self.names)):
                self._at(self.rng.random() * self.args.think_seconds, self._begin_chat)

    def _open_chat(self) -> None:
        self._begin_chat()
        if self.num_asked < self.args.requests:
            rate = self.args.rate * len(self.names) / self.args.turns
            self._at(self.now + self.rng.expovariate(rate), self._open_chat)

    def _begin_chat(self) -> None:
        system = min(bisect_left(self.popularity, self.rng.random()), len(self.popularity) - 1)
        turns = max(1, round(self.rng.expovariate(1 / self.args.turns)))
        self.num_chats += 1
        self._ask(MadeUpChat(self.num_chats, system, turns, self.rng, self.args))

    def _ask(self, chat: Chat) -> None:
        if self.num_asked >= self.args.requests:
            return
        turn = chat.next_turn()
        if turn is None:
            if self.chats is None and self.args.rate is None:
                self._begin_chat()
            return
        self.num_asked += 1
        turn.asked_at = self.now
        name = self._route(turn)
        self.loads[name] += 1
        self._at(self.now + self.args.delay, self._arrive, self.engines[name], turn)

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
            self.router.report(name, engine.cache)
        self._at(self.now + self.args.staleness, self._report, name)

    # Engines

    def _arrive(self, engine: Engine, turn: Turn) -> None:
        engine.waiting.append(turn)
        if engine.plan is None:
            self._go_on(engine)
        elif not engine.prefilling and (when := engine.interrupt(self.now)) is not None:
            engine.version += 1
            self._at(when, self._stepped, engine, engine.version)

    def _go_on(self, engine: Engine) -> None:
        if engine.waiting:
            engine.admit(self.outcome)
        when = engine.begin(self.now)
        if when is not None:
            engine.version += 1
            self._at(when, self._stepped, engine, engine.version)

    def _stepped(self, engine: Engine, version: int) -> None:
        if version != engine.version:
            return  # it was interrupted before
        for turn in engine.complete(self._first_token):
            self.outcome.output_tokens += turn.num_output_tokens
            self._at(self.now + self.args.delay, self._heard, engine.name)
            think = self.rng.expovariate(1 / self.args.think_seconds)
            self._at(self.now + self.args.delay + think, self._ask, turn.chat)
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
    add("--users", type=int, default=24, help="that ask each replica, one chat after another")
    add("--rate", type=float, help="requests a second for each replica instead, as Poisson arrivals of chats")
    add("--turns", type=float, default=6, help="of a chat, mean of an exponential distribution")
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
    gc.disable()  # there are no cycles, and millions of objects to look through for them
    main()
