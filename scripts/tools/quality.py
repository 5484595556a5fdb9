"""What low-bit weights and caches cost in quality: perplexity on real text, and how far the distributions move.

    python scripts/tools/quality.py --dtype bfloat16

Perplexity: of the shipped model on the prompts that ship with it. (They are cut from paragraphs that were held out
from tokenizer and training; eleven of the shortest are openings that other paragraphs have too.) Divergence: of random
LFM2-350M (its shape, no trained weights: a bound rather than an example) on random tokens, KL(full ‖ low) in nats and
how often the likeliest token stays. Each against the same model in full precision, in `--dtype`; all by the engine's
own forward, over its paged cache, each text in chunks of 64 tokens. On a card, where low-bit weights are refused, what
its kernels change (`--kernels torch` beside it):

    python scripts/tools/quality.py --device cuda --weights --kernels triton
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from lfm2_cb import demo_model_path
from lfm2_cb.engine.runner import ModelRunner
from lfm2_cb.loading import as_lfm2_cb, load_tokenizer
from lfm2_cb.model.hybrid_cache import CachePlan
from lfm2_cb.model.ragged_batch import Row

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.harness.workloads import load_model

#: (weights, cache_dtype) of each line
VARIANTS = {
    "int8": ("int8", None),
    "int4": ("int4", None),
    "int8 cache": (None, "int8"),
    "int8, int8 cache": ("int8", "int8"),
    "int4, int8 cache": ("int4", "int8"),
}
CHUNK = 64  # tokens


class Reader:
    """Gives the logits of every token of a text, by the engine's forward."""

    def __init__(self, model: PreTrainedModel, weights: str | None, cache_dtype: str | None, kernels: str) -> None:
        model = as_lfm2_cb(model, weights)
        plan = CachePlan.from_budget(
            model.config,
            2**26,
            block_size=CHUNK,
            num_slots=1,
            dtype=model.dtype,
            checkpoints=False,
            cache_dtype=cache_dtype,
        )
        self.runner = ModelRunner(model, plan, kernels)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """fp32 `[tokens, vocab_size]`"""
        blocks = list(range(-(-len(token_ids) // CHUNK)))
        chunks = [token_ids[start : start + CHUNK] for start in range(0, len(token_ids), CHUNK)]
        rows = [Row(ids, i * CHUNK, blocks[: i + 1], 0, num_logits=len(ids)) for i, ids in enumerate(chunks)]
        return torch.cat([self.runner.forward([row]) for row in rows]).cpu()


def perplexity(reader: Reader, texts: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of all tokens but each text's first."""
    total, count = 0.0, 0
    for token_ids in texts:
        logits = reader.logits(token_ids)[:-1]
        total += F.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="sum").item()
        count += len(token_ids) - 1
    return math.exp(total / count)


def divergence(full: torch.Tensor, low: torch.Tensor) -> tuple[float, float]:
    """Of logits `[tokens, vocab_size]`: KL(full ‖ low) in nats a token, and how often the likeliest token stays."""
    p, q = full.log_softmax(-1), low.log_softmax(-1)
    same = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return F.kl_div(q, p, log_target=True, reduction="sum").item() / len(p), same.item()


def held_out_texts() -> list[list[int]]:
    path = demo_model_path()
    tokenizer, lines = load_tokenizer(path), Path(path, "prompts.jsonl").read_text("utf-8").splitlines()
    return [ids for line in lines if len(ids := tokenizer(json.loads(line)["prompt"])["input_ids"]) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="*", choices=["int8", "int4"], default=["int8", "int4"])
    parser.add_argument("--cache-dtype", nargs="*", choices=["int8"], default=["int8"], help="empty: leave it out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--kernels", choices=["auto", "native", "triton", "torch"], default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=256, help="random tokens for the 350M; 0 leaves it out")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    variants = {
        name: (weights, cache)
        for name, (weights, cache) in VARIANTS.items()
        if weights in (None, *args.weights) and cache in (None, *args.cache_dtype)
    }

    texts, tiny = held_out_texts(), load_model("tiny", dtype).to(args.device)
    base = perplexity(Reader(tiny, None, None, args.kernels), texts)
    print(
        f"tiny model, {sum(map(len, texts))} tokens of held-out text: perplexity {base:.3f} in {args.dtype}",
        flush=True,
    )
    for name, options in variants.items():
        low = perplexity(Reader(tiny, *options, args.kernels), texts)
        print(f"  {name}: {low:.3f} ({low / base - 1:+.2%})", flush=True)
    if args.tokens:
        model = load_model("random-350m", dtype).to(args.device)
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(10, model.config.vocab_size, (args.tokens,), generator=generator).tolist()
        full = Reader(model, None, None, args.kernels).logits(token_ids)
        print(f"random-350m, {args.tokens} random tokens:", flush=True)
        for name, options in variants.items():
            kl, same = divergence(full, Reader(model, *options, args.kernels).logits(token_ids))
            print(f"  {name}: KL {kl:.5f} nats, top-1 agreement {same:.1%}", flush=True)


if __name__ == "__main__":
    main()
