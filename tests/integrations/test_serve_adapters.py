# ruff: noqa: E402  (what the extra brings is looked for before it is imported)
"""A server's adapters: `model=` picks one, /v1/models lists them, and they can be loaded where that was asked for."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
peft = pytest.importorskip("peft")

from helpers import demo_prompts, ours
from serving import Server

from lfm2_cb import ContinuousBatchingGenerator

sys.path.append(str(Path(__file__).parent.parent / "adapters"))
from making import save_adapter

GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def paths(demo_stock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {f"a{i}": save_adapter(demo_stock, folder / str(i), i, r=1 + i, std=0.05) for i in range(16)}


@pytest.fixture(scope="module")
def server(demo_stock, demo_tokenizer, paths):
    with Server(ours(demo_stock), demo_tokenizer, adapters=paths, adapter_endpoints=True) as running:
        yield running


def test_16_clients_on_16_adapters_at_once_get_what_generate_gives(server, demo_stock, demo_tokenizer, paths):
    texts = demo_prompts(16)
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, adapters=paths, cache_memory="8MiB") as generator:
        expected = generator.generate(texts, adapter=[*paths], max_new_tokens=12, do_sample=False)
        base = generator.generate(texts, max_new_tokens=12, do_sample=False)

    def ask(name, text):
        answer = server.client.completions.create(model=name, prompt=text, **GREEDY)
        assert answer.model == name
        return answer.choices[0].text

    with ThreadPoolExecutor(17) as clients:
        plain = clients.submit(ask, "tiny", texts[0])
        answers = list(clients.map(ask, paths, texts))
    assert answers == [output.text for output in expected]
    assert plain.result() == base[0].text
    assert sum(one.text != other.text for one, other in zip(expected, base, strict=True)) > 8


def test_models_lists_adapters_with_their_parent(server, paths):
    listed = {model.id: model for model in server.client.models.list()}
    assert listed.keys() == {"tiny", *paths}
    assert listed["a3"].parent == "tiny" and not hasattr(listed["tiny"], "parent")
    assert server.client.models.retrieve("a3").parent == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="other", prompt="It was", **GREEDY)


def test_adapters_are_loaded_and_unloaded(server, paths):
    def post(path, **body):
        answer = server.http.post(f"/v1/{path}_lora_adapter", json=body)
        return answer.status_code, answer.text

    assert post("load", lora_name="new", lora_path=paths["a1"])[0] == 200
    texts = [
        server.client.completions.create(model=m, prompt="It was", **GREEDY).choices[0].text for m in ("new", "a1")
    ]
    assert texts[0] == texts[1]
    assert post("load", lora_name="new", lora_path=paths["a2"])[0] == 400
    assert post("load", lora_name="tiny", lora_path=paths["a2"], load_inplace=True)[0] == 400
    assert post("load", lora_name="new", lora_path=paths["a2"], load_inplace=True)[0] == 200
    texts = [
        server.client.completions.create(model=m, prompt="It was", **GREEDY).choices[0].text for m in ("new", "a2")
    ]
    assert texts[0] == texts[1]
    assert post("unload", lora_name="new")[0] == 200
    status, text = post("unload", lora_name="new")
    assert status == 404 and "new" in text
    status, text = post("load", lora_name="new", lora_path="/nowhere")
    assert status == 400 and "/nowhere" in text
    assert post("load", lora_name="new")[0] == 400
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="new", prompt="It was", **GREEDY)


def test_a_live_peft_model_is_served_with_its_adapters(server, demo_stock, demo_tokenizer, paths):
    model = peft.PeftModel.from_pretrained(copy.deepcopy(demo_stock), paths["a1"], adapter_name="a1")
    with Server(model, demo_tokenizer, adapters={"a2": paths["a2"]}) as live:
        for name in ("tiny", "a1", "a2"):
            answers = [
                client.completions.create(model=name, prompt="It was", **GREEDY).choices[0].text
                for client in (live.client, server.client)
            ]
            assert answers[0] == answers[1]


def test_nobody_loads_adapters_where_it_was_not_asked_for(demo_stock, demo_tokenizer, paths):
    with Server(ours(demo_stock), demo_tokenizer) as plain:
        body = {"lora_name": "new", "lora_path": paths["a1"]}
        assert plain.http.post("/v1/load_lora_adapter", json=body).status_code == 404
