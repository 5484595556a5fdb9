# ruff: noqa: E402  (what the extras bring is looked for before it is imported)
"""What becomes of requests while replicas come, go and die: minutes, as replicas take long to start."""

import asyncio
import signal
import time

import pytest

pytest.importorskip("prometheus_client")
ray = pytest.importorskip("ray")
openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")

from fleet import Fleet
from helpers import demo_prompts
from serving import KEY

pytestmark = pytest.mark.slow

LONG = {"model": "tiny", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


def client_of(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, timeout=240)


def test_a_killed_replica_loses_no_request_that_has_no_token_yet():
    """32 JSON requests, which have no token before their end, and 32 streams, some of which have."""
    prompts = demo_prompts(16) * 2

    async def run(fleet: Fleet):
        client = client_of(fleet)

        async def whole(prompt):
            return (await client.completions.create(**LONG, prompt=prompt)).choices[0].text

        async def stream(prompt):
            text = ""
            try:
                async for event in await client.completions.create(**LONG, prompt=prompt, stream=True):
                    text += event.choices[0].text
            except openai.APIError as error:
                return text, str(error)
            return text, None

        expected = dict(zip(prompts[:16], await asyncio.gather(*map(whole, prompts[:16])), strict=True))
        answers = [asyncio.ensure_future(ask(prompt)) for prompt in prompts for ask in (whole, stream)]
        victim = fleet.replica_processes()[0]
        await asyncio.to_thread(fleet.wait_until, lambda metrics: min(metrics["running"].values()) >= 8)
        victim.send_signal(signal.SIGKILL)
        return expected, await asyncio.gather(*answers)

    with Fleet(replicas=2) as fleet:
        expected, answers = asyncio.run(run(fleet))
        texts, streams = answers[::2], answers[1::2]
        assert texts == [expected[prompt] for prompt in prompts]
        for prompt, (text, problem) in zip(prompts, streams, strict=True):
            assert expected[prompt].startswith(text) and (text == expected[prompt] or "was lost" in problem)
        num_broken = sum(problem is not None for _, problem in streams)
        metrics = fleet.metrics()
        assert metrics["front_broken_total"][""] == num_broken and metrics["front_rerun_total"][""] > 0
        print(f"{metrics['front_rerun_total']['']:.0f} run again, {num_broken} streams of {len(streams)} broken off")
        fleet.wait_until(lambda metrics: len(metrics.get("running", {})) == 2)  # and another has taken its place


def test_a_stuck_step_is_noticed_and_what_waits_for_it_is_answered_elsewhere():
    prompts = demo_prompts(16)

    def get_stuck(actor):
        """Run on a replica (and defined here, so that it is sent there): its engine's next step never ends."""
        replica = actor._replica_impl._user_callable_wrapper._callable
        replica._served.dispatcher.manager.batch_processor.engine.runner.run = lambda *_: time.sleep(3600)

    async def run(fleet: Fleet):
        client = client_of(fleet)

        async def whole(prompt):
            return (await client.completions.create(**LONG, prompt=prompt)).choices[0].text

        expected = await asyncio.gather(*map(whole, prompts))
        victim = next(name for name in fleet.metrics()["running"])
        actor = ray.get_actor(f"SERVE_REPLICA::fleet#engine#{victim}", namespace="serve")
        await asyncio.to_thread(ray.get, actor.__ray_call__.remote(get_stuck))
        return victim, expected, await asyncio.gather(*map(whole, prompts))

    with Fleet(replicas=2, stuck_seconds=3) as fleet:
        victim, expected, texts = asyncio.run(run(fleet))
        assert texts == expected and fleet.metrics()["front_rerun_total"][""] > 0
        fleet.wait_until(lambda metrics: len(metrics.get("running", {})) == 2 and victim not in metrics["running"])


def test_replicas_come_and_go_with_the_load_and_no_request_fails():
    prompts = demo_prompts(16)

    async def run(fleet: Fleet):
        client, expected, busy = client_of(fleet), {}, True

        async def keep_asking(index):
            count = 0
            while index == 0 or busy:  # one goes on to the end
                prompt = prompts[(index + count) % len(prompts)]
                text = (await client.completions.create(**LONG, prompt=prompt)).choices[0].text
                assert text == expected.setdefault(prompt, text)
                count += 1
                if index == 0 and done.is_set():
                    break
            return count

        def replicas(count):
            return asyncio.to_thread(fleet.wait_until, lambda metrics: len(metrics.get("running", {})) == count)

        done = asyncio.Event()
        asking = [asyncio.ensure_future(keep_asking(i)) for i in range(24)]
        await replicas(2)
        busy = False
        await replicas(1)
        done.set()
        return await asyncio.gather(*asking)

    scaling = {"upscale_delay_seconds": 1.0, "downscale_delay_seconds": 3.0, "max_sequences": 16}
    with Fleet(replicas=(1, 2), **scaling) as fleet:
        counts = asyncio.run(run(fleet))
        print(f"{sum(counts)} requests")
