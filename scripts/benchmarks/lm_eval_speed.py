"""`--model lfm2-cb` beside lm-eval's `--model hf` on the shipped model and tasks, alternating; prints ratios of times.

python scripts/benchmarks/lm_eval_speed.py --items 200 --hf-batch 1 16 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from lfm2_cb.integrations.lm_eval import Lfm2CbLM
from lfm2_cb.integrations.lm_eval.tasks.austen import last_words
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import lfm2_cb

GENERATION = {"until": [".", "!", "?", "\n"], "max_gen_toks": 48}  # as in austen_continue.yaml


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--hf-batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    path = lfm2_cb.demo_model_path()
    documents = list(last_words()["test"])[: args.items]
    ours = Lfm2CbLM(path, dtype="float32")
    theirs = {n: HFLM(path, dtype="float32", device=str(ours.device), batch_size=n) for n in args.hf_batch}
    shared = "\n\n".join(document["text"] for document in documents[:8])
    pairs = [(d["context"], f" {choice}") for d in documents for choice in d["choices"]]
    workloads = {
        "generate_until": [(d["context"], GENERATION) for d in documents],
        "loglikelihood": pairs,
        "loglikelihood, one common prefix": [(f"{shared}\n\n{c}", w) for c, w in pairs[:160]],
        "loglikelihood_rolling": [(d["text"],) for d in documents],
    }
    for name, arguments in workloads.items():
        kind = name.split(",")[0]
        requests = [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]  # type: ignore[arg-type]
        getattr(ours, kind)(requests[:4], disable_tqdm=True)  # warm-up
        for batch, hf in [pair for _ in range(args.repeats) for pair in theirs.items()]:
            ours.generator.engine.scheduler.cache.clear()
            answers, seconds = timed(lambda kind=kind, r=requests: getattr(ours, kind)(r, disable_tqdm=True))
            expected, hf_seconds = timed(lambda kind=kind, r=requests, hf=hf: getattr(hf, kind)(r, disable_tqdm=True))
            if kind == "generate_until":
                agree = f"{sum(a == b for a, b in zip(answers, expected, strict=True))} texts the same"
            else:
                values = [[a[0] if isinstance(a, tuple) else a for a in both] for both in (answers, expected)]
                agree = f"largest difference {max(abs(a - b) for a, b in zip(*values, strict=True)):.0e}"
            times = f"{seconds:.2f} s, hf at batch {batch} {hf_seconds:.2f} s, {hf_seconds / seconds:.2f} x"
            print(f"{name}: {len(requests)} requests, {times}, {agree}")


if __name__ == "__main__":
    main()
