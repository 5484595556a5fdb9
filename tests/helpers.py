"""Random LFM2s and stock's answers, shared by the tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM

import lfm2_cb
from lfm2_cb.model.conversion import FUSED, adopt
from lfm2_cb.model.modeling import Lfm2CbForCausalLM


def random_config(seed: int, **overrides) -> Lfm2Config:
    """A small config of any shape the family allows. (At least one attention layer: stock fails without.)"""
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    heads, dim, layers = kv_heads * group, rng.choice([4, 8, 10]), rng.randint(1, 4)
    fields = {
        "vocab_size": rng.randint(60, 200),
        "hidden_size": heads * dim,
        "intermediate_size": rng.randint(20, 90),
        "num_hidden_layers": layers + 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "conv_L_cache": rng.choice([2, 3, 3, 4, 5]),
        "conv_bias": rng.random() < 0.5,
        "block_multiple_of": rng.choice([8, 16]),
        "block_auto_adjust_ff_dim": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "layer_types": ["full_attention"] + [rng.choice(["conv", "full_attention"]) for _ in range(layers)],
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
    }
    rng.shuffle(fields["layer_types"])
    if rng.random() < 0.3:
        fields["head_dim"] = 2 * rng.randint(2, 8)  # stated, and not the even share
    return Lfm2Config(**{**fields, **overrides})


def random_stock(seed: int, **overrides) -> Lfm2ForCausalLM:
    """A stock model with weights of ordinary scale everywhere, norms and biases included."""
    torch.manual_seed(seed)
    model = Lfm2ForCausalLM(random_config(seed, **overrides)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model


def ours(stock: Lfm2ForCausalLM) -> Lfm2CbForCausalLM:
    return adopt(stock, Lfm2CbForCausalLM).eval()


def ids(seed: int, batch: int = 3, length: int = 9) -> torch.Tensor:
    """Random token ids that every random config has, none of them special."""
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def fuse_gradients(stock: Lfm2ForCausalLM) -> dict[str, torch.Tensor]:
    """A stock model's gradients under our parameter names."""
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    for name in list(gradients):
        for fused, parts in FUSED.items():
            if name.endswith(parts[0]):
                stem = name.removesuffix(parts[0])
                gradients[stem + fused] = torch.cat([gradients.pop(stem + part) for part in parts])
    return gradients


def random_prompts(rng: random.Random, count: int, longest: int, vocab_size: int = 60) -> list[list[int]]:
    return [[rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def stock_greedy(model: Lfm2ForCausalLM, prompt: list[int], max_new_tokens: int, **kwargs) -> list[int]:
    """Stock generate() on one prompt: its new tokens."""
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": max_new_tokens, **kwargs}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def demo_prompts(count: int) -> list[str]:
    lines = Path(lfm2_cb.demo_model_path(), "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]
