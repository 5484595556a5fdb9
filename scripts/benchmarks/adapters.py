"""Decoding with many LoRA adapters at once: beside the base alone, and beside PEFT's mixed batch.

python scripts/benchmarks/adapters.py  # on random-350m, all eight kinds of layers, some 3 minutes
python scripts/benchmarks/adapters.py --targets q_proj k_proj v_proj out_proj --parts rows zipf

Three ratios, each of runs in turn within this process: 64 rows with 64 different adapters beside the same rows on the
base; beside PEFT's `generate(adapter_names=...)` on the same rows; and requests for adapters drawn from a Zipf
distribution over 1,000 names, with memory for 64, beside the same requests on the base. (The 1,000 names have 64 files
of weights between them, which lie in the system's cache of files; the engine knows of no two that they are the same.)
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness.machine import facts
from harness.roofline import rates as machine_rates
from harness.workloads import load_model
from safetensors.torch import save_file

from lfm2_cb import ContinuousBatchingGenerator, default_dtype
from lfm2_cb.adapters.projections import projections_of
from lfm2_cb.generator import RequestOutput

#: what is measured: the same rows on the base; requests by Zipf; PEFT's mixed batch
PARTS = ["rows", "zipf", "peft"]
#: of each answer beside PEFT, whose batch of 64 takes seconds for each
PEFT_TOKENS = 4
ALL = ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"]
EXACT = {"do_sample": False, "eos_token_id": None, "progress_bar": False}


def save_adapters(model, folder: Path, count: int, rank: int, targets: list[str]) -> list[Path]:
    """Random adapters as PEFT saves them."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    parts = [part for projection in projections_of(model) for part in projection.parts]
    parts = [part for part in parts if part.name.rpartition(".")[2] in targets]
    paths = []
    for i in range(count):
        paths.append(folder / f"adapter-{i}")
        paths[-1].mkdir()
        tensors = {}
        for part in parts:
            stem = f"base_model.model.{part.name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, part.in_features) / part.in_features**0.5
            tensors[f"{stem}.lora_B.weight"] = 0.02 * torch.randn(part.out_features, rank)
        save_file({name: t.to(model.dtype) for name, t in tensors.items()}, paths[-1] / "adapter_model.safetensors")
        (paths[-1] / "adapter_config.json").write_text(json.dumps(config))
    return paths


def more_names(paths: list[Path], folder: Path, count: int) -> dict[str, Path]:
    """So many folders over the same files of weights."""
    named = {}
    for i in range(count):
        named[f"z{i}"] = folder / f"named-{i}"
        named[f"z{i}"].mkdir()
        for file in paths[i % len(paths)].iterdir():
            (named[f"z{i}"] / file.name).symlink_to(file)
    return named


