"""Stock checkpoints, state dicts and live models in; stock checkpoints out."""

import json

import pytest
import torch
import transformers
from helpers import ids, ours, random_config, random_stock, stock_greedy
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM, Lfm2Model

from lfm2_cb import Lfm2CbConfig, Lfm2CbForCausalLM, Lfm2CbModel
from lfm2_cb.model.conversion import adopt, still_adopted

IDS = ids(0, batch=2)


@pytest.fixture
def warnings_of_transformers(capfd):
    """A function: what transformers has warned of since."""
    transformers.utils.logging.set_verbosity_warning()
    yield lambda: capfd.readouterr().err
    transformers.utils.logging.set_verbosity_error()


def load(model_class, path, unexpected=(), **kwargs):
    """`from_pretrained`, which must find every weight and leave none over but those named."""
    model, info = model_class.from_pretrained(path, output_loading_info=True, **kwargs)
    assert info.pop("unexpected_keys") == set(unexpected)
    assert not any(info.values()), info
    return model


def assert_same_parameters(a: nn.Module, b: nn.Module) -> None:
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def assert_same_logits(model: nn.Module, stock: nn.Module) -> None:
    torch.testing.assert_close(model(IDS)[0], stock(IDS)[0], atol=1e-5, rtol=0)


def test_a_config_of_ours_makes_a_stock_model():
    Lfm2ForCausalLM(ours(random_stock(11)).config)
    Lfm2ForCausalLM(Lfm2CbForCausalLM(random_config(11)).config)


# Checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_stock_to_ours_to_stock_is_exact(tmp_path, dtype, tied):
    stock = random_stock(11, tie_word_embeddings=tied).to(dtype)
    stock.save_pretrained(tmp_path / "stock")
    model = load(Lfm2CbForCausalLM, tmp_path / "stock", dtype="auto")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path / "ours")
    back = load(Lfm2ForCausalLM, tmp_path / "ours", dtype="auto")
    assert_same_parameters(stock, back)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == (
        load_file(tmp_path / "stock" / "model.safetensors").keys()
    )
    again = load(AutoModelForCausalLM, tmp_path / "ours", dtype="auto")
    assert type(again) is Lfm2CbForCausalLM
    assert_same_parameters(model, again)


@pytest.mark.parametrize("seed", range(20))
def test_every_config_survives_the_round_trip(tmp_path, seed):
    stock = random_stock(seed)
    stock.save_pretrained(tmp_path / "stock")
    model = load(Lfm2CbForCausalLM, tmp_path / "stock")
    assert_same_logits(model, stock)
    model.save_pretrained(tmp_path / "ours")
    back = load(Lfm2ForCausalLM, tmp_path / "ours")
    assert_same_parameters(stock, back)
    assert back.config.to_diff_dict() == stock.config.to_diff_dict() | {"architectures": ["Lfm2CbForCausalLM"]}


def test_sharded_checkpoints_in_and_out(tmp_path):
    stock = random_stock(12)
    stock.save_pretrained(tmp_path / "stock", max_shard_size="20KB")
    model = load(Lfm2CbForCausalLM, tmp_path / "stock")
    assert_same_logits(model, stock)
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    for saved in ("stock", "ours"):
        assert len(list((tmp_path / saved).glob("*.safetensors"))) > 2
    assert_same_parameters(stock, load(Lfm2ForCausalLM, tmp_path / "ours"))


def test_models_that_were_never_loaded_save_in_the_stock_layout_too(tmp_path):
    stock = random_stock(6)
    ours(stock).save_pretrained(tmp_path / "adopted")
    assert_same_parameters(stock, load(Lfm2ForCausalLM, tmp_path / "adopted"))
    made = Lfm2CbForCausalLM(ours(stock).config)
    made.save_pretrained(tmp_path / "made", state_dict=made.state_dict())  # as Trainer saves
    assert_same_logits(load(Lfm2ForCausalLM, tmp_path / "made"), made.eval())


