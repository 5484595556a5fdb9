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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import simulate_fleet

import lfm2_cb

MODEL = lfm2_cb.demo_model_path()
BLOCK_SIZE, NUM_BLOCKS, ANSWER_TOKENS = 16, 3000, 32
PORT = 8765


def questions(count: int) -> list[str]:
    lines = Path(MODEL, "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(lines[i % len(lines)])["prompt"] for i in range(count)]


async def talk(url: str, args: argparse.Namespace) -> tuple[int, int]:
    """All chats. Returns: prompt tokens, and those that were cached."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    texts = questions(args.chats * args.turns)
    system = " ".join(questions(args.chats))[: args.system_characters]
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
    """As `measure`, by the simulator, with the lengths that those texts have."""
    from lfm2_cb.loading import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    texts = questions(args.chats * args.turns)
    question = sum(len(tokenizer(text)["input_ids"]) + 5 for text in texts) / len(texts)  # and a turn's markers
    system = " ".join(questions(args.chats))[: args.system_characters]
    flags = {
        "requests": args.chats * args.turns,
        "system-prompts": 1,
        "system-tokens": len(tokenizer(system)["input_ids"]) + 5,
        "question-tokens": question,
        "answer-tokens": ANSWER_TOKENS + 5,
        "block-size": BLOCK_SIZE,
        "blocks": NUM_BLOCKS,
        "chats": args.chats,
        "turns": args.turns,
        "spread": 0.0,
        "think-seconds": 1e-3,
        "staleness": 2.0,
    }
    policy = "round_robin" if in_turns else "prefix"
    given = [text for name, value in flags.items() for text in (f"--{name}", f"{value}")]
    parsed = simulate_fleet.parse(["--replicas", f"{replicas}", "--policies", policy, *given])
    # the tiny model's steps: a few milliseconds, whatever is in them
    cost = simulate_fleet.CostModel(step=0.004, token=2e-5, row=1e-4, kv_token=0.0)
    outcome = simulate_fleet.Fleet(policy, replicas, parsed, cost).run()
    return outcome.row()["hit rate %"], outcome.seconds


if __name__ == "__main__":
    main()
