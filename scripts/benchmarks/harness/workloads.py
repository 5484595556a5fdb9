"""The fixed workloads, and the models they run on."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from lfm2_cb import demo_model_path

Workload = list[tuple[list[int], int]]  # (prompt token ids, output tokens)
#: stock's batch sizes tried for each workload
STOCK_BATCHES = {"single": [1], "five": [5], "ragged64": [16], "ragged256": [16], "prefix64": [16], "long8": [8]}
#: workload → the one whose rate by stock it is compared with, where it is another: the same kind of requests, fewer
STOCK_RUNS = {"ragged256": "ragged64"}


def make_workloads(vocab_size: int, longest: int) -> dict[str, Workload]:
    """The six workloads, from one seed. Lengths are cut to `longest` tokens in all."""
    rng = random.Random(20261121)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(10, min(65000, vocab_size)) for _ in range(min(n, longest // 2))]

    def lognormal(median: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(math.exp(rng.gauss(math.log(median), sigma)))))

    def ragged(n: int) -> Workload:
        return [(tokens(lognormal(96, 0.9, 16, 768)), lognormal(64, 0.8, 8, 256)) for _ in range(n)]

    workloads = {
        "single": [(tokens(128), 128)],
        "five": [(tokens(n), 100) for n in (12, 18, 25, 33, 47)],
        "ragged64": ragged(64),
        "ragged256": ragged(256),
    }
    prefix = tokens(512)
    workloads["prefix64"] = [(prefix + tokens(rng.randrange(16, 65)), 32) for _ in range(64)]
    workloads["long8"] = [(tokens(2048), 64) for _ in range(8)]
    return workloads


def equal_requests(count: int, vocab_size: int, prompt_tokens: int = 32, output_tokens: int = 32) -> Workload:
    """As many requests of one shape: for throughput against batch size, where stock wastes nothing on padding."""
    rng = random.Random(count)
    return [([rng.randrange(10, vocab_size) for _ in range(prompt_tokens)], output_tokens) for _ in range(count)]


def cut(workload: Workload, requests: int, tokens: int) -> Workload:
    """At most so many requests, prompts and answers of at most so many tokens each: for trying things out."""
    return [(prompt[:tokens], min(length, tokens)) for prompt, length in workload[:requests]]


#: random models: LFM2-350M's shape, so that speed is the same, and one with its proportions that computes an eighth
SHAPES: dict[str, dict[str, int]] = {
    "random-350m": {
        "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 6656,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "random-45m": {
        "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 3328,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def load_model(name: str, dtype: torch.dtype) -> Lfm2ForCausalLM:
    """A checkpoint's path, "tiny" (the one that ships), or one of `SHAPES`."""
    if name == "tiny":
        name = demo_model_path()
    if name not in SHAPES:
        return Lfm2ForCausalLM.from_pretrained(name, dtype=dtype).eval()
    attention, shape = {2, 5, 8, 10, 12, 14}, SHAPES[name]
    layer_types = ["full_attention" if i in attention else "conv" for i in range(shape["num_hidden_layers"])]
    config = Lfm2Config(**shape, layer_types=layer_types, eos_token_id=7)
    torch.manual_seed(0)
    return Lfm2ForCausalLM(config).to(dtype).eval()


def save_checkpoint(name: str, dtype: torch.dtype, folder: str) -> str:
    """The model as a checkpoint in `folder`, for processes of their own; what is there already is taken as it is.

    Returns: the folder.
    """
    if not Path(folder, "config.json").is_file():
        load_model(name, dtype).save_pretrained(folder)
    return folder
