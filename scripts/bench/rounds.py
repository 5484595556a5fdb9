"""The engines in turn: ours, stock, peers, ours, … and the report saved after every reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import Lfm2ForCausalLM

from lfm2_cb import ContinuousBatchingGenerator

from . import machine
from .peers import Peer
from .readings import Reading, run_ours, run_stock
from .report import Report
from .workloads import STOCK_RUNS, Workload


@dataclass
class Bench:
    """The engines of a run.

    Attributes:
        stock: None: not run; never the instance that ours has adopted.
        repeats: rounds. stock_repeats: of them, the first ones in which stock runs too.
        uncached_repeats: of the first rounds of "five", those with its prompts one by one and `use_cache=False` too.
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

    def run(self, name: str, workloads: dict[str, Workload]) -> None:
        """All rounds of one workload."""
        workload, rounds = workloads[name], []
        self.report.section("workloads")[name] = {
            "name": name,
            "prompt_lengths": [len(prompt) for prompt, _ in workload],
            "output_lengths": [length for _, length in workload],
            "rounds": rounds,
        }
        other = STOCK_RUNS.get(name, name)
        stock_elsewhere = other != name and other in workloads
        for i in range(self.repeats):
            entry: dict[str, Any] = {"machine": machine.measure()}
            rounds.append(entry)
            ours = self._note(entry, "ours", lambda: run_ours(self.generator, workload))
            entry["reached"] = machine.reached(name, self.work, workload, ours, entry["machine"])
            if self.stock is not None and i < self.stock_repeats and not stock_elsewhere:
                self._stock(entry, rounds, name, workload)
            if self.stock is not None and name == "five" and i < self.uncached_repeats:
                self._note(entry, "uncached", lambda: run_stock(self.stock, workload, 1, use_cache=False))
            for peer in self.peers:
                self._note(entry, peer.name, lambda peer=peer: peer.run(workload))

    def sweep(self, workload: Workload, with_stock: bool) -> None:
        """Ours, and stock in one static batch, on as many equal requests."""
        rounds: list[dict[str, Any]] = []
        self.report.section("sweep")[str(len(workload))] = rounds
        for i in range(self.repeats):
            entry: dict[str, Any] = {}
            rounds.append(entry)
            self._note(entry, "ours", lambda: run_ours(self.generator, workload))
            if self.stock is not None and with_stock and i < self.stock_repeats:
                self._note(entry, "stock", lambda: run_stock(self.stock, workload, len(workload)))

    def _stock(self, entry: dict[str, Any], rounds: list[dict[str, Any]], name: str, workload: Workload) -> None:
        """The best of the batch sizes; after the first round that is known."""
        if "stock" in rounds[0]:
            self._note(entry, "stock", lambda: run_stock(self.stock, workload, rounds[0]["stock"]["batch_size"]))
            return
        tried = [run_stock(self.stock, workload, size) for size in self.stock_batches[name]]
        entry["tried"] = {str(found.batch_size): found.output_tokens_per_s for found in tried}
        self._note(entry, "stock", lambda: max(tried, key=lambda found: found.output_tokens_per_s))

    def _note(self, entry: dict[str, Any], engine: str, run: Callable[[], Reading]) -> Reading:
        found = run()
        entry[engine] = asdict(found)
        self.report.save()
        return found
