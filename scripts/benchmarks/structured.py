"""What a grammar costs a full batch, and what its forced tokens bring; strictly alternating in one process, ratios.

    python scripts/benchmarks/structured.py --model random-350m
    python scripts/benchmarks/structured.py --model tiny --rounds 1

`cost`: rows with a schema that never ends beside the same rows without, to the same lengths, greedy and sampled.
`forced`: answers of a dozen keys, with forced tokens verified together and one by one.
The shipped tokenizer has 4,096 tokens; a model of more gets a byte-level BPE of up to its whole vocabulary, trained on
the standard library's sources (20 s), so that masks are as long and as varied as a real tokenizer's.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness.machine import facts
from harness.workloads import load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from lfm2_cb import ContinuousBatchingGenerator, default_dtype, demo_model_path
from lfm2_cb.engine.constraints import Constraint

NAMES = ("name", "given_name", "street_address", "postal_code", "country", "telephone_number", "email_address")
DOZEN = (*NAMES, "is_subscribed", "has_children", "number_of_orders", "customer_since", "preferred_language")
WORD = {"type": "string", "pattern": "^[a-z]{2,8}$"}


def record(properties: dict[str, Any]) -> dict[str, Any]:
    shape = {"type": "object", "properties": properties, "required": [*properties]}
    return {**shape, "additionalProperties": False}


#: people without end, of free text, numbers and lists: what is measured is masks, not how soon an answer ends
ENDLESS = {
    "type": "array",
    "items": record(
        {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": WORD}}
    ),
    "minItems": 10_000,
}
DOZEN_KEYS = record({name: {"type": "boolean"} if name.startswith(("is", "has")) else WORD for name in DOZEN})


def sources(limit: int) -> Iterator[str]:
    """The standard library's sources, so many characters of them."""
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts and size < limit:
            text = path.read_text("utf-8", errors="replace")
            size += len(text)
            yield text


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    shipped = AutoTokenizer.from_pretrained(demo_model_path())
    if len(shipped) >= vocab_size:
        return shipped
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|startoftext|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(sources(12_000_000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=special[0], eos_token=special[2])


class Rows:
    """The same prompts again and again, run by one generator."""

    def __init__(self, generator: ContinuousBatchingGenerator, count: int, num_tokens: int) -> None:
        torch.manual_seed(0)
        self.generator, self.num_tokens = generator, num_tokens
        self.prompts = torch.randint(10, 4000, (count, 4)).tolist()  # short: what is measured is decoding

    def rate(self, schema: Any = None, **options: Any) -> float:
        """Output tokens a second."""
        self.generator.engine.scheduler.cache.clear()
        start = time.perf_counter()
        outputs = self.generator.generate(
            self.prompts, max_new_tokens=self.num_tokens, structured=schema, seed=1, **options
        )
        return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - start)


def alternate(rounds: int, **runs: Callable[[], float]) -> str:
    """Run each in turn. Returns: a row: medians, and the median ratio of the first to the second."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # compiled, captured, warm
    for _ in range(rounds):
        for name, run in runs.items():
            rates[name].append(run())
    first, second = rates.values()
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    medians = " | ".join(f"{statistics.median(values):.0f}" for values in rates.values())
    return f"| {medians} | {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}) |"


def cost(generator: ContinuousBatchingGenerator, args: argparse.Namespace) -> None:
    rows = Rows(generator, args.rows, args.tokens)
    print(
        f"\n| {args.rows} rows of {args.tokens} tokens | with a schema, tok/s | without | ratio |\n|---|---|---|---|"
    )
    for name, options in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True, "top_k": 0})):
        runs = {
            "with": lambda o=options: rows.rate(ENDLESS, **o),
            "without": lambda o=options: rows.rate(eos_token_id=None, **o),
        }
        print(f"| {name} {alternate(args.rounds, **runs)}", flush=True)


def forced(generator: ContinuousBatchingGenerator, args: argparse.Namespace) -> None:
    print("\n| a dozen keys | forced tokens together, tok/s | one by one | ratio |\n|---|---|---|---|")
    for count in args.forced_rows:
        rows = Rows(generator, count, 400)

        def one_by_one(rows: Rows = rows) -> float:
            with mock.patch.object(Constraint, "forced", lambda *_: []):
                return rows.rate(DOZEN_KEYS, do_sample=True)

        together = lambda rows=rows: rows.rate(DOZEN_KEYS, do_sample=True)  # noqa: E731
        print(f"| {count} rows {alternate(args.rounds, together=together, one_by_one=one_by_one)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help='checkpoint path, "tiny" or "random-350m"')
    parser.add_argument("--parts", nargs="+", choices=["cost", "forced"], default=["cost", "forced"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--forced-rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.disable_progress_bar()
    model = load_model(args.model, default_dtype())
    tokenizer = make_tokenizer(model.config.vocab_size)
    print(f"{args.model}, {model.dtype}, {len(tokenizer)} tokens, on {facts()['cpu']}")
    with ContinuousBatchingGenerator(model, tokenizer, cache_memory="1GiB") as generator:
        for part in args.parts:
            {"cost": cost, "forced": forced}[part](generator, args)


if __name__ == "__main__":
    main()
