"""Importing changes nothing for others; enable() does, and disable() undoes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers import ids, ours, random_stock
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Lfm2ForCausalLM, TextGenerationPipeline, pipeline

import lfm2_cb
from lfm2_cb.hf.registration import Lfm2CbForLfm2Checkpoints, register

IDS = ids(0, batch=2)
STOCK_CLASS = Lfm2ForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stock checkpoint, as the hub has them."""
    path = tmp_path_factory.mktemp("stock")
    random_stock(31).save_pretrained(path)
    return path


@pytest.fixture
def enabled():
    lfm2_cb.enable()
    yield
    lfm2_cb.disable()


def run_python(code: str, *arguments: object) -> None:
    """Run code in a fresh process, with `sys.argv[1:]`."""
    command = [sys.executable, "-c", "import sys\n" + code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def assert_same_files(a: Path, b: Path) -> None:
    """The same weights under the same names, whatever the sharding."""
    a, b = ({k: v for f in path.glob("*.safetensors") for k, v in load_file(f).items()} for path in (a, b))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Only importing


def test_importing_changes_nothing_for_those_who_do_not_ask(folder, tmp_path):
    """Everything that stock resolves by name is compared before and after the import, in one fresh process."""
    run_python(
        """
import transformers
from transformers import AutoModelForCausalLM, AutoModel, AutoConfig, AutoTokenizer, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
folder, demo, out = sys.argv[1:]

def resolved():
    model = AutoModelForCausalLM.from_pretrained(folder)
    pipe = pipeline("text-generation", model=demo)
    return [
        type(AutoConfig.from_pretrained(folder)), type(model), type(AutoModelForCausalLM.from_config(model.config)),
        type(AutoModel.from_pretrained(folder)), transformers.Lfm2ForCausalLM, type(pipe), type(pipe.model),
        type(pipeline("text-generation", model=model, tokenizer=pipe.tokenizer)),
        transformers.Lfm2ForCausalLM.generate, transformers.Lfm2ForCausalLM.forward,
        transformers.pipelines.pipeline, sorted(PIPELINE_REGISTRY.get_supported_tasks()),
        PIPELINE_REGISTRY.supported_tasks["text-generation"]["default"],
    ]

before = resolved()
import lfm2_cb
assert resolved() == before, (resolved(), before)
pipe = pipeline("text-generation", model=demo)
assert type(pipe) is transformers.TextGenerationPipeline
pipe.save_pretrained(out)
""",
        folder,
        lfm2_cb.demo_model_path(),
        tmp_path,
    )
    assert "custom_pipelines" not in config_of(tmp_path)
    assert config_of(tmp_path)["architectures"] == ["Lfm2ForCausalLM"]


@pytest.mark.parametrize("given", ["path", "stock model", "our model"])
def test_a_pipeline_without_generator_is_exactly_stocks(demo_stock, demo_tokenizer, tmp_path, given, capfd):
    path = lfm2_cb.demo_model_path()
    model = demo_stock if given == "stock model" else path
    if given == "our model":
        model = lfm2_cb.Lfm2CbForCausalLM.from_pretrained(path)
    pipe = pipeline("text-generation", model=model, tokenizer=demo_tokenizer)
    assert type(pipe) is TextGenerationPipeline
    assert vars(pipe).keys() == vars(TextGenerationPipeline(model=pipe.model, tokenizer=demo_tokenizer)).keys()
    assert "is not supported" not in capfd.readouterr().err
    pipe.save_pretrained(tmp_path)
    assert "custom_pipelines" not in config_of(tmp_path)


def test_our_model_type_is_registered_and_registering_again_is_harmless(tmp_path):
    register()
    register()
    model = ours(random_stock(32))
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is lfm2_cb.Lfm2CbConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is lfm2_cb.Lfm2CbModel
    assert type(AutoModelForCausalLM.from_config(model.config)) is lfm2_cb.Lfm2CbForCausalLM
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is lfm2_cb.Lfm2CbForCausalLM
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_what_we_save_loads_everywhere(folder, tmp_path):
    """In stock without lfm2_cb, then in stock and through the Auto classes beside it, in one fresh process."""
    lfm2_cb.Lfm2CbForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    assert config_of(tmp_path / "ours")["model_type"] == "lfm2_cb"
    Lfm2CbForLfm2Checkpoints.from_pretrained(folder).save_pretrained(tmp_path / "enabled")
    run_python(
        """
from transformers import AutoModelForCausalLM, Lfm2ForCausalLM
root = sys.argv[1]

def load(model_class, name):
    model, info = model_class.from_pretrained(f"{root}/{name}", output_loading_info=True)
    assert not any(info.values()), info
    return model

load(Lfm2ForCausalLM, "ours").save_pretrained(f"{root}/1")
model = load(AutoModelForCausalLM, "enabled")
assert type(model) is Lfm2ForCausalLM
model.save_pretrained(f"{root}/2")
assert "lfm2_cb" not in sys.modules

import lfm2_cb
load(Lfm2ForCausalLM, "ours").save_pretrained(f"{root}/3")
model = load(AutoModelForCausalLM, "ours")
assert type(model) is lfm2_cb.Lfm2CbForCausalLM
model.save_pretrained(f"{root}/4")
""",
        tmp_path,
    )
    for saved in ("ours", "enabled", "1", "2", "3", "4"):
        assert_same_files(tmp_path / saved, folder)


# Enabled


def test_enable_makes_stock_checkpoints_ours_and_disable_puts_it_back(folder):
    config = AutoConfig.from_pretrained(folder)
    before = len(AutoModelForCausalLM._model_mapping._extra_content)
    lfm2_cb.enable()
    lfm2_cb.enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is type(AutoModelForCausalLM.from_config(config)) is Lfm2CbForLfm2Checkpoints
        assert transformers.Lfm2ForCausalLM is Lfm2CbForLfm2Checkpoints
        assert isinstance(model, lfm2_cb.Lfm2CbForCausalLM)
    finally:
        lfm2_cb.disable()
    lfm2_cb.disable()
    for model in (AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_config(config)):
        assert type(model) is transformers.Lfm2ForCausalLM is STOCK_CLASS
    assert len(AutoModelForCausalLM._model_mapping._extra_content) == before


def test_a_model_loaded_while_enabled_computes_what_stock_does(folder, enabled):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    expected = STOCK_CLASS.from_pretrained(folder)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=0)