def alternate(repeats: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Median of each, run in turn."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(values) for name, values in found.items()}


def decode_rate(generator, prompts, new_tokens: int, adapter) -> float:
    """Tokens a second from the second token on: prefills are not what is compared."""
    counts, times = [0], [time.perf_counter()]
    for event in generator.stream(prompts, max_new_tokens=new_tokens, adapter=adapter, **EXACT_STREAM):
        counts.append(counts[-1] + len(event.token_ids))
        times.append(time.perf_counter())
    begin = next(i for i, count in enumerate(counts) if count >= 2 * len(prompts))
    return (counts[-1] - counts[begin]) / (times[-1] - times[begin])


def call_rate(generator, prompts, new_tokens: int, adapter) -> float:
    """Tokens a second of a whole call."""
    start = time.perf_counter()
    generator.generate(prompts, max_new_tokens=new_tokens, adapter=adapter, **EXACT)
    return len(prompts) * new_tokens / (time.perf_counter() - start)


EXACT_STREAM = {name: value for name, value in EXACT.items() if name != "progress_bar"}


def rows_on_the_base(generator, prompts, names: list[str], args: argparse.Namespace) -> str:
    rates = alternate(
        args.repeats,
        base=lambda: decode_rate(generator, prompts, args.new_tokens, None),
        adapters=lambda: decode_rate(generator, prompts, args.new_tokens, names),
    )
    count, read = len(prompts), machine_rates(0.3).get("probe_read_gb_per_s", math.nan)
    size = count * generator.engine.adapters.get(names[0]).num_bytes
    extra = count / rates["adapters"] - count / rates["base"]
    return (
        f"{count} rows, {count} adapters of rank {args.rank} on {' '.join(args.targets)}: "
        f"{rates['adapters'] / rates['base']:.2f} × base "
        f"({rates['adapters']:.0f} and {rates['base']:.0f} tok/s)\n"
        f"a step takes {1e3 * extra:.1f} ms more, and {size / 1e9:.2f} GB of adapters at the rate "
        f"at which memory is read, {read:.1f} GB/s, {size / read / 1e6:.1f} ms"
    )


def peft_rate(stock, paths: list[Path], prompts, new_tokens: int) -> float:
    """PEFT's mixed batch: tokens a second of a whole call, the second of two."""
    import peft

    model = peft.PeftModel.from_pretrained(stock, str(paths[0]), adapter_name="0", autocast_adapter_dtype=False)
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    config = model.peft_config["0"]
    for i in range(1, len(paths)):  # what `load_adapter` leaves behind, which takes seconds for each
        model.peft_config[str(i)] = config
        for layer in layers:
            for kept in (*layer._modules.values(), *vars(layer).values()):
                if isinstance(kept, (dict, torch.nn.ModuleDict)) and "0" in kept:
                    kept[str(i)] = copy.deepcopy(kept["0"])
    model.to(stock.dtype).eval()
    ids = torch.tensor(prompts)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for count in (1, new_tokens):
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(ids, adapter_names=[str(i) for i in range(len(paths))], max_new_tokens=count, **options)
        seconds = time.perf_counter() - start
    return len(prompts) * new_tokens / seconds


def zipf(generator, names: list[str], exponent: float, num_requests: int, repeats: int) -> str:
    rng = random.Random(0)
    vocab = generator.model.config.vocab_size
    weights = [1 / (i + 1) ** exponent for i in range(len(names))]
    asked = rng.choices(names, weights, k=num_requests)
    prompts = [[rng.randrange(10, vocab) for _ in range(rng.randint(8, 24))] for _ in asked]
    limits = [rng.randint(16, 48) for _ in asked]

    def run(adapter) -> float:
        start = time.perf_counter()
        outputs: list[RequestOutput] = generator.generate(prompts, max_new_tokens=limits, adapter=adapter, **EXACT)
        assert all(output.error is None for output in outputs)
        return sum(limits) / (time.perf_counter() - start)

    places = generator.engine.scheduler.adapters
    places.num_loads = places.num_hits = 0
    rates = alternate(repeats, base=lambda: run(None), adapters=lambda: run(asked))
    return (
        f"Zipf({exponent}) over {len(names)}: {rates['adapters'] / rates['base']:.2f} × base "
        f"({rates['adapters']:.0f} and {rates['base']:.0f} tok/s), {places.num_loads / repeats:.0f} loads "
        f"for {num_requests} requests "
        f"({len(set(asked))} different adapters)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random-350m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: the one that is quicker here")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=ALL)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--policy", default="fcfs")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype()
    model = load_model(args.model, dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(10, model.config.vocab_size) for _ in range(16)] for _ in range(args.rows)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = save_adapters(model, folder, args.rows, args.rank, args.targets)
        budget = args.rows * 2**20 * -(-_size_of(model, paths[0]) // 2**20)
        names = [str(i) for i in range(args.rows)]
        options = {"max_sequences": args.rows, "adapter_memory": budget, "policy": args.policy}
        with ContinuousBatchingGenerator(model, **options) as generator:
            for key, path in zip(names, paths, strict=True):
                generator.load_adapter(key, path)
            decode_rate(generator, prompts, 4, names)
            where = f"{facts()['cpu']}, {model.dtype}, {torch.get_num_threads()} threads"
            print(f"{where}; {budget / 2**20:,.0f} MiB of adapters", flush=True)
            if "rows" in args.parts:
                print(rows_on_the_base(generator, prompts, names, args), flush=True)
            short = [prompt[:2] for prompt in prompts]  # PEFT takes half a minute to prefill 64 prompts of 16 tokens
            ours = call_rate(generator, short, PEFT_TOKENS, names) if "peft" in args.parts else math.nan
            if "zipf" in args.parts:
                for key, path in more_names(paths, folder, 1000).items():
                    generator.load_adapter(key, path)
                print(zipf(generator, [f"z{i}" for i in range(1000)], args.zipf, args.requests, 2), flush=True)
        if "peft" in args.parts:
            theirs = peft_rate(load_model(args.model, dtype), paths, short, PEFT_TOKENS)
            print(f"PEFT's mixed batch, prompts of two tokens and {PEFT_TOKENS} more: ", end="")
            print(f"{ours / theirs:.1f} × its {theirs:.1f} tok/s")


def _size_of(model, path: Path) -> int:
    return (path / "adapter_model.safetensors").stat().st_size * 17 // 16


if __name__ == "__main__":
    main()
