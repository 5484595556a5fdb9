"""The main job on the model that ships: 32 ragged prompts, answered as they finish, then beside the stock pipeline."""

import json
import time
from pathlib import Path

import torch
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

import lfm2_cb

MAX_NEW_TOKENS = 64


def show(path, prompts):
    """Answers of 40 tokens at most, sampled as the model's configuration says, each printed as it ends."""
    limits = [16 + 8 * (i % 4) for i in range(len(prompts))]
    with lfm2_cb.ContinuousBatchingGenerator(path, max_batch_tokens=256, max_sequences=12) as generator:
        texts, start = [""] * len(prompts), time.perf_counter()
        for event in generator.stream(prompts, max_new_tokens=limits, seed=0):
            texts[event.index] += event.text
            if event.finished:
                prompt, answer = prompts[event.index][-48:], " ".join(texts[event.index].split())
                print(f"{time.perf_counter() - start:5.2f} s  #{event.index:<2} …{prompt} | {answer}", flush=True)


def run(pipe, prompts):
    """Records, and generated tokens per second; a short warm-up first."""
    pipe(prompts[:2], do_sample=False, max_new_tokens=4)
    start = time.perf_counter()
    records = pipe(prompts, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, return_tensors=True)
    seconds = time.perf_counter() - start
    tokens = sum(len(record[0]["generated_token_ids"]) for record in records)
    tokens -= sum(len(pipe.tokenizer(prompt)["input_ids"]) for prompt in prompts)
    return records, tokens / seconds


def main() -> None:
    disable_progress_bar()
    path = lfm2_cb.demo_model_path()
    lines = Path(path, "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:32]]
    show(path, prompts)

    stock = pipeline("text-generation", model=path, dtype=torch.float32)
    cb = pipeline("text-generation", model=path, dtype=torch.float32, generator="cb")
    ours, our_rate = run(cb, prompts)
    theirs, stock_rate = run(stock, prompts)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"\n{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} characters, greedy, fp32")
    print(f'generator="cb"   {our_rate:8.0f} tokens/s')
    print(f"stock pipeline   {stock_rate:8.0f} tokens/s  (one prompt after another)")
    print(f"ratio            {our_rate / stock_rate:8.1f} ×, {same} of {len(prompts)} answers identical to stock's")


if __name__ == "__main__":
    main()
