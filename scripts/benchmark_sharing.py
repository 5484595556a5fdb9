"""What prefix sharing and the scheduling policies are worth on the real engine; ratios within one process run.

python scripts/benchmark_sharing.py prefix --model random-350m    # prefix64: shared, not shared, stock
python scripts/benchmark_sharing.py turns batch evictions queue   # on the shipped tiny model, a minute or two
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from benchmark import load_model, make_workloads, run_ours, run_stock

from lfm2_cb import ContinuousBatchingGenerator, default_dtype
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES, make_policy
from lfm2_cb.scheduling.request import FinishReason, Request
from lfm2_cb.scheduling.scheduler import Scheduler

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
    """Answers that stop far below their limit, in a cache that holds a part of what may run."""
    rng = random.Random(0)
    lengths = [max(4, min(1500, round(rng.lognormvariate(5, 0.9)))) for _ in range(400)]
    workload = [([rng.randrange(10, 4000) for _ in range(rng.randint(100, 300))], n) for n in lengths]
    policies_on(
        model, workload, ("fcfs", "past_future"), args, max_sequences=128, num_blocks=1000, block_size=8, limit=1500
    )


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
    """The same list under each policy, once before it is timed: a policy may learn from what has run.

    limit: what the scheduler is told, where true lengths are hidden from it.
    """
    evicted: dict[str, int] = {}
    policies = {name: make_policy(name) for name in names}

    def request(i: int, prompt: list[int], length: int) -> Request:
        def ends(ids: torch.Tensor, scores: object) -> torch.Tensor:
            return torch.tensor([ids.shape[1] >= len(prompt) + length])

        params = SamplingParams(stopping_criteria=[ends] if limit else [])
        return Request(i, prompt, limit or length, params=params)

    def run(name: str) -> float:
        engine = Engine(as_lfm2_cb(model), EngineConfig(2048, max_sequences, 2**30, block_size, policy=policies[name]))
        engine.scheduler.cache = CacheManager(num_blocks, block_size, engine.plan.num_slots)  # exactly so many
        requests = [request(i, *item) for i, item in enumerate(workload)]
        start = time.perf_counter()
        engine.add_all(requests)
        while engine.has_unfinished:
            engine.step()
        seconds = time.perf_counter() - start
        assert [r.num_output_tokens for r in requests] == [n for _, n in workload]
        evicted[name] = sum(r.metrics.num_preemptions for r in requests)
        return seconds

    for name in names:
        print(f"  {name}, the first time: {run(name):.2f} s, {evicted[name]} evictions", flush=True)
    if not args.repeats:
        return
    seconds = alternate(args.repeats, **{name: (lambda name=name: run(name)) for name in names})
    for name in names:
        ratio = seconds[names[0]] / seconds[name]
        print(f"{name}: {seconds[name]:.2f} s ({ratio:.2f} × {names[0]}), {evicted[name]} evictions")


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
    parser.add_argument("--model", default="tiny", help='checkpoint path, "tiny" or "random-350m"')
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3, help="0: batch and evictions run once, untaught")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--stock-batch", type=int, nargs="+", default=[16])
    args = parser.parse_args()
    model = load_model(args.model, getattr(torch, args.dtype) if args.dtype else default_dtype())
    for name in args.parts:
        parts[name](model, args)


if __name__ == "__main__":
    main()
