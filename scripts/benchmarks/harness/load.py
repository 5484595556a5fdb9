"""Requests that arrive over time: Poisson arrivals at a given rate, through `submit()`, whose thread runs them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.engine import Engine

from .readings import gaps, percentile
from .workloads import Workload

LONG_PROMPT, LONG_EVERY = 2048, 8


@dataclass
class LoadReading:
    """One rate. Times in seconds; latencies are those of the short requests where there are long ones.

    Attributes:
        rate: arrivals a second, asked for. max_batch_tokens: the engine's. num_long: requests with a long prompt.
        ttft_p50, ttft_p99: first token, from when the request should have arrived.
        itl_p50, itl_p99: gap between two tokens of a request.
        long_ttft_p50: of the long ones; None without.
    """

    rate: float
    max_batch_tokens: int
    num_requests: int
    num_long: int
    num_output_tokens: int
    seconds: float
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    long_ttft_p50: float | None = None


@contextlib.contextmanager
def noted_tokens(engine: Engine) -> Iterator[dict[int, list[float]]]:
    """Request id → when each of its tokens came."""
    times: dict[int, list[float]] = {}
    step = engine.step

    def noted():
        outputs, now = step(), time.perf_counter()
        for output in outputs:
            times.setdefault(output.request.request_id, []).extend([now] * len(output.new_token_ids))
        return outputs

    engine.step = noted  # type: ignore[method-assign]
    try:
        yield times
    finally:
        engine.step = step  # type: ignore[method-assign]


def with_long_prompts(workload: Workload, vocab_size: int, tokens: int = LONG_PROMPT) -> Workload:
    """The same, where every eighth request has a prompt of `tokens` tokens."""
    rng = random.Random(1)
    return [
        ([rng.randrange(10, vocab_size) for _ in range(tokens)], length) if i % LONG_EVERY == 4 else (prompt, length)
        for i, (prompt, length) in enumerate(workload)
    ]


def run_load(
    generator: ContinuousBatchingGenerator,
    workload: Workload,
    rate: float,
    long_from: int = LONG_PROMPT,
    seed: int = 0,
) -> LoadReading:
    """Submit the workload's requests one by one at random times, `rate` a second on average, and wait for the last.

    Args: long_from: prompts of so many tokens and more are the long ones.
    """
    generator.engine.scheduler.cache.clear()
    rng, due, handles = random.Random(seed), 0.0, []
    arrivals: list[float] = []
    with noted_tokens(generator.engine) as noted:
        start = time.perf_counter()
        for prompt, length in workload:
            due += rng.expovariate(rate)
            arrivals.append(start + due)
            time.sleep(max(0.0, start + due - time.perf_counter()))
            handles.append(generator.submit(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None))
        outputs = [handle.result() for handle in handles]
        seconds = time.perf_counter() - arrivals[0]
    if [len(output.token_ids) for output in outputs] != [length for _, length in workload]:
        raise RuntimeError("answers of other lengths than asked for")
    times = [noted[i] for i in sorted(noted)]  # ids rise in the order of submission
    ttft = [tokens[0] - arrival for tokens, arrival in zip(times, arrivals, strict=True)]
    is_long = [len(prompt) >= long_from for prompt, _ in workload]
    short = [i for i, long in enumerate(is_long) if not long]
    itl, num_tokens = gaps([times[i] for i in short]), sum(map(len, times))
    return LoadReading(
        rate,
        generator.engine.config.max_batch_tokens,
        len(workload),
        sum(is_long),
        num_tokens,
        seconds,
        num_tokens / seconds,
        percentile([ttft[i] for i in short], 0.5),
        percentile([ttft[i] for i in short], 0.99),
        percentile(itl, 0.5),
        percentile(itl, 0.99),
        percentile([t for t, long in zip(ttft, is_long, strict=True) if long], 0.5) if any(is_long) else None,
    )
