"""Checkpoints: LFM2 only, safetensors only, nobody's code."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import lfm2_cb
from lfm2_cb.loading import UnsafeCheckpointError, load_model, load_tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(lfm2_cb.demo_model_path(), tmp_path / "model"))


def test_a_pickle_is_refused_with_advice_and_read_when_asked(checkpoint, demo_stock):
    (checkpoint / "model.safetensors").unlink()
    torch.save(demo_stock.state_dict(), checkpoint / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError, match="save_pretrained"):
        load_model(str(checkpoint))
    with pytest.raises(UnsafeCheckpointError, match="pickle"):
        lfm2_cb.ContinuousBatchingGenerator(str(checkpoint))
    model = load_model(str(checkpoint), torch.float32, allow_pickle=True)
    assert torch.equal(model.model.embed_tokens.weight, demo_stock.model.embed_tokens.weight)


def test_a_pickle_beside_safetensors_is_not_read(checkpoint):
    (checkpoint / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load_model(str(checkpoint)).config.hidden_size == 192


def test_another_architecture_is_refused(tmp_path):
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="'llama'"):
        load_model(str(tmp_path))


def test_code_beside_a_checkpoint_is_not_run(checkpoint):
    (checkpoint / "evil.py").write_text("raise SystemExit('code of the checkpoint was run')\nclass T: ...\n")
    for name in ("config.json", "tokenizer_config.json"):
        data = json.loads((checkpoint / name).read_text())
        auto = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoModelForCausalLM": "evil.T", "AutoConfig": "evil.T"}
        (checkpoint / name).write_text(json.dumps({**data, "auto_map": auto}))
    assert load_model(str(checkpoint)).config.hidden_size == 192
    try:
        tokenizer = load_tokenizer(str(checkpoint))
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    else:
        assert type(tokenizer).__module__.startswith("transformers.")


def test_nothing_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError):
        load_model(str(tmp_path / "nothing"))
