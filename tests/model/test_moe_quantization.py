"""Mixtures of experts with low-bit weights."""

import random

import pytest
import torch
from helpers import ids, random_moe, random_prompts
from safetensors.torch import save_file
from test_moe_conversion import WITH_EXPERTS
from transformers import Lfm2MoeForCausalLM, core_model_loading

from lfm2_cb import ContinuousBatchingGenerator, load_model
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.model.quantization import num_weights, quantize, weights_of
from lfm2_cb.ops.linear.quantized import QuantizedStack

EVERY_WEIGHTS = pytest.mark.parametrize("weights", ["int8", "int4"])


def assert_same_tensors(a, b) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def fused(model) -> dict[str, torch.Tensor]:
    """A model's weights as stock holds them in memory."""
    stock = Lfm2MoeForCausalLM(model.config).to(model.dtype)
    parts = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "feed_forward.w13": ("w1", "w3")}
    weights = model.state_dict()
    for name in list(weights):
        for whole, names in parts.items():
            if name.endswith(f"{whole}.weight"):
                stem = name.removesuffix(f"{whole}.weight") + whole.split(".")[0]
                targets = [f"{stem}.{part}.weight" for part in names]
                sizes = [len(stock.state_dict()[target]) for target in targets]
                weights |= dict(zip(targets, weights.pop(name).split(sizes), strict=True))
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


@EVERY_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loading_quantises_experts_and_not_the_router(tmp_path, weights, dtype):
    """From a checkpoint, a live stock model and one of ours: all the same; and again from what is saved."""
    random_moe(7, **WITH_EXPERTS).save_pretrained(tmp_path / "stock")
    full = load_model(str(tmp_path / "stock"), dtype)
    loaded = load_model(str(tmp_path / "stock"), dtype, weights=weights)
    assert weights_of(loaded) == weights and num_weights(loaded) == num_weights(full)
    assert_same_tensors(loaded, quantize(full, weights))
    if dtype == torch.float32:
        assert_same_tensors(loaded, as_lfm2_cb(random_moe(7, **WITH_EXPERTS), weights))
    plain, block = (model.model.layers[1].feed_forward for model in (full, loaded))
    assert torch.equal(block.gate.weight, plain.gate.weight) and block.gate.weight.dtype == dtype
    assert torch.equal(block.expert_bias, plain.expert_bias) and block.expert_bias.dtype == torch.float32
    for stack, weight in (
        (block.experts.gate_up_proj, plain.experts.gate_up_proj),
        (block.experts.down_proj, plain.experts.down_proj),
    ):
        error = (stack.dequantize(torch.float32) - weight.float()).abs().max() / weight.abs().max()
        assert 0 < error < {"int8": 0.02, "int4": 0.12}[weights]
    save_file({k: t.contiguous() for k, t in fused(full).items()}, tmp_path / "stock" / "model.safetensors")
    assert_same_tensors(loaded, load_model(str(tmp_path / "stock"), dtype, weights=weights))
    loaded.save_pretrained(tmp_path / "low")
    assert_same_tensors(load_model(str(tmp_path / "low")), loaded)


@EVERY_WEIGHTS
def test_answers_are_those_of_the_dequantised_model_whatever_the_schedule(weights):
    stock = random_moe(7, **WITH_EXPERTS)
    model = quantize(stock, weights)
    with torch.no_grad():
        for block in (model.model.layers[i].feed_forward for i in (1, 2)):
            x = torch.randn(9, model.config.hidden_size)
            selected = torch.rand(9, model.config.num_experts).topk(2).indices
            chosen = selected, torch.rand(9, 2)
            got = block.experts(x, *chosen)
            experts = stock.model.layers[1].feed_forward.experts.__class__(stock.config)
            experts.gate_up_proj.copy_(block.experts.gate_up_proj.dequantize(torch.float32))
            experts.down_proj.copy_(block.experts.down_proj.dequantize(torch.float32))
            experts.config = stock.config
            expected = experts(x, *chosen)
            assert (got - expected).abs().max() < 0.03 * expected.abs().max()
        assert model(ids(7)).logits.isfinite().all()
    prompts, answers = random_prompts(random.Random(2), 6, 20), []
    for options in ({}, {"max_batch_tokens": 8, "block_size": 2, "max_sequences": 3}):
        with ContinuousBatchingGenerator(model, cache_memory="4MiB", **options) as generator:
            outputs = generator.generate(prompts, max_new_tokens=8, do_sample=False, eos_token_id=None)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


@EVERY_WEIGHTS
def test_experts_are_read_one_after_another(tmp_path, weights, monkeypatch):
    """Of a layer no more than one expert's matrices are in memory in full precision."""
    random_moe(7, **WITH_EXPERTS).save_pretrained(tmp_path)
    log: list[str] = []
    read, into = core_model_loading._materialize_copy, QuantizedStack._quantize_into
    monkeypatch.setattr(core_model_loading, "_materialize_copy", lambda *a: (log.append("read"), read(*a))[1])
    monkeypatch.setattr(QuantizedStack, "_quantize_into", lambda *a: (log.append("quantised"), into(*a))[1])
    load_model(str(tmp_path), weights=weights)
    first = log.index("quantised")
    assert "quantised read quantised" in " ".join(log[first:])  # w2 after w2
    assert "read read read quantised" not in " ".join(log[first : first + 10])
