"""Adapters behind every door: the same answers as `generate(adapter=...)`."""

import copy
import json

import peft
import pytest
import torch
from making import Peft, save_adapter
from transformers import GenerationConfig, pipeline

from lfm2_cb import ContinuousBatchingGenerator, disable, enable
from lfm2_cb.adapters.peft_config import AdapterError
from lfm2_cb.cli.main import main
from lfm2_cb.hf.manager import Lfm2CbManager
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.model.conversion import adopt
from lfm2_cb.model.modeling import Lfm2CbForCausalLM

TEXTS = ["It was the best", "Who is", "She had said that"]
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 0}  # which none of the answers has
SIZES = {"cache_memory": "8MiB", "max_sequences": 8}


@pytest.fixture(scope="module")
def paths(demo_stock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(demo_stock, folder / name, i, r=2 + i, std=0.1) for i, name in enumerate("ab")}


@pytest.fixture(scope="module")
def expected(demo_stock, demo_tokenizer, paths):
    """PEFT's tokens by (adapter, text)."""
    reference = Peft(demo_stock)
    ids = {text: demo_tokenizer(text)["input_ids"] for text in TEXTS}
    return {(a, t): reference.greedy(paths.get(a), ids[t], 8) for a in (None, *paths) for t in TEXTS}


def test_python_faces(demo_stock, demo_tokenizer, paths, expected):
    assert len({tuple(tokens) for tokens in expected.values()}) > 6
    asked = ["b", None, "a"]
    wanted = [expected[pair] for pair in zip(asked, TEXTS, strict=True)]
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, adapters=paths, **SIZES) as generator:
        assert [o.token_ids for o in generator.generate(TEXTS, adapter=asked, **OPTIONS)] == wanted
        assert [o.token_ids for o in generator.generate(TEXTS, adapter="a", **OPTIONS)] == [
            expected["a", text] for text in TEXTS
        ]
        streamed = {0: [], 1: [], 2: []}
        for event in generator.stream(TEXTS, adapter=asked, **OPTIONS):
            streamed[event.index] += event.token_ids
        assert [*streamed.values()] == wanted
        handles = [generator.submit(t, adapter=a, **OPTIONS) for a, t in zip(asked, TEXTS, strict=True)]
        assert [handle.result(60).token_ids for handle in handles] == wanted
    given = {"adapters": paths, **SIZES}
    pipe = pipeline(
        "text-generation", model=demo_stock, tokenizer=demo_tokenizer, generator="cb", generator_kwargs=given
    )
    records = pipe(TEXTS, adapter=asked, return_full_text=False, **OPTIONS)
    assert [r[0]["generated_text"] for r in records] == [
        demo_tokenizer.decode(tokens, skip_special_tokens=True) for tokens in wanted
    ]


def test_generate_batch(demo_stock, demo_tokenizer, paths, expected):
    model = adopt(demo_stock, Lfm2CbForCausalLM)
    config = Lfm2CbBatchingConfig(adapters=paths, cache_memory="8MiB")
    outputs = model.generate_batch(
        [demo_tokenizer(text)["input_ids"] for text in TEXTS],
        GenerationConfig(**OPTIONS),
        continuous_batching_config=config,
        adapter=["a", "b", None],
    )
    wanted = [expected[pair] for pair in zip(["a", "b", None], TEXTS, strict=True)]
    assert [output.generated_tokens for output in outputs.values()] == wanted


