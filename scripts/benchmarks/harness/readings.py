"""One run of one engine on one workload, and what is read from it. Greedy, no end-of-sequence, exact lengths."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Lfm2ForCausalLM, StoppingCriteria, StoppingCriteriaList

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.engine import Engine
from lfm2_cb.model.hybrid_cache import HybridCache

from .workloads import Workload


@dataclass
class Reading:
    """Times in seconds, from the moment the whole workload is submitted.

    Attributes:
        ttft_p50, ttft_p99: time to first token, over requests. ttft_last: the last request's.
        itl_p50, itl_p99: inter-token latency, over all gaps between two tokens of a request; 0 where there is none.
        batch_size: of stock's static batches.
    """

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    ttft_last: float
    itl_p50: float
    itl_p99: float
    batch_size: int | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies; 0 of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def gaps(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between one token and the next of the same request."""
    return [b - a for tokens in times for a, b in itertools.pairwise(tokens)]


def reading(
    workload: Workload, seconds: float, times: Sequence[Sequence[float]], batch_size: int | None = None
) -> Reading:
    """Args: times: of each request's tokens, in seconds from the start.

    Raises: RuntimeError: a request has another number of tokens than it should.
    """
    lengths = [length for _, length in workload]
    if [len(tokens) for tokens in times] != lengths:
        raise RuntimeError(f"answers of {[len(t) for t in times]} tokens, not of {lengths}")
    num_prompt_tokens, num_output_tokens = sum(len(prompt) for prompt, _ in workload), sum(lengths)
    first, itl = [tokens[0] for tokens in times], gaps(times)
    return Reading(
        seconds,
        num_prompt_tokens,
        num_output_tokens,
        num_output_tokens / seconds,
        (num_prompt_tokens + num_output_tokens) / seconds,
        percentile(first, 0.5),
        percentile(first, 0.99),
        max(first),
        percentile(itl, 0.5),
        percentile(itl, 0.99),
        batch_size,
    )


def commit(cache: HybridCache) -> None:
    """Let the system commit the cache's memory, which else happens at the first use of each block."""
    for tensors in (cache.keys, cache.values, cache.conv_states):
        for tensor in tensors.values():
            tensor.zero_()


def run_ours(generator: ContinuousBatchingGenerator, workload: Workload) -> Reading:
    """One call with the whole workload; the prefix cache starts empty."""
    generator.engine.scheduler.cache.clear()
    prompts, lengths = [p for p, _ in workload], [n for _, n in workload]
    times: list[list[float]] = [[] for _ in workload]
    start = time.perf_counter()
    for event in generator.stream(prompts, max_new_tokens=lengths, do_sample=False, eos_token_id=None):
        times[event.index] += [time.perf_counter() - start] * len(event.token_ids)
    return reading(workload, time.perf_counter() - start, times)


class Clock(StoppingCriteria):
    """Notes when stock `generate()` has chosen each token; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def run_stock(model: Lfm2ForCausalLM, workload: Workload, batch_size: int, use_cache: bool = True) -> Reading:
    """Left-padded static batches, each as long as its longest answer; a row's tokens count up to its own length."""
    times: list[list[float]] = []
    start = time.perf_counter()
    for i in range(0, len(workload), batch_size):
        chunk, clock = workload[i : i + batch_size], Clock()
        width, new = max(len(p) for p, _ in chunk), max(n for _, n in chunk)
        ids = torch.zeros(len(chunk), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(chunk):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=use_cache,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        times += [[t - start for t in clock.times[:length]] for _, length in chunk]
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return reading(workload, time.perf_counter() - start, times, batch_size)


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
        return statistics.median(gaps(times))

    ratios = [step_seconds(**options) / step_seconds(do_sample=False) for _ in range(repeats + 1)][1:]
    return statistics.median(ratios) - 1
