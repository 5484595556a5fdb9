"""Models with low-bit weights: loading, saving, refusing, and what they say."""

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import demo_prompts, ours, random_prompts, random_stock
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2ForCausalLM, pipeline

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator, Lfm2CbForCausalLM
from lfm2_cb.cli.main import main
from lfm2_cb.loading import as_lfm2_cb, load_model
from lfm2_cb.model.quantization import Lfm2CbQuantizationConfig, quantize
from lfm2_cb.ops.linear.int8 import quantize_inputs
from lfm2_cb.ops.linear.quantized import QuantizedEmbedding, QuantizedLinear
from lfm2_cb.scoring import Scorer

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
WEIGHTS = ["int8", "int4"]


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


@torch.no_grad()
def loss(model, tokenizer, count=40):
    """Mean negative log-likelihood of the shipped prompts, in nats a token."""
    total = tokens = 0
    for prompt in demo_prompts(count):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model(ids).logits[0, :-1]
        total += nn.functional.cross_entropy(out, ids[0, 1:], reduction="sum").item()
        tokens += ids.shape[1] - 1
    return total / tokens


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# What they say


@pytest.mark.parametrize("weights, limit", [("int8", 0.01), ("int4", 0.05)])
def test_perplexity_stays_near_full_precision(weights, limit, demo_stock, demo_tokenizer):
    before = loss(demo_stock, demo_tokenizer)
    after = loss(quantize(demo_stock, weights), demo_tokenizer)
    assert math.exp(after - before) - 1 < limit
    assert after != before


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", range(6))
def test_every_layer_is_what_its_matrices_say(seed, weights):
    """Beside a stock model whose matrices, and inputs, are replaced by what the quantised ones stand for."""
    stock = random_stock(seed)
    model = quantize(stock, weights)
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "w13": ["w1", "w3"]}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
                parent, _, leaf = name.rpartition(".")
                names = [f"{parent}.{part}".lstrip(".") for part in parts.get(leaf, [leaf])]
                targets = [stock.get_submodule(n).weight for n in names]
                whole = module.dequantize(torch.float32).split([t.shape[0] for t in targets])
                for target, piece in zip(targets, whole, strict=True):
                    target.copy_(piece)
                if isinstance(module, QuantizedLinear) and module.bits == 8:
                    for n in names:
                        stock.get_submodule(n).register_forward_pre_hook(lambda _, args: (quantize_inputs(args[0]),))
    expected = logits(stock)
    # An input that lies between two of 8 bits may be rounded either way, as the last bits of what comes before say.
    assert (logits(model) - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tokens_do_not_depend_on_batch_mates(weights):
    model = quantize(random_stock(4), weights)
    prompts = random_prompts(random.Random(5), 9, 40)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    with ContinuousBatchingGenerator(model, cache_memory="8MiB", max_batch_tokens=37) as generator:
        together = [output.token_ids for output in generator.generate(prompts, **options)]
    with ContinuousBatchingGenerator(model, cache_memory="8MiB", prefix_caching=False) as generator:
        alone = [generator.generate([prompt], **options)[0].token_ids for prompt in prompts]
    assert together == alone
    stock_way = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    assert together == stock_way


def test_the_torch_reference_says_the_same(demo_stock, demo_tokenizer):
    model = quantize(demo_stock, "int8")
    texts = {}
    for kernels in ("auto", "torch"):
        with ContinuousBatchingGenerator(model, demo_tokenizer, kernels=kernels, cache_memory="16MiB") as generator:
            texts[kernels] = [o.text for o in generator.generate(demo_prompts(6), do_sample=False, max_new_tokens=12)]
    assert texts["auto"] == texts["torch"]


# Ways to get one


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_all_ways_give_the_same_model(tmp_path, weights, tied):
    stock = random_stock(11, tie_word_embeddings=tied, conv_bias=True)
    stock.save_pretrained(tmp_path)
    expected = quantize(stock, weights)
    assert (expected.lm_head.weight is expected.model.embed_tokens.weight) == tied
    ways = [
        quantize(ours(random_stock(11, tie_word_embeddings=tied, conv_bias=True)), weights),
        load_model(str(tmp_path), torch.float32, weights=weights),
        AutoModelForCausalLM.from_pretrained(
            tmp_path,
            config=lfm2_cb.Lfm2CbConfig.from_pretrained(tmp_path),
            quantization_config=Lfm2CbQuantizationConfig(weights),
        ),
        ContinuousBatchingGenerator(stock, weights=weights, cache_memory="4MiB").model,
    ]
    for model in ways:
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert (model.lm_head.weight_scale is model.model.embed_tokens.weight_scale) == tied
        assert_same(parameters(model), parameters(expected))
        assert model.dtype == torch.float32 and not model.model.embed_tokens.weight_scale.requires_grad
        assert torch.equal(logits(model), logits(expected))


def test_a_live_model_is_left_as_it_is():
    stock = random_stock(2)
    before, places = parameters(stock), [p.data_ptr() for p in stock.parameters()]
    model = quantize(stock, "int8")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert_same(parameters(stock), before)
    assert places == [p.data_ptr() for p in stock.parameters()]
    assert not hasattr(stock.config, "quantization_config")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "converted"])
