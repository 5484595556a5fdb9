"""Mixtures of experts: stock checkpoints, state dicts and live models in; stock checkpoints out."""

import json

import pytest
import torch
import transformers
from helpers import ids, ours, random_moe, random_stock
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2MoeForCausalLM, Lfm2MoeModel

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator, Lfm2CbForCausalLM, Lfm2CbMoeForCausalLM, load_model
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.model.conversion import still_adopted
from lfm2_cb.model.modeling import Lfm2CbMoeModel

IDS = ids(0, batch=2)
WITH_EXPERTS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
WITH_EXPERTS |= {"use_expert_bias": True}


def load(model_class, path, **kwargs):
    """`from_pretrained`, which must find every weight and leave none over."""
    model, info = model_class.from_pretrained(path, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model


def assert_same_tensors(a: nn.Module, b: nn.Module) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def assert_same_logits(model: nn.Module, stock: nn.Module) -> None:
    torch.testing.assert_close(model(IDS)[0], stock(IDS)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(15))
def test_stock_to_ours_to_stock_is_exact(tmp_path, seed):
    stock = random_moe(seed)
    stock.save_pretrained(tmp_path / "stock")
    model = load_model(str(tmp_path / "stock"))
    assert type(model) is Lfm2CbMoeForCausalLM
    assert_same_logits(model, stock)
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    assert_same_tensors(stock, load(Lfm2MoeForCausalLM, tmp_path / "ours"))
    assert_same_tensors(model, load(Lfm2CbMoeForCausalLM, tmp_path / "ours"))
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "stock" / "config.json").read_text()


@pytest.mark.parametrize("model_class", [Lfm2CbMoeForCausalLM, Lfm2MoeForCausalLM])
def test_the_routers_bias_stays_in_fp32(tmp_path, model_class):
    random_moe(4, **WITH_EXPERTS).save_pretrained(tmp_path / "fp32")
    low = load(model_class, tmp_path / "fp32", dtype=torch.bfloat16)
    low.save_pretrained(tmp_path / "bf16")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")
    biases = {name for name in stored if name.endswith("expert_bias")}
    assert len(biases) == 2
    for model in (load_model(str(tmp_path / "fp32"), "bfloat16"), load_model(str(tmp_path / "bf16"))):
        block = model.model.layers[1].feed_forward
        assert block.expert_bias.dtype == torch.float32 and block.gate.weight.dtype == torch.bfloat16
        for name in biases:
            assert torch.equal(model.state_dict()[name], stored[name]) and stored[name].dtype == torch.float32
    model = load_model(str(tmp_path / "fp32")).to(torch.bfloat16)
    assert torch.equal(model.state_dict()[min(biases)], stored[min(biases)]) and model.dtype == torch.bfloat16


def test_fused_experts_load_from_a_checkpoint_and_a_state_dict(tmp_path):
    stock = random_moe(4, **WITH_EXPERTS | {"tie_word_embeddings": False})
    stock.config.save_pretrained(tmp_path)
    save_file({name: t.contiguous() for name, t in stock.state_dict().items()}, tmp_path / "model.safetensors")
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert_same_logits(load(Lfm2CbMoeForCausalLM, tmp_path), stock)
    model = Lfm2CbMoeForCausalLM(stock.config).eval()
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_same_logits(model, stock)


def test_the_base_model_loads_and_saves_alone(tmp_path):
    stock = random_moe(4, **WITH_EXPERTS | {"tie_word_embeddings": True})
    stock.save_pretrained(tmp_path / "whole")
    model = load(Lfm2CbMoeModel, tmp_path / "whole")
    assert_same_logits(model, stock.model)
    model.save_pretrained(tmp_path / "base")
    assert_same_tensors(stock.model, load(Lfm2MoeModel, tmp_path / "base"))


def test_new_models_have_experts_of_the_usual_scale():
    model = Lfm2CbMoeForCausalLM(random_moe(4, **WITH_EXPERTS, hidden_size=32, num_attention_heads=4).config)
    block = model.model.layers[1].feed_forward
    for weight in (block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight):
        assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)
    assert not block.expert_bias.any()