def test_stocks_methods_of_a_live_peft_model(demo_stock, demo_tokenizer, paths, expected):
    """With its adapters, by their names; without `adapter=` the one that is active, as its own `generate()`."""
    live = peft.PeftModel.from_pretrained(copy.deepcopy(demo_stock), paths["a"], adapter_name="a").eval()
    live.load_adapter(paths["b"], "b")
    ids, config = [demo_tokenizer(text)["input_ids"] for text in TEXTS], Lfm2CbBatchingConfig(cache_memory="8MiB")
    options = {"generation_config": GenerationConfig(**OPTIONS), "continuous_batching_config": config}

    def run(**kwargs):
        outputs = live.generate_batch(ids, persistent_manager=True, **options, **kwargs)
        return [output.generated_tokens for output in outputs.values()]

    def wanted(*names):
        return [expected[pair] for pair in zip(names, TEXTS, strict=True)]

    enable()
    try:
        assert run(adapter=["a", "b", None]) == wanted("a", "b", None)
        assert run() == wanted("a", "a", "a")
        kept = live._cached_continuous_batching_manager
        live.set_adapter("b")
        assert run() == wanted("b", "b", "b")
        assert run(adapter=None) == wanted(None, None, None)
        with live.disable_adapter():
            assert run() == wanted(None, None, None)
        with torch.no_grad():  # trained further
            for name, parameter in live.named_parameters():
                if "lora_B.b" in name:
                    parameter.mul_(-3)
        own = [live.generate(input_ids=torch.tensor([row]), **OPTIONS)[0, len(row) :].tolist() for row in ids]
        assert run() == own != wanted("b", "b", "b")
        assert live._cached_continuous_batching_manager is kept
        live.base_model.set_adapter(["a", "b"])
        with pytest.raises(AdapterError, match="together"):
            run()
        live.destroy_cached_continuous_batching_manager()
    finally:
        disable()
    manager = Lfm2CbManager(live, options["generation_config"], config)
    manager.start()
    names = manager.add_requests(ids, adapter="a")
    assert [manager.get_result(name).generated_tokens for name in names] == wanted("a", "a", "a")
    live.merge_adapter(["a"])  # into weights that the manager shares
    with pytest.raises(AdapterError, match="'a' is merged"):
        manager.add_requests(ids, adapter="a")
    manager.destroy()


def test_a_live_models_adapters_are_copied_once_a_start(demo_stock, demo_tokenizer, paths, expected, monkeypatch):
    """And do not take the names that the configuration gives to others."""
    live = peft.PeftModel.from_pretrained(copy.deepcopy(demo_stock), paths["a"], adapter_name="a").eval()
    copied, state_dict = [], peft.get_peft_model_state_dict
    monkeypatch.setattr(
        peft, "get_peft_model_state_dict", lambda *args, **kwargs: (copied.append(1), state_dict(*args, **kwargs))[1]
    )
    config = Lfm2CbBatchingConfig(adapters={"a": paths["b"]}, cache_memory="8MiB")
    manager = Lfm2CbManager(live, GenerationConfig(**OPTIONS), config)
    ids = [demo_tokenizer(text)["input_ids"] for text in TEXTS]
    for starts in (1, 2):
        manager.start()
        assert len(copied) == starts
        names = manager.add_requests(ids)
        assert [manager.get_result(name).generated_tokens for name in names] == [expected["b", t] for t in TEXTS]
        manager.stop(keep_for_next_session=True)
    manager.destroy()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_command_line(suffix, demo_tokenizer, paths, expected, tmp_path, monkeypatch, capsys):
    import lfm2_cb

    monkeypatch.chdir(tmp_path)
    asked = ["b", None, "a"]
    if suffix == "csv":
        rows = [f'"{text}",{name or ""}\n' for text, name in zip(TEXTS, asked, strict=True)]
        (tmp_path / "in.csv").write_text("prompt,adapter\n" + "".join(rows))
    else:
        rows = [{"prompt": text, "adapter": name} for text, name in zip(TEXTS, asked, strict=True)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [f"{name}={path}" for name, path in paths.items()]
    flags = ["--max-new-tokens", "8", "--no-do-sample", "--dtype", "float32", "--cache-memory", "16MiB", "--quiet"]
    flags += ["--set", "eos_token_id=[0]"]
    command = ["generate", lfm2_cb.demo_model_path(), "--input", f"in.{suffix}", "--output", "out.jsonl", "--ordered"]
    assert main([*command, *flags, "--adapter", *named]) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    wanted = [expected[pair] for pair in zip(asked, TEXTS, strict=True)]
    assert texts == [demo_tokenizer.decode(tokens, skip_special_tokens=True) for tokens in wanted]
    # the same names for other adapters are another job, and a row's unknown name is its own error
    assert main([*command, *flags, "--adapter", f"a={paths['b']}", f"b={paths['a']}"]) == 2
    assert "adapters" in capsys.readouterr().err
    assert main([*command, *flags, "--overwrite", "--adapter", f"a={paths['a']}"]) == 3
    (error,) = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_bytes().splitlines()]
    assert error["index"] == 0 and "'b'" in error["error"]
    for wrong in (["a"], ["a=x", "a=y"], ["a=/nowhere"]):
        assert main([*command, *flags, "--overwrite", "--adapter", *wrong]) == 2