def test_saved_and_reloaded_it_is_the_same(tmp_path, weights, loaded, dtype):
    random_stock(8).save_pretrained(tmp_path / "stock")
    stock = Lfm2ForCausalLM.from_pretrained(tmp_path / "stock", dtype=dtype)
    model = load_model(str(tmp_path / "stock"), dtype, weights=weights) if loaded else quantize(stock, weights)
    model.save_pretrained(tmp_path / "low", max_shard_size="4KB")
    assert json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "lfm2_cb",
        "weights": weights,
    }
    files = [load_file(path) for path in (tmp_path / "low").glob("*.safetensors")]
    assert len(files) > 1 and any(t.dtype in (torch.int8, torch.uint8) for f in files for t in f.values())
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype="auto"),
        load_model(str(tmp_path / "low"), dtype, weights=weights),
        load_model(str(tmp_path / "low"), dtype),
    ):
        assert type(again) is Lfm2CbForCausalLM
        assert_same(parameters(again), parameters(model))
        assert torch.equal(logits(again), logits(model))


def test_the_command_takes_them(capsys):
    size = ["--cache-memory", "16MiB", "--dtype", "float32"]
    assert main(["info", lfm2_cb.demo_model_path(), "--weights", "int4", *size]) == 0
    assert "4.7 M parameters" in (out := capsys.readouterr().out) and "int4" in out
    assert main(["info", lfm2_cb.demo_model_path(), *size]) == 0
    assert "4.7 M parameters" in (out := capsys.readouterr().out) and "full precision" in out


def test_another_dtype_says_the_same_to_its_rounding(tmp_path):
    quantize(random_stock(8), "int4").save_pretrained(tmp_path)
    full, half = load_model(str(tmp_path), torch.float32), load_model(str(tmp_path), torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for a, b in zip(full.modules(), half.modules(), strict=True):
        if isinstance(a, QuantizedLinear):
            assert torch.equal(a.dequantize(torch.float32), b.dequantize(torch.float32))


def test_loading_never_holds_the_full_weights(tmp_path):
    """Growth of a fresh process's peak memory while it quantises what it loads."""
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 3000}
    layers = {"num_hidden_layers": 6, "layer_types": ["full_attention", "conv"] * 3}
    stock = random_stock(0, vocab_size=4000, tie_word_embeddings=True, **shape, **layers)
    stock.save_pretrained(tmp_path)
    code = (
        "import re, sys, torch, lfm2_cb\nfrom lfm2_cb.loading import load_model\n"
        "load_model(lfm2_cb.demo_model_path(), torch.float32, weights='int8')\n"  # what is imported only then
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "model = load_model(sys.argv[1], torch.float32, weights='int8')\n"
        "print(peak() - before)"
    )
    # What is freed goes back to the system at once, so that the peak is what was held.
    command, env = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    grown = int(subprocess.check_output(command, env=env).split()[-1]) * 1024
    full = sum(p.numel() * p.itemsize for p in stock.parameters())
    low = sum(p.numel() * p.itemsize for p in quantize(stock, "int8").parameters())
    assert low < 0.26 * full
    assert low < grown < 0.6 * full


# What is refused


def test_weights_that_are_none_of_ours_are_refused_by_name(demo_stock):
    for act in (
        lambda: load_model(lfm2_cb.demo_model_path(), weights="int2"),
        lambda: as_lfm2_cb(demo_stock, "int2"),
        lambda: ContinuousBatchingGenerator(demo_stock, weights="int2"),
    ):
        with pytest.raises(ValueError, match="'int8', 'int4' or None, got 'int2'"):
            act()


def test_quantising_twice_is_refused(tmp_path):
    model = quantize(random_stock(1), "int8")
    model.save_pretrained(tmp_path)
    assert as_lfm2_cb(model, "int8") is model and as_lfm2_cb(model) is model
    with pytest.raises(ValueError, match="already has int8"):
        as_lfm2_cb(model, "int4")
    with pytest.raises(ValueError, match="already has int8"):
        load_model(str(tmp_path), weights="int4")


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "gptq"])
def test_a_checkpoint_that_others_quantised_is_refused_by_name(tmp_path, method):
    random_stock(1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    for weights in (None, "int8"):
        with pytest.raises(TypeError, match=method):
            load_model(str(tmp_path), weights=weights)


class Subclass(torch.Tensor):
    """Stands where torchao's tensors do: plain modules whose parameters are of another class."""


def test_a_live_model_with_tensors_of_others_is_refused_by_name():
    for model in (random_stock(1), ours(random_stock(1))):
        name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("feed_forward.w2"))
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(Subclass))
        for weights in (None, "int8"):
            with pytest.raises(TypeError, match=rf"{name}.*Subclass"):
                as_lfm2_cb(model, weights)


