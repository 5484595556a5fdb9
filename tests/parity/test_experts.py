"""Mixtures of experts beside stock's `Lfm2MoeForCausalLM`, in fp32, on random configs: a forward, then the engine."""

import random
import shutil

import pytest
import torch
from helpers import ids, ours, random_moe, random_moe_config, random_prompts, stock_greedy, taken_gradients
from transformers import pipeline

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.runner import ModelRunner
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.ops.experts import mix_experts
from lfm2_cb.ops.native import CapturedGraph
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.request import Request

SEEDS = range(18)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] + [1] * 8])
MASKS = [None, LEFT, LEFT.flip(1)]
GREEDY = {"do_sample": False, "eos_token_id": None}
#: as in the published models: dense layers first, a bias, four experts a token
PUBLISHED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_experts": 16}
PUBLISHED |= {"num_experts_per_tok": 4, "num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True}
NATIVE = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="needs a C++ compiler"
)


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_the_random_configs_cover_the_family():
    configs = [random_moe_config(seed) for seed in SEEDS]
    assert {c.num_experts for c in configs} >= {4, 64} and {c.num_experts_per_tok for c in configs} >= {1, 8}
    for switch in ("use_expert_bias", "norm_topk_prob", "tie_word_embeddings", "conv_bias"):
        assert {getattr(c, switch) for c in configs} == {True, False}, switch
    assert any(c.num_dense_layers == 0 for c in configs)
    assert any(c.num_dense_layers >= c.num_hidden_layers for c in configs)
    assert any(c.moe_intermediate_size % 2 and c.intermediate_size % 2 for c in configs)
    assert {c.routed_scaling_factor for c in configs} == {1.0, 2.5}


# One forward


@pytest.mark.parametrize("mask", MASKS, ids=["unpadded", "left", "right"])
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_loss_and_gradients_equal_stock(seed, mask):
    stock = random_moe(seed)
    model = ours(stock)
    expected = stock(ids(seed), attention_mask=mask, labels=ids(seed))
    got = model(ids(seed), attention_mask=mask, labels=ids(seed))
    assert_equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=0)
    expected.loss.backward()
    gradients = taken_gradients(stock)
    got.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("seed", SEEDS[::3])
