# ruff: noqa: E402  (what the extras bring is looked for before it is imported)
"""A fleet of two replicas on Ray Serve, asked by official clients over real sockets."""

import asyncio
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import httpx
from fleet import BLOCK, Fleet
from helpers import demo_prompts
from serving import CHAT, ENDLESS, KEY

from lfm2_cb import ContinuousBatchingGenerator

sys.path.append(str(Path(__file__).parent.parent / "adapters"))
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft makes the adapters")


@pytest.fixture(scope="module")
def adapters(demo_stock, tmp_path_factory):
    if find_spec("peft") is None:
        return {}
    from making import save_adapter

    folder = tmp_path_factory.mktemp("adapters")
    return {f"a{i}": save_adapter(demo_stock, folder / str(i), i, std=0.05) for i in range(2)}


@pytest.fixture(scope="module")
def fleet(adapters):
    running = Fleet(replicas=2, adapters=adapters)
    yield running
    running.close()


def ask_64(url, prompts):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def ask(index, prompt):  # each over a connection of its own, as all are open at once
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=index % 2 == 1
        )
        if index % 2 == 0:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all():
        return await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))

    return asyncio.run(ask_all())


def test_64_clients_get_what_generate_says_from_both_replicas(fleet, greedy):
    prompts = demo_prompts(16) * 4
    expected = {prompt: greedy(prompt) for prompt in prompts[:16]}
    assert ask_64(fleet.url, prompts) == [expected[prompt] for prompt in prompts]
    counts = fleet.metrics()["sequences_total"]
    assert len(counts) == 2 and sum(counts.values()) == 64 and min(counts.values()) >= 8
    assert fleet.metrics()["fleet_sequences_total"] == {"": 64.0}


def test_all_of_the_surface_is_there(fleet, greedy):
    http, client = fleet.http, fleet.client
    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content == greedy(CHAT)
    events = list(
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0, stream=True)
    )
    assert "".join(event.choices[0].delta.content or "" for event in events) == greedy(CHAT)
    assert events[0].choices[0].delta.role == "assistant" and len(events) > 6
    ask = {"model": "tiny", "input": CHAT[0]["content"], "max_output_tokens": 12, "temperature": 0}
    *_, last = client.responses.create(**ask, stream=True)
    assert last.response.output_text == greedy(CHAT)
    assert next(iter(client.models.list())).id == "tiny"
    assert http.post("/tokenize", json={"prompt": "It was"}).json()["count"] == 3
    assert http.get("/health").json() == {"status": "ok"} and http.get("/version").status_code == 200
    named = http.get("/v1/models", headers={"x-request-id": "mine:7"})
    assert named.headers.get_list("x-request-id") == ["mine:7"]


@needs_peft
def test_adapters_are_on_every_replica(fleet, adapters, demo_stock, demo_tokenizer):
    texts = demo_prompts(8)
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, adapters=adapters, cache_memory="8MiB") as generator:
        expected = {
            name: [one.text for one in generator.generate(texts, adapter=name, max_new_tokens=12, do_sample=False)]
            for name in (*adapters, None)
        }
    assert len({*map(tuple, expected.values())}) == 3

    async def ask_all(client):
        asked = [(name, text) for name in expected for text in texts]
        answers = (
            client.completions.create(model=name or "tiny", prompt=text, max_tokens=12, temperature=0)
            for name, text in asked
        )
        return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    client = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, timeout=120)
    assert asyncio.run(ask_all(client)) == [text for texts in expected.values() for text in texts]
    listed = {model.id: getattr(model, "parent", None) for model in fleet.client.models.list()}
    assert listed == {"tiny": None, "a0": "tiny", "a1": "tiny"}
    for path in ("load", "unload"):
        answer = fleet.http.post(f"/v1/{path}_lora_adapter", json={"lora_name": "a2", "lora_path": "a2"})
        assert answer.status_code == 404 and "--adapter NAME=PATH" in answer.json()["error"]["message"]


def test_the_status_page_finds_the_fleet_s_sums(fleet):
    fleet.client.completions.create(model="tiny", prompt="It was", max_tokens=4)
    page = httpx.get(fleet.url)
    assert page.status_code == 200 and "lfm2_cb_fleet_" in page.text
    assert httpx.get(f"{fleet.url}/metrics").status_code == 401
    there = set(re.findall(r"^(\w+)", fleet.http.get("/metrics").text, re.M))
    names = {f"lfm2_cb_fleet_{name}" for name in re.findall(r'\bget\("(\w+)"\)', page.text)}
    names |= {
        name.replace("cb_", "cb_fleet_") + "_bucket" for name in re.findall(r'"(lfm2_cb_\w+_seconds)"', page.text)
    }
    assert len(names) >= 9 and names - there <= {"lfm2_cb_fleet_refused_total"}  # has a label, counts none yet
    assert len(re.findall(r"^lfm2_cb_running{replica=", fleet.http.get("/metrics").text, re.M)) == 2


@pytest.mark.parametrize(
    "status, path, options",
    [
        (401, "/v1/models", {"headers": {"Authorization": "Bearer no"}}),
        (404, "/nothing", {}),
        (405, "/v1/completions", {}),
        (400, "/v1/completions", {"method": "POST", "content": b"{"}),
        (400, "/v1/chat/completions", {"method": "POST", "json": {"messages": [{"role": "nobody"}]}}),
        (404, "/v1/completions", {"method": "POST", "json": {"model": "other", "prompt": "It"}}),
        (413, "/v1/completions", {"method": "POST", "content": b" " * (2**22 + 1)}),
    ],
)
def test_what_is_refused(fleet, status, path, options):
    answer = fleet.http.request(**{"method": "GET", "url": path, **options})
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_chat_finds_its_blocks_where_it_was(fleet):
    chats = [[{"role": "user", "content": f"{text} " * 8}] for text in demo_prompts(8)]
    for turn in range(3):
        for messages in chats:
            ask = {"model": "tiny", "messages": messages, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
            answer = fleet.client.chat.completions.create(**ask)
            if turn:
                cached = answer.usage.prompt_tokens_details.cached_tokens
                assert cached >= answer.usage.prompt_tokens - 20 - 10 - 2 * BLOCK
            messages += [answer.choices[0].message.model_dump(include={"role", "content"})]
            messages += [{"role": "user", "content": "And then?"}]


def test_a_client_that_leaves_ends_its_request(fleet):
    stream = fleet.client.completions.create(model="tiny", prompt="It was", stream=True, extra_body=ENDLESS)
    next(iter(stream))
    assert sum(fleet.metrics()["running"].values()) == 1
    stream.close()
    fleet.wait_until(lambda metrics: metrics["fleet_running"] == {"": 0.0})
