# ruff: noqa: E402  (what the extra brings is looked for before it is imported)
"""Structured answers and tools, by OpenAI's own client, from the request to objects and calls."""

import json
import random
import time

import jsonschema
import pydantic
import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from helpers import ours
from serving import CHAT, ENDLESS, Server
from test_serve_fields import VALUES, json_schema, refusal
from transformers import AutoTokenizer

import lfm2_cb
from lfm2_cb.requests.tool_calls import CALL_END, CALL_START

#: the ways of LFM2's own: a list of tools in the system message, their results marked, and calls dropped
LFM2_TEMPLATE = """
{{- bos_token -}}
{%- set ns = namespace(system="") -%}
{%- if messages[0].role == "system" -%}
  {%- set ns.system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
  {%- set listed = "List of tools: <|tool_list_start|>" + (tools | tojson) + "<|tool_list_end|>" -%}
  {%- set ns.system = ns.system + ("\n" if ns.system else "") + listed -%}
{%- endif -%}
{%- if ns.system -%}{{ "<|im_start|>system\n" + ns.system + "<|im_end|>\n" }}{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content -%}
  {%- if message.role == "tool" -%}
    {%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
  {%- endif -%}
  {{ "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}
"""
MARKERS = [CALL_START, CALL_END, "<|tool_response_start|>", "<|tool_response_end|>"]
CITY = {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}
WEATHER = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "wind": {"type": "boolean"}},
    "required": ["city", "wind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def lfm2_tokenizer(tmp_path_factory):
    """The shipped tokenizer with LFM2's call markers, in place of its last merges, and a template like LFM2's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(lfm2_cb.demo_model_path()).save_pretrained(folder)
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model, size = data["model"], len(data["model"]["vocab"])
    for text in [text for text, id_ in model["vocab"].items() if id_ >= size - len(MARKERS)]:
        del model["vocab"][text]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    for id_, marker in enumerate(MARKERS, size - len(MARKERS)):
        data["added_tokens"].append({**data["added_tokens"][-1], "id": id_, "content": marker})
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = LFM2_TEMPLATE
    assert tokenizer.convert_tokens_to_ids(CALL_START) == size - 4 and len(tokenizer) <= 4096
    return tokenizer


@pytest.fixture(scope="module")
def tooled(demo_stock, lfm2_tokenizer):
    with Server(ours(demo_stock), lfm2_tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def ask(tooled):
    defaults = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "temperature": 1.0, "seed": 3}
    return lambda **kwargs: tooled.client.chat.completions.create(**{**defaults, **kwargs})


def check_calls(calls):
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call.function.name, arguments) == ("now", {})


# Structured answers


def test_answers_fit_what_response_format_says(ask, tooled):
    schema = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
    for seed in range(4):
        answer = ask(response_format=json_schema(schema), seed=seed).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content), schema)
    events = ask(response_format=json_schema(schema), seed=3, stream=True)
    assert "".join(e.choices[0].delta.content or "" for e in events) == answer.message.content
    free = ask(response_format={"type": "json_object"}, n=3)
    for choice in free.choices:
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "medium"}
    said = tooled.client.responses.create(model="tiny", input="Who?", text=form)
    jsonschema.validate(json.loads(said.output_text), schema)
    assert said.text.format.type == "json_schema"


class Place(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[a-z]{1,8}$")
    visited: bool


class Trip(pydantic.BaseModel):
    places: list[Place] = pydantic.Field(min_length=1, max_length=2)
    budget: int | None = pydantic.Field(ge=0, le=999)


def test_clients_get_objects_of_their_pydantic_classes(tooled):
    ask = {"model": "tiny", "messages": CHAT, "temperature": 1.0}
    parsed = tooled.client.chat.completions.parse(**ask, response_format=Trip).choices[0].message.parsed
    assert isinstance(parsed, Trip) and 1 <= len(parsed.places) <= 2
    with tooled.client.chat.completions.stream(**ask, response_format=Trip) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Trip)
    said = tooled.client.responses.parse(model="tiny", input="Where to?", text_format=Trip)
    assert isinstance(said.output_parsed, Trip)


def test_what_a_grammar_cannot_have_is_the_requests_own_fault(tooled):
    config = {"suppress_tokens": [i for i in range(4096) if i not in (2, 7)]}
    body = {"messages": CHAT, "response_format": json_schema({"type": "boolean"})}
    response = tooled.http.post("/v1/chat/completions", json={**body, "generation_config": json.dumps(config)})
    assert response.status_code == 400 and "grammar" in refusal(response)["message"]


# Tools


def test_a_call_can_be_required_or_named(ask, tooled, lfm2_tokenizer):
    (end,) = lfm2_tokenizer("]", add_special_tokens=False)["input_ids"]
    numbers = set()
    for bias in (0, 3, 5):  # the model would make calls without end
        for choice in ask(tools=TOOLS, tool_choice="required", logit_bias={end: bias}, max_tokens=400, n=3).choices:
            if choice.finish_reason == "length":
                assert choice.message.content.startswith(CALL_START)
                continue
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            check_calls(choice.message.tool_calls)
            numbers.add(len(choice.message.tool_calls))
    assert numbers, "no answer came to its end"
    (choice,) = ask(tools=TOOLS, tool_choice=NAMED).choices
    check_calls(choice.message.tool_calls)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    one = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4).choices
    assert [len(choice.message.tool_calls) for choice in one] == [1] * 4
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choose = {"type": "function", "name": "weather"}
    said = tooled.client.responses.create(model="tiny", input="Who?", tools=flat, tool_choice=choose)
    assert [item.type for item in said.output] == ["function_call"] and said.output[0].name == "weather"
    *_, done, last = tooled.client.responses.create(
        model="tiny", input="Who?", tools=flat, tool_choice=choose, stream=True
    )
    assert done.type == "response.output_item.done" and last.response.output[0].arguments == done.item.arguments


def test_names_that_python_has_not_are_called_in_json(ask):
    odd = {"type": "object", "properties": {"from": CITY, "a b": {"type": "null"}}, "required": ["from", "a b"]}
    tools = [{"type": "function", "function": {"name": "send-mail", "parameters": odd}}]
    (call,) = ask(tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), odd)
    assert call.function.name == "send-mail"


def test_without_markers_calls_can_be_required_too(demo_stock, demo_tokenizer):
    tokenizer = type(demo_tokenizer).from_pretrained(demo_tokenizer.name_or_path)
    tokenizer.chat_template = LFM2_TEMPLATE
    with Server(ours(demo_stock), tokenizer) as server:
        ask = {"model": "tiny", "messages": CHAT, "tools": TOOLS}
        (choice,) = server.client.chat.completions.create(**ask, tool_choice=NAMED, temperature=1.0).choices
        check_calls(choice.message.tool_calls)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        with pytest.raises(openai.BadRequestError, match="no tokens that mark tool calls") as caught:
            server.client.chat.completions.create(**ask, parallel_tool_calls=False)
        assert caught.value.param == "parallel_tool_calls"


def test_a_chat_with_tools_to_its_end(tooled, lfm2_tokenizer):
    """Call, result, answer; plain and streamed alike."""
    ask = {"model": "tiny", "tools": TOOLS, "temperature": 1.0, "seed": 4}
    messages = [{"role": "user", "content": "How is the weather in Bath?"}]
    choice = tooled.client.chat.completions.create(**ask, messages=messages, tool_choice=NAMED).choices[0]
    with tooled.client.chat.completions.stream(**ask, messages=messages, tool_choice=NAMED) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    functions = [c.message.tool_calls[0].function for c in (choice, streamed)]
    assert functions[0].name == functions[1].name and functions[0].arguments == functions[1].arguments
    assert streamed.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in {event.type for event in events}
    (call,) = choice.message.tool_calls
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'}]
    answer = tooled.client.chat.completions.create(**ask, messages=messages, max_tokens=12).choices[0]
    assert answer.message.content and answer.message.tool_calls is None
    chunks = list(tooled.client.chat.completions.create(**ask, messages=messages, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    dumped = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages]
    said = tooled.http.post("/tokenize", json={"messages": dumped, "tools": TOOLS}).json()["tokens"]
    prompt = lfm2_tokenizer.decode(said)
    arguments = json.loads(call.function.arguments)
    written = f'{CALL_START}[weather(city="{arguments["city"]}"'
    assert written in prompt and '<|tool_response_start|>{"sky": "blue"}<|tool_response_end|>' in prompt
    assert "<|tool_list_start|>[{" in prompt and said[-1] != 0
    items = [
        {"role": "user", "content": "How is the weather?"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": call.function.arguments},
        {"type": "function_call_output", "call_id": "1", "output": "blue"},
    ]
    assert tooled.client.responses.create(model="tiny", input=items, max_output_tokens=8).output_text


def say(monkeypatch, tokenizer, text):
    """Let the model say this, whatever it is asked."""
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], 7]
    (turn,) = tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
    header = len(tokenizer("assistant\n", add_special_tokens=False)["input_ids"])

    def sample(logits, params, histories, *kernels):
        num_said = [history[::-1].index(turn) - header for history in histories]
        return [tokens[min(n, len(tokens) - 1)] for n in num_said]

    monkeypatch.setattr("lfm2_cb.engine.choices.sample", sample)


SAID = {
    f'Let me see.{CALL_START}[weather(city="Bath", days=3), now()]{CALL_END}': (
        "Let me see.",
        [("weather", {"city": "Bath", "days": 3}), ("now", {})],
    ),
    f'{CALL_START}[{{"name": "now", "arguments": {{}}}}]{CALL_END} Done.': (" Done.", [("now", {})]),
    '[weather(city="Bath")]': (None, [("weather", {"city": "Bath"})]),
    f'{CALL_START}[weather(city="Bath"]{CALL_END}': (f'{CALL_START}[weather(city="Bath"]{CALL_END}', []),
    f"{CALL_START}[now(": (f"{CALL_START}[now(", []),
    "[weather] is fine": ("[weather] is fine", []),
}


@pytest.mark.parametrize("text", SAID)
def test_calls_are_read_and_broken_ones_are_content(ask, monkeypatch, lfm2_tokenizer, text):
    content, calls = SAID[text]
    say(monkeypatch, lfm2_tokenizer, text)
    (choice,) = ask(tools=TOOLS).choices
    said = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []]
    assert (choice.message.content, said) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    events = list(ask(tools=TOOLS, stream=True))
    deltas = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == (content or "")
    names = [c.function.name for delta in deltas for c in delta.tool_calls or [] if c.function.name]
    assert names == [name for name, _ in calls] and events[-1].choices[0].finish_reason == choice.finish_reason
    assert [c.index for d in deltas for c in d.tool_calls or []] == [i for i in range(len(calls)) for _ in range(2)]
    if content != text:
        assert ask().choices[0].message.content  # without tools an answer is text


def test_calls_that_are_not_required_fit_a_strict_schema(ask, monkeypatch):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    start = {4092: 100}  # the model wants to call
    for extra in ({}, {"response_format": json_schema({"type": "boolean"})}):
        (choice,) = ask(tools=strict, logit_bias=start, **extra, parallel_tool_calls=False).choices
        check_calls(choice.message.tool_calls)
        assert choice.finish_reason == "tool_calls"
    (choice,) = ask(tools=strict, logit_bias={4092: -100}, response_format=json_schema({"type": "boolean"})).choices
    assert choice.message.content in ("true", "false") and not choice.message.tool_calls


def parameters(schema):
    return {"function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize(
    "param, body",
    [
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "missing"}}}),
        ("tool_choice", {"tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice", {"tool_choice": "required", "tools": []}),
        ("tools", {"tool_choice": "required", "tools": [parameters({"not": {}})]}),
        ("tools", {"tool_choice": "required", "tools": [parameters({"required": [[]]})]}),
        ("tools", {"tool_choice": "required", "tools": [parameters({"properties": 1})]}),
        ("ignore_eos", {"tool_choice": "required", "ignore_eos": True}),
    ],
    ids=lambda value: str(value)[:80],
)
def test_tools_that_cannot_be_had_are_refused_by_name(tooled, param, body):
    tools = [{"type": "function", **tool} for tool in body.pop("tools", TOOLS)]
    response = tooled.http.post("/v1/chat/completions", json={"messages": CHAT, "tools": tools, **body})
    assert response.status_code == 400 and refusal(response)["param"] == param


# Terms


def test_a_passed_deadline_ends_the_request(tooled, ask):
    started = time.monotonic()
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="deadline") as caught:
            list(ask(max_tokens=None, extra_body=ENDLESS, extra_headers={"x-deadline-seconds": "0.3"}, stream=stream))
        assert caught.value.code == "deadline_exceeded"
        assert stream or caught.value.status_code == 504
    tooled.wait_for(running=0, queue_depth=0)
    assert time.monotonic() - started < 60
    assert ask(max_tokens=3, extra_headers={"x-deadline-seconds": "60"}).choices[0].message.content


def test_headers_that_are_not_understood_are_refused(tooled):
    for name, wrong in (("x-priority", "high"), ("x-priority", "0.5"), ("x-deadline-seconds", "-1")):
        response = tooled.http.post("/v1/completions", json={"prompt": "x"}, headers={name: wrong})
        assert response.status_code == 400 and refusal(response)["param"] == name


def test_requests_of_higher_priority_run_first(tooled, monkeypatch):
    seen = []
    manager = tooled.app.state.served.dispatcher.manager
    add = manager.add_groups
    monkeypatch.setattr(manager, "add_groups", lambda *a, **k: (seen.append(k["priority"]), add(*a, **k))[1])
    for headers in ({}, {"x-priority": "7"}, {"x-priority": "-2"}):
        tooled.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        tooled.http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1}, headers=headers)
        tooled.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1}, headers=headers)
    assert seen == [0] * 3 + [7] * 3 + [-2] * 3


def test_an_input_that_is_too_long_can_lose_its_oldest_turns(tooled):
    turns = [{"role": "user", "content": "so " * 4000}, {"role": "assistant", "content": "yes"}]
    turns += [{"role": "user", "content": "so " * 100}, {"role": "assistant", "content": "no"}]
    items = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "Who is Emma?"}]
    ask = {"model": "tiny", "max_output_tokens": 8}
    with pytest.raises(openai.BadRequestError) as caught:
        tooled.client.responses.create(**ask, input=items)
    assert caught.value.code == "context_length_exceeded"
    said = tooled.client.responses.create(**ask, input=items, truncation="auto")
    kept = tooled.client.responses.create(**ask, input=[items[0], *items[3:]])
    assert said.usage.input_tokens == kept.usage.input_tokens > 100 and said.truncation == "auto"
    with pytest.raises(openai.BadRequestError):
        tooled.client.responses.create(**ask, input="so " * 5000, truncation="auto")


# Hostile input

CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bath"}'}}
CHAT_WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}],
    "tool_choice": NAMED,
    "parallel_tool_calls": False,
    "response_format": json_schema(WEATHER),
    "max_tokens": 2,
}
FLAT = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
RESPONSE_WITH_TOOLS = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Bath"}'},
        {"type": "function_call_output", "call_id": "1", "output": "blue"},
    ],
    "tools": [FLAT],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": WEATHER, "strict": True}},
    "truncation": "auto",
    "max_output_tokens": 2,
}


def places(value, path=()):
    """Where something stands in a JSON value."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(body, path, new):
    """A copy with something else in a place."""
    copied = json.loads(json.dumps(body))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copied


@pytest.mark.parametrize(
    "path, body", [("/v1/chat/completions", CHAT_WITH_TOOLS), ("/v1/responses", RESPONSE_WITH_TOOLS)]
)
def test_nothing_within_tools_and_formats_is_more_than_refused(tooled, path, body):
    assert tooled.http.post(path, json=body).status_code == 200
    rng, num_refused = random.Random(0), 0
    for place in places(body):
        for value in rng.sample(VALUES, 4):
            response = tooled.http.post(path, json=changed(body, place, value))
            assert response.status_code in (200, 400), (place, value, response.text)
            num_refused += response.status_code == 400 and bool(refusal(response)["param"])
    assert num_refused > 60
    assert tooled.http.get("/health").json() == {"status": "ok"}
