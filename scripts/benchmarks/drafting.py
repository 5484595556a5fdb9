"""Speculative decoding beside plain decoding, strictly alternating in one process; prints ratios.

    python scripts/benchmarks/drafting.py --model copying-350m --workloads quote       # one stream that copies
    python scripts/benchmarks/drafting.py --model random-350m --workloads single five  # where there is nothing to copy
    python scripts/benchmarks/drafting.py --model tiny

`copying-350m` has LFM2-350M's shape and speed, and a head set so that each token is followed by its most frequent
follower in a text of the shipped prompts: its answers quote that text, mostly. `quote` asks it (or any model) to go on
from the text, one request at a time; `quote16` sixteen together. The other workloads are the benchmark's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import torch
from harness.readings import run_ours
from harness.workloads import STOCK_BATCHES, Workload, load_model, make_workloads
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

from lfm2_cb import ContinuousBatchingGenerator, default_dtype, demo_model_path


def text_tokens() -> list[int]:
    """The shipped prompts, one after another, by the shipped tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    lines = Path(demo_model_path(), "prompts.jsonl").read_text("utf-8").splitlines()
    return [token for line in lines for token in tokenizer(json.loads(line)["prompt"])["input_ids"]]


def copying(model: Lfm2ForCausalLM) -> Lfm2ForCausalLM:
    """Make a random model quote: layers hardly disturb the embedding, and the head answers it with its follower."""
    followers: dict[int, Counter] = defaultdict(Counter)
    tokens = text_tokens()
    for a, b in itertools.pairwise(tokens):
        followers[a][b] += 1
    config = Lfm2Config(**{**model.config.to_dict(), "tie_word_embeddings": False})
    untied = Lfm2ForCausalLM(config).to(model.dtype).eval()
    with torch.no_grad():
        untied.load_state_dict(model.state_dict() | {"lm_head.weight": torch.zeros_like(untied.lm_head.weight)})
        for name, parameter in untied.named_parameters():
            if name.endswith(("out_proj.weight", "w2.weight")):
                parameter *= 1e-3
        embedding = untied.model.embed_tokens.weight
        for token, counts in followers.items():
            untied.lm_head.weight[counts.most_common(1)[0][0]] += embedding[token]
    return untied


def quotes(count: int) -> Workload:
    """Passages of the text, each followed by a line from its middle to go on from."""
    tokens = text_tokens()
    passages = [tokens[i * 400 : i * 400 + 400] for i in range(count)]
    return [(passage + passage[100:120], 128) for passage in passages]


def run(generator: ContinuousBatchingGenerator, workload: Workload, one_by_one: bool) -> float:
    """Output tokens a second."""
    if not one_by_one:
        return run_ours(generator, workload).output_tokens_per_s
    readings = [run_ours(generator, [item]) for item in workload]
    return sum(n for _, n in workload) / sum(reading.seconds for reading in readings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help='checkpoint path, "tiny", "random-350m" or "copying-350m"')
    parser.add_argument("--workloads", nargs="+", default=["quote", "quote16", *STOCK_BATCHES])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype()
    model = (
        copying(load_model("random-350m", dtype)) if args.model == "copying-350m" else load_model(args.model, dtype)
    )
    workloads = make_workloads(model.config.vocab_size, model.config.max_position_embeddings)
    workloads |= {"quote": quotes(3), "quote16": quotes(16)}
    print("| workload | auto tok/s | none tok/s | ratio | guesses right |")
    print("|---|---|---|---|---|")
    with (
        ContinuousBatchingGenerator(model, cache_memory="1GiB", drafting="auto") as drafting,
        ContinuousBatchingGenerator(model, cache_memory="1GiB") as plain,
    ):
        for name in args.workloads:
            rates: dict[str, list[float]] = {"auto": [], "none": []}
            speculation = drafting.engine.speculation
            run(drafting, workloads[name][:1], one_by_one=True)  # warm
            run(plain, workloads[name][:1], one_by_one=True)
            drafted, accepted = speculation.num_drafted, speculation.num_accepted
            for _ in range(args.repeats):
                for key, generator in (("auto", drafting), ("none", plain)):
                    rates[key].append(run(generator, workloads[name], one_by_one=name == "quote"))
            ratio = statistics.median(a / b for a, b in zip(*rates.values(), strict=True))
            drafted, accepted = speculation.num_drafted - drafted, speculation.num_accepted - accepted
            auto, none = (statistics.median(values) for values in rates.values())
            print(f"| {name} | {auto:.1f} | {none:.1f} | {ratio:.2f} | {accepted} of {drafted} |", flush=True)


if __name__ == "__main__":
    main()