def test_a_pipeline_made_while_enabled_takes_our_model_without_complaint(enabled, capfd):
    pipe = pipeline("text-generation", model=lfm2_cb.demo_model_path())
    assert type(pipe) is TextGenerationPipeline and type(pipe.model) is Lfm2CbForLfm2Checkpoints
    assert "is not supported" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["positional", "keyword", "sharded"])
def test_what_is_saved_while_enabled_is_a_stock_checkpoint(folder, tmp_path, enabled, how):
    model = AutoModelForCausalLM.from_pretrained(folder)
    if how == "keyword":
        model.save_pretrained(save_directory=tmp_path)
    else:
        model.save_pretrained(tmp_path, **{"max_shard_size": "20KB"} if how == "sharded" else {})
    assert config_of(tmp_path) == config_of(folder)
    assert_same_files(tmp_path, folder)


def test_a_model_outlives_disable(folder, tmp_path):
    lfm2_cb.enable()
    model = AutoModelForCausalLM.from_pretrained(folder)
    lfm2_cb.disable()
    model.save_pretrained(tmp_path)
    assert_same_files(tmp_path, folder)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is STOCK_CLASS


def test_a_model_loaded_while_enabled_generates_through_the_engine(folder, enabled):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        (output,) = generator.generate([[5, 6, 7]], max_new_tokens=4, do_sample=False, eos_token_id=None)
    tensor = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert output.token_ids == tensor[0, 3:].tolist()


def test_the_demo_model_ships_with_everything(demo_tokenizer):
    assert demo_tokenizer.vocab_size == 4096
    special = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
    assert demo_tokenizer.convert_tokens_to_ids(list(special)) == list(special.values())
    chat = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|startoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
