"""`lfm2-cb bench`: times one ragged workload on our engine and, on request, on stock's (more: scripts/benchmarks)."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time

import torch

from ..generator import ContinuousBatchingGenerator

STOCK_BATCH = 16


def bench(
    generator: ContinuousBatchingGenerator,
    num_prompts: int,
    median_prompt_tokens: int,
    max_new_tokens: int,
    with_stock: bool = False,
) -> str:
    """Run random prompts of lognormal lengths greedily to exactly `max_new_tokens` each.

    Returns: throughput (output tokens a second), time to first token, gap between tokens, in a line or two.
    Raises: ValueError: a count below 1, or lengths beyond the model's or the cache's.
    """
    if min(num_prompts, median_prompt_tokens, max_new_tokens) < 1:
        raise ValueError("--prompts, --prompt-tokens and --max-new-tokens must be 1 or more")
    config, rng = generator.model.config, random.Random(0)
    longest = config.max_position_embeddings - max_new_tokens

    def prompt() -> list[int]:
        length = round(math.exp(rng.gauss(math.log(median_prompt_tokens), 0.7)))
        return [rng.randrange(10, config.vocab_size) for _ in range(max(1, min(length, longest)))]

    prompts = [prompt() for _ in range(num_prompts)]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    list(generator.stream(prompts[:2], **{**options, "max_new_tokens": min(4, max_new_tokens)}))  # warm-up
    times: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    for event in generator.stream(prompts, **options):
        times[event.index] += [time.perf_counter()] * len(event.token_ids)
    rate = num_prompts * max_new_tokens / (time.perf_counter() - start)
    gaps = sorted(b - a for t in times for a, b in itertools.pairwise(t)) or [0.0]
    first = statistics.median(t[0] - start for t in times)
    report = (
        f"ours   {rate:,.1f} tok/s; time to first token p50 {first:.3f} s; between tokens p50 "
        f"{1e3 * gaps[len(gaps) // 2]:.1f} ms, p99 {1e3 * gaps[int(len(gaps) * 0.99)]:.1f} ms"
    )
    if not with_stock:
        return report
    stock = num_prompts * max_new_tokens / _stock_seconds(generator, prompts, max_new_tokens)
    return f"{report}\nstock  {stock:,.1f} tok/s (batches of {STOCK_BATCH}); ratio {rate / stock:.2f}"


def _stock_seconds(generator: ContinuousBatchingGenerator, prompts: list[list[int]], max_new_tokens: int) -> float:
    """Stock's `generate()` on the same weights, in left-padded static batches."""
    start = time.perf_counter()
    for batch in (prompts[i : i + STOCK_BATCH] for i in range(0, len(prompts), STOCK_BATCH)):
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=generator.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch], device=generator.model.device)
        generator.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - start
