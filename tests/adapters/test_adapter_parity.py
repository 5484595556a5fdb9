"""fp32 greedy tokens are those of `PeftModel.generate()` with the adapter, a prompt at a time, whatever the batch."""

import copy
import random
from math import inf

import peft
import pytest
import torch
from helpers import random_moe, random_prompts, random_stock
from making import ALL, Peft, save_adapter

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.adapters.peft_config import AdapterError
from lfm2_cb.adapters.pool import AdaptedKernels
from lfm2_cb.adapters.projections import base_weight, projections_of
from lfm2_cb.engine import sharing
from lfm2_cb.ops.kernel_set import KernelSet, mlp
from lfm2_cb.ops.linear.dense import PackedLinear
from lfm2_cb.ops.linear.quantized import QuantizedLinear
from lfm2_cb.ops.linear.table import DENSE, MLP_TABLE, SWIGLU_TABLE
from lfm2_cb.ops.native.library import load
from lfm2_cb.ops.pointwise import swiglu
from lfm2_cb.scheduling.cache_manager import CacheManager

GREEDY = {"do_sample": False, "eos_token_id": None}


def varied(rng, index):
    """Fields of an adapter's configuration, of another kind for each index."""
    kinds = [
        {"r": rng.choice([1, 2, 3, 7, 8, 16, 17, 64])},
        {"r": rng.choice([1, 4, 33]), "use_rslora": True},
        {"r": rng.choice([2, 5, 16]), "use_dora": True},
        {"r": 8, "rank_pattern": {"q_proj": 3, r"layers\.1\..*w1": 16}, "alpha_pattern": {"w2": 5, "v_proj": 1}},
        {"target_modules": rng.sample(ALL, 3), "r": 6},
        {"target_modules": r".*\.layers\.[01]\..*(q_proj|in_proj|w[123])", "r": 4},
        {"r": 4, "modules_to_save": ["lm_head"]},
        {"r": 4, "lora_bias": True, "use_rslora": True, "exclude_modules": ["w3"]},
        {"r": 4, "target_modules": [*ALL, "lm_head"], "layers_to_transform": None},
        {"r": 2, "target_modules": ["w1", "q_proj", "in_proj"], "layers_to_transform": [0, 2]},
    ]
    return kinds[index % len(kinds)]


