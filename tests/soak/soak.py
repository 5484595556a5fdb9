"""Thousands of random requests from several threads; then nothing may be left over, and answers must be stock's.

python tests/soak/soak.py --requests 100000
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import threading
import time
from dataclasses import dataclass, field

import psutil
import torch
import transformers

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.scheduling.scheduler import RequestTooLarge

#: seconds without a finished request that count as a hang
HANG_SECONDS = 120.0
#: answers kept for the comparison, a fair draw from all (so that memory does not grow with the soak)
MAX_SAMPLES = 500
#: requests before the first measurement: allocators and caches have then taken what they keep
WARM_UP = 200


@dataclass
class Tally:
    """What has happened, over all threads."""

    num_requests: int = 0
    num_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    num_preemptions: int = 0
    num_greedy: int = 0
    num_cached_tokens: int = 0
    samples: list[tuple[list[int], int, list[int]]] = field(default_factory=list)  # greedy: prompt, limit, answer
    last_event: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, output, is_sample: bool, limit: int) -> None:
        with self.lock:
            self.num_requests += 1
            self.num_tokens += len(output.token_ids)
            self.num_preemptions += output.metrics.num_preemptions
            self.num_cached_tokens += output.metrics.num_cached_tokens
            self.reasons[str(output.finish_reason)] = self.reasons.get(str(output.finish_reason), 0) + 1
            self.last_event = time.monotonic()
            if is_sample and output.finish_reason == "length":
                self.num_greedy += 1
                sample = (output.prompt_token_ids, limit, output.token_ids)
                if len(self.samples) < MAX_SAMPLES:
                    self.samples.append(sample)
                elif (place := random.randrange(self.num_greedy)) < MAX_SAMPLES:
                    self.samples[place] = sample


@dataclass
class Footprint:
    """What a process holds."""

    threads: int
    files: int
    rss: int  # bytes

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc: what the allocator keeps for later is no leak
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        process = psutil.Process()
        return cls(threading.active_count(), process.num_fds(), process.memory_info().rss)

    @classmethod
    def settled(cls, before: Footprint) -> Footprint:
        """Now, or within some seconds, when nothing more is open than before: what other tests of this process still
        close is no leak."""
        for _ in range(50):
            if (now := cls.now()).files <= before.files and now.threads <= before.threads:
                break
            time.sleep(0.1)
        return now


class Client:
    """One thread's random calls."""

    def __init__(self, generator: ContinuousBatchingGenerator, tally: Tally, seed: int) -> None:
        self.generator, self.tally, self.rng = generator, tally, random.Random(seed)
        self.prefixes = [self.tokens(random.Random(i).randint(8, 70)) for i in range(6)]  # the same for all clients

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(10, 4000) for _ in range(n)]

    def prompt(self) -> list[int]:
        rng = self.rng
        own = self.tokens(1 + min(300, int(rng.expovariate(1 / 12))))
        return rng.choice(self.prefixes) + own if rng.random() < 0.3 else own

    def options(self) -> dict:
        rng = self.rng
        options: dict = {
            "max_new_tokens": 1 + min(80, int(rng.expovariate(1 / rng.choice([4, 4, 4, 30])))),
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "use_prefix_cache": rng.random() < 0.9,
        }
        if rng.random() < 0.3:
            options["prompt_lookup_num_tokens"] = rng.randint(1, 8)
        kind = rng.random()
        if kind < 0.5:
            return {**options, "do_sample": False, "eos_token_id": None}
        options |= {"do_sample": True, "seed": rng.randrange(1000), "temperature": rng.uniform(0.3, 2.0)}
        extras = [
            {"top_k": rng.randint(1, 50)},
            {"top_p": rng.uniform(0.1, 1.0)},
            {"repetition_penalty": rng.uniform(1.0, 1.5)},
            {"min_new_tokens": 3},
            {"no_repeat_ngram_size": 2},
            {"max_time": rng.uniform(0.0, 0.2)},
            {"eos_token_id": [rng.randrange(10, 4000) for _ in range(20)]},
        ]
        for extra in rng.sample(extras, rng.randint(0, 3)):
            options |= extra
        return options

    def call(self, budget: int) -> int:
        """One call of `budget` requests at most; returns how many it made."""
        rng, options = self.rng, self.options()
        is_sample = not options["do_sample"]
        prompts = [self.prompt() for _ in range(rng.randint(1, min(budget, 24)))]
        kind = rng.random()
        if kind < 0.02:
            return self.call_refused(prompts)
        if kind < 0.05:
            return self.call_failing(prompts[0], options)
        if kind < 0.55:
            for output in self.generator.generate(prompts, **options):
                self.tally.add(output, is_sample, options["max_new_tokens"])
            return len(prompts)
        if kind < 0.7 and not is_sample and budget >= 3:
            for output in self.generator.generate(prompts[:1], **{**options, "num_return_sequences": 3}):
                self.tally.add(output, False, 0)
            return 3
        if kind < 0.85:
            return self.call_stream(prompts, options, leaves=rng.random() < 0.3)
        handles = [self.generator.submit(prompt, **options) for prompt in prompts[:4]]
        for handle in handles:
            cancels = rng.random() < 0.3
            if cancels:
                time.sleep(rng.random() * 0.01)
                handle.cancel()
            self.tally.add(handle.result(HANG_SECONDS), is_sample, options["max_new_tokens"])
        return len(handles)

    def call_stream(self, prompts: list[list[int]], options: dict, leaves: bool) -> int:
        stop_at = self.rng.randint(0, 20) if leaves else None
        stream = self.generator.stream(prompts, **options)
        for i, _ in enumerate(stream):
            if i == stop_at:
                stream.close()
                break
            if self.rng.random() < 0.01:
                time.sleep(0.01)  # a slow reader
        with self.tally.lock:
            self.tally.num_requests += len(prompts)
            self.tally.last_event = time.monotonic()
        return len(prompts)

    def call_refused(self, prompts: list[list[int]]) -> int:
        """A budget that cannot be met, and input that is none."""
        for bad, error in (([*prompts, [5] * 4000], RequestTooLarge), ([[]], ValueError), ([[10**9]], ValueError)):
            try:
                self.generator.generate(bad, max_new_tokens=90)
            except error:
                with self.tally.lock:
                    self.tally.refused += 1
            else:
                raise AssertionError(f"{error.__name__} was not raised")
        return 0

    def call_failing(self, prompt: list[int], options: dict) -> int:
        def fail(ids, scores):
            raise ArithmeticError("a processor of the soak")

        (output,) = self.generator.generate([prompt], logits_processor=[fail], **options)
        assert output.finish_reason == "error" and isinstance(output.error, ArithmeticError)
        self.tally.add(output, False, 0)
        return 1


