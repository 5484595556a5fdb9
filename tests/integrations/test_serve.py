# ruff: noqa: E402  (what the extra brings is looked for before it is imported)
"""The server, asked by real OpenAI clients over real sockets."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import httpx
from helpers import demo_prompts, ours, stock_greedy
from hypothesis import given
from hypothesis import strategies as st
from lfm2_cb.integrations.serve import build_app
from lfm2_cb.integrations.serve.choices import Choice, StopStrings
from lfm2_cb.integrations.serve.parsers import TemplateParser
from serving import CHAT, ENDLESS, KEY, Server
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.chat_parsing import ResponseParser

import lfm2_cb
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.hf.manager_outputs import CbGenerationOutput, RequestStatus

# What is answered


def test_64_clients_at_once_get_what_generate_says(server, greedy):
    prompts = demo_prompts(16) * 4
    expected = {prompt: greedy(prompt) for prompt in prompts[:16]}
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def ask(index, prompt):  # each over a connection of its own, as all are open at once
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=index % 2 == 1
        )
        if index % 2 == 0:
            assert answer.usage.completion_tokens <= 12
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all():
        return await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))

    assert asyncio.run(ask_all()) == [expected[prompt] for prompt in prompts]


def test_chat_as_json_and_as_events(chat, greedy):
    whole = chat()
    assert whole.choices[0].message.content == greedy(CHAT)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens, whole.object) == (
        "length",
        12,
        "chat.completion",
    )
    *events, last = chat(stream=True, stream_options={"include_usage": True})
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == greedy(CHAT)
    assert [event.choices[0].finish_reason for event in events][-2:] == [None, "length"] and len(events) > 6
    assert not last.choices and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_responses_as_json_and_as_events(server, greedy):
    ask = {"model": "tiny", "input": CHAT[0]["content"], "max_output_tokens": 12, "temperature": 0}
    whole = server.client.responses.create(**ask)
    assert whole.output_text == greedy(CHAT) and whole.usage.output_tokens == 12
    *events, last = server.client.responses.create(**ask, stream=True)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == greedy(CHAT)
    assert last.response.output_text == greedy(CHAT) and whole.object == "response"
    for cut, kind in ((whole, "json"), (last.response, last.type)):
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens"), kind
        assert cut.output[0].status == "incomplete" and cut.usage.total_tokens == whole.usage.total_tokens
    assert last.type == "response.incomplete"
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))


def test_a_response_that_ends_by_itself_is_completed(server):
    ask = {
        "model": "tiny",
        "input": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "extra_body": {"stop": "e"},
    }
    whole = server.client.responses.create(**ask, metadata={"batch": "7"}, instructions="Be brief.")
    assert (whole.status, whole.incomplete_details, whole.output[0].status) == ("completed", None, "completed")
    assert whole.metadata == {"batch": "7"} and whole.instructions == "Be brief." and "e" not in whole.output_text
    *events, last = server.client.responses.create(**ask, stream=True, instructions="Be brief.")
    assert last.type == "response.completed" and last.response.output_text == whole.output_text
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done"),
    ]
    server.client.responses.create(**ask, instructions="Be brief." * 40)
    again = server.client.responses.create(**ask, instructions="Be brief." * 40)
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_prompt_is_text_or_token_ids_or_several(complete, demo_tokenizer, greedy):
    prompts = demo_prompts(3)
    ids = [demo_tokenizer(prompt)["input_ids"] for prompt in prompts]
    for given_prompt in (prompts, ids):
        choices = complete(prompt=given_prompt).choices
        assert [(c.index, c.text) for c in choices] == [(i, greedy(prompt)) for i, prompt in enumerate(prompts)]
    assert complete(prompt=ids[0]).choices[0].text == greedy(prompts[0])


def test_without_a_limit_the_answer_takes_the_room_there_is(complete):
    answer = complete(prompt=[1] + [300] * 4090, max_tokens=None)
    assert answer.usage.total_tokens <= 4096 and answer.usage.completion_tokens >= 1


# Parameters of each request


def test_sampling_is_each_requests_own(chat):
    def texts(**kwargs):
        return [choice.message.content for choice in chat(**kwargs).choices]

    one, same, other = (texts(temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    greedy = texts(temperature=0)
    assert greedy == texts(temperature=1.0, extra_body={"top_k": 1}) == texts(temperature=1.0, seed=1, top_p=1e-6)
    # what is not said is the model's: its generation_config samples
    model = GenerationConfig.from_pretrained(lfm2_cb.demo_model_path())
    own = {"temperature": model.temperature, "top_p": model.top_p}
    assert greedy != texts(temperature=None, seed=1) == texts(**own, seed=1)
    assert texts(extra_body={"generation_config": json.dumps({"max_new_tokens": 12, "suppress_tokens": [276]})})


def test_several_choices(chat, complete):
    choices = chat(n=3, temperature=1.5, seed=5).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.message.content for choice in choices}) == 3
    assert len({choice.text for choice in complete(prompt="It was", n=3).choices}) == 1  # greedy
    texts = ["", "", ""]
    for event in chat(n=3, temperature=1.5, seed=5, stream=True):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in choices]


def test_stop_strings_end_the_answer_before_them(complete, greedy, server):
    whole = greedy("It was", 40)
    for stop in (whole[7:11], [whole[20:23], "never to be seen"]):
        cut = whole[: whole.find(stop if isinstance(stop, str) else stop[0])]
        (choice,) = complete(prompt="It was", stop=stop, max_tokens=400).choices
        assert (choice.text, choice.finish_reason) == (cut, "stop")
        events = list(complete(prompt="It was", stop=stop, max_tokens=400, stream=True))
        assert "".join(event.choices[0].text for event in events) == cut
        assert events[-1].choices[0].finish_reason == "stop"
    server.wait_for(running=0)  # the rest is not computed for nobody


@torch.no_grad()
def test_logprobs_are_the_models(chat, complete, demo_stock, demo_tokenizer):
    ids = demo_tokenizer("It was")["input_ids"]
    answer = complete(prompt="It was", logprobs=3, max_tokens=5).choices[0]
    tokens = stock_greedy(demo_stock, ids, 5)
    logprobs = demo_stock(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs.token_logprobs), expected, atol=1e-3, rtol=0)
    assert "".join(answer.logprobs.tokens) == answer.text and all(len(t) == 3 for t in answer.logprobs.top_logprobs)
    offsets = answer.logprobs.text_offset
    assert [answer.text[o:].startswith(t) for o, t in zip(offsets, answer.logprobs.tokens, strict=True)] == [True] * 5
    entries = chat(logprobs=True, top_logprobs=2, max_tokens=5).choices[0].logprobs.content
    assert [entry.top_logprobs[0].token for entry in entries] == [entry.token for entry in entries]
    events = list(chat(logprobs=True, top_logprobs=2, max_tokens=5, stream=True))
    streamed = [e for event in events if (lp := event.choices[0].logprobs) for e in lp.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_what_asks_for_nothing_is_accepted(chat, complete, greedy):
    neutral = {"presence_penalty": 0, "response_format": {"type": "text"}, "user": "me", "store": False, "stop": None}
    assert chat(extra_body=neutral).choices[0].message.content == greedy(CHAT)
    assert complete(prompt="It was", echo=False, best_of=1).choices[0].text == greedy("It was")


@pytest.mark.parametrize("door", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "the engine's flag"])
def test_drafts_are_made_and_change_no_answer(demo_stock, demo_tokenizer, door):
    limits = Lfm2CbBatchingConfig(drafting="auto" if door == "the engine's flag" else "none")
    text = "one two three four " * 12
    body = {"ignore_eos": True, "logit_bias": {"276": 100, "300": 100}}  # answers of two tokens repeat themselves
    if "chat" in door:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 60}
    elif "responses" in door:
        body |= {"input": text, "max_output_tokens": 60}
    else:
        body |= {"prompt": text, "max_tokens": 60}
    path = door if door.startswith("/") else "/v1/completions"
    with Server(ours(demo_stock), demo_tokenizer, continuous_batching_config=limits) as server:

        def answer(**more):
            said = server.http.post(path, json={**body, "temperature": 0, **more}).json()
            return (said.get("output") and said["output"][0]["content"]) or said["choices"]

        drafting = {"generation_config": '{"prompt_lookup_num_tokens": 8}'}
        plain = answer()
        assert (server.metrics()["drafted_tokens"] > 0) == (door == "the engine's flag")
        assert answer(**drafting) == plain
        assert server.metrics()["drafted_tokens"] >= server.metrics()["accepted_tokens"] > 0


# The door


def test_the_key_is_asked_of_everything_but_health(server):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for path in ("/v1/models", "/metrics"):
            response = httpx.get(f"{server.url}{path}", headers=headers)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_stocks_routes_that_load_and_unload_models_are_not_there(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ("/reset", "/load_model", "/v1/audio/transcriptions", "/docs"):
        assert httpx.post(f"{server.url}{path}", headers=headers, json={"model": "x"}).status_code in (404, 405)


def test_a_request_that_is_too_long_is_not_read(demo_stock, demo_tokenizer):
    with Server(ours(demo_stock), demo_tokenizer, max_request_bytes=1000) as server:
        with pytest.raises(openai.APIStatusError, match="longer than 1000 bytes"):
            server.client.completions.create(model="tiny", prompt="x" * 1000)

        def endless():  # no content-length
            while True:
                yield b"x" * 100

        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            response = httpx.post(f"{server.url}/v1/completions", headers=headers, content=endless(), timeout=30)
            assert response.status_code == 413
        except (httpx.WriteError, httpx.ReadError):
            pass  # the connection was closed while we were still sending
        assert server.metrics()['refused_total{status="413"}'] == 2


def test_a_full_queue_is_answered_with_429(demo_stock, demo_tokenizer):
    limits = ContinuousBatchingConfig(max_requests_per_batch=1)
    with Server(ours(demo_stock), demo_tokenizer, max_queue=2, continuous_batching_config=limits) as server:

        async def crowd():
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
            long = {"model": "tiny", "prompt": "It was", "extra_body": ENDLESS, "stream": True}
            first = await client.completions.create(**long)
            await anext(first.__aiter__())  # it runs
            waiting = [await client.completions.create(**long) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**long)
            assert caught.value.response.headers["retry-after"] == "1"
            assert server.metrics()["queue_depth"] == 2
            for stream in (first, *waiting):
                await stream.close()

        asyncio.run(crowd())
        server.wait_for(running=0, queue_depth=0)
        assert server.metrics()['refused_total{status="429"}'] == 1
        assert server.client.completions.create(model="tiny", prompt="It was", max_tokens=3).choices[0].text


# Clients that leave


def test_kill_9_of_a_client_in_mid_stream_frees_its_blocks(server):
    code = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
endless = {"generation_config": sys.argv[3]}
for event in client.completions.create(model="tiny", prompt="It was", n=2, extra_body=endless, stream=True):
    print("token", flush=True)
"""
    server.wait_for(running=0)
    before = server.metrics()
    command = [sys.executable, "-c", code, f"{server.url}/v1", KEY, ENDLESS["generation_config"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"token\n"
        server.wait_for(running=2)
        assert server.metrics()["cache_usage"] > 0
        client.send_signal(signal.SIGKILL)
    server.wait_for(running=0, queue_depth=0, cache_usage=0)
    name = 'sequences_total{finish_reason="cancelled"}'
    assert server.metrics()[name] - before.get(name, 0) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_client_that_does_not_wait_for_its_json_cancels_it(server, path):
    server.wait_for(running=0)
    body = {"model": "tiny", **ENDLESS}
    body |= {"prompt": "It was"} if path == "/v1/completions" else {}
    body |= {"messages": CHAT} if "chat" in path else {}
    body |= {"input": "Hello"} if "responses" in path else {}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=0.3)
    server.wait_for(running=0, queue_depth=0, cache_usage=0)


def test_metrics_count_what_was_done(server, complete):
    server.wait_for(running=0)
    before = server.metrics()
    answer = complete(prompt="It was a day like no other", max_tokens=7)
    after = server.metrics()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["generated_tokens_total"] == answer.usage.completion_tokens == 7
    assert gained["prompt_tokens_total"] == answer.usage.prompt_tokens
    assert gained['sequences_total{finish_reason="length"}'] == 1
    assert gained["time_to_first_token_seconds_count"] == 1 and gained["inter_token_seconds_count"] == 6
    assert gained['inter_token_seconds_bucket{le="+Inf"}'] == 6 and gained["sequence_seconds_count"] == 1


def test_a_dead_engine_is_said_to_be_dead(demo_stock, demo_tokenizer, monkeypatch):
    with Server(ours(demo_stock), demo_tokenizer) as server:
        monkeypatch.setattr("lfm2_cb.engine.engine.Engine.step", lambda self: 1 / 0)
        for error, status in ((openai.InternalServerError, 500), (openai.InternalServerError, 503)):
            with pytest.raises(error) as caught:
                server.client.completions.create(model="tiny", prompt="It was")
            assert caught.value.status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 503
        monkeypatch.undo()


def test_stocks_own_command_serves_ours_once_enabled(greedy):
    """`transformers serve --continuous-batching`, in a process that has called `enable()`."""
    from transformers.cli.serve import Serve

    lfm2_cb.enable()
    path = lfm2_cb.demo_model_path()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stock_server = Serve(
        path, continuous_batching=True, device="cpu", dtype="float32", port=port, non_blocking=True, log_level="error"
    )
    try:
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)
        ask = {"model": path, "messages": CHAT, "max_tokens": 12, "temperature": 0}
        assert client.chat.completions.create(**ask).choices[0].message.content == greedy(CHAT)
        events = client.chat.completions.create(**ask, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == greedy(CHAT)
    finally:
        stock_server.kill_server()
        lfm2_cb.disable()


# The pieces


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stops, data):
    reader, seen, rest = StopStrings(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        seen += reader.add(rest[:size])
        rest = rest[size:]
    seen += reader.flush()
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    assert reader.found == bool(ends)
    if not ends:
        assert seen == text
    else:  # the first to be complete, whatever comes in one piece; nothing of a stop string is ever handed out
        assert text.startswith(seen) and min(place for _, place in ends) <= len(seen) <= max(p for _, p in ends)
        assert not any(stop in seen for stop in stops)


def test_reasoning_and_tool_calls_are_told_apart(demo_tokenizer):
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"content": "text"},
        },
    }
    call = {"name": "weather", "arguments": {"city": "Bath"}}
    text = f"<think>hm</think>Let me see.<call>{json.dumps(call)}</call>"
    ids = demo_tokenizer(text, add_special_tokens=False)["input_ids"]
    choice = Choice(0, demo_tokenizer, parser=TemplateParser(ResponseParser(template, prefix="")))
    for end in range(1, len(ids) + 1):
        status = RequestStatus.FINISHED if end == len(ids) else RequestStatus.DECODING
        reason = "stop" if end == len(ids) else None
        choice.read(CbGenerationOutput("r", [1], ids[:end], status=status, finish_reason=reason))
    assert (choice.whole.reasoning, choice.whole.text) == ("hm", "Let me see.")
    (found,) = choice.whole.tool_calls
    assert {"name": found.name, "arguments": json.loads(found.arguments)} == call
    assert choice.whole.finish_reason == "tool_calls"


def test_the_engine_has_a_servers_defaults(server):
    manager = server.app.state.served.dispatcher.manager
    assert manager.continuous_batching_config.max_step_seconds == EngineConfig.for_server().max_step_seconds == 0.2


def test_what_build_app_cannot_do(demo_stock):
    with pytest.raises(ValueError, match="tokenizer"):
        build_app(ours(demo_stock))
    with pytest.raises(ValueError, match="max_queue"):
        build_app(lfm2_cb.demo_model_path(), max_queue=0)
