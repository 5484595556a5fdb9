"""The engine's own scheduler and cache bookkeeping under a cost model, far beyond what this machine could run.

    python scripts/tools/simulate.py --requests 20000 --sequences 256 --policies fcfs past_future
    python scripts/tools/simulate.py --trace reasoning --requests 1000000 --sequences 1000 --rate 30
    python scripts/tools/simulate.py --trace answers.jsonl --prefixes 50 --plot policies.png

Nothing is computed but which rows a step holds; the step then takes `CostModel.seconds` of simulated time. The model's
constants are those of LFM2-350M as `compare.py --cost-model FILE` fitted them; `--cost-model FILE` takes others.
Requests stop at lengths that the scheduler cannot see; it knows their limit only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice

from lfm2_cb.ops.experts import expected_experts
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES, make_policy
from lfm2_cb.scheduling.request import FinishReason, Request
from lfm2_cb.scheduling.scheduler import ScheduledRow, Scheduler

#: median and sigma of lognormal prompt lengths and output lengths, tokens
TRACES = {
    "chat": ((96, 0.9), (64, 0.8)),  # the benchmark's ragged workloads
    "summaries": ((1500, 0.6), (120, 0.5)),
    "reasoning": ((80, 0.6), (400, 0.9)),
}


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: fixed, per packed token, per row, per token of K/V that its rows read, and per expert that
    its tokens touch in each layer, of `num_experts`, `top_k` of which each token chooses."""

    step: float = 0.075
    token: float = 0.0039
    row: float = 0.00025
    kv_token: float = 1.2e-6
    expert: float = 0.0
    num_experts: int = 1
    top_k: int = 1

    def seconds(self, rows: list[ScheduledRow]) -> float:
        num_tokens = num_kv_tokens = 0
        for row in rows:
            num_tokens += row.num_tokens
            num_kv_tokens += row.start + row.num_tokens
        return self.seconds_of(num_tokens, len(rows), num_kv_tokens)

    def seconds_of(self, num_tokens: int, num_rows: int, num_kv_tokens: int) -> float:
        touched = expected_experts(self.num_experts, self.top_k, num_tokens)
        others = self.step + self.token * num_tokens + self.row * num_rows + self.kv_token * num_kv_tokens
        return others + self.expert * touched

    @classmethod
    def fit(cls, steps: list[tuple[int, int, int, float]], num_experts: int = 1, top_k: int = 1) -> CostModel:
        """Least squares, in relative error, over measured steps: (tokens, rows, K/V tokens, seconds).

        num_experts, top_k: of a mixture of experts.
        """
        import numpy

        tokens, rows, kv_tokens, seconds = numpy.array(steps, dtype=float).T
        columns = {"step": numpy.ones_like(tokens), "token": tokens, "row": rows, "kv_token": kv_tokens}
        if num_experts > 1:
            columns["expert"] = numpy.array([expected_experts(num_experts, top_k, step[0]) for step in steps])
        while True:  # without those that come out negative: no cost is
            matrix = numpy.stack(list(columns.values()), 1) / seconds[:, None]
            found = dict(zip(columns, numpy.linalg.lstsq(matrix, numpy.ones_like(seconds))[0].tolist(), strict=True))
            negative = [name for name, value in found.items() if value < 0]
            if not negative:
                zero = {"step": 0.0, "token": 0.0, "row": 0.0, "kv_token": 0.0}
                return cls(**{**zero, **found}, num_experts=num_experts, top_k=top_k)
            del columns[min(negative, key=found.__getitem__)]


@dataclass(frozen=True)
class Arrival:
    """A request to come: `output` tokens is where it will stop."""

    seconds: float
    prompt: list[int]
    output: int


def lognormal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(math.exp(rng.gauss(math.log(median), sigma)))))