def trained_head(model):
    for name, parameter in model.named_parameters():
        if "lm_head.modules_to_save" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_adapter_in_one_ragged_batch(seed, kernels, tmp_path):
    rng, stock = (
        random.Random(seed),
        random_stock(seed, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    )
    paths = {f"a{i}": save_adapter(stock, tmp_path / str(i), i, trained_head, **varied(rng, i)) for i in range(10)}
    prompts = random_prompts(rng, 24, 40)
    asked = [rng.choice([None, *paths]) for _ in prompts]
    lengths = [rng.randint(1, 20) for _ in prompts]
    reference = Peft(stock)
    expected = [reference.greedy(paths.get(name), p, n) for name, p, n in zip(asked, prompts, lengths, strict=True)]
    options = {"kernels": kernels, "cache_memory": "4MiB", "block_size": rng.choice([3, 8]), "max_batch_tokens": 50}
    with ContinuousBatchingGenerator(stock, adapters=paths, **options) as generator:
        for _ in range(2):  # the second time from the prefix cache, and from graphs of before
            outputs = generator.generate(prompts, max_new_tokens=lengths, adapter=asked, **GREEDY)
            assert [o.error for o in outputs] == [None] * len(prompts)
            assert [o.token_ids for o in outputs] == expected
        generator.engine.scheduler.check_integrity()
    assert sum(e != reference.greedy(None, p, n) for e, p, n in zip(expected, prompts, lengths, strict=True)) > 5


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A net, three adapters of different kinds, ragged prompts (some share prefixes), and PEFT's answers."""
    rng, folder = random.Random(7), tmp_path_factory.mktemp("mixed")
    layers = ["conv", "full_attention", "conv"]
    stock = random_stock(11, num_hidden_layers=3, layer_types=layers, conv_bias=True)
    kinds = [{"r": 16}, {"r": 5, "use_dora": True, "use_rslora": True}, {"r": 1, "target_modules": ["in_proj", "w2"]}]
    paths = {f"a{i}": save_adapter(stock, folder / str(i), i, **kind) for i, kind in enumerate(kinds)}
    head = random_prompts(rng, 1, 30)[0] * 2
    prompts = random_prompts(rng, 9, 30) + [head + tail for tail in random_prompts(rng, 9, 9)]
    asked = [[None, *paths][i % 4] for i in range(len(prompts))]
    lengths = [rng.randint(4, 16) for _ in prompts]
    reference = Peft(stock)
    expected = [reference.greedy(paths.get(a), p, n) for a, p, n in zip(asked, prompts, lengths, strict=True)]
    return stock, paths, prompts, asked, lengths, expected


SITUATIONS = {
    "torch": {"kernels": "torch"},
    "chunked prefill": {"max_batch_tokens": 7, "block_size": 4},
    "preemption": {"block_size": 4, "few_blocks": 24},
    "no prefix caching": {"prefix_caching": False},
    "prefix hits, read once": {"block_size": 2, "max_sequences": 4},
    "prompt lookup": {"drafting": "auto", "block_size": 8},
    "one place at a time": {"adapter_places": 1},
    "by adapter": {"policy": "by_adapter", "adapter_places": 1, "max_sequences": 3},
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_tokens_do_not_depend_on_the_situation(name, mixed, monkeypatch):
    stock, paths, prompts, asked, lengths, expected = mixed
    options = dict(SITUATIONS[name])
    few_blocks, places = options.pop("few_blocks", None), options.pop("adapter_places", None)
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 4)
    with ContinuousBatchingGenerator(stock, adapters=paths, **{"cache_memory": "4MiB", **options}) as generator:
        engine = generator.engine
        if few_blocks is not None:
            slots = engine.plan.num_slots
            engine.scheduler.cache = CacheManager(few_blocks, engine.config.block_size, slots, prefix_caching=True)
        if places is not None:
            engine.scheduler.adapters.max_places = places
            engine.scheduler.adapters._free = list(range(places))
        for _ in range(2):
            outputs = generator.generate(prompts, max_new_tokens=lengths, adapter=asked, **GREEDY)
            assert [o.error for o in outputs] == [None] * len(prompts)
            assert [o.token_ids for o in outputs] == expected
        if few_blocks is not None:
            assert sum(o.metrics.num_preemptions for o in outputs) > 0
        if name == "prefix hits, read once":
            assert sum(o.metrics.num_cached_tokens for o in outputs) > 100
        engine.scheduler.check_integrity()


def test_captured_steps_in_bf16_give_the_bits_of_the_others(mixed):
    """Of more rows than one kernel is for, and of numbers of rows that are rounded up."""
    stock, paths, prompts, asked, lengths, _ = mixed
    results = []
    for capturing in (False, True):
        with ContinuousBatchingGenerator(
            copy.deepcopy(stock).bfloat16(), adapters=paths, cache_memory="4MiB"
        ) as generator:
            runner = generator.engine.runner
            runner.capturing = capturing
            outputs = generator.generate(
                prompts,
                max_new_tokens=lengths,
                adapter=asked,
                output_logits=True,
                return_dict_in_generate=True,
                **GREEDY,
            )
            assert runner.native is None or bool(runner.captured.num_graphs) == capturing
            results.append([(o.token_ids, torch.cat(list(o.logits))) for o in outputs])
    for (plain, logits), (captured, same) in zip(*results, strict=True):
        assert plain == captured and torch.equal(logits, same)


def test_places_that_change_hands_hold_nothing_of_the_one_before(tmp_path):
    """Adapters of one layout, whose memory is taken over, and of others, by turns through one place."""
    stock = random_stock(12, num_hidden_layers=2, layer_types=["conv", "full_attention"])
    kinds = [{"r": 4}, {"r": 4}, {"r": 3, "use_dora": True}, {"r": 4}, {"r": 4, "modules_to_save": ["lm_head"]}] * 2
    paths = {f"a{i}": save_adapter(stock, tmp_path / str(i), i, trained_head, **kind) for i, kind in enumerate(kinds)}
    prompts = random_prompts(random.Random(4), len(paths), 20)
    reference = Peft(stock)
    expected = [reference.greedy(path, prompt, 6) for path, prompt in zip(paths.values(), prompts, strict=True)]
    with ContinuousBatchingGenerator(stock, adapters=paths, cache_memory="4MiB") as generator:
        places = generator.engine.scheduler.adapters
        places.max_places, places._free = 1, [0]
        for _ in range(2):
            outputs = generator.generate(prompts, max_new_tokens=6, adapter=[*paths], **GREEDY)
            assert [o.token_ids for o in outputs] == expected
        assert places.num_loads == 2 * len(paths)


def test_an_assistant_and_prompt_lookup_guess_for_rows_with_adapters(mixed):
    stock, paths, prompts, asked, lengths, expected = mixed
    with ContinuousBatchingGenerator(stock, adapters=paths, cache_memory="4MiB") as generator:
        for guessing in ({"assistant_model": stock}, {"prompt_lookup_num_tokens": 4}):
            outputs = generator.generate(prompts, max_new_tokens=lengths, adapter=asked, **guessing, **GREEDY)
            assert [o.token_ids for o in outputs] == expected
        assert generator.engine.speculation.num_accepted > 0


def test_an_adapter_replaced_under_its_name_shares_nothing_with_the_old_one(mixed, tmp_path):
    stock, paths, prompts, *_ = mixed
    prompt, new = prompts[-1], save_adapter(stock, tmp_path / "new", 99, r=3)
    reference = Peft(stock)
    with ContinuousBatchingGenerator(stock, adapters={"a": paths["a0"]}, cache_memory="4MiB", block_size=4) as g:
        options = {"max_new_tokens": 8, "adapter": "a", **GREEDY}
        old = g.generate([prompt], **options)[0]
        again = g.generate([prompt], **options)[0]
        assert again.metrics.num_cached_tokens > 0
        g.load_adapter("a", new)
        replaced = g.generate([prompt], **options)[0]
        assert replaced.metrics.num_cached_tokens == 0
        assert old.token_ids == again.token_ids == reference.greedy(paths["a0"], prompt, 8)
        assert replaced.token_ids == reference.greedy(new, prompt, 8) != old.token_ids
        # what runs keeps the adapter that it started with
        handle = g.submit(prompt, **options)
        g.unload_adapter("a")
        assert handle.result().token_ids == replaced.token_ids
        with pytest.raises(AdapterError, match="no adapter 'a'"):
            g.generate([prompt], **options)


def test_what_rests_on_the_base_follows_it(tmp_path):
    """DoRA's norms and trained biases are of the base as it is."""
    stock = random_stock(5, num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_bias=True)
    path = save_adapter(stock, tmp_path / "a", 1, use_dora=True, r=4)
    prompt = random_prompts(random.Random(3), 1, 20)[0]
    with ContinuousBatchingGenerator(stock, adapters={"a": path}, cache_memory="4MiB") as generator:
        for _ in range(2):
            output = generator.generate([prompt], max_new_tokens=8, adapter="a", **GREEDY)[0]
            assert output.token_ids == Peft(stock).greedy(path, prompt, 8)
            with torch.no_grad():
                for name, parameter in stock.named_parameters():
                    if "proj" in name or ".w" in name:
                        parameter.mul_(0.5 + torch.rand(len(parameter), *[1] * (parameter.ndim - 1)))


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_are_the_adapters_own(bias, tmp_path):
    stock = random_stock(6, num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_bias=True)

    def train(model):
        for name, parameter in model.named_parameters():
            if name.endswith("base_layer.bias"):
                parameter.add_(0.5 * torch.randn_like(parameter))

    path = save_adapter(stock, tmp_path / "a", 1, train, bias=bias)
    prompts = random_prompts(random.Random(3), 4, 20)
    reference = Peft(stock)
    expected = [reference.greedy(path if i % 2 else None, p, 8) for i, p in enumerate(prompts)]
    with ContinuousBatchingGenerator(stock, adapters={"a": path}, cache_memory="4MiB") as generator:
        outputs = generator.generate(prompts, max_new_tokens=8, adapter=[None, "a"] * 2, **GREEDY)
        assert [o.token_ids for o in outputs] == expected


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_base_keeps_deltas_in_the_models_dtype(weights, tmp_path):
    """As PEFT over the matrices that the quantised layers stand for."""
    stock = random_stock(8, num_hidden_layers=2, layer_types=["conv", "full_attention"], tie_word_embeddings=True)
    path = save_adapter(stock, tmp_path / "a", 1, r=8)
    prompts = random_prompts(random.Random(3), 4, 20)
    with ContinuousBatchingGenerator(stock, weights=weights, adapters={"a": path}, cache_memory="4MiB") as generator:
        plain = generator.generate(
            prompts, max_new_tokens=2, output_logits=True, return_dict_in_generate=True, **GREEDY
        )
        both = generator.generate(
            prompts, max_new_tokens=2, adapter="a", output_logits=True, return_dict_in_generate=True, **GREEDY
        )
        model, dense = generator.model, copy.deepcopy(stock)
        with torch.no_grad():
            for projection in projections_of(model):
                for part in projection.parts:
                    if part.name != "lm_head":
                        weight = base_weight(model, projection, part)
                        dense.get_submodule(part.name).weight.copy_(weight)
        wrapped = peft.PeftModel.from_pretrained(dense, path).eval()
        for prompt, mine, without in zip(prompts, both, plain, strict=True):
            with torch.no_grad():
                logits = wrapped(input_ids=torch.tensor([prompt])).logits[0, -1]
            error = (torch.as_tensor(mine.logits[0]).flatten() - logits).abs().max()
            change = (torch.as_tensor(without.logits[0]).flatten() - logits).abs().max()
            assert error < 0.2 * change  # inputs in 8 bits, and the head


def test_the_dense_layers_of_a_mixture_of_experts(tmp_path):
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    stock = random_moe(3, **layers)
    path = save_adapter(stock, tmp_path / "a", 1, r=8)
    prompts = random_prompts(random.Random(3), 6, 20)
    reference, asked = Peft(stock), [None, "a"] * 3
    expected = [reference.greedy(path if name else None, p, 8) for name, p in zip(asked, prompts, strict=True)]
    with ContinuousBatchingGenerator(stock, adapters={"a": path}, cache_memory="4MiB") as generator:
        outputs = generator.generate(prompts, max_new_tokens=8, adapter=asked, **GREEDY)
        assert [o.token_ids for o in outputs] == expected


def test_gates_and_values_that_adapters_change_are_stored(monkeypatch):
    """Where a kernel gives SwiGLU of a product, it knows nothing of the deltas in between."""
    changed, other = (PackedLinear(8, 6, bias=False).requires_grad_(False) for _ in range(2))
    native = load()
    monkeypatch.setitem(
        SWIGLU_TABLE,
        (DENSE, torch.float32, native.isa),
        ((inf, lambda native, x, weight, bias: swiglu(x @ weight.T)),),
    )
    kernels = AdaptedKernels(KernelSet(native), {changed: None}, {}, None, None)
    monkeypatch.setattr(AdaptedKernels, "linear", lambda self, module, x: 2 * module(x))
    x = torch.randn(30, 8)
    torch.testing.assert_close(kernels.linear_swiglu(changed, x), swiglu(2 * changed(x)))
    torch.testing.assert_close(kernels.linear_swiglu(other, x), swiglu(other(x)))


def test_a_layer_with_adapters_is_not_made_by_one_kernel(monkeypatch):
    """Of both products, and whichever of them is changed: that kernel knows nothing of the deltas."""
    w13, w2 = QuantizedLinear(8, 64, False, bits=8), QuantizedLinear(32, 8, False, bits=8)
    for layer in (w13, w2):
        layer.put(layer.quantize(torch.randn(layer.out_features, layer.in_features)))
    native, x = load(), torch.randn(40, 8)
    monkeypatch.setitem(MLP_TABLE, (torch.float32, native.isa), ((inf, lambda native, x, *weights: x),))
    monkeypatch.setattr(AdaptedKernels, "linear", lambda self, module, x, residual=None: 2 * module(x))
    with torch.no_grad():
        assert mlp(AdaptedKernels(KernelSet(native), {}, {}, None, None), w13, w2, x) is x
        for changed in (w13, w2):
            kernels = AdaptedKernels(KernelSet(native), {changed: None}, {}, None, None)
            assert mlp(kernels, w13, w2, x) is not x
