"""Random LFM2s and stock's answers, shared by the tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

import lfm2_cb
from lfm2_cb.model.conversion import FUSED, adopt
from lfm2_cb.model.modeling import Lfm2CbForCausalLM, class_for


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
    return _with_ordinary_weights(Lfm2ForCausalLM(random_config(seed, **overrides)))


def _with_ordinary_weights(model: PreTrainedModel) -> PreTrainedModel:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            nn.init.normal_(tensor, mean=1.0, std=0.3)
        elif name.endswith("bias"):
            nn.init.normal_(tensor, std=0.3)
    return model.eval()


def random_moe_config(seed: int, **overrides) -> Lfm2MoeConfig:
    """A small mixture of experts of any shape the family allows, odd widths included."""
    rng = random.Random(seed)
    dense = random_config(seed)
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "conv_L_cache", "conv_bias", "tie_word_embeddings", "layer_types",
        "max_position_embeddings", "initializer_range",
    )  # fmt: skip
    num_experts = [4, 5, 8, 16, 32, 64][seed % 6]
    fields = {name: getattr(dense, name) for name in names} | {
        "moe_intermediate_size": rng.randint(5, 40),
        "num_experts": num_experts,
        "num_experts_per_tok": rng.choice([k for k in (1, 2, 4, 8) if k <= num_experts]),
        "num_dense_layers": rng.choice([0, 1, 1, 2, dense.num_hidden_layers]),
        "use_expert_bias": rng.random() < 0.6,
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }
    if hasattr(dense, "head_dim"):
        fields["head_dim"] = dense.head_dim
    return Lfm2MoeConfig(**{**fields, **overrides})


def random_moe(seed: int, **overrides) -> Lfm2MoeForCausalLM:
    """As `random_stock`, with experts. (By stock's eager experts: its others refuse odd widths.)"""
    torch.manual_seed(seed)
    model = _with_ordinary_weights(Lfm2MoeForCausalLM(random_moe_config(seed, **overrides)))
    model.set_experts_implementation("eager")
    return model


def ours(stock: PreTrainedModel) -> Lfm2CbForCausalLM:
    return adopt(stock, class_for(stock.config)).eval()


def ids(seed: int, batch: int = 3, length: int = 9) -> torch.Tensor:
    """Random token ids that every random config has, none of them special."""
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def taken_gradients(stock: Lfm2ForCausalLM) -> dict[str, torch.Tensor]:
    """A stock model's gradients under our parameter names; it has none left, as our model shares some parameters."""
    gradients = {name: p.grad for name, p in stock.named_parameters()}
    stock.zero_grad(set_to_none=True)
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


def generated_tokens(outputs: dict[str, GenerationOutput]) -> list[list[int]]:
    """The new tokens of each request that `generate_batch` returned."""
    return [output.generated_tokens for output in outputs.values()]


def demo_prompts(count: int) -> list[str]:
    lines = Path(lfm2_cb.demo_model_path(), "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]
