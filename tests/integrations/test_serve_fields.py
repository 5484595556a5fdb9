# ruff: noqa: E402  (what the extra brings is looked for before it is imported)
"""Every field of OpenAI's requests: honoured, or refused by name with OpenAI's error body."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from helpers import ours
from lfm2_cb.integrations import serve
from lfm2_cb.integrations.serve.fields import CHAT as CHAT_FIELDS
from lfm2_cb.integrations.serve.fields import COMPLETION, DETOKENIZE, RESPONSE, TOKENIZE
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponseParams
from serving import CHAT, Server

from lfm2_cb.engine.engine import Engine

#: endpoint → the fields it knows, and a request of it that is right
ENDPOINTS = {
    "/v1/chat/completions": (CHAT_FIELDS, {"messages": CHAT, "max_tokens": 2}),
    "/v1/completions": (COMPLETION, {"prompt": "It was", "max_tokens": 2}),
    "/v1/responses": (RESPONSE, {"input": "Who is Emma?", "max_output_tokens": 2}),
    "/tokenize": (TOKENIZE, {"prompt": "It was"}),
    "/detokenize": (DETOKENIZE, {"tokens": [1]}),
}
OPENAI_FIELDS = {
    "/v1/chat/completions": ChatParams.__required_keys__ | ChatParams.__optional_keys__,
    "/v1/completions": CompletionParams.__required_keys__ | CompletionParams.__optional_keys__,
    "/v1/responses": ResponseParams.__required_keys__ | ResponseParams.__optional_keys__,
}
#: of every kind; most fields have only one or two that are right
VALUES = [
    *("x", "", "[1]", -1, 0, 0.5, 1e300, 10**30, True, [], {}),
    *([[[]]], ["x"], [None], [1], [{}], {"a": 1}, {"": None}, {"1": "x"}, {"99999999": 1}, {"type": "x"}),
    *(
        [{"type": "image_url"}],
        [{"role": [], "content": "x"}],
        [{"type": "function"}],
        [{"type": "function", "name": 1}],
    ),
]


def json_schema(schema: dict) -> dict:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def refusal(response) -> dict:
    """The error of an answer, which has to be in OpenAI's form."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_value_of_any_field_is_more_than_refused_by_name(server, path):
    fields, right = ENDPOINTS[path]
    num_refused = 0
    for name in fields:
        for value in VALUES:
            response = server.http.post(path, json={**right, name: value})
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if response.status_code != 200:
                num_refused += 1
                # A prompt without the separator that `chunks` names is the prompt's fault.
                blamed = (name, "messages", "prompt", "input") if name == "chunks" else name
                assert (refusal(response)["param"] or "").startswith(blamed), (name, value, response.text)
    assert num_refused > 8 * len(fields)
    assert server.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", OPENAI_FIELDS)
def test_every_field_that_openai_has_is_in_our_tables(path):
    assert OPENAI_FIELDS[path] - {"extra_headers"} <= ENDPOINTS[path][0].keys()