def soak(
    num_requests: int, num_threads: int = 8, seed: int = 0, num_samples: int = 60, policy: str = "past_future"
) -> str:
    """Run the soak; returns a summary. Raises: AssertionError: a leak, a wrong token, a hang, an unexpected error."""
    path = lfm2_cb.demo_model_path()
    stock = transformers.Lfm2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Small enough that requests wait, give way to each other and share prefixes.
    generator = ContinuousBatchingGenerator(
        stock, cache_memory="1.6MiB", block_size=4, max_sequences=48, max_batch_tokens=512, policy=policy
    )
    _drive(generator, Tally(), min(WARM_UP, num_requests), num_threads, seed + 1)
    before, tally = Footprint.now(), Tally()
    start = time.monotonic()
    _drive(generator, tally, num_requests, num_threads, seed)
    seconds, after = time.monotonic() - start, Footprint.settled(before)

    engine = generator.engine
    assert not engine.has_unfinished and not engine.scheduler.running and engine.scheduler.num_waiting == 0
    assert not generator.loop._submissions and not engine._inbox and not engine._cancelled
    engine.scheduler.cache.check_integrity([])
    assert engine.scheduler.cache.num_free_slots == engine.plan.num_slots
    assert engine.scheduler.cache.pool.num_free == engine.plan.num_blocks
    assert not engine.prompt_lookup()._texts
    assert after.threads == before.threads, (before, after)
    assert after.files <= before.files, (before, after)  # one may have been open for a moment before
    grown = (after.rss - before.rss) / 2**20
    assert grown < 32, f"RSS grew by {grown:.0f} MiB"
    wrong = _wrong_answers(stock, tally, num_samples, seed)
    assert not wrong, f"{len(wrong)} answers differ from stock's, the first for prompt {wrong[0]}"
    generator.close()
    return (
        f"{tally.num_requests:,} requests, {num_threads} threads, {seconds:,.0f} s; ends {tally.reasons}, "
        f"{tally.refused} calls refused, {tally.num_preemptions:,} preemptions, "
        f"{tally.num_cached_tokens:,} tokens from the cache; RSS {grown:+.1f} MiB, threads and files as before; "
        f"{min(num_samples, len(tally.samples))} answers compared with stock's"
    )


def _drive(
    generator: ContinuousBatchingGenerator, tally: Tally, num_requests: int, num_threads: int, seed: int
) -> None:
    errors: list[BaseException] = []

    def work(client: Client, share: int) -> None:
        try:
            client.call_refused([])
            while share > 0 and not errors:
                share -= client.call(share)
        except BaseException as error:
            errors.append(error)

    shares = [num_requests // num_threads + (i < num_requests % num_threads) for i in range(num_threads)]
    threads = [
        threading.Thread(target=work, args=(Client(generator, tally, seed * 1000 + i), share), daemon=True)
        for i, share in enumerate(shares)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[-1].join(1.0)
        for thread in threads:
            thread.join(0.01)
        if time.monotonic() - tally.last_event > HANG_SECONDS:
            faulthandler.dump_traceback()
            raise AssertionError(f"nothing has finished for {HANG_SECONDS:.0f} s")
    if errors:
        raise errors[0]
    background = generator.loop._background
    if background is not None:
        background.join(HANG_SECONDS)


@torch.no_grad()
def _wrong_answers(stock, tally: Tally, num_samples: int, seed: int) -> list[list[int]]:
    """Prompts of the sampled greedy answers that stock answers otherwise."""
    wrong = []
    for prompt, limit, answer in random.Random(seed).sample(tally.samples, min(num_samples, len(tally.samples))):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": limit}
        if stock.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() != answer:
            wrong.append(prompt)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=int(os.environ.get("LFM2_CB_SOAK_REQUESTS", 100_000)))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--policy", default="past_future")
    args = parser.parse_args()
    print(soak(args.requests, args.threads, args.seed, args.samples, args.policy))