def test_a_live_model_with_layers_of_others_is_refused_by_name():
    class Linear8bitLt(nn.Linear):
        pass

    stock = random_stock(1)
    width = stock.config.hidden_size
    stock.model.layers[0].feed_forward.w2 = Linear8bitLt(width, width)
    for weights in (None, "int8"):
        with pytest.raises(TypeError, match="Linear8bitLt"):
            as_lfm2_cb(stock, weights)


def test_our_layers_swapped_for_others_are_refused_by_name():
    """As bitsandbytes does by hand: a linear of its own, whose parameter is of its own class."""

    class Int8Params(nn.Parameter):
        pass

    model = ours(random_stock(1))
    layer = next(m for n, m in model.named_modules() if n.endswith("feed_forward.w2"))
    layer.weight = Int8Params(layer.weight.data)
    for weights in (None, "int8"):
        with pytest.raises(TypeError, match=r"feed_forward.w2.weight is a Int8Params.*weights="):
            as_lfm2_cb(model, weights)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_torchs_dynamic_quantisation_is_refused_by_name():
    model = ours(random_stock(1))
    name = next(n for n, _ in model.named_modules() if n.endswith("feed_forward.w2"))
    model.set_submodule(name, torch.ao.nn.quantized.dynamic.Linear(8, 8))
    for weights in (None, "int8"):
        with pytest.raises(TypeError, match=r"feed_forward\.w2 is a torch\.ao"):
            as_lfm2_cb(model, weights)


def test_adapters_in_our_model_are_not_left_out_in_silence():
    model = ours(random_stock(1))
    layer = next(m for n, m in model.named_modules() if n.endswith("feed_forward"))
    layer.lora_A = nn.Linear(3, 3)
    assert as_lfm2_cb(model) is model
    with pytest.raises(TypeError, match=r"lora_A.* merge adapters"):
        as_lfm2_cb(model, "int8")


def faces(model):
    """Every way to hand over a live model."""
    yield lambda: ContinuousBatchingGenerator(model)
    yield lambda: ContinuousBatchingGenerator(model, weights="int8")
    yield lambda: Scorer(model)
    if isinstance(model, lfm2_cb.Lfm2CbForCausalLM):
        yield lambda: model.generate_batch([[1, 5, 9]])
    tokenizer = AutoTokenizer.from_pretrained(lfm2_cb.demo_model_path())
    yield lambda: pipeline("text-generation", model=model, tokenizer=tokenizer, generator="cb")


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("model_class", [Lfm2ForCausalLM, lfm2_cb.Lfm2CbForCausalLM])
def test_what_torchao_quantised_is_refused_by_name(model_class, loaded, tmp_path):
    """The real library, where it is installed: on a live model, while loading, and saved."""
    torchao = pytest.importorskip("torchao.quantization")
    config, path = torchao.Int8WeightOnlyConfig(), lfm2_cb.demo_model_path()
    how = {"quantization_config": transformers.TorchAoConfig(config)} if loaded else {}
    model = model_class.from_pretrained(path, dtype=torch.float32, **how)
    if not loaded:
        torchao.quantize_(model, config)
    for face in faces(model):
        with pytest.raises(
            TypeError, match="'torchao', which lfm2_cb" if loaded else "is a Int8Tensor, which lfm2_cb"
        ):
            face()
    if loaded and model_class is Lfm2ForCausalLM:
        model.save_pretrained(tmp_path)
        with pytest.raises(TypeError, match="checkpoint is quantised by 'torchao'"):
            ContinuousBatchingGenerator(str(tmp_path))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("model_class", [Lfm2ForCausalLM, lfm2_cb.Lfm2CbForCausalLM])
def test_what_bitsandbytes_quantised_is_refused_by_name(model_class, bits):
    """The real library, where it is installed, through transformers and by hand."""
    bnb = pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    path = lfm2_cb.demo_model_path()
    model = model_class.from_pretrained(path, dtype=torch.float32, quantization_config=config)
    for face in faces(model):
        with pytest.raises(TypeError, match="'bitsandbytes', which lfm2_cb"):
            face()
    model = model_class.from_pretrained(path, dtype=torch.float32)
    kind = bnb.nn.Linear8bitLt if bits == 8 else bnb.nn.Linear4bit
    model.model.layers[0].feed_forward.w2 = kind(8, 8, bias=False)
    for face in faces(model):
        with pytest.raises(TypeError, match=r"w2\.weight is a (Int8Params|Params4bit), which lfm2_cb"):
            face()


def test_gguf_is_refused_by_name_with_a_way_out(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(TypeError, match=r"GGUF.*gguf_file"):
            ContinuousBatchingGenerator(str(path))


def test_the_stock_class_is_refused_by_name(tmp_path):
    random_stock(1).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="Lfm2ForCausalLM"):
        Lfm2ForCausalLM.from_pretrained(tmp_path, quantization_config=Lfm2CbQuantizationConfig("int8"))


def test_an_unknown_config_entry_is_refused():
    with pytest.raises(ValueError, match="quant_method"):
        Lfm2CbQuantizationConfig("int8", quant_method="other")
    with pytest.raises(TypeError):
        Lfm2CbQuantizationConfig("int8", group_size=64)