def test_the_readme_says_of_every_field_what_the_tables_say():
    text = (Path(serve.__file__).parent / "README.md").read_text("utf-8")
    sections = dict(re.findall(r"^## `(\S+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert sections.keys() == ENDPOINTS.keys()
    for path, (fields, _) in ENDPOINTS.items():
        rows = re.findall(r"^\| (`.+?) \| (\w+)", sections[path], re.M)
        said = {name: reading for names, reading in rows for name in re.findall(r"`(\w+)`", names)}
        assert said == {name: str(field.reading) for name, field in fields.items()}, path


# What is refused


@pytest.mark.parametrize(
    "param, body",
    [
        ("response_format", {"response_format": "json_object"}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("response_format", {"response_format": json_schema({"type": "strin"})}),
        ("response_format", {"response_format": json_schema({"not": {"type": "string"}})}),
        ("response_format", {"response_format": json_schema({"type": "integer", "minimum": 5, "maximum": 4})}),
        ("min_tokens", {"response_format": {"type": "json_object"}, "min_tokens": 1}),
        ("ignore_eos", {"response_format": {"type": "json_object"}, "ignore_eos": True}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("modalities", {"modalities": ["audio"]}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 2}),
        ("frequency_penalty", {"frequency_penalty": "much"}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("logit_bias", {"logit_bias": {"²": 1}}),
        ("logit_bias", {"logit_bias": {"99999999": 1}}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("logit_bias", {"logit_bias": {"5": True}}),
        ("logit_bias", {"logit_bias": [5]}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream": True, "stream_options": "x"}),
        ("stream_options", {"stream": True, "stream_options": {"usage": True}}),
        ("generation_config", {"generation_config": {"max_new_tokens": 3}}),
        ("generation_config", {"generation_config": "[1]"}),
        ("generation_config", {"generation_config": "{"}),
        ("generation_config", {"generation_config": '{"num_beams": 3}'}),
        ("generation_config", {"generation_config": '{"unheard_of": 3}'}),
        ("generation_config", {"generation_config": '{"max_new_tokens": "x"}', "max_tokens": None}),
        ("generation_config", {"generation_config": '{"num_return_sequences": 3}'}),
        ("generation_config", {"generation_config": '{"sequence_bias": [[[99999999], 1.0]]}'}),
        ("generation_config", {"generation_config": '{"sequence_bias": {"a": 1.0}}'}),
        ("generation_config", {"generation_config": '{"suppress_tokens": [99999999]}'}),
        ("generation_config", {"generation_config": f'{{"suppress_tokens": {[*range(4096)]}}}'}),
        ("generation_config", {"generation_config": '{"sequence_bias": [[[1], -1e300]]}'}),
        ("generation_config", {"generation_config": '{"is_assistant": true}'}),
        ("generation_config", {"generation_config": '{"encoder_no_repeat_ngram_size": 1e30}'}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "mine"}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": "many"}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 50}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 2, "logprobs": False}),
        ("n", {"n": 0}),
        ("n", {"n": 1000}),
        ("stop", {"stop": [1]}),
        ("stop", {"stop": ""}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 5000}),
        ("max_completion_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
        ("min_tokens", {"min_tokens": 13}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "no role"}]}),
        ("messages[0].role", {"messages": [{"role": "narrator", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "Emma"}]}),
        ("messages[0].wrong", {"messages": [{"role": "user", "content": "x", "wrong": 1}]}),
        (
            "messages[1].content[1]",
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}],
                    },
                ]
            },
        ),
        (
            "messages[0].tool_calls",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        ),
        ("continue_final_message", {"continue_final_message": True}),
        ("store", {"store": True}),
        ("unheard_of", {"unheard_of": 1}),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(chat, param, body):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(extra_body={**({"stream": True} if stream else {}), **body})
        assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
        assert param in caught.value.body["message"]


def test_stream_options_go_with_a_stream(chat, complete, server):
    for ask in (chat, lambda **options: complete(prompt="It was", **options)):
        with pytest.raises(openai.BadRequestError, match="stream_options needs stream=true"):
            ask(extra_body={"stream_options": {"include_usage": True}})
        assert [bool(event.usage) for event in ask(stream=True, stream_options={"include_usage": True})][-2:] == [
            False,
            True,
        ]
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        server.client.responses.create(model="tiny", input="x", extra_body={"stream_options": {}})


