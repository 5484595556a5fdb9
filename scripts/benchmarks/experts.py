"""Mixtures of experts beside stock: a random net with the shapes of LFM2-8B-A1B, of as many layers as asked for.

python scripts/benchmarks/experts.py --layers 4

Stock runs its own "grouped_mm" on the same weights, in memory of its own. For one request, eight at once (a static
batch for stock: of one length, and ragged) and 64 ragged ones it prints tokens a second of both, prompts included, in
turn, as medians, and their ratios; then what a decode step of ours takes by its number of rows, how many experts of a
layer these touch, and the fraction that it reaches of the rate at which this processor reads memory, which is measured
before and after.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from harness.machine import facts
from harness.readings import run_ours, run_stock
from harness.roofline import rates
from harness.workloads import Workload, equal_requests
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.ops.kernel_set import KernelSet

#: of the published LFM2-8B-A1B, but for the layers
SHAPE = {
    "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64)


def make_stock(layers: int, dtype: torch.dtype) -> Lfm2MoeForCausalLM:
    """Random, but for its large matrices, which repeat a million numbers: it takes no time, and none to read them."""
    kinds = ["full_attention" if i % 4 == 2 else "conv" for i in range(layers)]
    config = Lfm2MoeConfig(**SHAPE, num_hidden_layers=layers, num_dense_layers=1, layer_types=kinds, eos_token_id=7)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Lfm2MoeForCausalLM(config)
    numbers = (torch.randn(2**20 + 1) * 0.02).to(dtype)
    filled = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("norm.weight"):
            filled[name] = torch.ones(tensor.shape, dtype=dtype)
        elif name.endswith("expert_bias"):
            filled[name] = torch.randn(tensor.shape) * 0.05
        elif "inv_freq" not in name:
            start = random.Random(name).randrange(2**20)
            filled[name] = (
                numbers.roll(start).repeat(-(-tensor.numel() // len(numbers)))[: tensor.numel()].view(tensor.shape)
            )
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    model.model.pos_emb = type(model.model.pos_emb)(config)
    return model.eval()


def ragged(count: int, longest: int) -> Workload:
    """As the benchmark's, shorter."""
    rng = random.Random(20261121)

    def length(median: float) -> int:
        return max(2, min(longest, round(math.exp(rng.gauss(math.log(median), 0.8)))))

    return [([rng.randrange(10, 65000) for _ in range(length(24))], length(12)) for _ in range(count)]


@contextmanager
def touched_experts(experts: int) -> Iterator[list[int]]:
    """Within, how many experts each layer of each step touches."""
    counts: list[int] = []
    route = KernelSet.route

    def counted(self, logits, *args):
        selected, weights = route(self, logits, *args)
        counts.append(len(selected.unique()))
        return selected, weights

    KernelSet.route = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        KernelSet.route = route  # type: ignore[method-assign]


def decode_seconds(generator: ContinuousBatchingGenerator, rows: int, tokens: int) -> float:
    """The median time between two tokens of so many rows."""
    workload = equal_requests(rows, SHAPE["vocab_size"], 8, tokens)
    times: list[float] = []
    for event in generator.stream([p for p, _ in workload], max_new_tokens=tokens, do_sample=False, eos_token_id=None):
        if event.index == 0:
            times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times[1:]))


def step_bytes(model: torch.nn.Module, touched: float) -> float:
    """What a decode step reads of the weights when each layer touches so many experts."""
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    # of the rest the embedding is read once, as the head
    rest = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    return rest + experts * touched / SHAPE["num_experts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="the first of them is dense; 0.7 GB each in bf16, twice")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="of each workload but the 64 ragged ones (one)")
    parser.add_argument("--workloads", nargs="*", default=["one", "eight", "ragged8", "ragged64"])
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of the decode steps that are timed")
    parser.add_argument("--weights", choices=["int8", "int4"], help="ours, beside stock in full precision")
    args = parser.parse_args()
    stock = make_stock(args.layers, getattr(torch, args.dtype))
    stock.set_experts_implementation("grouped_mm")
    vocabulary = SHAPE["vocab_size"]
    workloads = {
        "one": (equal_requests(1, vocabulary, 32, 24), 1, args.repeats),
        "eight": (equal_requests(8, vocabulary, 32, 12), 8, args.repeats),
        "ragged8": (ragged(8, 48), 8, args.repeats),
        "ragged64": (ragged(64, 48), 16, 1),
    }
    options = {"weights": args.weights, "drafting": "none"}
    with ContinuousBatchingGenerator(make_stock(args.layers, stock.dtype), **options) as generator:
        ours = f"{args.dtype}, ours {args.weights}" if args.weights else args.dtype
        print(f"{facts()['cpu']}; {torch.get_num_threads()} threads; {args.layers} layers, {ours}")
        run_ours(generator, equal_requests(2, vocabulary, 8, 3))
        run_stock(stock, equal_requests(1, vocabulary, 8, 2), 1)
        print("| workload | ours, tok/s | stock's grouped_mm, tok/s | ratio (of each pair) |\n|---|---|---|---|")
        for name in args.workloads:
            workload, batch, repeats = workloads[name]
            pairs = [
                (
                    run_ours(generator, workload).total_tokens_per_s,
                    run_stock(stock, workload, batch).total_tokens_per_s,
                )
                for _ in range(repeats)
            ]
            speed, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratios = [a / b for a, b in pairs]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {name} | {speed:.1f} | {theirs:.1f} | {statistics.median(ratios):.2f} × ({each}) |", flush=True)
        print(
            "\n| rows | ms a step | experts touched | GB read | GB/s | of the processor's |\n|---|---|---|---|---|---|"
        )
        for rows in args.rows:
            with touched_experts(SHAPE["num_experts"]) as counts:
                generator.engine.runner.capturing = False
                decode_seconds(generator, rows, 6)
                touched = statistics.mean(counts[-3 * (args.layers - 1) :])
                generator.engine.runner.capturing = True
            before = rates(0.3).get("probe_read_gb_per_s", math.nan)
            seconds = decode_seconds(generator, rows, 12)
            rate = (before + rates(0.3).get("probe_read_gb_per_s", math.nan)) / 2
            size = step_bytes(generator.model, touched) / 1e9
            print(
                f"| {rows} | {1e3 * seconds:.1f} | {touched:.1f} | {size:.2f} | {size / seconds:.1f} | "
                f"{size / seconds / rate:.0%} of {rate:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
