"""Stock checkpoints, state dicts and live models in; stock checkpoints out."""

import json

import pytest
import torch
from helpers import ours, random_config, random_stock
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from lfm2_cb import Lfm2CbConfig, Lfm2CbForCausalLM, Lfm2CbModel
from lfm2_cb.model.conversion import adopt, still_adopted

IDS = torch.tensor([[5, 9, 4, 30, 12, 7]])


def assert_same_parameters(a, b):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_stock_to_ours_to_stock_is_exact(tmp_path, dtype, tied):
    stock = random_stock(11, tie_word_embeddings=tied).to(dtype)
    stock.save_pretrained(tmp_path / "stock")
    model, info = Lfm2CbForCausalLM.from_pretrained(tmp_path / "stock", output_loading_info=True, dtype=dtype)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path / "ours")
    back = Lfm2ForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    assert_same_parameters(stock, back)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    assert type(again) is Lfm2CbForCausalLM
    assert_same_parameters(model, again)


def test_sharded_checkpoints_load(tmp_path):
    stock = random_stock(12)
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = Lfm2CbForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, atol=1e-5, rtol=0)


def test_the_base_model_loads_alone(tmp_path):
    stock = random_stock(13)
    stock.save_pretrained(tmp_path)
    model = Lfm2CbModel.from_pretrained(tmp_path)
    expected = stock.model(IDS).last_hidden_state
    torch.testing.assert_close(model(IDS).last_hidden_state, expected, atol=1e-5, rtol=0)


def test_disk_offload_and_device_map_give_the_same_logits(tmp_path):
    stock = random_stock(14, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    stock.save_pretrained(tmp_path / "m")
    expected = stock(IDS).logits
    whole = Lfm2CbForCausalLM.from_pretrained(tmp_path / "m", device_map="cpu")
    torch.testing.assert_close(whole(IDS).logits, expected, atol=1e-5, rtol=0)
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.embedding_norm": "cpu"}
    device_map |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    split = Lfm2CbForCausalLM.from_pretrained(
        tmp_path / "m", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    torch.testing.assert_close(split(IDS).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_a_stock_state_dict_loads(seed):
    stock = random_stock(seed)
    model = Lfm2CbForCausalLM(Lfm2CbConfig(**stock.config.to_dict() | {"model_type": "lfm2_cb"})).eval()
    model.load_state_dict(stock.state_dict(), strict=True)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, atol=1e-5, rtol=0)
    clone = Lfm2CbForCausalLM(model.config).eval()
    clone.load_state_dict(model.state_dict(), strict=True)  # and our own names
    torch.testing.assert_close(clone(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "old, new",
    [
        ({"full_attn_idxs": [1]}, {"layer_types": ["conv", "full_attention", "conv"]}),
        ({"block_ff_dim": 48}, {"intermediate_size": 48}),
        ({"tie_embedding": False}, {"tie_word_embeddings": False}),
        ({"rope_theta": 5000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_old_spellings_of_the_config(tmp_path, old, new):
    base = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    base |= {"num_key_value_heads": 2, "intermediate_size": 64, "block_multiple_of": 8, "layer_types": None}
    base |= {"full_attn_idxs": [0, 2], "model_type": "lfm2"}
    if "layer_types" in new:
        base.pop("full_attn_idxs")
    (tmp_path / "config.json").write_text(json.dumps(base | old))
    ours_config, stock_config = Lfm2CbConfig.from_pretrained(tmp_path), Lfm2Config.from_pretrained(tmp_path)
    for name, value in new.items():
        assert getattr(ours_config, name) == getattr(stock_config, name) == value
    torch.manual_seed(0)
    stock = Lfm2ForCausalLM(stock_config).eval()
    model = Lfm2CbForCausalLM(ours_config).eval()
    model.load_state_dict(stock.state_dict(), strict=True)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, atol=1e-5, rtol=0)


def test_a_stock_config_is_read_without_a_warning(tmp_path, capfd):
    from transformers.utils import logging

    random_config(1).save_pretrained(tmp_path)
    logging.set_verbosity_warning()
    try:
        config = Lfm2CbConfig.from_pretrained(tmp_path)
    finally:
        logging.set_verbosity_error()
    assert config.model_type == "lfm2_cb"
    assert "You are using a model of type" not in capfd.readouterr().err


def storage_bytes(*models) -> int:
    storages = {}
    for model in models:
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_adopting_keeps_one_copy_and_leaves_stock_usable(tmp_path):
    stock = random_stock(21)
    expected, size = stock(IDS).logits, storage_bytes(stock)
    model = adopt(stock, Lfm2CbForCausalLM).eval()
    assert storage_bytes(stock, model) == size
    torch.testing.assert_close(stock(IDS).logits, expected)
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=0)
    stock.save_pretrained(tmp_path)
    assert_same_parameters(stock, Lfm2ForCausalLM.from_pretrained(tmp_path))


def test_updates_in_place_are_seen_by_both():
    stock = random_stock(22)
    model = ours(stock)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, atol=1e-4, rtol=0)
    assert still_adopted(stock, model)
    stock.to(torch.bfloat16)
    assert not still_adopted(stock, model)


def test_what_cannot_be_adopted_is_refused_by_name():
    stock = random_stock(23)

    class Quantised(nn.Linear):
        pass

    stock.model.layers[0].feed_forward.w1 = Quantised(4, 4)
    with pytest.raises(TypeError, match=r"layers\.0\.feed_forward\.w1 is a Quantised"):
        adopt(stock, Lfm2CbForCausalLM)
