"""What low-bit weights cost in quality: perplexity on real text, and how far the next-token distributions move.

    python scripts/quality.py --weights int8 int4

Perplexity: of the shipped model on the prompts that ship with it (held-out text). Divergence: of random LFM2-350M (its
shape, no trained weights: a bound rather than an example) on random tokens, KL(full ‖ low) in nats and how often the
likeliest token stays. Each against the same model with full-precision weights, in `--dtype`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from benchmark import load_model
from torch.nn import functional as F
from transformers import PreTrainedModel

from lfm2_cb import demo_model_path
from lfm2_cb.loading import as_lfm2_cb, load_tokenizer
from lfm2_cb.model.quantization import WEIGHTS


@torch.inference_mode()
def perplexity(model: PreTrainedModel, texts: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of all tokens but each text's first."""
    total, count = 0.0, 0
    for token_ids in texts:
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float()
        total += F.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="sum").item()
        count += len(token_ids) - 1
    return math.exp(total / count)


@torch.inference_mode()
def divergence(full: PreTrainedModel, low: PreTrainedModel, input_ids: torch.Tensor) -> tuple[float, float]:
    """KL(full ‖ low) in nats a token, and the share of positions whose likeliest token is the same."""
    p, q = (model(input_ids).logits.float().log_softmax(-1) for model in (full, low))
    same = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return F.kl_div(q, p, log_target=True, reduction="sum").item() / input_ids.numel(), same.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=256, help="random tokens for the 350M; 0 leaves it out")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    path = demo_model_path()
    tokenizer, lines = load_tokenizer(path), Path(path, "prompts.jsonl").read_text("utf-8").splitlines()
    texts = [ids for line in lines if len(ids := tokenizer(json.loads(line)["prompt"])["input_ids"]) > 1]
    tiny = load_model("tiny", dtype)
    base = perplexity(tiny, texts)
    print(f"tiny model, {sum(map(len, texts))} tokens of held-out text: perplexity {base:.3f} in {args.dtype}")
    for weights in args.weights:
        low = perplexity(as_lfm2_cb(tiny, weights), texts)
        print(f"  {weights}: {low:.3f} ({low / base - 1:+.2%})")
    if args.tokens:
        full = load_model("random-350m", dtype)
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(10, full.config.vocab_size, (1, args.tokens), generator=generator)
        print(f"random-350m, {args.tokens} random tokens:")
        for weights in args.weights:
            kl, same = divergence(full, as_lfm2_cb(full, weights), input_ids)
            print(f"  {weights}: KL {kl:.5f} nats, top-1 agreement {same:.1%}")


if __name__ == "__main__":
    main()
