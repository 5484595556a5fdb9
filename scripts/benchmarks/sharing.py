"""What prefix sharing and the scheduling policies are worth on the real engine; ratios within one process run.

python scripts/benchmarks/sharing.py prefix --model random-350m    # prefix64: shared, not shared, stock
python scripts/benchmarks/sharing.py turns batch queue             # on the shipped tiny model, a minute or two
python scripts/benchmarks/sharing.py evictions --model random-45m  # fcfs and past_future
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness.readings import run_ours, run_stock
from harness.workloads import load_model, make_workloads

from lfm2_cb import ContinuousBatchingGenerator, default_dtype
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES, make_policy
from lfm2_cb.scheduling.request import FinishReason, Request
from lfm2_cb.scheduling.scheduler import ScheduledRow, Scheduler

EXACT = {"do_sample": False, "eos_token_id": None}


def alternate(repeats: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each, run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(run())
            print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
    return {name: statistics.median(values) for name, values in seconds.items()}


def prefix(model, args: argparse.Namespace) -> None:
    """64 prompts that share 512 tokens: with sharing, without, and stock's static batches."""
    workload = make_workloads(model.config.vocab_size, model.config.max_position_embeddings)["prefix64"]
    with (
        ContinuousBatchingGenerator(model) as shared,
        ContinuousBatchingGenerator(model, prefix_caching=False) as unshared,
    ):
        runs = {
            "shared": lambda: run_ours(shared, workload).seconds,
            "not shared": lambda: run_ours(unshared, workload).seconds,
        }
        if not args.no_stock:
            for size in args.stock_batch:
                runs[f"stock, batch {size}"] = lambda size=size: run_stock(model, workload, size).seconds
        seconds = alternate(args.repeats, **runs)
    ours = seconds.pop("shared")
    for name, value in seconds.items():
        print(f"prefix64: {value / ours:.2f} × the speed of {name}")


def turns(model, args: argparse.Namespace) -> None:
    """Chats of ten turns: history tokens that a turn computes again."""
    rng, block_size, worst = random.Random(0), 64, 0
    histories: list[list[int]] = [[] for _ in range(16)]
    with ContinuousBatchingGenerator(model, cache_memory="512MiB", block_size=block_size) as generator:
        for _ in range(10):
            prompts = [h + [rng.randrange(10, 4000) for _ in range(rng.randint(5, 90))] for h in histories]
            outputs = generator.generate(prompts, max_new_tokens=rng.randint(10, 90), **EXACT)
            for history, output in zip(histories, outputs, strict=True):
                # An answer's last token has not been computed before.
                worst = max(worst, len(history) - 1 - output.metrics.num_cached_tokens)
            histories = [p + output.token_ids for p, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, histories))
    print(
        f"turns: at most {worst} tokens of a history (of up to {longest}) computed again; a block holds {block_size}"
    )


def batch(model, args: argparse.Namespace) -> None:
    """A shuffled list of prompts under 48 prefixes, answers of mixed lengths, a cache for a few prefixes."""
    rng = random.Random(0)
    workload = []
    for _ in range(48):
        head = [rng.randrange(10, 4000) for _ in range(448)]
        for _ in range(8):
            tail = [rng.randrange(10, 4000) for _ in range(rng.randint(8, 60))]
            workload.append((head + tail, max(4, min(128, round(rng.lognormvariate(3.2, 0.8))))))
    rng.shuffle(workload)
    policies_on(model, workload, ("fcfs", "batch"), args, max_sequences=32, num_blocks=160)


