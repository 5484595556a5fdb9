"""Our engine beside stock `generate()` (and others) on fixed workloads, strictly alternating; prints Markdown.

    python scripts/benchmarks/compare.py --workloads five ragged64 --repeats 3 --json out.json
    python scripts/benchmarks/compare.py --workloads five --uncached --memory five --startup
    python scripts/benchmarks/compare.py --workloads --sweep 1 4 16 64 256 --load 0.5 1 2 --plots plots
    python scripts/benchmarks/compare.py --peer vllm=/path/to/its/python --checkpoint /path/for/the/model
    python scripts/benchmarks/compare.py --read a.json b.json --json both.json --markdown table.md --plots plots

Greedy, end-of-sequence ignored, exact output lengths. Stock runs left-padded static batches of `--stock-batch` sizes,
the best of which is compared with. Times on shared machines wander: trust the ratios, which are medians over rounds,
each of which has every engine in turn, and measures the machine anew. The JSON file is whole after every reading.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from harness import fresh, load, machine, plots
from harness.peers import Peer
from harness.readings import log_steps, run_ours, sampling_overhead
from harness.report import Report, markdown
from harness.rounds import Bench
from harness.workloads import (
    STOCK_BATCHES,
    Workload,
    cut,
    equal_requests,
    load_model,
    make_workloads,
    save_checkpoint,
)
from transformers import PreTrainedConfig

from lfm2_cb import ContinuousBatchingGenerator, default_dtype
from lfm2_cb.engine.config import EngineConfig, parse_bytes
from lfm2_cb.model.quantization import WEIGHTS

sys.path.append(str(Path(__file__).parents[1]))
from tools.simulate import CostModel


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random-350m", help='checkpoint path, "tiny" or "random-350m"')
    add("--device", default="cpu", help='of ours, stock and the peers: "cpu", "cuda" (default: %(default)s)')
    add("--dtype", choices=["float32", "bfloat16"], help="default: what this hardware multiplies best")
    add("--workloads", nargs="*", default=list(STOCK_BATCHES), choices=list(STOCK_BATCHES))
    add("--repeats", type=int, default=3, help="rounds")
    add("--limit", type=int, nargs=2, metavar=("REQUESTS", "TOKENS"), help="cut workloads to these, to try out")
    add("--json", help="file for all readings")
    add("--markdown", help="file for the tables, which are printed too")
    add("--plots", metavar="DIR", help="PNG files: workloads, --sweep and --load")
    add("--read", nargs="+", metavar="JSON", help="measure nothing; show what earlier runs wrote, together: of two "
        "runs of a workload, the later one counts for the engines that it ran")  # fmt: skip

    stock = parser.add_argument_group("stock generate()")
    stock.add_argument("--no-stock", action="store_true")
    stock.add_argument("--stock-batch", type=int, nargs="+", help="batch sizes for stock to try")
    stock.add_argument("--stock-repeats", type=int, help="the first rounds only, where stock is slow")
    stock.add_argument("--uncached", type=int, nargs="?", const=1, default=0, metavar="ROUNDS",
                       help="five also one by one with use_cache=False, in its first ROUNDS (1)")  # fmt: skip

    ours = parser.add_argument_group("our engine")
    ours.add_argument("--weights", choices=list(WEIGHTS), help="low-bit; in full, where absent")
    ours.add_argument("--policy", default="fcfs")
    ours.add_argument("--no-prefix-caching", action="store_true")
    ours.add_argument("--cache-memory", default=EngineConfig.cache_memory)
    ours.add_argument("--max-batch-tokens", type=int, default=EngineConfig.max_batch_tokens)
    ours.add_argument("--max-step-seconds", type=float, default=EngineConfig.max_step_seconds)

    others = parser.add_argument_group("other engines")
    others.add_argument(
        "--peer", nargs="+", default=[], metavar="NAME=PYTHON", help="vllm, openvino, generate_batch; and its Python"
    )
    others.add_argument("--peer-model", nargs="+", default=[], metavar="NAME=DIR", help="default: the checkpoint")
    others.add_argument("--checkpoint", help="folder for the model that other processes load; default: temporary")

    modes = parser.add_argument_group("beside the workloads")
    modes.add_argument("--memory", nargs="+", default=[], choices=list(STOCK_BATCHES), metavar="WORKLOAD",
                       help="peak RSS of each engine on these, in fresh processes")  # fmt: skip
    modes.add_argument("--startup", action="store_true", help="seconds to the first token, in fresh processes")
    modes.add_argument("--no-build", action="store_true", help="--startup without building the kernels anew")
    modes.add_argument("--sweep", type=int, nargs="+", default=[], metavar="SIZE", help="throughput by batch size")
    modes.add_argument("--sweep-stock-to", type=int, default=256, help="largest batch for stock")
    modes.add_argument("--load", type=float, nargs="+", default=[], metavar="RATE", help="Poisson arrivals a second")
    modes.add_argument("--load-requests", type=int, default=64)
    modes.add_argument("--load-long", action="store_true", help="every eighth prompt has 2,048 tokens")
    modes.add_argument("--load-chunks", type=int, nargs="+", help="values of max_batch_tokens for --load to compare")
    modes.add_argument("--sampling-overhead", action="store_true", help="of repetition_penalty + top_p, 64 rows")
    modes.add_argument("--cost-model", help="fit simulate.py's cost model to this run's steps, and write it here")
    args = parser.parse_args(argv)
    args.peer, args.peer_model = (_pairs(parser, value) for value in (args.peer, args.peer_model))
    args.stock_repeats = args.repeats if args.stock_repeats is None else args.stock_repeats
    args.dtype = args.dtype or str(default_dtype()).removeprefix("torch.")
    return args


def _pairs(parser: argparse.ArgumentParser, values: list[str]) -> dict[str, str]:
    if wrong := [value for value in values if "=" not in value]:
        parser.error(f"{wrong[0]!r} is not NAME=PATH")
    return dict(value.split("=", 1) for value in values)


class Run:
    """One call of this script: what its parts share."""

    def __init__(self, args: argparse.Namespace, report: Report, stack: contextlib.ExitStack) -> None:
        self.args, self.report, self.stack = args, report, stack
        self.device = torch.device(args.device)
        model = load_model(args.model, getattr(torch, args.dtype)).to(self.device)
        self.vocab_size = model.config.vocab_size
        workloads = make_workloads(self.vocab_size, model.config.max_position_embeddings)
        self.workloads = {name: self.limited(workload) for name, workload in workloads.items()}
        # Ours adopts the instance it is given, so stock has one of its own.
        self.stock = None if args.no_stock else copy.deepcopy(model)
        self.model = model
        work = machine.ModelWork.of(model)
        self.generator = self.make_generator(args.max_batch_tokens)
        plan = self.generator.engine.plan
        self.work = replace(
            work,
            weight_bytes=machine.bytes_a_step(self.generator.model),
            block_bytes=plan.bytes_per_block - (plan.bytes_per_state if plan.checkpoints else 0),
            weights=args.weights,
        )

    def limited(self, workload: Workload) -> Workload:
        return cut(workload, *self.args.limit) if self.args.limit else workload

    def make_generator(self, max_batch_tokens: int) -> ContinuousBatchingGenerator:
        args = self.args
        generator = ContinuousBatchingGenerator(
            self.model,
            cache_memory=args.cache_memory,
            max_batch_tokens=max_batch_tokens,
            max_step_seconds=args.max_step_seconds,
            prefix_caching=not args.no_prefix_caching,
            policy=args.policy,
            weights=args.weights,
        )
        return self.stack.enter_context(generator)

    def checkpoint(self) -> str:
        """The model in a folder, made when first asked for."""
        if not self.args.checkpoint:
            self.args.checkpoint = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="lfm2-cb-model-"))
        return save_checkpoint(self.args.model, getattr(torch, self.args.dtype), self.args.checkpoint)

    def start_peers(self) -> list[Peer]:
        args, peers = self.args, []
        for name, python in args.peer.items():
            options = {
                "model": args.peer_model.get(name) or self.checkpoint(),
                "threads": torch.get_num_threads(),
                "max_batch_tokens": args.max_batch_tokens,
                "max_sequences": 256,
                "cache_memory": parse_bytes(args.cache_memory),
                "dtype": args.dtype,
                "prefix_caching": not args.no_prefix_caching,
                "device": args.device,
            }
            peer = Peer(name, python, options)
            self.stack.callback(peer.close)
            peers.append(peer)
            self.report.section("peers")[name] = peer.facts
        return peers

    def alternate(self) -> None:
        """The workloads and the sweep, all engines in turn."""
        args = self.args
        sizes = {name: args.stock_batch or STOCK_BATCHES[name] for name in STOCK_BATCHES}
        peers = self.start_peers() if args.workloads else []
        bench = Bench(
            self.report, self.generator, self.work, self.stock, args.repeats, args.stock_repeats, args.uncached, sizes,
            peers, functools.partial(measure_machine, args),
        )  # fmt: skip
        warm_up = cut(self.workloads["five"], 2, 8)
        run_ours(self.generator, warm_up)
        for peer in peers:
            peer.run(warm_up)
        for name in args.workloads:
            bench.run(name, self.workloads, args.workloads)
        for peer in peers:
            self.report.section("memory").setdefault(peer.name, {})["all"] = {"peak_rss_mb": peer.peak_rss_mb()}
        for size in args.sweep:
            workload = equal_requests(size, self.vocab_size)
            bench.sweep(cut(workload, size, args.limit[1]) if args.limit else workload, size <= args.sweep_stock_to)

    def load(self) -> None:
        args = self.args
        workload = self.workloads["ragged256"][: args.load_requests]
        long = min(load.LONG_PROMPT, self.model.config.max_position_embeddings // 2)
        if args.limit:
            long = min(long, 4 * args.limit[1])
        if args.load_long:
            workload = load.with_long_prompts(workload, self.vocab_size, long)
        readings = self.report.data.setdefault("load", [])
        for chunk in args.load_chunks or [args.max_batch_tokens]:
            with contextlib.ExitStack() as stack:
                generator = self.generator
                if chunk != args.max_batch_tokens:
                    generator = stack.enter_context(self.make_generator(chunk))
                run_ours(generator, cut(workload, 2, 8))
                for rate in args.load:
                    long_from = long if args.load_long else load.LONG_PROMPT
                    readings.append(asdict(load.run_load(generator, workload, rate, long_from)))
                    self.report.save()

    def fresh_processes(self) -> None:
        args, cache = self.args, parse_bytes(self.args.cache_memory)
        for name in args.memory:
            for engine in ("ours", *(() if args.no_stock else ("stock",))):
                batch = (args.stock_batch or STOCK_BATCHES[name])[0]
                weights = args.weights if engine == "ours" else None
                found = fresh.memory(
                    self.checkpoint(), args.dtype, weights, self.workloads[name], cache, engine, batch
                )
                self.report.section("memory").setdefault(engine, {})[name] = found
                self.report.save()
        if args.startup:
            job = {"model": self.checkpoint(), "dtype": args.dtype, "weights": args.weights, "cache_memory": cache}
            found = fresh.startup(job, args.repeats, not args.no_build)
            self.report.section("startup").update(found)
            self.report.save()


def measure(args: argparse.Namespace) -> Report:
    """Run all that is asked for."""
    places = ("json", "markdown", "plots", "read", "peer", "peer_model", "checkpoint")  # of this machine
    options = {name: value for name, value in vars(args).items() if name not in places}
    facts = machine.facts() | machine.card_facts(torch.device(args.device))
    report = Report(args.json, {"machine": facts | {"measured": measure_machine(args)}, "options": options})
    with contextlib.ExitStack() as stack:
        run = Run(args, report, stack)
        steps = log_steps(run.generator.engine) if args.cost_model else []
        run.alternate()
        if args.sampling_overhead:
            report.data["sampling_overhead"] = sampling_overhead(run.generator, args.repeats)
        if args.cost_model:
            fit_cost_model(steps, run.generator.model.config, args.cost_model)
        if args.load:
            run.load()
        run.fresh_processes()
    report.save()
    return report


def measure_machine(args: argparse.Namespace) -> dict[str, float]:
    device = torch.device(args.device)
    return machine.measure_card(device) if device.type == "cuda" else machine.measure()


def fit_cost_model(steps: list[tuple[int, int, int, float]], config: PreTrainedConfig, path: str) -> None:
    cost = CostModel.fit(steps, getattr(config, "num_experts", 1), getattr(config, "num_experts_per_tok", 1))
    error = statistics.median(abs(cost.seconds_of(*shape) / seconds - 1) for *shape, seconds in steps)
    print(f"{cost}: median error {error:.0%} over {len(steps)} steps", file=sys.stderr)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(asdict(cost), file, indent=1)


def main(argv: list[str] | None = None) -> Report:
    args = parse(argv)
    if args.plots:
        plots.check()
    report = Report.read(args.read, args.json) if args.read else measure(args)
    text = markdown(report.data)
    print(text)
    if "sampling_overhead" in report.data:
        print(f"\nrepetition_penalty + top_p add {report.data['sampling_overhead']:.1%} to a step of 64 rows")
    if args.markdown:
        with open(args.markdown, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    if args.plots:
        for path in plots.write(report.data, args.plots):
            print(path)
    return report


if __name__ == "__main__":
    main()