@torch.no_grad()
def test_cached_continuation_equals_stock(seed):
    stock, mask = random_moe(seed), MASKS[seed // 3 % 3]
    model, caches, start = ours(stock), [None, None], 0
    for end in (4, 5, 6, 9):
        kwargs = {"use_cache": True, "attention_mask": None if mask is None else mask[:, :end]}
        chunk = ids(seed)[:, start:end]
        expected = stock(chunk, past_key_values=caches[0], **kwargs)
        got = model(chunk, past_key_values=caches[1], **kwargs)
        caches, start = [expected.past_key_values, got.past_key_values], end
        assert_equal(got.logits, expected.logits)


@torch.no_grad()
def test_stock_generate_runs_on_our_model():
    stock = random_moe(3, **PUBLISHED)
    for options in ({}, {"num_beams": 3}):
        kwargs = {"attention_mask": LEFT, "max_new_tokens": 6, **GREEDY, **options}
        assert torch.equal(stock.generate(ids(3), **kwargs), ours(stock).generate(ids(3), **kwargs))


def test_gradient_checkpointing_and_a_training_step():
    losses = []
    for model in (random_moe(5, **PUBLISHED), ours(random_moe(5, **PUBLISHED))):
        model.train().activation_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
        for _ in range(3):
            loss = model(ids(5), labels=ids(5)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_router_logits_are_refused_by_name():
    with pytest.raises(ValueError, match="output_router_logits"):
        ours(random_moe(3))(ids(3), output_router_logits=True)


def test_stock_generate_does_not_compile_what_depends_on_data():
    assert lfm2_cb.Lfm2CbForCausalLM._can_compile_fullgraph and not ours(random_moe(3))._can_compile_fullgraph


def test_the_bias_moves_the_choice_and_not_the_weights():
    stock = random_moe(3, **PUBLISHED | {"norm_topk_prob": False})
    model, block = ours(stock), stock.model.layers[1].feed_forward
    with torch.no_grad():
        block.expert_bias.copy_(torch.arange(16.0))  # the last four, whatever the scores
    seen = []
    model.model.layers[1].feed_forward.experts.register_forward_hook(lambda _, args, __: seen.append(args[1:]))
    logits = model(ids(3)).logits
    ((selected, weights),) = seen
    assert set(selected.flatten().tolist()) == {12, 13, 14, 15} and 0 < weights.min() < weights.max() < 1
    assert_equal(logits, stock(ids(3)).logits)


# A layer's experts, by kernels and by the reference


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_native_experts_compute_what_the_reference_does(rows, dtype, monkeypatch):
    model = as_lfm2_cb(random_moe(7, **PUBLISHED)).to(dtype)
    runner = ModelRunner(model, Engine(model, EngineConfig(64, 4, 2**22)).plan)
    experts = model.model.layers[2].feed_forward.experts
    hidden = model.config.hidden_size
    torch.manual_seed(rows)
    x, weights = torch.randn(rows, hidden).to(dtype), torch.rand(rows, 4).to(dtype)
    selected = torch.rand(rows, 16).topk(4).indices
    wide = [t.detach().double() for t in (experts.gate_up_proj, experts.down_proj)]
    exact = mix_experts(x.double(), selected, weights.double(), *wide)
    calls = []
    call = type(runner.native).call
    monkeypatch.setattr(type(runner.native), "call", lambda self, name, *a: (calls.append(name), call(self, name, *a)))
    with torch.inference_mode():
        got = runner.kernels.experts(experts, x, selected, weights)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * exact.abs().max()
    assert len(calls) == 1


# The engine


def run(model, prompts, lengths, *, block_size, spare, max_batch_tokens, max_sequences):
    """Through an engine whose cache has few blocks."""
    needed = max(-(-(len(p) + n) // block_size) for p, n in zip(prompts, lengths, strict=True))
    engine = Engine(model, EngineConfig(max_batch_tokens, max_sequences, 2**26, block_size, True))
    engine.scheduler.cache = CacheManager(needed + spare, block_size, engine.plan.num_slots, True)
    requests = [
        Request(i, p, n, params=SamplingParams()) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for request in requests:
        engine.add(request)
    for _ in range(10_000):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.scheduler.check_integrity()
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_tokens_equal_stocks_under_hostile_schedules(seed):
    """Small chunks, a cache too small for all, shared prefixes, the same prompts twice."""
    stock, rng = random_moe(seed), random.Random(seed)
    prefix = random_prompts(rng, 1, 30)[0]
    prompts = [prefix[: rng.randint(0, len(prefix))] + p for p in random_prompts(rng, 7, 20)]
    prompts += prompts[:2]
    lengths = [rng.randint(1, 12) for _ in prompts]
    expected = [stock_greedy(stock, p, n) for p, n in zip(prompts, lengths, strict=True)]
    got = run(
        as_lfm2_cb(stock),
        prompts,
        lengths,
        block_size=rng.choice([1, 2, 5, 16]),
        spare=rng.randint(0, 6),
        max_batch_tokens=rng.choice([1, 3, 17, 400]),
        max_sequences=rng.choice([2, 5, 40]),
    )
    assert got == expected


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("draft", [{"prompt_lookup_num_tokens": 4}, "assistant"], ids=["prompt lookup", "assistant"])
def test_drafted_tokens_equal_stocks(draft, kernels):
    stock = random_moe(11, **PUBLISHED, vocab_size=9)  # few tokens, so that there is something to look up
    prompts = [p * 3 for p in random_prompts(random.Random(4), 6, 9, vocab_size=9)]
    options = {"assistant_model": stock} if draft == "assistant" else draft
    expected = [stock_greedy(stock, p, 10) for p in prompts]
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", block_size=4, kernels=kernels) as generator:
        generator.engine.speculation._lengths = lambda _, available: available  # whatever it costs
        outputs = generator.generate(prompts, max_new_tokens=10, **options, **GREEDY)
        assert [o.token_ids for o in outputs] == expected
        assert generator.engine.speculation.num_drafted > 10


@NATIVE
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("num_dense", [0, 1, 4])
def test_decode_steps_are_captured_whatever_they_choose(num_dense, weights, monkeypatch):
    replayed, replay, results = [], CapturedGraph.replay, []
    monkeypatch.setattr(CapturedGraph, "replay", lambda self: (replayed.append(1), replay(self))[1])
    stock = random_moe(2, **PUBLISHED | {"num_dense_layers": num_dense})
    prompts = random_prompts(random.Random(1), 5, 9)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12, **GREEDY}
    for capturing in (False, True):
        with ContinuousBatchingGenerator(stock, weights=weights, cache_memory="4MiB") as generator:
            generator.engine.runner.capturing = capturing
            results.append(generator.generate(prompts, **options))
        assert bool(replayed) == capturing
    for plain, captured in zip(*results, strict=True):
        assert plain.token_ids == captured.token_ids
        assert all(map(torch.equal, plain.logits, captured.logits))
    if weights is None:
        assert [o.token_ids for o in results[1]] == [stock_greedy(stock, p, 12) for p in prompts]


@NATIVE
@pytest.mark.parametrize("change", [{"top_k": 1}, {"normalize": False}, {"scale": 0.1}], ids=str)
def test_a_router_changed_between_two_calls_is_not_replayed(change):
    model, prompts = ours(random_moe(2, **PUBLISHED)), random_prompts(random.Random(1), 3, 9)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 4, **GREEDY}
    with ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        before = generator.generate(prompts, **options)
        for name, value in change.items():
            setattr(model.model.layers[2].feed_forward, name, value)
        after = generator.generate(prompts, **options)
    with ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        expected = generator.generate(prompts, **options)
    for a, b, e in zip(after, before, expected, strict=True):
        assert all(map(torch.equal, a.logits, e.logits)) and not torch.equal(a.logits[1], b.logits[1])


def test_pipeline_and_generate_batch(demo_tokenizer, tmp_path):
    stock = random_moe(6, **PUBLISHED, vocab_size=demo_tokenizer.vocab_size)
    stock.save_pretrained(tmp_path)
    demo_tokenizer.save_pretrained(tmp_path)
    texts = ["The river", "Once upon a time there was"]
    expected = [stock_greedy(stock, demo_tokenizer(text)["input_ids"], 5) for text in texts]
    options = {"generator": "cb", "generator_kwargs": {"cache_memory": "4MiB"}}
    pipe = pipeline("text-generation", model=str(tmp_path), **options)
    outputs = pipe(texts, max_new_tokens=5, return_tensors=True, **GREEDY)
    assert [output[0]["generated_token_ids"][-5:] for output in outputs] == expected
    model = lfm2_cb.load_model(str(tmp_path))
    outputs = model.generate_batch([demo_tokenizer(t)["input_ids"] for t in texts], max_new_tokens=5, **GREEDY)
    assert [output.generated_tokens for output in outputs.values()] == expected
