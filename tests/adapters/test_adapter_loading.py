"""What is read of an adapter, what is refused, and by which key."""

import json
import random
import shutil
import weakref

import peft
import pytest
import torch
from helpers import random_prompts, random_stock
from making import Peft, save_adapter
from safetensors.torch import load_file, save_file

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.adapters import pool as pool_module
from lfm2_cb.adapters.peft_config import AdapterError, PeftConfig
from lfm2_cb.adapters.pool import AdapterPool
from lfm2_cb.adapters.sources import Folder
from lfm2_cb.model.conversion import adopt
from lfm2_cb.model.modeling import Lfm2CbForCausalLM
from lfm2_cb.ops.memory import zeros
from lfm2_cb.scheduling.adapters import AdapterTooLarge

GREEDY = {"do_sample": False, "eos_token_id": None}
LAYERS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_bias": True}


@pytest.fixture(scope="module")
def stock():
    return random_stock(21, **LAYERS)


@pytest.fixture(scope="module")
def generator(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", adapter_memory="1MiB") as generator:
        yield generator


@pytest.fixture(scope="module")
def saved(stock, tmp_path_factory):
    return save_adapter(stock, tmp_path_factory.mktemp("saved") / "a", 1, r=4)


def changed(saved, tmp_path, config=None, tensors=None):
    """A copy of an adapter, with other fields or other tensors (None: without one)."""
    folder = tmp_path / "changed"
    shutil.copytree(saved, folder)
    if config:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        found = load_file(folder / "adapter_model.safetensors") | tensors
        save_file({k: v for k, v in found.items() if v is not None}, folder / "adapter_model.safetensors")
    return folder


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
REFUSED = {
    "another kind": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
    "a field unknown here": ({"alora_invocation_tokens": [1, 2]}, {}, "alora_invocation_tokens"),
    "experts": ({"target_parameters": ["experts.gate_up_proj"]}, {}, "target_parameters"),
    "a start that changes the base": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa'"),
    "other modules saved": ({"modules_to_save": ["embed_tokens"]}, {}, "modules_to_save"),
    "a matrix is missing": ({}, {KEY: None}, f"{KEY} is missing"),
    "another rank": ({"r": 5}, {}, "has shape"),
    "another shape": ({}, {KEY: torch.zeros(4, 3)}, KEY.replace(".", r"\.") + " has shape"),
    "a key too many": ({}, {"base_model.model.model.norm.lora_A.weight": torch.zeros(2, 2)}, "model.norm.lora_A"),
    "embeddings": ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, "embedding_A"),
    "DoRA without magnitudes": ({"use_dora": True}, {}, "use_dora"),
    "magnitudes without DoRA": (
        {},
        {KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(1)},
        "use_dora=False",
    ),
    "fewer targets than matrices": ({"target_modules": ["w1"]}, {}, "belongs to no layer"),
    "whole numbers": ({}, {KEY: torch.zeros(4, 3, dtype=torch.int8)}, f"{KEY} is of I8"),
    "no rank": ({"r": None}, {}, "cannot be read"),
    "a convolution's bias": ({}, {"base_model.model.model.layers.0.conv.conv.bias": torch.ones(3)}, "conv.conv.bias"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_applied_is_refused_by_its_key(what, generator, saved, tmp_path):
    config, tensors, message = REFUSED[what]
    with pytest.raises(AdapterError, match="adapter 'x': .*" + message):
        generator.load_adapter("x", changed(saved, tmp_path, config, tensors))
    assert generator.engine.adapters.names == []


def test_files_that_are_not_there_damaged_or_pickled(generator, saved, tmp_path):
    with pytest.raises(AdapterError, match="no folder"):
        generator.load_adapter("x", tmp_path / "nowhere")
    folder = changed(saved, tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"not one")
    with pytest.raises(AdapterError, match="cannot be read"):
        generator.load_adapter("x", folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="has no adapter_model"):
        generator.load_adapter("x", folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="pickle"):
        generator.load_adapter("x", folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterError):
        generator.load_adapter("x", folder)


def test_one_larger_than_the_budget_is_refused_when_it_is_loaded(stock, saved):
    with pytest.raises(AdapterTooLarge, match="adapter_memory holds 1,000"):
        ContinuousBatchingGenerator(stock, cache_memory="4MiB", adapter_memory=1000, adapters={"x": saved})


def test_unknown_names_and_calls_for_stock_are_refused_before_anything_runs(generator, saved):
    with pytest.raises(AdapterError, match="no adapter 'y'"):
        generator.generate([[3, 4]], adapter="y", **GREEDY)
    with pytest.raises(ValueError, match="adapter has 1 entries for 2 prompts"):
        generator.generate([[3, 4], [5]], adapter=["y"], **GREEDY)
    with pytest.raises(ValueError, match="adapter"):
        generator.generate([[3, 4]], adapter="y", num_beams=2, max_new_tokens=2)
    output = generator.generate([[3, 4], [5]], adapter=["y", None], on_error="return", max_new_tokens=2, **GREEDY)
    assert output[0].finish_reason == "error" and output[1].error is None


def test_requests_of_an_adapter_that_is_gone_end_alone(generator, stock, saved, tmp_path):
    folder = changed(saved, tmp_path)
    generator.load_adapter("gone", folder)
    generator.load_adapter("here", saved)
    (folder / "adapter_model.safetensors").unlink()
    asked = [None, "gone", "here", "gone"]
    prompts = random_prompts(random.Random(1), 4, 20)
    outputs = generator.generate(prompts, adapter=asked, max_new_tokens=6, **GREEDY)
    reference = Peft(stock)
    for prompt, name, output in zip(prompts, asked, outputs, strict=True):
        if name == "gone":
            assert output.finish_reason == "error" and "adapter_model.safetensors" in str(output.error)
        else:
            assert output.token_ids == reference.greedy(name and saved, prompt, 6)
    generator.engine.scheduler.check_integrity()
    # files exchanged since they were loaded are not mistaken for those
    shutil.copy(saved + "/adapter_model.safetensors", folder)
    output = generator.generate(prompts[:1], adapter="gone", max_new_tokens=6, **GREEDY)[0]
    assert "load the adapter again" in str(output.error)
    generator.load_adapter("gone", folder)
    output = generator.generate(prompts[:1], adapter="gone", max_new_tokens=6, **GREEDY)[0]
    assert output.token_ids == reference.greedy(saved, prompts[0], 6)
    for name in ("gone", "here"):
        generator.unload_adapter(name)


def test_files_are_asked_for_when_requests_are_queued_that_want_them(generator, saved, monkeypatch):
    asked, prefetch = [], Folder.prefetch
    monkeypatch.setattr(Folder, "prefetch", lambda self: (asked.append(self.folder), prefetch(self)))
    generator.load_adapter("x", saved)
    try:
        for _ in range(2):  # then it is in memory
            generator.generate([[5, 6]] * 3, adapter="x", max_new_tokens=2, **GREEDY)
            assert [*map(str, asked)] == [str(saved)]
    finally:
        generator.unload_adapter("x")


@pytest.mark.parametrize("rank", [4, 5])
def test_what_is_let_go_never_lies_beside_new_memory(rank, stock, saved, tmp_path, monkeypatch):
    """Memory is taken over by an adapter that is laid out alike, and else given back before there is new memory."""
    pool = AdapterPool(adopt(stock, Lfm2CbForCausalLM), 1)
    pool.load("old", saved)
    pool.load("new", save_adapter(stock, tmp_path / "new", 2, r=rank))
    pool.fill(0, pool.get("old"))
    held, at_new_memory = weakref.ref(pool._active[0].deltas[0].a), []
    monkeypatch.setattr(pool_module, "zeros", lambda *args: (at_new_memory.append(held()), zeros(*args))[1])
    pool.clear(0)
    pool.fill(0, pool.get("new"))
    assert at_new_memory == ([] if rank == 4 else [None])
    assert (held() is None) == (rank != 4)


def test_a_live_peft_model_is_taken_with_its_adapters(stock, tmp_path):
    paths = [save_adapter(stock, tmp_path / str(i), i, r=2 + i, use_dora=i == 1) for i in range(2)]
    prompts = random_prompts(random.Random(5), 6, 20)
    asked = [None, "one", "two"] * 2
    reference = Peft(stock)
    by_name = {"one": paths[0], "two": paths[1]}
    expected = [reference.greedy(by_name.get(name), p, 6) for name, p in zip(asked, prompts, strict=True)]
    live = peft.PeftModel.from_pretrained(random_stock(21, **LAYERS), paths[0], adapter_name="one").eval()
    live.load_adapter(paths[1], "two")
    with ContinuousBatchingGenerator(live, cache_memory="4MiB") as generator:
        outputs = generator.generate(prompts, adapter=asked, max_new_tokens=6, **GREEDY)
        assert [o.token_ids for o in outputs] == expected
        # the live model still works, and what it is trained to be is taken again when asked for
        ids = torch.tensor([prompts[0]])
        own = live.generate(input_ids=ids, max_new_tokens=6, **GREEDY)[0, len(prompts[0]) :].tolist()
        assert own == reference.greedy(paths[0], prompts[0], 6)
        with torch.no_grad():
            for name, parameter in live.named_parameters():
                if "lora_B.one" in name:
                    parameter.mul_(-3)
        new = live.generate(input_ids=ids, max_new_tokens=6, **GREEDY)[0, len(prompts[0]) :].tolist()
        options = {"adapter": "one", "max_new_tokens": 6, **GREEDY}
        assert generator.generate(prompts[:1], **options)[0].token_ids == own
        generator.load_adapter("one", live)
        assert generator.generate(prompts[:1], **options)[0].token_ids == new
        with pytest.raises(AdapterError, match="'three'"):
            generator.load_adapter("three", live)
        live.merge_adapter(["two"])  # into weights that the generator shares
        with pytest.raises(AdapterError, match=r"'two' is merged into .* unmerge_adapter"):
            generator.generate(prompts[:1], max_new_tokens=6, **GREEDY)
        live.unmerge_adapter()
        assert generator.generate(prompts[:1], **options)[0].token_ids == new
    live.merge_adapter()
    with pytest.raises(AdapterError, match="merged"):
        ContinuousBatchingGenerator(live)


def test_an_adapter_merged_into_layers_that_had_none_is_refused():
    """Layers that PEFT wraps after the generator was made share their weights with it, too."""
    live = peft.get_peft_model(random_stock(21, **LAYERS), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    with ContinuousBatchingGenerator(live, cache_memory="4MiB") as generator:
        expected = generator.generate([[5, 6]], max_new_tokens=4, **GREEDY)[0].token_ids
        live.add_adapter("late", peft.LoraConfig(r=2, target_modules=["w2"], init_lora_weights=False))
        assert generator.generate([[5, 6]], max_new_tokens=4, **GREEDY)[0].token_ids == expected
        live.merge_adapter(["late"])
        with pytest.raises(AdapterError, match=r"'late' is merged into model\.layers\.0\.feed_forward\.w2"):
            generator.generate([[5, 6]], max_new_tokens=4, **GREEDY)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "w1"]},
        {"target_modules": r".*layers\.[02]\..*(proj|w2)"},
        {"target_modules": ["q_proj", "w1", "out_proj"], "exclude_modules": ["conv.out_proj"]},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": [1, 2]},
        {"target_modules": ["w1"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": "all-linear"},
    ],
)
def test_targets_are_those_that_peft_finds(fields):
    net = random_stock(2, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    names = [name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)]
    wrapped = peft.get_peft_model(net, peft.LoraConfig(r=2, **fields))
    found = {name for name in names if hasattr(wrapped.base_model.model.get_submodule(name), "lora_A")}
    config = PeftConfig.of({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **fields})
    assert found and {name for name in names if config.targets(name)} == found
