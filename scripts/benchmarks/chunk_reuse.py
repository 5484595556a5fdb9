"""What it is worth, and what it costs, to take up segments of prompts at other places.

python scripts/benchmarks/chunk_reuse.py speed --prompts 16           # 64: as long as it takes on this machine
python scripts/benchmarks/chunk_reuse.py perplexity --texts austen_*.txt

"speed": prompts that draw 8 of 40 segments of 400 tokens in random order and end in a question; prefix caching alone
against `chunks=`, each with an engine that has seen nothing, but whose cache's memory the system has committed: that
happens once in an engine's life, at the first use of each block, and costs both alike. "perplexity" is of a text's
true continuation by the tiny model, after segments of the text that were computed apart, against all computed in
place; beside it how far the distributions of these tokens are from those after a full prefill (KL divergence).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from harness.machine import facts
from harness.readings import commit
from harness.workloads import load_model

from lfm2_cb import ContinuousBatchingGenerator, demo_model_path
from lfm2_cb.loading import load_tokenizer
from lfm2_cb.requests.prompts import SegmentedPrompt

GREEDY = {"do_sample": False, "eos_token_id": None}


def speed(args: argparse.Namespace) -> None:
    rng, model = random.Random(0), load_model(args.model, torch.bfloat16)
    segments = [[rng.randrange(10, 60000) for _ in range(400)] for _ in range(40)]
    prompts = [[*rng.sample(segments, 8), [rng.randrange(10, 60000) for _ in range(24)]] for _ in range(args.prompts)]
    tokens = sum(len(part) for prompt in prompts for part in prompt) + 8 * len(prompts)
    print(f"{facts()['cpu']}, {torch.get_num_threads()} threads; {args.model}, bf16; {args.prompts} prompts")
    print("| | seconds | tokens/s | speed |")
    print("|---|---|---|---|")
    first, clock = 0.0, time.process_time if args.processor_time else time.perf_counter
    for share in (None, *args.shares):
        with ContinuousBatchingGenerator(model, cache_memory="4GiB") as generator:
            generator.generate([[5] * 300], max_new_tokens=2, **GREEDY)
            commit(generator.engine.runner.cache)
            start = clock()
            if share is None:
                flat = [[token for part in prompt for token in part] for prompt in prompts]
                generator.generate(flat, max_new_tokens=8, progress_bar=False, **GREEDY)
            else:
                options = {"chunks": True, "recompute": share, "max_new_tokens": 8, "progress_bar": False}
                generator.generate(prompts, **options, **GREEDY)
            seconds = clock() - start
        first = first or seconds
        name = "prefix caching alone" if share is None else f"recompute {share}"
        print(f"| {name} | {seconds:.1f} | {tokens / seconds:,.0f} | {first / seconds:.2f} × |", flush=True)


def perplexity(args: argparse.Namespace) -> None:
    """After 8 segments of 400 tokens that stand before the continuation in the text, in their order."""
    tokenizer, model = load_tokenizer(demo_model_path()), load_model("tiny", torch.float32)
    texts = [Path(text).read_text("utf-8") for text in args.texts]
    if not texts:
        texts = [Path(demo_model_path(), "prompts.jsonl").read_text("utf-8")]
    windows: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        step = max(3456, len(ids) // args.windows)
        windows += [ids[i : i + 3456] for i in range(0, len(ids) - 3456, step)]
    print(f"perplexity of 256 tokens after 8 segments of 400, {len(windows)} windows; the tiny model in fp32")
    shares = [1.0, *args.shares]
    losses, divergences = dict.fromkeys(shares, 0.0), dict.fromkeys(shares, 0.0)
    with ContinuousBatchingGenerator(model, max_sequences=2) as generator:
        for window in windows:
            targets, full = torch.tensor(window[3201:]), torch.empty(0)
            for share in shares:
                log_probs = distributions(generator, window, share)
                full = full if len(full) else log_probs
                losses[share] += float(torch.nn.functional.nll_loss(log_probs, targets)) / len(windows)
                divergences[share] += float((full.exp() * (full - log_probs)).sum(-1).mean()) / len(windows)
    print("| recompute | perplexity | against all | KL divergence, millinats a token |")
    print("|---|---|---|---|")
    for share, loss in losses.items():
        ratio = math.expm1(loss - losses[1.0])
        print(f"| {share} | {math.exp(loss):.3f} | {ratio:+.2%} | {1000 * divergences[share]:.2f} |", flush=True)


def distributions(generator: ContinuousBatchingGenerator, window: list[int], share: float) -> torch.Tensor:
    """Log-probabilities `[255, vocab]` of the last tokens of a window: the model is made to say them."""
    parts = [window[i : i + 400] for i in range(0, 3200, 400)]
    following = window[3200:]
    forced = {"prefix_allowed_tokens_fn": lambda _, ids: [following[min(len(ids) - 3200, 255)]]}
    options = {"chunks": True, "recompute": share, "return_dict_in_generate": True, "output_logits": True, **GREEDY}
    resolved = generator.resolve(None, {**options, **forced, "max_new_tokens": 256})
    submission = generator.enqueue([SegmentedPrompt([*parts, following[:1]])], resolved)
    (output,) = generator.run(submission)
    return torch.stack([row.flatten() for row in output.logits[:-1]]).float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "perplexity"])
    parser.add_argument("--model", default="random-350m", help='checkpoint path, or "random-350m"')
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.0], help="recomputed")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="instead of seconds, on a shared machine (with OMP_NUM_THREADS=1)",
    )
    parser.add_argument("--texts", nargs="*", default=[], help="files; default: the prompts that ship")
    parser.add_argument("--windows", type=int, default=4, help="of each text, at most")
    args = parser.parse_args()
    {"speed": speed, "perplexity": perplexity}[args.what](args)


if __name__ == "__main__":
    main()
