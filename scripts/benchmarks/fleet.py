"""What a fleet of the tiny model does: its answers, how much its caches hold, and what becomes of requests when a
replica is killed, and when replicas come and go.

    python scripts/benchmarks/fleet.py                     # 3 minutes on 2 idle cores
    python scripts/benchmarks/fleet.py --parts chats
    python scripts/benchmarks/fleet.py --simulate          # the same chats in the simulator, seconds

The chats are all under way at once, each asking its next turn as it has its answer. Needs the extras ray and serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import simulate_fleet
from fleet_model import RecordedChat
from harness.machine import facts
from transformers.utils import logging as transformers_logging

import lfm2_cb
from lfm2_cb.loading import load_tokenizer
from lfm2_cb.scheduling.prefix_hashes import prefix_hashes

MODEL = lfm2_cb.demo_model_path()
BLOCK_SIZE, NUM_BLOCKS, ANSWER_TOKENS, LONG_ANSWER_TOKENS = 16, 3000, 32, 200
PORT = 8765
PARTS = ("chats", "clients", "killed", "scaling")


def questions(count: int) -> list[str]:
    lines = Path(MODEL, "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(lines[i % len(lines)])["prompt"] for i in range(count)]


def system_prompt(num_chats: int, num_characters: int) -> str:
    return " ".join(questions(num_chats))[:num_characters]


def client() -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=300)


async def ask(text: str, tokens: int, stream: bool = False, **options: Any) -> tuple[str, str | None]:
    """The answer, and how it was broken off (of a stream only; a request that fails raises)."""
    import openai

    asked = {"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": stream, **options}
    answer = await client().completions.create(**asked)
    if not stream:
        return answer.choices[0].text, None
    said = ""
    try:
        async for event in answer:
            said += event.choices[0].text
    except openai.APIError as error:
        return said, str(error)
    return said, None


# The fleet


@contextmanager
def fleet(replicas: int | tuple[int, int], in_turns: bool = False, **options: Any) -> Iterator[None]:
    from in_turns import InTurns
    from lfm2_cb.integrations.ray.routing import PrefixRequestRouter
    from lfm2_cb.integrations.ray.serve import build_deployment
    from ray import serve

    application = build_deployment(
        MODEL,
        name="tiny",
        replicas=replicas,
        request_router=InTurns if in_turns else PrefixRequestRouter,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kernels="torch",  # nothing to compile: it is the fleet that is looked at
        dtype="float32",
        **options,
    )
    serve.run(application, name="fleet")
    yield
    serve.delete("fleet")


@contextmanager
def cluster() -> Iterator[None]:
    """Ray and Ray Serve, for as long as the measurements take."""
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT, "request_timeout_s": None})
        yield
        serve.shutdown()
    finally:
        ray.shutdown()


async def metrics() -> dict[str, dict[str, float]]:
    """Of each metric, its value by replica ("": the fleet's)."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {}
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"http://127.0.0.1:{PORT}/metrics")).text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values, replica = found.setdefault(sample.name, {}), sample.labels.get("replica", "")
            values[replica] = values.get(replica, 0.0) + sample.value
    return found


async def wait_for_replicas(count: int) -> None:
    while len((await metrics()).get("lfm2_cb_running", {})) != count:
        await asyncio.sleep(0.2)


# The parts