def test_a_config_of_a_live_stock_model_makes_ours():
    """Which names how stock computes experts, and goes on doing so."""
    stock = random_moe(4, **WITH_EXPERTS)
    stock.set_experts_implementation("grouped_mm")
    model = Lfm2CbMoeForCausalLM(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    assert stock.config._experts_implementation == "grouped_mm"
    assert_same_logits(model, stock)
    model.set_experts_implementation("batched_mm")
    assert_same_logits(model, stock)


def test_the_dense_class_refuses_experts_by_name(tmp_path):
    random_moe(4).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="Lfm2CbMoeForCausalLM"):
        Lfm2CbForCausalLM.from_pretrained(tmp_path)


def test_enable_makes_stock_checkpoints_ours_and_disable_puts_it_back(tmp_path):
    stock = random_moe(4, **WITH_EXPERTS)
    stock.save_pretrained(tmp_path / "stock")
    lfm2_cb.enable()
    try:
        model = load(AutoModelForCausalLM, tmp_path / "stock")
        assert type(model) is transformers.Lfm2MoeForCausalLM is Lfm2CbMoeForCausalLM
        assert_same_logits(model, stock)
        outputs = stock.generate_batch([[5, 6, 7]], max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert len(outputs) == 1
    finally:
        lfm2_cb.disable()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "stock")) is Lfm2MoeForCausalLM
    assert transformers.Lfm2MoeForCausalLM is Lfm2MoeForCausalLM is not Lfm2CbMoeForCausalLM
    model.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == ["Lfm2MoeForCausalLM"]


# Live models


def storage_bytes(*models: nn.Module) -> int:
    """Bytes that the models' parameters and buffers keep in memory, shared ones counted once."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adopting_keeps_one_copy(dtype):
    stock = random_moe(7, **WITH_EXPERTS).to(dtype)
    size = storage_bytes(stock)
    model = as_lfm2_cb(stock)
    assert as_lfm2_cb(stock) is model and storage_bytes(stock, model) == size
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    experts = [m.model.layers[1].feed_forward.experts for m in (stock, model)]
    assert experts[0].gate_up_proj is experts[1].gate_up_proj and experts[0].down_proj is experts[1].down_proj
    if dtype == torch.float32:
        assert_same_logits(model, stock)


def replace_bias(stock: nn.Module) -> None:
    block = stock.model.layers[1].feed_forward
    block.expert_bias = block.expert_bias.clone()


def replace_experts(stock: nn.Module) -> None:
    experts = stock.model.layers[1].feed_forward.experts
    experts.down_proj = nn.Parameter(-experts.down_proj.detach())


@pytest.mark.parametrize("change", [replace_bias, replace_experts])
def test_weights_that_moved_away_are_noticed(change):
    stock = random_moe(7, **WITH_EXPERTS)
    model = ours(stock)
    assert still_adopted(stock, model)
    change(stock)
    assert not still_adopted(stock, model)


def test_changes_of_a_live_model_are_followed():
    stock = random_moe(7, **WITH_EXPERTS)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
        before = generator.generate([[5, 6, 7]], **options)[0].token_ids
        replace_experts(stock)
        stock.model.layers[2].feed_forward.expert_bias = -stock.model.layers[2].feed_forward.expert_bias
        after = generator.generate([[5, 6, 7]], **options)[0].token_ids
    assert before != after == stock.generate(torch.tensor([[5, 6, 7]]), **options)[0, 3:].tolist()


class Quantised(nn.Module):
    """What a quantisation library puts in a layer's place."""


@pytest.mark.parametrize("path", ["experts", "gate"])
def test_what_cannot_be_adopted_is_refused_by_name(path):
    stock = random_moe(7, **WITH_EXPERTS)
    setattr(stock.model.layers[1].feed_forward, path, Quantised())
    with pytest.raises(TypeError, match=rf"^model\.layers\.1\.feed_forward\.{path} is a Quantised"):
        as_lfm2_cb(stock)
    hooked = random_moe(7, **WITH_EXPERTS)
    getattr(hooked.model.layers[1].feed_forward, path).register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=rf"^model\.layers\.1\.feed_forward\.{path} has a forward hook"):
        as_lfm2_cb(hooked)


def test_dense_models_know_nothing_of_experts():
    assert not any("expert" in name for name in ours(random_stock(1)).state_dict())
