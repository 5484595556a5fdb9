"""Chats on one replica, on two behind the prefix-aware router, and on two in turns: how much the caches held.

    python scripts/benchmarks/fleet.py               # 32 chats of 6 turns, the tiny model; 3 minutes on 2 cores
    python scripts/benchmarks/fleet.py --simulate    # the same chats in the simulator, seconds

All chats are under way at once, each asking its next turn as it has its answer. Needs the extras ray and serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import simulate_fleet
from fleet_model import RecordedChat

import lfm2_cb
from lfm2_cb.loading import load_tokenizer
from lfm2_cb.scheduling.prefix_hashes import prefix_hashes

MODEL = lfm2_cb.demo_model_path()
BLOCK_SIZE, NUM_BLOCKS, ANSWER_TOKENS = 16, 3000, 32
PORT = 8765


def questions(count: int) -> list[str]:
    lines = Path(MODEL, "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(lines[i % len(lines)])["prompt"] for i in range(count)]


def system_prompt(num_chats: int, num_characters: int) -> str:
    return " ".join(questions(num_chats))[:num_characters]


async def talk(url: str, args: argparse.Namespace) -> tuple[int, int]:
    """All chats. Returns: prompt tokens, and those that were cached."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    texts = questions(args.chats * args.turns)
    system = system_prompt(args.chats, args.system_characters)
    totals = [0, 0]

    async def chat(number: int) -> None:
        messages = [{"role": "system", "content": system}]
        for turn in range(args.turns):
            messages.append({"role": "user", "content": texts[number * args.turns + turn]})
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=ANSWER_TOKENS, extra_body={"ignore_eos": True}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            totals[0] += answer.usage.prompt_tokens
            totals[1] += answer.usage.prompt_tokens_details.cached_tokens

    await asyncio.gather(*(chat(i) for i in range(args.chats)))
    return totals[0], totals[1]


def measure(replicas: int, in_turns: bool, args: argparse.Namespace) -> tuple[float, float]:
    """Hit rate in percent, and seconds."""
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
        kernels="torch",  # nothing to compile: it is the caches that are measured
    )
    serve.run(application, name="fleet")
    began = time.perf_counter()
    prompt, cached = asyncio.run(talk(f"http://127.0.0.1:{PORT}", args))
    seconds = time.perf_counter() - began
    serve.delete("fleet")
    return 100 * cached / prompt, seconds


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--chats", type=int, default=32)
    add("--turns", type=int, default=6)
    add("--system-characters", type=int, default=600, help="of the system prompt that all share")
    add("--simulate", action="store_true")
    args = parser.parse_args()
    print("| replicas | router | hit rate % | seconds |")
    print("|---|---|---|---|")
    run = simulated if args.simulate else measure
    with nullcontext() if args.simulate else cluster():
        for replicas, in_turns in ((1, False), (2, False), (2, True)):
            rate, seconds = run(replicas, in_turns, args)
            print(f"| {replicas} | {'in turns' if in_turns else 'prefix'} | {rate:.1f} | {seconds:.1f} |", flush=True)


def simulated(replicas: int, in_turns: bool, args: argparse.Namespace) -> tuple[float, float]:
    """As `measure`, by the simulator, on the same chats."""
    flags = f"--requests {args.chats * args.turns} --block-size {BLOCK_SIZE} --blocks {NUM_BLOCKS}".split()
    parsed = simulate_fleet.parse([*flags, "--staleness", "2", "--think-seconds", "0.001"])
    # the tiny model's steps: a few milliseconds, whatever is in them
    cost = simulate_fleet.CostModel(step=0.004, token=2e-5, row=1e-4, kv_token=0.0)
    chats = [RecordedChat(deque(turns)) for turns in held_chats(args.chats, args.turns, args.system_characters)]
    policy = "round_robin" if in_turns else "prefix"
    outcome = simulate_fleet.Fleet(policy, replicas, parsed, cost, chats).run()
    return outcome.row()["hit rate %"], outcome.seconds


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
    with lfm2_cb.ContinuousBatchingGenerator(MODEL, tokenizer, kernels="torch", cache_memory="64MiB") as generator:
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


if __name__ == "__main__":
    main()