def test_an_old_pickled_checkpoint_loads(tmp_path):
    stock = random_stock(3)
    stock.config.save_pretrained(tmp_path)
    torch.save(stock.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_logits(load(Lfm2CbForCausalLM, tmp_path), stock)


def test_the_base_model_loads_and_saves_alone(tmp_path):
    stock = random_stock(13)  # untied
    stock.save_pretrained(tmp_path / "whole")
    model = load(Lfm2CbModel, tmp_path / "whole", unexpected=["lm_head.weight"])
    assert_same_logits(model, stock.model)
    model.save_pretrained(tmp_path / "base")
    assert_same_parameters(stock.model, load(Lfm2Model, tmp_path / "base"))
    assert_same_parameters(model, load(Lfm2CbModel, tmp_path / "base"))


def test_a_head_goes_on_a_base_model_that_was_saved_alone(tmp_path):
    stock = random_stock(14, tie_word_embeddings=True)
    stock.model.save_pretrained(tmp_path)
    assert_same_logits(load(Lfm2CbForCausalLM, tmp_path), stock)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_stocks_base_model_reads_what_we_save(tmp_path, tied):
    """While lfm2_cb is imported: our conversions must not be applied to a stock class that reads our config."""
    stock = random_stock(13, tie_word_embeddings=tied)
    ours(stock).save_pretrained(tmp_path)
    base = load(Lfm2Model, tmp_path, unexpected=[] if tied else ["lm_head.weight"])
    assert_same_parameters(stock.model, base)


OFFLOADED = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.embedding_norm", "lm_head"], "cpu")
OFFLOADED |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk", "model.layers.3": "cpu"}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("device_map", ["cpu", "auto", OFFLOADED, {"": "disk"}], ids=["cpu", "auto", "some", "all"])
def test_placed_by_a_device_map(tmp_path, device_map):
    """On disk as well; the one attention layer and a conv layer are offloaded."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    stock = random_stock(14, num_hidden_layers=4, layer_types=kinds, conv_bias=True)
    stock.save_pretrained(tmp_path / "m")
    model = load(Lfm2CbForCausalLM, tmp_path / "m", device_map=device_map, offload_folder=str(tmp_path / "offload"))
    on_disk = [name for name, p in model.named_parameters() if p.is_meta]
    assert bool(on_disk) == (not isinstance(device_map, str))
    assert_same_logits(model, stock)
    prompt = IDS[:1]
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert answer[0, 9:].tolist() == stock_greedy(stock, prompt[0].tolist(), 5)
    model.save_pretrained(tmp_path / "saved")
    assert_same_parameters(stock, load(Lfm2ForCausalLM, tmp_path / "saved"))


# State dicts


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("seed", [1, 4, 6])
def test_a_stock_state_dict_loads(seed, assign):
    stock = random_stock(seed)
    model = Lfm2CbForCausalLM(Lfm2CbConfig(**stock.config.to_dict() | {"model_type": "lfm2_cb"})).eval()
    weights = stock.state_dict()
    names = list(weights)
    model.load_state_dict(weights, strict=True, assign=assign)
    assert list(weights) == names
    assert_same_logits(model, stock)
    clone = Lfm2CbForCausalLM(model.config).eval()
    clone.load_state_dict(model.state_dict(), strict=True)  # and our own names
    assert torch.equal(clone(IDS).logits, model(IDS).logits)


def test_a_state_dict_with_a_part_missing_is_refused():
    stock = random_stock(6)
    weights = stock.state_dict()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing .*layers\.1\.self_attn\.qkv_proj"):
        ours(random_stock(6)).load_state_dict(weights, strict=True)


# Configs


BASE = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "model_type": "lfm2"}
BASE |= {"num_key_value_heads": 2, "intermediate_size": 64, "block_multiple_of": 8, "full_attn_idxs": [0, 2]}
BASE |= {"max_position_embeddings": 64, "initializer_range": 0.2}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "old, new",
    [
        ({"full_attn_idxs": [1]}, {"layer_types": ["conv", "full_attention", "conv"]}),
        ({"full_attn_idxs": None}, {"layer_types": ["full_attention"] * 3, "full_attn_idxs": [0, 1, 2]}),
        ({"block_ff_dim": 48}, {"intermediate_size": 48}),
        ({"block_ffn_dim_multiplier": 1.3}, {"intermediate_size": 64}),
        ({"tie_embedding": False}, {"tie_word_embeddings": False}),
        ({"rope_theta": 5000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        (
            {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"type": "linear", "rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
        ),
        (
            {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, **LLAMA3}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
    ],
    ids=lambda fields: " ".join(fields),
)
def test_old_spellings_of_the_config(tmp_path, warnings_of_transformers, old, new):
    (tmp_path / "config.json").write_text(json.dumps(BASE | old))
    config = Lfm2CbConfig.from_pretrained(tmp_path)
    assert "You are using a model of type" not in warnings_of_transformers()
    stock_config = Lfm2Config.from_pretrained(tmp_path)
    assert config.model_type == "lfm2_cb"
    for name, value in new.items():
        assert getattr(config, name) == getattr(stock_config, name) == value
    torch.manual_seed(0)
    stock = Lfm2ForCausalLM(stock_config).eval()
    model = Lfm2CbForCausalLM(config).eval()
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_same_logits(model, stock)


def test_a_stock_checkpoint_loads_without_a_warning(tmp_path, warnings_of_transformers):
    stock = random_stock(1)
    stock.save_pretrained(tmp_path)
    warnings_of_transformers()
    config = Lfm2CbConfig.from_pretrained(tmp_path)
    for kwargs in ({}, {"config": config}):
        assert_same_logits(Lfm2CbForCausalLM.from_pretrained(tmp_path, **kwargs), stock)
    assert warnings_of_transformers() == ""


# Live models


def storage_bytes(*models: nn.Module) -> int:
    """Bytes that the models' parameters and buffers keep in memory, shared ones counted once."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [3, 13, 18])  # tied with biases; untied; head_dim stated
def test_adopting_keeps_one_copy_and_leaves_stock_usable(tmp_path, seed, dtype):
    stock = random_stock(seed).to(dtype)
    expected, size = stock(IDS).logits, storage_bytes(stock)
    model = adopt(stock, Lfm2CbForCausalLM)
    assert storage_bytes(stock, model) == size
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(stock(IDS).logits, expected)
    if dtype == torch.float32:
        assert_same_logits(model, stock)
    stock.save_pretrained(tmp_path)
    assert_same_parameters(stock, load(Lfm2ForCausalLM, tmp_path, dtype=dtype))


def test_adoption_takes_over_what_hangs_on_the_model():
    stock = random_stock(7).train()
    stock.set_attn_implementation("eager")
    stock.generation_config.max_new_tokens = 3
    stock.model.embed_tokens.weight.requires_grad_(False)
    model = adopt(stock, Lfm2CbForCausalLM)
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == "eager" and model.generation_config is stock.generation_config
    assert (
        not model.model.embed_tokens.weight.requires_grad and model.lm_head.weight is model.model.embed_tokens.weight
    )
    assert model.model.layers[0].self_attn.qkv_proj.weight.requires_grad


@pytest.mark.parametrize("seed", [6, 10])
def test_updates_in_place_are_seen_by_both(seed):
    stock = random_stock(seed)
    model = ours(stock)
    before = stock(IDS).logits
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(1.1)
    assert_same_logits(model, stock)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1.1)
    assert_same_logits(model, stock)
    torch.testing.assert_close(stock(IDS).logits, before, atol=1e-4, rtol=0)
    stock.load_state_dict({name: 0.9 * weight for name, weight in stock.state_dict().items()})
    assert_same_logits(model, stock)
    assert (stock(IDS).logits - before).abs().max() > 1e-2 and still_adopted(stock, model)


