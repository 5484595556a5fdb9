"""Which of many engines a request goes to: the one that has computed most of its prompt, unless too much waits there.

It knows names, hashes of blocks and loads, so a simulator runs the same code as a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

#: A prefix that more engines hold than this is looked for among as many that are drawn: enough to find a little loaded
#: one, and what a decision costs does not grow with the fleet.
SAMPLE = 16

#: An engine is loaded beyond its share at this many times the mean load, and this many requests beyond. (Simulated
#: with 8 and 64 engines: see integrations/ray/README.md.)
SHARE, SLACK = 1.5, 2.0

#: what cached blocks count for where the adapter itself would have to be loaded
ABSENT_ADAPTER = 0.25


@dataclass
class _Engine:
    """The state of one: the blocks that it reported, and those of requests sent there since, counted as computed."""

    known: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)  # since the last report
    adapters: frozenset[str] = frozenset()


class PrefixRouter:
    """Chooses an engine for each request by score: cached blocks of its prompt × adapter present ÷ load.

    Reports may be out of date: an engine that has evicted a prefix computes it again.

    Args: seed: of the draws.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._engines: dict[str, _Engine] = {}
        self._ring: list[str] = []  # of all engines, in no order
        self._holders: dict[int, set[str]] = {}  # by block hash
        self._carriers: dict[str, set[str]] = {}  # by adapter
        self._random = random.Random(seed)

    def keep(self, names: Iterable[str]) -> None:
        """Route to these engines, and to no others."""
        names = set(names)
        if names == self._engines.keys():
            return
        for name in self._engines.keys() - names:
            self._learn(name, set(), self._engines[name].known, frozenset())
            del self._engines[name]
        for name in sorted(names - self._engines.keys()):
            self._engines[name] = _Engine()
        self._ring = list(self._engines)
        self._random.shuffle(self._ring)

    def report(self, name: str, hashes: Iterable[int], adapters: Iterable[str] = ()) -> None:
        """Replace what is known of an engine by its report of the blocks and adapters that it holds."""
        engine, reported = self._engines[name], set(hashes)
        self._learn(name, reported - engine.known, engine.known - reported - engine.sent, frozenset(adapters))
        engine.sent = set()

    def sent(self, name: str, hashes: Sequence[int]) -> None:
        """Record that a request was sent to an engine, chosen here or not."""
        if (engine := self._engines.get(name)) is not None:
            engine.sent.update(hashes)
            for block in [block for block in hashes if block not in engine.known]:
                engine.known.add(block)
                self._holders.setdefault(block, set()).add(name)

    def choose(self, hashes: Sequence[int], load: Callable[[str], float], adapter: str | None = None) -> str:
        """The engine for a request.

        Args:
            hashes: of its prompt's blocks, from the first.
            load: of an engine, in requests.
            adapter: that it runs with.
        Raises: IndexError: there are no engines.
        """
        if not self._ring:
            raise IndexError("no engine is available to route to")
        drawn = self._draw(self._ring)
        carriers = None if adapter is None else self._carriers.get(adapter, set())
        if carriers:
            drawn = list({*drawn, *self._draw(sorted(carriers))})
        loads = {name: load(name) for name in drawn}
        fair = SHARE * sum(loads.values()) / len(loads) + SLACK
        best, best_score, seen = None, 0.0, set()
        for depth in range(len(hashes), 0, -1):
            if depth <= best_score:  # an idle engine with so few blocks scores no more
                break
            holders = self._holders.get(hashes[depth - 1], ())
            for name in holders if len(holders) <= SAMPLE else drawn:
                if name in seen or name not in holders:
                    continue
                seen.add(name)
                if (there := loads.get(name)) is None:
                    there = load(name)
                presence = 1.0 if carriers is None or name in carriers else ABSENT_ADAPTER
                score = depth * presence / (1 + there)
                if there <= fair and score > best_score:
                    best, best_score = name, score
        if best is not None:
            return best
        free = [name for name in drawn if loads[name] <= fair]
        free = [name for name in free if carriers and name in carriers] or free
        return min(self._random.sample(free, min(2, len(free))), key=loads.__getitem__)

    def _draw(self, names: list[str]) -> list[str]:
        """All, or as many as `SAMPLE`: neighbours, which costs a tenth of drawing each by itself."""
        if len(names) <= SAMPLE:
            return names
        first = int(self._random.random() * len(names))
        return names[first : first + SAMPLE] + names[: max(0, first + SAMPLE - len(names))]

    def _learn(self, name: str, new: set[int], gone: set[int], adapters: frozenset[str]) -> None:
        engine = self._engines[name]
        for adapter in engine.adapters ^ adapters:
            self._carriers.setdefault(adapter, set()).symmetric_difference_update({name})
        engine.adapters = adapters
        for block in gone:
            holders = self._holders[block]
            holders.discard(name)
            if not holders:
                del self._holders[block]
        for block in new:
            self._holders.setdefault(block, set()).add(name)
        engine.known -= gone
        engine.known |= new