def test_other_endpoints_refuse_by_name_too(server, complete):
    for param, wrong in (
        ("echo", {"echo": True, "logprobs": 1}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": [["x"]]}),
        ("prompt", {"prompt": [1, 99999999]}),
        ("prompt", {"prompt": [1] * 5000, "max_tokens": None}),
        ("best_of", {"best_of": 2}),
        ("suffix", {"suffix": "x"}),
        ("logprobs", {"logprobs": True}),
        ("messages", {"extra_body": {"messages": CHAT}}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(**{"prompt": "It was", **wrong})
        assert caught.value.param == param
    image = [{"type": "input_image", "image_url": "x"}]
    for param, wrong in (
        ("previous_response_id", {"previous_response_id": "r"}),
        ("input", {"input": ""}),
        ("input", {"input": None}),
        ("input[0].content[0]", {"input": [{"role": "user", "content": image}]}),
        ("input[0].type", {"input": image}),
        ("input[1].role", {"input": [{"role": "user", "content": "x"}, {"role": "narrator", "content": "x"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}),
        ("truncation", {"truncation": "never"}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client.responses.create(**{"model": "tiny", "input": "Hello", "instructions": "Be brief.", **wrong})
        assert caught.value.param == param


def test_an_unknown_model_is_not_found(server, complete):
    for ask in (
        lambda: complete(prompt="It was", model="another"),
        lambda: server.client.responses.create(model="another", input="x"),
        lambda: server.client.models.retrieve("another/one"),
    ):
        with pytest.raises(openai.NotFoundError, match="pinned to 'tiny'") as caught:
            ask()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"prompt": NaN}', "NaN is not JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 10**4 + b"1" + b"}" * 10**4 + b"}", "nested too deeply"),
        (b'{"prompt": "\\ud800 alone"}', "prompt is not valid text: it has half of a surrogate pair"),
        (b'{"prompt": "x", "stop": ["\\udc00"]}', "stop is not valid text: it has half of a surrogate pair"),
        (b'{"\\ud800": 1}', r"\ud800 is not valid text: it has half of a surrogate pair"),
        (
            b'{"prompt": "x", "generation_config": "{\\"stop_strings\\": \\"\\\\ud800\\"}"}',
            "generation_config is not valid text: it has half",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_json_is_refused_without_a_word_of_ours(server, content, message):
    response = server.http.post("/v1/completions", content=content)
    error = refusal(response)
    assert response.status_code == 400 and message in error["message"]
    assert not re.search(r"\.py|/site-packages|lfm2_cb/|Traceback", response.text)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_deep_values_of_any_field_are_refused(server, path):
    fields, right = ENDPOINTS[path]
    for name in fields:
        for depth in (200, 700, 900, 950):
            for value in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
                content = json.dumps({**right, name: "here"}).replace('"here"', value)
                response = server.http.post(path, content=content)
                if response.status_code == 200 and name == "chat_template_kwargs":
                    continue  # a template may do with it what it likes
                assert response.status_code == 400 and refusal(response), (name, depth)
            config = json.dumps({"suppress_tokens": "here"}).replace('"here"', "[" * depth + "]" * depth)
            if name == "generation_config":
                response = server.http.post(path, json={**right, name: config})
                assert response.status_code == 400, (name, depth)


def test_half_pairs_make_whole_ones(complete, server, greedy):
    content = b'{"prompt": "It \\ud83d\\ude00 was", "max_tokens": 12, "temperature": 0}'
    response = server.http.post("/v1/completions", content=content)
    assert response.json()["choices"][0]["text"] == greedy("It 😀 was")


def test_paths_and_methods_that_are_not_there(server):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/models/", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/openapi.json", 404),
    ):
        response = server.http.request(method, path)
        assert response.status_code == status, (method, path)
        assert refusal(response)["type"] == "invalid_request_error" and path in refusal(response)["message"]
    assert response.headers["x-request-id"]


# What is honoured


def test_logit_bias_moves_tokens(chat, complete, demo_tokenizer):
    token = demo_tokenizer("the", add_special_tokens=False)["input_ids"][-1]
    for bias in ({str(token): 100}, {token: 100.0}):
        assert complete(prompt="It was", logit_bias=bias, max_tokens=3).choices[0].text == demo_tokenizer.decode(
            [token] * 3
        )
        assert chat(logit_bias=bias, max_tokens=3).choices[0].message.content == demo_tokenizer.decode([token] * 3)
    first = complete(prompt="It was", max_tokens=1, logprobs=0).choices[0].logprobs.tokens[0]
    (id_,) = demo_tokenizer(first, add_special_tokens=False)["input_ids"][-1:]
    assert complete(prompt="It was", max_tokens=1, logprobs=0, logit_bias={id_: -100}).choices[0].logprobs.tokens != [
        first
    ]


@torch.no_grad()
def test_penalties_are_openais(complete, demo_stock, demo_tokenizer):
    """Greedy, with presence and frequency taken off by hand at each step; prompts of two lengths at once."""
    prompts = ["It was", "It was the best and it was the best and it was"]
    expected = []
    for prompt in prompts:
        ids, answer = demo_tokenizer(prompt)["input_ids"], []
        for _ in range(20):
            scores = demo_stock(torch.tensor([ids + answer])).logits[0, -1].float()
            for token in set(answer):
                scores[token] -= 0.7 + 1.1 * answer.count(token)
            answer.append(int(scores.argmax()))
        expected.append(demo_tokenizer.decode(answer, skip_special_tokens=True))
    ask = {"prompt": prompts, "max_tokens": 20, "extra_body": {"ignore_eos": True}, "temperature": 0}
    texts = [choice.text for choice in complete(**ask, presence_penalty=0.7, frequency_penalty=1.1).choices]
    assert texts == expected
    assert texts != [choice.text for choice in complete(**ask).choices]
    sampled = {"prompt": prompts, "temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "n": 2}
    one, two = ([c.text for c in complete(**sampled).choices] for _ in range(2))
    assert one == two and len({*one}) == 4


def test_min_tokens_and_ignore_eos(complete, demo_stock, demo_tokenizer):
    text = complete(prompt="It was", max_tokens=40).choices[0].text
    stop = text[5:8]
    cut = complete(prompt="It was", max_tokens=40, stop=stop)
    later = complete(prompt="It was", max_tokens=40, stop=stop, extra_body={"min_tokens": 30})
    assert cut.usage.completion_tokens < 30 <= later.usage.completion_tokens
    eos_bias = {2: 100, 7: 100}  # end at once, if that is possible
    assert complete(prompt="It was", logit_bias=eos_bias).usage.completion_tokens == 1
    held = complete(prompt="It was", logit_bias=eos_bias, extra_body={"min_tokens": 5})
    assert (held.usage.completion_tokens, held.choices[0].finish_reason) == (6, "stop")
    ignored = complete(prompt="It was", logit_bias=eos_bias, extra_body={"ignore_eos": True, "min_tokens": 5})
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (12, "length")


def test_options_of_long_prompts_reach_the_request(complete, chat, server, monkeypatch):
    seen, add_all = [], Engine.add_all
    monkeypatch.setattr(Engine, "add_all", lambda self, requests: (seen.extend(requests), add_all(self, requests))[1])
    options = {"chunks": " of all", "recompute": 0.5, "sparse_prefill": 0.7}
    prompt = "It was the best of all that she had said to him, and it was the best of all that"
    complete(prompt=prompt, extra_body=options)
    complete(prompt=[prompt, prompt], extra_body=options)
    chat(messages=[{"role": "user", "content": prompt}], extra_body=options)
    server.client.responses.create(model="tiny", input=prompt, max_output_tokens=4, extra_body=options)
    marked = [request for request in seen if request.segments]  # the others are segments, computed by themselves
    assert [len(request.segments) for request in marked] == [3] * 5
    assert {(request.recompute, request.sparse_prefill) for request in marked} == {(0.5, 0.7)}
    with pytest.raises(openai.BadRequestError, match=r"prompt 0 has no separator \(chunks: '@@'\)"):
        complete(prompt=prompt, extra_body={"chunks": "@@"})


def test_top_k_of_minus_one_is_no_limit(complete):
    ask = {"prompt": "It was", "temperature": 2.0, "seed": 5}
    texts = [complete(**ask, extra_body={"top_k": k}).choices[0].text for k in (-1, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert complete(prompt="It was", temperature=1e-30, seed=5).choices[0].text == texts[2]


def test_echo_puts_the_prompt_first(complete, demo_tokenizer):
    prompts = ["It was", "Emma had"]
    plain = [choice.text for choice in complete(prompt=prompts, n=2).choices]
    expected = [prompt + text for prompt, text in zip([p for p in prompts for _ in range(2)], plain, strict=True)]
    assert [choice.text for choice in complete(prompt=prompts, n=2, echo=True).choices] == expected
    ids = demo_tokenizer("It was", add_special_tokens=False)["input_ids"]
    assert complete(prompt=ids, echo=True).choices[0].text.startswith("It was")
    streamed = ["", ""]
    for event in complete(prompt=prompts, echo=True, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == expected[::2]


def test_a_final_message_is_continued(chat, server, greedy, demo_tokenizer):
    ids = demo_tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": "Emma is"}], tokenize=False)
    prompt = ids.rpartition("<|im_end|>")[0].removeprefix(demo_tokenizer.bos_token)
    messages = [*CHAT, {"role": "assistant", "content": "Emma is"}]
    for extra in ({}, {"add_generation_prompt": False}):
        answer = chat(messages=messages, extra_body={"continue_final_message": True, **extra})
        assert answer.choices[0].message.content == greedy(prompt)
    assert chat(messages=[{"role": "developer", "content": "Be brief."}, *CHAT]).choices[0].message.content == greedy(
        [{"role": "system", "content": "Be brief."}, *CHAT]
    )


def test_content_in_parts(chat, greedy):
    parts = [{"type": "text", "text": "Who is"}, {"type": "text", "text": "Emma?"}]
    assert chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content == greedy(CHAT)


def test_usage_has_what_the_cache_gave(chat, server):
    messages = [{"role": "user", "content": "What a long story that was, of which nobody remembers a thing! " * 12}]
    first, again = (chat(messages=messages).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    *_, last = chat(messages=messages, stream=True, stream_options={"include_usage": True})
    assert last.usage == again
    assert chat(max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


def test_models_versions_and_tokens(server, demo_tokenizer):
    (listed,) = server.client.models.list()
    assert server.client.models.retrieve("tiny") == listed and listed.max_model_len == 4096
    assert server.http.get("/version").json().keys() == {"version", "transformers"}
    ids = demo_tokenizer("It was")["input_ids"]
    said = server.http.post("/tokenize", json={"model": "tiny", "prompt": "It was"}).json()
    assert said == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    said = server.http.post("/tokenize", json={"prompt": "It was", "add_special_tokens": False}).json()
    assert said["tokens"] == demo_tokenizer("It was", add_special_tokens=False)["input_ids"]
    said = server.http.post("/tokenize", json={"messages": CHAT}).json()
    assert said["tokens"] == demo_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    said = server.http.post("/detokenize", json={"tokens": ids}).json()
    assert said == {"prompt": demo_tokenizer.decode(ids)}
    for path, wrong, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "messages"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/detokenize", {"tokens": [99999999]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        assert refusal(server.http.post(path, json=wrong))["param"] == param


def test_tools_reach_a_template_that_has_a_place_for_them(demo_stock, demo_tokenizer):
    template = demo_tokenizer.chat_template
    tokenizer = type(demo_tokenizer).from_pretrained(demo_tokenizer.name_or_path)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with Server(ours(demo_stock), tokenizer) as server:

        def num_tokens(**body):
            ask = {"model": "tiny", "messages": CHAT, "max_tokens": 1}
            return server.client.chat.completions.create(**ask, **body).usage.prompt_tokens

        assert (
            num_tokens(tools=[tool])
            > num_tokens()
            == num_tokens(tools=[])
            == num_tokens(tools=[tool], tool_choice="none")
        )
        flat = {"type": "function", **tool["function"]}
        answer = server.client.responses.create(model="tiny", input=CHAT, tools=[flat], max_output_tokens=16)
        assert answer.usage.input_tokens == num_tokens(tools=[tool]) and answer.tools[0].name == "weather"
        for wrong, param in (
            ({"type": "function", "function": {"name": "f", "strict": 1}}, "tools[0].function.strict"),
            ({"type": "function", "function": {"name": "f", "strict": True}}, "tools"),  # it has no call markers
            ({"type": "function", "function": {"name": "f", "parameters": 1}}, "tools[0].function.parameters"),
            ({"type": "function", "function": {}}, "tools[0].function"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                num_tokens(tools=[wrong])
            assert caught.value.param == param


def test_a_failure_leaves_the_connection_usable(demo_stock, demo_tokenizer, monkeypatch, caplog):
    with Server(ours(demo_stock), demo_tokenizer) as server:
        monkeypatch.setattr("lfm2_cb.integrations.serve.dispatch.Dispatcher.submit", lambda *a, **k: 1 / 0)
        for _ in range(3):  # over one connection, as long as it is not closed
            response = server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
            error = refusal(response)
            assert response.status_code == 500 and error["type"] == "server_error"
            assert "mine-1" in error["message"] and "division" not in response.text
            assert response.headers["x-request-id"] == "mine-1" and "connection" not in response.headers
        assert server.metrics()['refused_total{status="500"}'] == 3
        monkeypatch.undo()
        assert server.http.post("/v1/completions", json={"prompt": "It was", "max_tokens": 2}).status_code == 200
    assert "mine-1" in caplog.text and "ZeroDivisionError" in caplog.text


def test_pages_of_named_origins_may_ask(demo_stock, demo_tokenizer, server):
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.http.options("/v1/completions", headers=ask).headers
    with Server(ours(demo_stock), demo_tokenizer, cors_origins=["http://page.example"]) as open_server:
        preflight = open_server.http.options(
            "/v1/completions",
            headers={**ask, "Authorization": "", "Access-Control-Request-Headers": "authorization,content-type"},
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        answer = open_server.http.get("/v1/models", headers={"Origin": "http://page.example"})
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = open_server.http.get("/v1/models", headers={"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_json_in_a_generation_config_may_say_what_no_field_does(complete):
    config = {"max_new_tokens": 3, "suppress_tokens": [276], "sequence_bias": [[[300], 1.0]]}
    answer = complete(prompt="It was", max_tokens=None, extra_body={"generation_config": json.dumps(config)})
    assert answer.usage.completion_tokens == 3