def test_adopting_again_shares_the_weights_with_the_first_adoption():
    stock = random_stock(6)
    first, size = ours(stock), storage_bytes(stock)
    second = ours(stock)
    assert still_adopted(stock, second) and still_adopted(stock, first)
    assert storage_bytes(stock, first, second) == size


class Wrapper(nn.Module):
    """What an adapter library puts around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Quantised(nn.Linear):
    """What a quantisation library puts in a linear's place."""


class Int4(torch.Tensor):
    """What others put in a weight's place."""


def fresh(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def replace(stock: nn.Module, path: str, make) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(stock.get_submodule(parent), leaf, make(getattr(stock.get_submodule(parent), leaf)))


MOVED = {
    "to another dtype": lambda stock: stock.to(torch.bfloat16),
    "another q": lambda stock: replace(stock, "model.layers.1.self_attn.q_proj.weight", fresh),
    "another v": lambda stock: replace(stock, "model.layers.1.self_attn.v_proj.weight", fresh),
    "another w3": lambda stock: replace(stock, "model.layers.0.feed_forward.w3.weight", fresh),
    "another norm": lambda stock: replace(stock, "model.layers.0.ffn_norm.weight", fresh),
    "q wrapped": lambda stock: replace(stock, "model.layers.1.self_attn.q_proj", Wrapper),
    "out wrapped": lambda stock: replace(stock, "model.layers.0.conv.out_proj", Wrapper),
    "head untied": lambda stock: replace(stock, "lm_head.weight", fresh),
    "new embeddings": lambda stock: stock.resize_token_embeddings(300),
}


@pytest.mark.parametrize("change", MOVED.values(), ids=MOVED.keys())
def test_weights_that_moved_away_are_noticed(change):
    stock = random_stock(10, layer_types=["conv", "full_attention"], num_hidden_layers=2)
    model = ours(stock)
    assert still_adopted(stock, model)
    change(stock)
    assert not still_adopted(stock, model)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.feed_forward.w1",
        "model.layers.1.feed_forward.w2",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.out_proj",
        "model.layers.0.conv.in_proj",
        "model.layers.0.conv.conv",
        "model.embed_tokens",
        "lm_head",
    ],
)
@pytest.mark.parametrize("make", [Wrapper, lambda layer: Quantised(4, 4)], ids=["adapter", "quantised"])
def test_what_cannot_be_adopted_is_refused_by_name(path, make):
    stock = random_stock(10, layer_types=["conv", "full_attention"], num_hidden_layers=2)
    replace(stock, path, make)
    places = [p.data_ptr() for p in stock.parameters()]
    with pytest.raises(TypeError, match=rf"^{path} is a (Wrapper|Quantised), not a plain"):
        adopt(stock, Lfm2CbForCausalLM)
    assert [p.data_ptr() for p in stock.parameters()] == places  # refused before anything was moved


def test_weights_that_are_no_plain_tensors_are_refused_by_name():
    stock = random_stock(10)
    replace(stock, "model.layers.2.feed_forward.w2.weight", lambda p: nn.Parameter(p.detach().as_subclass(Int4)))
    with pytest.raises(TypeError, match=r"layers\.2\.feed_forward\.w2\.weight is a Int4"):
        adopt(stock, Lfm2CbForCausalLM)


def test_an_offloaded_model_is_refused_by_name(tmp_path):
    random_stock(12).save_pretrained(tmp_path)
    stock = Lfm2ForCausalLM.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=str(tmp_path / "o"))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is offloaded"):
        adopt(stock, Lfm2CbForCausalLM)