def evictions(model, args: argparse.Namespace) -> None:
    """Answers that stop far below their limit (as reasoning does, after short prompts), in a cache that holds a part
    of what may run."""
    rng = random.Random(0)
    workload = []
    for _ in range(args.requests):
        length = max(4, min(args.limit, round(args.answer * rng.lognormvariate(0, 0.9))))
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(args.answer // 10, args.answer // 3))]
        workload.append((prompt, length))
    for num_blocks in args.blocks:
        print(f"{num_blocks} blocks of {args.block_size} tokens", flush=True)
        policies_on(
            model, workload, ("fcfs", "past_future"), args, max_sequences=128, num_blocks=num_blocks,
            block_size=args.block_size, limit=args.limit,
        )  # fmt: skip


@dataclass
class Served:
    """What one policy made of a list once."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the process: robust beside others' work
    steps: int = 0
    running: int = 0  # summed over steps
    computed: int = 0  # tokens
    recomputed: int = 0  # of them, those that an eviction had thrown away
    evictions: int = 0

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s ({self.cpu_seconds:.1f} s CPU), {self.evictions} evictions, {self.steps:,} steps, "
            f"{self.running / self.steps:.1f} rows each, {self.computed:,} tokens computed, {self.recomputed:,} again"
        )


def serve(engine: Engine, workload: list[tuple[list[int], int]], limit: int | None) -> Served:
    """Run the list to its end. limit: what the scheduler is told, where true lengths are hidden from it; the requests
    are then ended from here, as the simulator does, at no cost to the steps."""
    params = SamplingParams()
    requests = [Request(i, prompt, limit or n, params=params) for i, (prompt, n) in enumerate(workload)]
    served, known = Served(), [0] * len(requests)
    advance = engine.scheduler.on_computed

    def counted(row: ScheduledRow, new_token_ids: list[int]) -> None:
        i, end = row.request.request_id, row.start + row.num_tokens
        served.computed += row.num_tokens
        served.recomputed += max(0, min(end, known[i]) - row.start)
        served.running += 1
        known[i] = max(known[i], end)
        advance(row, new_token_ids)

    engine.scheduler.on_computed = counted  # type: ignore[method-assign]
    start, cpu_start = time.perf_counter(), time.process_time()
    engine.add_all(requests)
    while engine.has_unfinished:
        for output in engine.step():
            request = output.request
            if request.num_output_tokens >= workload[request.request_id][1]:
                engine.scheduler.finish(request, FinishReason.STOP)  # nothing, where it has ended
        served.steps += 1
    served.seconds, served.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert [r.num_output_tokens for r in requests] == [n for _, n in workload]
    served.evictions = sum(r.metrics.num_preemptions for r in requests)
    return served


def policies_on(
    model,
    workload: list[tuple[list[int], int]],
    names: tuple[str, ...],
    args: argparse.Namespace,
    *,
    max_sequences: int,
    num_blocks: int,
    block_size: int = 64,
    limit: int | None = None,
) -> None:
    """The same list under each policy, once before it is compared: a policy may learn from what has run."""
    policies = {name: make_policy(name) for name in names}
    runs: dict[str, list[Served]] = {name: [] for name in names}
    for i in range(args.repeats + 1):
        for name in names:
            engine = Engine(
                as_lfm2_cb(model), EngineConfig(2048, max_sequences, 2**30, block_size, policy=policies[name])
            )
            engine.scheduler.cache = CacheManager(num_blocks, block_size, engine.plan.num_slots)  # exactly so many
            served = serve(engine, workload, limit)
            print(f"  {name}{'' if i else ', the first time'}: {served}", flush=True)
            runs[name] += [served] * (i > 0 or not args.repeats)
    first = runs[names[0]]
    for name in names[1:]:
        for clock in ("seconds", "cpu_seconds"):
            ratio = statistics.median(
                getattr(a, clock) / getattr(b, clock) for a, b in zip(first, runs[name], strict=True)
            )
            print(f"{name}: {ratio:.2f} × the speed of {names[0]} by {clock}", flush=True)
        fewer = sum(r.evictions for r in first) / max(1, sum(r.evictions for r in runs[name]))
        print(f"{name}: 1 / {fewer:.1f} of its evictions" if first[0].evictions else "no evictions", flush=True)


def queue(model, args: argparse.Namespace) -> None:
    """Scheduling alone: 100,000 waiting, 256 running."""
    for name in POLICIES:
        rng = random.Random(0)
        scheduler = Scheduler(CacheManager(2000, 64, 256), make_policy(name), 2048, 256)
        scheduler.add_all(
            [
                Request(i, list(rng.randbytes(rng.randint(16, 200))), rng.randint(8, 256), params=None)
                for i in range(100_000)
            ]
        )
        steps = []
        for _ in range(500):
            start = time.perf_counter()
            rows = scheduler.schedule()
            for row in rows:
                scheduler.on_computed(row, [0] if row.samples else [])
                if row.samples and row.request.num_output_tokens >= row.request.max_new_tokens:
                    scheduler.finish(row.request, FinishReason.LENGTH)
            steps.append(time.perf_counter() - start)
        ms = 1e3 * statistics.median(steps[50:])
        print(
            f"{name}: {ms:.2f} ms a step with {len(scheduler.running)} running, {scheduler.num_waiting:,} waiting",
            flush=True,
        )


def main() -> None:
    parts = {f.__name__: f for f in (prefix, turns, batch, evictions, queue)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(parts))
    parser.add_argument("--model", default="tiny", help='checkpoint path, "tiny", "random-350m" or "random-45m"')
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3, help="0: batch and evictions run once, untaught")
    parser.add_argument("--requests", type=int, default=300, help="of evictions")
    parser.add_argument("--answer", type=int, default=400, help="median tokens of its answers")
    parser.add_argument("--limit", type=int, default=2048, help="of its answers, all that the scheduler knows")
    parser.add_argument("--blocks", type=int, nargs="+", default=[300], help="of its caches")
    parser.add_argument("--block-size", type=int, default=64, help="its blocks, tokens")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--stock-batch", type=int, nargs="+", default=[16])
    args = parser.parse_args()
    model = load_model(args.model, getattr(torch, args.dtype) if args.dtype else default_dtype())
    for name in args.parts:
        parts[name](model, args)


if __name__ == "__main__":
    main()