def read_lengths(path: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of a JSONL trace: numbers under prompt_tokens and output_tokens, or texts under prompt
    and response, which the shipped tokenizer counts."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    if all("prompt_tokens" in record for record in records):
        return [(record["prompt_tokens"], record["output_tokens"]) for record in records]
    from transformers import AutoTokenizer

    from lfm2_cb import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    return [
        (len(tokenizer(record["prompt"])["input_ids"]), max(1, len(tokenizer(record["response"])["input_ids"])))
        for record in records
    ]


def arrivals(args: argparse.Namespace, replica: int = 0) -> Iterator[Arrival]:
    """One replica's part of the trace, the same for every policy: one generator, one seed, made as they are needed."""
    rng = random.Random(args.seed)
    prefixes = [list(rng.randbytes(args.prefix_tokens)) for _ in range(args.prefixes)]
    lengths = None if args.trace in TRACES else read_lengths(args.trace)
    now = 0.0
    for i in range(args.requests):
        if lengths is not None:
            prompt, output = rng.choice(lengths)
        else:
            prompt, output = (lognormal(rng, *shape, args.longest) for shape in TRACES[args.trace])
        if args.rate:
            now += rng.expovariate(args.rate)
        head = rng.choice(prefixes) if prefixes else []
        tokens = head + list(rng.randbytes(min(prompt, args.longest)))
        if i % args.replicas == replica:
            yield Arrival(now, tokens, min(output, args.max_new_tokens))


@dataclass
class Result:
    """What one policy made of the trace. Times in simulated seconds."""

    policy: str
    seconds: float = 0.0
    output_tokens: int = 0
    good_tokens: int = 0  # of requests that met both latency limits
    computed_tokens: int = 0
    steps: int = 0
    evictions: int = 0
    most_running: int = 0
    most_blocks: int = 0
    real_seconds: float = 0.0
    ttft: array = field(default_factory=lambda: array("d"))
    itl: array = field(default_factory=lambda: array("d"))  # each request's mean

    def row(self) -> dict[str, float]:
        return {
            "output tok/s": self.output_tokens / self.seconds,
            "goodput tok/s": self.good_tokens / self.seconds,
            "evictions": self.evictions,
            "computed/output": self.computed_tokens / self.output_tokens,
            "TTFT p50 s": percentile(self.ttft, 0.5),
            "TTFT p99 s": percentile(self.ttft, 0.99),
            "ITL p99 ms": 1e3 * percentile(self.itl, 0.99),
            "running at most": self.most_running,
            "steps": self.steps,
            "ms real/step": 1e3 * self.real_seconds / self.steps,
        }


def merge(results: list[Result]) -> Result:
    """What replicas made together: it takes as long as the slowest of them."""
    total = results[0]
    for other in results[1:]:
        for name in ("output_tokens", "good_tokens", "computed_tokens", "steps", "evictions", "real_seconds"):
            setattr(total, name, getattr(total, name) + getattr(other, name))
        for name in ("seconds", "most_running", "most_blocks"):
            setattr(total, name, max(getattr(total, name), getattr(other, name)))
        total.ttft += other.ttft
        total.itl += other.itl
    return total


def percentile(values: array, share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


class Simulation:
    """One policy on one trace, or on one replica's part of it."""

    def __init__(self, policy: str, args: argparse.Namespace, cost: CostModel, replica: int = 0) -> None:
        self.args, self.cost, self.now = args, cost, 0.0
        cache = CacheManager(args.blocks, args.block_size, args.sequences)
        self.scheduler = Scheduler(
            cache, make_policy(policy), args.max_batch_tokens, args.sequences, clock=lambda: self.now
        )
        self.result = Result(policy)
        self.ends: dict[int, int] = {}  # output length by request id, of the unfinished
        self._to_come = arrivals(args, replica)
        self._next = next(self._to_come, None)
        self._num_requests = 0

    def run(self) -> Result:
        began = time.perf_counter()
        while self._next is not None or self.scheduler.has_unfinished:
            self._take_in()
            self._step()
        self.scheduler.cache.check_integrity([])
        self.result.seconds, self.result.real_seconds = self.now, time.perf_counter() - began
        return self.result

    def _take_in(self) -> None:
        """Queue what has arrived; where nothing runs, wait for the next. A list without arrival times is streamed
        in, as a batch job's input is: `list_size` at a time."""
        if self._next is None:
            return
        if not self.args.rate:
            if self.scheduler.num_waiting < self.args.list_size // 2:
                rest = list(islice(self._to_come, self.args.list_size - 1))
                requests = [self._request(a) for a in [self._next, *rest]]
                for request in requests:
                    self.scheduler.check_fits(request)
                self.scheduler.add_all(requests)
                self._next = next(self._to_come, None)
            return
        if not self.scheduler.has_unfinished:
            self.now = max(self.now, self._next.seconds)
        while self._next is not None and self._next.seconds <= self.now:
            request = self._request(self._next)
            request.metrics.arrival_time = self._next.seconds
            self.scheduler.add(request)
            self._next = next(self._to_come, None)

    def _request(self, arrival: Arrival) -> Request:
        self._num_requests += 1
        self.ends[self._num_requests] = arrival.output
        limit = arrival.output if self.args.known_lengths else self.args.max_new_tokens
        return Request(self._num_requests, arrival.prompt, limit)

    def _step(self) -> None:
        rows = self.scheduler.schedule()
        pool, result = self.scheduler.cache.pool, self.result
        result.most_blocks = max(result.most_blocks, pool.num_blocks - pool.num_free)
        result.most_running = max(result.most_running, len(self.scheduler.running))
        self.now += self.cost.seconds(rows)
        result.steps += 1
        for row in rows:
            result.computed_tokens += row.num_tokens
            self.scheduler.on_computed(row, [0] if row.samples else [])
            if row.samples:
                self._gained(row.request)

    def _gained(self, request: Request) -> None:
        metrics, gained = request.metrics, request.num_output_tokens
        if metrics.first_token_time is None:
            metrics.first_token_time = self.now
        if gained < self.ends[request.request_id]:
            return
        del self.ends[request.request_id]
        self.scheduler.finish(request, FinishReason.STOP)
        ttft, itl = metrics.time_to_first_token or 0.0, (self.now - metrics.first_token_time) / max(gained - 1, 1)
        result = self.result
        result.ttft.append(ttft)
        result.itl.append(itl)
        result.evictions += metrics.num_preemptions
        result.output_tokens += gained
        result.good_tokens += gained * (ttft <= self.args.ttft_limit and itl <= self.args.itl_limit)


def print_table(results: list[Result]) -> None:
    names = list(results[0].row())
    print("| policy | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for result in results:
        print(f"| {result.policy} | " + " | ".join(f"{value:,.4g}" for value in result.row().values()) + " |")


def plot(results: list[Result], path: str) -> None:
    """TTFT distributions, and evictions beside throughput."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    for result in results:
        ttft = sorted(result.ttft)
        left.plot(ttft, [i / len(ttft) for i in range(len(ttft))], label=result.policy)
    left.set(xlabel="time to first token, s", ylabel="share of requests", xscale="symlog")
    left.legend()
    names = [result.policy for result in results]
    middle.bar(names, [result.evictions for result in results])
    middle.set(ylabel="evictions")
    right.bar(names, [result.output_tokens / result.seconds for result in results])
    right.set(ylabel="output tokens/s")
    figure.tight_layout()
    figure.savefig(path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    add("--trace", default="chat", help=f"{', '.join(TRACES)}, or a JSONL file of lengths or texts")
    add("--requests", type=int, default=10_000)
    add("--rate", type=float, help="Poisson arrivals a second; default: a list, all there from the start")
    add("--list-size", type=int, default=20_000, help="requests of a list that are read ahead")
    add("--prefixes", type=int, default=0, help="shared prefixes, one of which begins each prompt")
    add("--prefix-tokens", type=int, default=512)
    add("--known-lengths", action="store_true", help="limits are the true output lengths")
    add("--max-new-tokens", type=int, default=2048, help="each request's limit")
    add("--longest", type=int, default=8192, help="prompts are cut here")
    add("--sequences", type=int, default=256)
    add("--max-batch-tokens", type=int, default=2048)
    add("--blocks", type=int, default=1500, help="cache blocks")
    add("--block-size", type=int, default=64)
    add("--replicas", type=int, default=1, help="engines that share the trace round-robin, each as large as told here")
    add("--ttft-limit", type=float, default=60.0, help="seconds; goodput counts requests within both limits")
    add("--itl-limit", type=float, default=1.5, help="seconds, mean of a request")
    add("--cost-model", help="JSON file of CostModel's constants")
    add("--seed", type=int, default=0)
    add("--json", help="file for the table's numbers")
    add("--plot", help="PNG file (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Result]:
    args = parse(argv)
    cost = CostModel()
    if args.cost_model:
        with open(args.cost_model, encoding="utf-8") as file:
            cost = CostModel(**json.load(file))
    results = [
        merge([Simulation(policy, args, cost, replica).run() for replica in range(args.replicas)])
        for policy in args.policies
    ]
    print_table(results)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"cost": asdict(cost), "policies": {r.policy: r.row() for r in results}}, file, indent=1)
    if args.plot:
        plot(results, args.plot)
    return results


if __name__ == "__main__":
    main()