async def hold_chats(args: argparse.Namespace) -> float:
    """Hit rate in percent."""
    texts = questions(args.chats * args.turns)
    system = system_prompt(args.chats, args.system_characters)
    totals = [0, 0]

    async def chat(number: int) -> None:
        messages = [{"role": "system", "content": system}]
        asked = {"model": "tiny", "max_tokens": ANSWER_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for turn in range(args.turns):
            messages.append({"role": "user", "content": texts[number * args.turns + turn]})
            answer = await one.chat.completions.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            totals[0] += answer.usage.prompt_tokens
            totals[1] += answer.usage.prompt_tokens_details.cached_tokens

    one = client()
    await asyncio.gather(*(chat(i) for i in range(args.chats)))
    return 100 * totals[1] / totals[0]


def generated() -> dict[str, str]:
    """What stock's `generate()` says to 16 prompts."""
    import torch
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), load_tokenizer(MODEL)
    expected = {}
    for text in questions(16):
        prompt = tokenizer(text, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
        expected[text] = tokenizer.decode(output[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return expected


async def be_64_clients(expected: dict[str, str]) -> str:
    asked = [(text, index % 2 == 1) for index, text in enumerate([*expected] * 4)]
    answers = await asyncio.gather(*(ask(text, ANSWER_TOKENS, stream) for text, stream in asked))
    right = sum(said == expected[text] for (text, _), (said, _) in zip(asked, answers, strict=True))
    counts = (await metrics())["lfm2_cb_sequences_total"]
    return f"{right} of {len(asked)} clients (half of them streams) got generate()'s text; {len(counts)} replicas ran"


async def lose_a_replica() -> str:
    import psutil

    texts = questions(32)
    options = {"extra_body": {"ignore_eos": True}}
    expected = dict(
        zip(texts, await asyncio.gather(*(ask(text, LONG_ANSWER_TOKENS, **options) for text in texts)), strict=True)
    )
    running = [
        asyncio.ensure_future(ask(text, LONG_ANSWER_TOKENS, stream, **options))
        for text in texts
        for stream in (False, True)
    ]
    while min((await metrics())["lfm2_cb_running"].values()) < 8:
        await asyncio.sleep(0.01)
    children = psutil.Process().children(recursive=True)
    victim = next(child for child in children if "ServeReplica:fleet:engine" in "".join(child.cmdline()))
    victim.send_signal(signal.SIGKILL)
    answers = await asyncio.gather(*running)
    whole, streams = answers[::2], answers[1::2]
    right = sum(one == expected[text] for one, text in zip(whole, texts, strict=True))
    broken = sum(problem is not None for _, problem in streams)
    right_streams = sum(one == expected[text] for one, text in zip(streams, texts, strict=True))
    rerun = (await metrics())["lfm2_cb_front_rerun_total"][""]
    return (
        f"one of two replicas killed under load: {right} of 32 JSON requests answered rightly, {right_streams} of 32 "
        f"streams whole, {broken} ended with an error event; {rerun:.0f} requests ran again"
    )


async def come_and_go() -> str:
    texts, busy, done = questions(24), True, asyncio.Event()
    expected: dict[str, tuple] = {}

    async def keep_asking(index: int) -> int:
        count = 0
        while busy or (index == 0 and not done.is_set()):  # one goes on to the end
            text = texts[(index + count) % len(texts)]
            answer = await ask(text, LONG_ANSWER_TOKENS, extra_body={"ignore_eos": True})
            assert answer == expected.setdefault(text, answer), "another answer than before"
            count += 1
        return count

    asking = [asyncio.ensure_future(keep_asking(i)) for i in range(len(texts))]
    await wait_for_replicas(2)
    busy = False
    await wait_for_replicas(1)
    done.set()
    return f"1 -> 2 -> 1 replicas under load: {sum(await asyncio.gather(*asking))} requests, none failed"


def measure(args: argparse.Namespace) -> None:
    """All parts that are asked for, with as few fleets as they need."""
    expected = generated() if "clients" in args.parts else {}
    with cluster():
        if "chats" in args.parts:
            with fleet(1):
                _say_rate("1", asyncio.run(hold_chats(args)))
            with fleet(2, in_turns=True):
                _say_rate("2, in turns", asyncio.run(hold_chats(args)))
        if {*PARTS[:3]} & {*args.parts}:
            with fleet(2):
                if "chats" in args.parts:
                    _say_rate("2, by prefix", asyncio.run(hold_chats(args)))
                if "clients" in args.parts:
                    print(asyncio.run(be_64_clients(expected)), flush=True)
                if "killed" in args.parts:
                    print(asyncio.run(lose_a_replica()), flush=True)
        if "scaling" in args.parts:
            with fleet((1, 2), upscale_delay_seconds=1.0, downscale_delay_seconds=3.0, max_sequences=16):
                print(asyncio.run(come_and_go()), flush=True)


def _say_rate(replicas: str, rate: float) -> None:
    print(f"replicas: {replicas}: {rate:.1f} % of the prompts' tokens were cached", flush=True)


# The same chats, simulated


def simulate(args: argparse.Namespace) -> None:
    chats = held_chats(args.chats, args.turns, args.system_characters)
    flags = f"--requests {args.chats * args.turns} --block-size {BLOCK_SIZE} --blocks {NUM_BLOCKS}".split()
    parsed = simulate_fleet.parse([*flags, "--staleness", "2", "--think-seconds", "0.001"])
    # the tiny model's steps: a few milliseconds, whatever is in them
    cost = simulate_fleet.CostModel(step=0.004, token=2e-5, row=1e-4, kv_token=0.0)
    for label, replicas, policy in (
        ("1", 1, "prefix"),
        ("2, in turns", 2, "round_robin"),
        ("2, by prefix", 2, "prefix"),
    ):
        begun = [RecordedChat(deque(turns)) for turns in chats]
        outcome = simulate_fleet.Fleet(policy, replicas, parsed, cost, begun).run()
        _say_rate(label, outcome.row()["hit rate %"])


@cache
def held_chats(num_chats: int, num_turns: int, system_characters: int) -> list[list[tuple]]:
    """The chats as they go (answers are greedy, so they go so wherever they are held): what `RecordedChat` takes.

    An answer comes back in the next prompt as its text, and may be tokenized otherwise there; special tokens in it do
    not come back at all.
    """
    tokenizer = load_tokenizer(MODEL)
    texts = questions(num_chats * num_turns)
    chats = [[{"role": "system", "content": system_prompt(num_chats, system_characters)}] for _ in range(num_chats)]
    recorded: list[list[tuple]] = [[] for _ in chats]
    transformers_logging.disable_progress_bar()
    options = {"kernels": "torch", "dtype": "float32", "cache_memory": "64MiB"}
    with lfm2_cb.ContinuousBatchingGenerator(MODEL, tokenizer, **options) as generator:
        no_token = generator.model.config.vocab_size
        for turn in range(num_turns):
            for number, messages in enumerate(chats):
                messages.append({"role": "user", "content": texts[number * num_turns + turn]})
            prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
            answers = generator.generate(prompts, max_new_tokens=ANSWER_TOKENS, do_sample=False, eos_token_id=no_token)
            for messages, turns, prompt, answer in zip(chats, recorded, prompts, answers, strict=True):
                said = answer.token_ids
                messages.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)})
                known_after = prefix_hashes([*prompt, *said], BLOCK_SIZE)
                turns.append((prefix_hashes(prompt, BLOCK_SIZE), known_after, len(prompt), len(said)))
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--chats", type=int, default=32)
    add("--turns", type=int, default=6)
    add("--system-characters", type=int, default=600, help="of the system prompt that all share")
    add("--simulate", action="store_true")
    args = parser.parse_args()
    print(f"{facts()['cpu']}, {os.cpu_count()} cores")
    began = time.perf_counter()
    (simulate if args.simulate else measure)(args)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
