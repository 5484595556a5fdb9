"""What low-bit weights are worth on the real engine: the same work over full-precision and low-bit weights, in turn.

python scripts/benchmarks/weights.py --weights int8 --workloads single five ragged64 ragged256 prefill

Every engine has its own copy of the model. Tokens a second of low-bit weights over those of `--dtype`, as medians of
the ratios of adjacent runs; "prefill" is four prompts of 1,024 tokens and one token of answer each.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack

import torch
from harness.readings import run_ours
from harness.workloads import Workload, equal_requests, load_model, make_workloads

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.quantization import WEIGHTS

FULL = "full"


def compare(generators: dict[str, ContinuousBatchingGenerator], name: str, workload: Workload, repeats: int) -> None:
    """Print a row of the table for each kind of low-bit weights."""
    rates: dict[str, list[float]] = {kind: [] for kind in generators}
    for _ in range(repeats):
        for kind, generator in generators.items():
            rates[kind].append(run_ours(generator, workload).total_tokens_per_s)
    for kind in generators:
        if kind != FULL:
            ratios = [low / full for low, full in zip(rates[kind], rates[FULL], strict=True)]
            full, low = statistics.median(rates[FULL]), statistics.median(rates[kind])
            each = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"| {name} | {kind} | {full:.1f} | {low:.1f} | {statistics.median(ratios):.2f} ({each}) |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-350m", help='checkpoint path, "tiny" or "random-350m"')
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=["int8"])
    parser.add_argument("--workloads", nargs="+", default=["single", "five", "ragged64", "prefill"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    with ExitStack() as stack:
        generators = {
            kind: stack.enter_context(
                ContinuousBatchingGenerator(load_model(args.model, dtype), weights=None if kind == FULL else kind)
            )
            for kind in (FULL, *args.weights)
        }
        config = generators[FULL].model.config
        workloads = make_workloads(config.vocab_size, config.max_position_embeddings)
        workloads["prefill"] = equal_requests(4, config.vocab_size, min(1024, config.max_position_embeddings // 2), 1)
        for generator in generators.values():
            run_ours(generator, equal_requests(2, config.vocab_size, 8, 4))  # warm-up
        print(f"{args.model}, {dtype}, {torch.get_num_threads()} threads; tokens a second, prompts included")
        print("| workload | weights | in full | low-bit | ratio (of each pair) |")
        print("|---|---|---|---|---|")
        for name in args.workloads:
            compare(generators, name, workloads[name], args.repeats)


if __name__ == "__main__":
    main()
