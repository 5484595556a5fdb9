"""A checkpoint of random weights with the shapes of LFM2-8B-A1B, written layer by layer: never all in memory.

    python scripts/tools/random_checkpoint.py FOLDER
    python scripts/tools/random_checkpoint.py FOLDER --load int4

The first writes it (16.7 GB in bfloat16, a file a layer, in the layout of the published checkpoint). The second loads
it, quantised or as it is, lets it decode, and prints what that took: time, peak memory, tokens a second.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Lfm2MoeConfig, Lfm2MoeForCausalLM

#: of LFM2-8B-A1B
ATTENTION = (2, 6, 10, 14, 18, 21)
SHAPE = {
    "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
    "num_dense_layers": 2,
}  # fmt: skip


def tensors_of(config: Lfm2MoeConfig) -> dict[str, torch.Size]:
    """Names and shapes of a stock checkpoint: experts are split there."""
    with torch.device("meta"):
        model = Lfm2MoeForCausalLM(config)
    found: dict[str, torch.Size] = {}
    for name, tensor in model.state_dict().items():
        stem, width = name.rpartition(".")[0], config.moe_intermediate_size
        if name.endswith("gate_up_proj"):
            for e in range(config.num_experts):
                found[f"{stem}.{e}.w1.weight"] = found[f"{stem}.{e}.w3.weight"] = torch.Size((width, tensor.shape[2]))
        elif name.endswith("down_proj"):
            for e in range(config.num_experts):
                found[f"{stem}.{e}.w2.weight"] = torch.Size(tensor.shape[1:])
        elif name != "lm_head.weight":
            found[name] = tensor.shape
    return found


def write(folder: Path, layers: int) -> None:
    """A million random numbers, repeated from a place of its own in each tensor: they take no time to make."""
    kinds = ["full_attention" if i in ATTENTION else "conv" for i in range(layers)]
    config = Lfm2MoeConfig(**SHAPE, num_hidden_layers=layers, layer_types=kinds, dtype="bfloat16")
    config.architectures = ["Lfm2MoeForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    numbers = (torch.randn(2**20 + 1) * 0.02).bfloat16()

    def filled(name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("expert_bias"):
            return torch.zeros(shape)
        start = random.Random(name).randrange(2**20)
        return numbers.roll(start).repeat(-(-shape.numel() // len(numbers)))[: shape.numel()].view(shape)

    shards: dict[str, dict[str, torch.Size]] = {}
    for name, shape in tensors_of(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, tensors in shards.items():
        save_file({name: filled(name, shape) for name, shape in tensors.items()}, folder / file, {"format": "pt"})
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=7, pad_token_id=0).save_pretrained(folder)


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def load_and_decode(folder: Path, weights: str | None, rows: int, tokens: int) -> None:
    from lfm2_cb import ContinuousBatchingGenerator, load_model

    print(f"imported: peak {peak_gb():.2f} GiB", flush=True)
    start = time.perf_counter()
    model = load_model(str(folder), weights=weights)
    size = sum(p.nbytes for p in model.parameters()) / 2**30
    print(
        f"loaded in {time.perf_counter() - start:.0f} s: {size:.2f} GiB of weights, peak {peak_gb():.2f} GiB",
        flush=True,
    )
    with ContinuousBatchingGenerator(model, cache_memory="64MiB") as generator:
        print(f"ready: peak {peak_gb():.2f} GiB", flush=True)
        for count in (1, rows):
            prompts = [[10 + i, 20, 30, 40] for i in range(count)]
            options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": tokens}
            generator.generate(prompts, **options | {"max_new_tokens": 2})
            times = [time.perf_counter() for event in generator.stream(prompts, **options) if event.index == 0]
            rate = count * (len(times) - 1) / (times[-1] - times[0])
            print(f"{count} at once: {rate:.1f} tokens/s, peak {peak_gb():.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--load", choices=["int4", "int8", "full"], help="load what was written before")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    if args.load is None:
        write(args.folder, args.layers)
    else:
        load_and_decode(args.folder, None if args.load == "full" else args.load, args.rows, args.tokens)


if __name__ == "__main__":
    main()
