# ruff: noqa: E402  (what the extras bring is looked for before it is imported)
"""A fleet of two replicas on Ray Serve, asked by official clients over real sockets."""

import asyncio
import os

import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from fleet import BLOCK, Fleet
from helpers import demo_prompts
from serving import CHAT, ENDLESS, KEY


@pytest.fixture(scope="module")
def fleet():
    running = Fleet(replicas=2)
    yield running
    running.close()


def ask_64(url, prompts):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def ask(index, prompt):  # each over a connection of its own, as all are open at once
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=12, stream=index % 2 == 1)
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
    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12)
    assert chat.choices[0].message.content == greedy(CHAT)
    events = list(client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == greedy(CHAT)
    assert events[0].choices[0].delta.role == "assistant" and len(events) > 6
    *_, last = client.responses.create(model="tiny", input=CHAT[0]["content"], max_output_tokens=12, stream=True)
    assert last.response.output_text == greedy(CHAT)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert http.post("/tokenize", json={"prompt": "It was"}).json()["count"] == 3
    assert http.get("/health").json() == {"status": "ok"} and http.get("/version").status_code == 200
    named = http.get("/v1/models", headers={"x-request-id": "mine:7"})
    assert named.headers.get_list("x-request-id") == ["mine:7"]


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
