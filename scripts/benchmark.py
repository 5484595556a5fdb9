"""Our engine beside stock `generate()` on fixed workloads, strictly alternating in one process; prints ratios.

    python scripts/benchmark.py --model random-350m --workloads five ragged64 --repeats 3 --json out.json

Greedy, end-of-sequence ignored, exact output lengths. Stock runs left-padded static batches of `--stock-batch` sizes,
the best of which is compared with. Times on shared machines wander: trust the ratios, which are medians over repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import resource
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from simulate import CostModel
from transformers import Lfm2Config, Lfm2ForCausalLM

from lfm2_cb import ContinuousBatchingGenerator, default_dtype, demo_model_path
from lfm2_cb.engine.engine import Engine

Workload = list[tuple[list[int], int]]  # (prompt token ids, output tokens)
#: stock's batch sizes tried for each workload
STOCK_BATCHES = {"single": [1], "five": [5], "ragged64": [16], "ragged256": [16], "prefix64": [16], "long8": [8]}


def make_workloads(vocab_size: int, longest: int) -> dict[str, Workload]:
    """The six workloads, from one seed. Lengths are cut to `longest` tokens in all."""
    rng = random.Random(20261121)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(10, min(65000, vocab_size)) for _ in range(min(n, longest // 2))]

    def lognormal(median: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(math.exp(rng.gauss(math.log(median), sigma)))))

    def ragged(n: int) -> Workload:
        return [(tokens(lognormal(96, 0.9, 16, 768)), lognormal(64, 0.8, 8, 256)) for _ in range(n)]

    workloads = {
        "single": [(tokens(128), 128)],
        "five": [(tokens(n), 100) for n in (12, 18, 25, 33, 47)],
        "ragged64": ragged(64),
        "ragged256": ragged(256),
    }
    prefix = tokens(512)
    workloads["prefix64"] = [(prefix + tokens(rng.randrange(16, 65)), 32) for _ in range(64)]
    workloads["long8"] = [(tokens(2048), 64) for _ in range(8)]
    return workloads


def load_model(name: str, dtype: torch.dtype) -> Lfm2ForCausalLM:
    """A checkpoint's path, "tiny" (the one that ships), or "random-350m" (LFM2-350M's shape: speed is the same)."""
    if name == "tiny":
        name = demo_model_path()
    if name != "random-350m":
        return Lfm2ForCausalLM.from_pretrained(name, dtype=dtype).eval()
    attention = {2, 5, 8, 10, 12, 14}
    config = Lfm2Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if i in attention else "conv" for i in range(16)],
        eos_token_id=7,
    )
    torch.manual_seed(0)
    return Lfm2ForCausalLM(config).to(dtype).eval()


@dataclass
class Reading:
    """One run of one engine on one workload."""

    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None


def reading(workload: Workload, seconds: float, **latencies: float) -> Reading:
    out = sum(n for _, n in workload)
    total = out + sum(len(prompt) for prompt, _ in workload)
    return Reading(seconds, out / seconds, total / seconds, **latencies)


def log_steps(engine: Engine) -> list[tuple[int, int, int, float]]:
    """From now on, note every step: (tokens, rows, K/V tokens read, seconds)."""
    log: list[tuple[int, int, int, float]] = []
    shapes: list[tuple[int, int, int]] = []
    run, step = engine.runner.run, engine.step

    def noted_run(rows):
        shapes.append((sum(r.num_tokens for r in rows), len(rows), sum(r.start + r.num_tokens for r in rows)))
        return run(rows)

    def noted_step():
        shapes.clear()
        start = time.perf_counter()
        outputs = step()
        if shapes:
            log.append((*shapes[0], time.perf_counter() - start))
        return outputs

    engine.runner.run, engine.step = noted_run, noted_step  # type: ignore[method-assign]
    return log


def run_ours(generator: ContinuousBatchingGenerator, workload: Workload) -> Reading:
    """One call with the whole workload; the prefix cache starts empty."""
    generator.engine.scheduler.cache.clear()
    prompts, lengths = [p for p, _ in workload], [n for _, n in workload]
    times: dict[int, list[float]] = {i: [] for i in range(len(workload))}
    start = time.perf_counter()
    for event in generator.stream(prompts, max_new_tokens=lengths, do_sample=False, eos_token_id=None):
        times[event.index] += [time.perf_counter()] * len(event.token_ids)
    seconds = time.perf_counter() - start
    assert [len(t) for t in times.values()] == lengths
    gaps = sorted(b - a for t in times.values() for a, b in itertools.pairwise(t)) or [0.0]
    return reading(
        workload,
        seconds,
        ttft_p50=statistics.median(t[0] - start for t in times.values()),
        itl_p50=gaps[len(gaps) // 2],
        itl_p99=gaps[int(len(gaps) * 0.99)],
    )


@torch.inference_mode()
def run_stock(model: Lfm2ForCausalLM, workload: Workload, batch_size: int) -> Reading:
    """Left-padded static batches, each as long as its longest answer."""
    start = time.perf_counter()
    for i in range(0, len(workload), batch_size):
        chunk = workload[i : i + batch_size]
        width, new = max(len(p) for p, _ in chunk), max(n for _, n in chunk)
        ids = torch.zeros(len(chunk), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(chunk):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return reading(workload, time.perf_counter() - start)


def machine(dtype: torch.dtype) -> dict[str, float]:
    """Read bandwidth (GB/s) and matrix rate (TFLOP/s) of this machine, best of several."""
    data, (a, b) = torch.ones(2**26), torch.randn(2, 2048, 2048).to(dtype)

    def best(f, n: int) -> float:
        times = []
        for _ in range(n):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    return {
        "read_gb_per_s": data.nbytes / best(data.sum, 8) / 1e9,
        "matrix_tflop_per_s": 2 * 2048**3 / best(lambda: a @ b, 4) / 1e12,
    }


def sampling_overhead(generator: ContinuousBatchingGenerator, repeats: int) -> float:
    """What choosing tokens with a repetition penalty and top-p adds to a step of 64 rows, as a share of it.

    Greedy and sampling alternate; a step's time is the median gap between two tokens.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 4000) for _ in range(rng.randrange(16, 48))] for _ in range(64)]
    options = {"do_sample": True, "repetition_penalty": 1.2, "top_p": 0.9, "seed": 0}

    def step_seconds(**kwargs) -> float:
        times: list[list[float]] = [[] for _ in prompts]
        for event in generator.stream(prompts, max_new_tokens=10, eos_token_id=None, **kwargs):
            times[event.index] += [time.perf_counter()] * len(event.token_ids)
        return statistics.median(b - a for t in times for a, b in itertools.pairwise(t))

    ratios = [step_seconds(**options) / step_seconds(do_sample=False) for _ in range(repeats + 1)][1:]
    return statistics.median(ratios) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-350m", help='checkpoint path, "tiny" or "random-350m"')
    parser.add_argument("--workloads", nargs="*", default=list(STOCK_BATCHES), choices=list(STOCK_BATCHES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: what this hardware multiplies best")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stock-batch", type=int, nargs="+", help="batch sizes for stock to try")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--sampling-overhead", action="store_true", help="of repetition_penalty + top_p, 64 rows")
    parser.add_argument("--policy", default="fcfs", help="of our engine")
    parser.add_argument("--cost-model", help="fit simulate.py's cost model to this run's steps, and write it here")
    parser.add_argument("--cache-memory", default="2GiB")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--json", help="file to write all readings to")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype()
    model = load_model(args.model, dtype)
    workloads = make_workloads(model.config.vocab_size, model.config.max_position_embeddings)
    generator = ContinuousBatchingGenerator(
        model,
        cache_memory=args.cache_memory,
        max_batch_tokens=args.max_batch_tokens,
        prefix_caching=not args.no_prefix_caching,
        policy=args.policy,
    )
    facts = machine(dtype) | {"threads": torch.get_num_threads(), "dtype": str(dtype)}
    print(f"{args.model}, {dtype}, {facts['threads']} threads, {facts['read_gb_per_s']:.1f} GB/s read, ", end="")
    print(f"{facts['matrix_tflop_per_s']:.2f} TFLOP/s")
    print("| workload | ours tok/s | stock tok/s (batch) | ratio | total tok/s | TTFT p50 s | ITL p50 / p99 ms |")
    print("|---|---|---|---|---|---|---|")
    report: dict = {"machine": facts, "workloads": {}}
    run_ours(generator, workloads["five"][:2])  # warm-up
    steps = log_steps(generator.engine) if args.cost_model else []
    for name in args.workloads:
        ours, stock = [], []
        for _ in range(args.repeats):
            ours.append(run_ours(generator, workloads[name]))
            if not args.no_stock:
                sizes = args.stock_batch or STOCK_BATCHES[name]
                stock.append(max(((run_stock(model, workloads[name], n), n) for n in sizes), key=_rate))
        rate = statistics.median(r.output_tokens_per_s for r in ours)
        row = sorted(ours, key=lambda r: r.seconds)[len(ours) // 2]
        beside = ratio = "–"
        if stock:
            ratios = [a.output_tokens_per_s / b.output_tokens_per_s for a, (b, _) in zip(ours, stock, strict=True)]
            ratio = f"{statistics.median(ratios):.2f}"
            beside = f"{statistics.median(r.output_tokens_per_s for r, _ in stock):.1f} ({stock[0][1]})"
        print(
            f"| {name} | {rate:.1f} | {beside} | {ratio} | {row.total_tokens_per_s:.0f} | {row.ttft_p50:.2f} | "
            f"{1e3 * row.itl_p50:.0f} / {1e3 * row.itl_p99:.0f} |",
            flush=True,
        )
        report["workloads"][name] = {"ours": [asdict(r) for r in ours], "stock": [asdict(r) for r, _ in stock]}
    if args.sampling_overhead:
        report["sampling_overhead"] = sampling_overhead(generator, args.repeats)
        print(f"repetition_penalty + top_p add {report['sampling_overhead']:.1%} to a step of 64 rows")
    report["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak RSS {report['peak_rss_mb']:.0f} MB (both engines, one copy of the weights)")
    if args.cost_model:
        model = CostModel.fit(steps)
        error = statistics.median(abs(model.seconds_of(*shape) / seconds - 1) for *shape, seconds in steps)
        print(f"{model}: median error {error:.0%} over {len(steps)} steps")
        with open(args.cost_model, "w", encoding="utf-8") as file:
            json.dump(asdict(model), file, indent=1)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def _rate(pair: tuple[Reading, int]) -> float:
    return pair[0].output_tokens_per_s


if __name__ == "__main__":
    main()
