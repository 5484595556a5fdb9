"""The engines in turn: ours, stock, peers, ours, … and the report saved after every reading."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import Lfm2ForCausalLM

from lfm2_cb import ContinuousBatchingGenerator

from . import machine
from .peers import Peer
from .readings import Reading, run_ours, run_stock
from .report import Report
from .roofline import steps_of
from .workloads import STOCK_RUNS, Workload


@dataclass
class Bench:
    """The engines of a run.

    Attributes:
        stock: None: not run; never the instance that ours has adopted.
        repeats: rounds. stock_repeats: of them, the first ones in which stock runs too.
        uncached_repeats: of the first rounds of "five", those with its prompts one by one and `use_cache=False` too.
        measure: what the machine could do at best, now.
        stock_batches: workload → batch sizes for stock: all in the first round, the quickest of them from then on.
    """

    report: Report
    generator: ContinuousBatchingGenerator
    work: machine.ModelWork
    stock: Lfm2ForCausalLM | None
    repeats: int
    stock_repeats: int
    uncached_repeats: int
    stock_batches: dict[str, list[int]]
    peers: list[Peer] = field(default_factory=list)
    measure: Callable[[], dict[str, float]] = field(default_factory=lambda: machine.measure)

    def run(self, name: str, workloads: dict[str, Workload], names: list[str]) -> None:
        """All rounds of one workload.

        Args: workloads: all there are. names: those of this run.
        """
        workload, rounds = workloads[name], []
        self.report.section("workloads")[name] = {
            "name": name,
            "prompt_lengths": [len(prompt) for prompt, _ in workload],
            "output_lengths": [length for _, length in workload],
            "rounds": rounds,
        }
        stock_name = STOCK_RUNS.get(name, name)
        stock_here = stock_name == name or stock_name not in names
        for i in range(self.repeats):
            entry: dict[str, Any] = {"machine": self.measure()}
            rounds.append(entry)
            with steps_of(self.generator.engine) as steps:
                ours = self._note(entry, "ours", name, lambda: run_ours(self.generator, workload))
            entry["reached"] = machine.reached(name, self.work, workload, ours, entry["machine"], steps)
            if self.stock is not None and i < self.stock_repeats and stock_here:
                self._stock(entry, rounds, stock_name, workloads[stock_name])
            if self.stock is not None and name == "five" and i < self.uncached_repeats:
                self._note(entry, "uncached", name, lambda: run_stock(self.stock, workload, 1, use_cache=False))
            for peer in list(self.peers):
                self._peer(entry, peer, name, workload)

    def sweep(self, workload: Workload, with_stock: bool) -> None:
        """Ours, and stock in one static batch, on as many equal requests."""
        size, rounds = len(workload), []
        name = f"{size} equal requests"
        self.report.section("sweep")[str(size)] = rounds
        for i in range(self.repeats):
            entry: dict[str, Any] = {}
            rounds.append(entry)
            self._note(entry, "ours", name, lambda: run_ours(self.generator, workload))
            if self.stock is not None and with_stock and i < self.stock_repeats:
                self._note(entry, "stock", name, lambda: run_stock(self.stock, workload, size))

    def _stock(self, entry: dict[str, Any], rounds: list[dict[str, Any]], name: str, workload: Workload) -> None:
        """The best of the batch sizes; after the first round that is known."""
        if "stock" in rounds[0]:
            size = rounds[0]["stock"]["batch_size"]
            self._note(entry, "stock", name, lambda: run_stock(self.stock, workload, size))
            return
        tried = [run_stock(self.stock, workload, size) for size in self.stock_batches[name]]
        entry["tried"] = {str(found.batch_size): found.output_tokens_per_s for found in tried}
        self._note(entry, "stock", name, lambda: max(tried, key=lambda found: found.output_tokens_per_s))

    def _peer(self, entry: dict[str, Any], peer: Peer, name: str, workload: Workload) -> None:
        """A peer that fails is left out from then on: it must not cost the others their readings."""
        try:
            self._note(entry, peer.name, name, lambda: peer.run(workload))
        except RuntimeError as error:
            self.peers.remove(peer)
            self.report.section("peers")[peer.name]["failed"] = f"on {name}: {error}"
            print(f"{peer.name} is left out from here on: {error}", file=sys.stderr, flush=True)

    def _note(self, entry: dict[str, Any], engine: str, name: str, run: Callable[[], Reading]) -> Reading:
        found = run()
        entry[engine] = asdict(found)
        self.report.save()
        print(f"{name}, {engine}: {found.output_tokens_per_s:.1f} tok/s", file=sys.stderr, flush=True)
        return found
