"""Importing changes nothing for others; enable() does, and disable() undoes it."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import ours, random_stock
from transformers import AutoConfig, AutoModelForCausalLM, Lfm2ForCausalLM

import lfm2_cb
from lfm2_cb.registration import Lfm2CbForLfm2Checkpoints, register

IDS = torch.tensor([[5, 9, 4, 30, 12, 7]])
STOCK_CLASS = Lfm2ForCausalLM


@pytest.fixture
def folder(tmp_path):
    random_stock(31).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def enabled():
    lfm2_cb.enable()
    yield
    lfm2_cb.disable()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_changes_nothing_for_those_who_do_not_ask(folder, tmp_path):
    out = run_python(
        f"""
import lfm2_cb, transformers
from transformers import AutoModelForCausalLM, pipeline
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert type(model) is transformers.models.lfm2.modeling_lfm2.Lfm2ForCausalLM
pipe = pipeline("text-generation", model=lfm2_cb.demo_model_path())
assert type(pipe) is transformers.TextGenerationPipeline, type(pipe)
assert type(pipe.model) is transformers.models.lfm2.modeling_lfm2.Lfm2ForCausalLM
pipe.save_pretrained({str(tmp_path / "pipe")!r})
print("ok")
"""
    )
    assert out.endswith("ok\n")
    assert "custom_pipelines" not in json.loads((tmp_path / "pipe" / "config.json").read_text())


def test_our_model_type_is_registered_and_registering_again_is_harmless(tmp_path):
    register()
    model = ours(random_stock(32))
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is lfm2_cb.Lfm2CbConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is lfm2_cb.Lfm2CbForCausalLM


def test_enable_makes_stock_checkpoints_ours_and_disable_puts_it_back(folder):
    config = AutoConfig.from_pretrained(folder)
    lfm2_cb.enable()
    lfm2_cb.enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model) is type(AutoModelForCausalLM.from_config(config)) is Lfm2CbForLfm2Checkpoints
        assert transformers.Lfm2ForCausalLM is Lfm2CbForLfm2Checkpoints
    finally:
        lfm2_cb.disable()
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is transformers.Lfm2ForCausalLM is STOCK_CLASS
    lfm2_cb.disable()


def test_what_is_saved_while_enabled_is_a_stock_checkpoint(folder, tmp_path, enabled):
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("lfm2", ["Lfm2ForCausalLM"])
    out = run_python(
        f"""
import torch
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained({str(tmp_path / "saved")!r}, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"]
print(type(model).__module__, model(torch.tensor({IDS.tolist()})).logits.sum().item())
"""
    )
    module, total = out.split()[-2:]
    assert module == "transformers.models.lfm2.modeling_lfm2"
    assert float(total) == pytest.approx(expected.sum().item(), abs=1e-2)


def test_a_model_loaded_while_enabled_generates_through_the_engine(folder, enabled):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        (output,) = generator.generate([[5, 6, 7]], max_new_tokens=4, eos_token_id=None)
    tensor = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert output.token_ids == tensor[0, 3:].tolist()


def test_the_demo_model_ships_with_everything(demo_tokenizer):
    assert demo_tokenizer.vocab_size == 4096
    ids = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
    assert demo_tokenizer.convert_tokens_to_ids(list(ids)) == list(ids.values())
    chat = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|startoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
