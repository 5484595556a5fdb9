"""The headline: a request's tokens do not depend on packing, chunking, batch mates, preemption, or cache hits."""

import random
import shutil

import pytest
import torch
from helpers import demo_prompts, random_prompts, random_stock, stock_greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.model import ragged_batch
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES
from lfm2_cb.scheduling.request import FinishReason, Request

NEW = 8


@pytest.fixture(scope="module")
def references(demo_stock, demo_tokenizer):
    """200 ragged real prompts, and stock's answer to each on its own."""
    ids = [demo_tokenizer(prompt)["input_ids"] for prompt in demo_prompts(200)]
    assert len(ids) == 200 and max(map(len, ids)) > 50 * min(map(len, ids)) / 5
    return [(prompt, stock_greedy(demo_stock, prompt, NEW)) for prompt in ids]


def make_engine(
    model, *, blocks, block_size, max_batch_tokens, max_sequences, policy="fcfs", prefix_caching=True, kernels="auto"
):
    """An engine whose cache has exactly so many blocks."""
    config = EngineConfig(max_batch_tokens, max_sequences, 2**26, block_size, prefix_caching, policy, kernels=kernels)
    engine = Engine(model, config)
    engine.scheduler.cache = CacheManager(blocks, block_size, engine.plan.num_slots, prefix_caching)
    return engine


def run(engine, requests, cancel_at=()):
    """Run to the end, checking the cache now and then. cancel_at: (step, request index)."""
    for request in requests:
        engine.add(request)
    step = 0
    while engine.has_unfinished:
        for at, index in cancel_at:
            if at == step:
                engine.cancel(requests[index])
        engine.step()
        if step % 5 == 0:
            engine.scheduler.check_integrity()
        step += 1
        assert step < 20_000, "no end in sight"
    engine.scheduler.cache.check_integrity([])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_200_real_prompts_under_any_schedule(demo_stock, references, data):
    order = data.draw(st.permutations(range(len(references))), label="order")
    block_size = data.draw(st.sampled_from([3, 8, 16, 64]), label="block size")
    needed = max(-(-(len(prompt) + NEW) // block_size) for prompt, _ in references)
    engine = make_engine(
        as_lfm2_cb(demo_stock),
        blocks=needed + data.draw(st.integers(0, 3 * needed), label="spare blocks"),
        block_size=block_size,
        max_batch_tokens=data.draw(st.sampled_from([40, 100, 512, 2048]), label="max_batch_tokens"),
        max_sequences=data.draw(st.sampled_from([5, 24, 200]), label="max_sequences"),
        policy=data.draw(st.sampled_from(sorted(POLICIES)), label="policy"),
        prefix_caching=data.draw(st.booleans(), label="prefix caching"),
    )
    cancelled = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 199)), max_size=6), label="cancel")
    requests = [Request(i, references[index][0], NEW, params=SamplingParams()) for i, index in enumerate(order)]
    run(engine, requests, cancelled)
    for request, index in zip(requests, order, strict=True):
        expected = references[index][1]
        if request.finish_reason is FinishReason.CANCELLED:
            assert request.output_token_ids == expected[: request.num_output_tokens]
        else:
            assert request.finish_reason is FinishReason.LENGTH and request.output_token_ids == expected


class Cases(list):
    """A list that does not print itself into hypothesis' reports."""

    def __repr__(self):
        return "cases"


@pytest.fixture(scope="module")
def small():
    """Random nets with conv kernels 2 … 5, shared-prefix prompts, and stock's answers."""
    cases = Cases()
    for seed in range(8):
        stock = random_stock(seed, conv_L_cache=2 + seed % 4)
        rng = random.Random(seed)
        prefix = random_prompts(rng, 1, 40)[0]
        prompts = [prefix[: rng.randint(0, len(prefix))] + p for p in random_prompts(rng, 12, 25)]
        lengths = [rng.randint(1, 20) for _ in prompts]
        answers = [stock_greedy(stock, p, n) for p, n in zip(prompts, lengths, strict=True)]
        cases.append((stock, prompts, lengths, answers))
    return cases


@pytest.fixture
def any_sharing(monkeypatch):
    """Attend to shared prefixes together however short they are."""
    monkeypatch.setattr("lfm2_cb.engine.sharing.MIN_SAVED_TOKENS", 1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.usefixtures("any_sharing")
def test_random_nets_preempted_forked_and_drafted(small, data):
    stock, prompts, lengths, answers = small[data.draw(st.integers(0, len(small) - 1), label="net")]
    block_size = data.draw(st.sampled_from([1, 2, 5, 16]), label="block size")
    needed = max(-(-(len(p) + n) // block_size) for p, n in zip(prompts, lengths, strict=True))
    engine = make_engine(
        as_lfm2_cb(stock),
        blocks=needed + data.draw(st.integers(0, 2 * needed), label="spare blocks"),
        block_size=block_size,
        max_batch_tokens=data.draw(st.sampled_from([1, 3, 17, 400]), label="max_batch_tokens"),
        max_sequences=data.draw(st.sampled_from([2, 5, 40]), label="max_sequences"),
        policy=data.draw(st.sampled_from(sorted(POLICIES)), label="policy"),
    )
    num_forks = data.draw(st.integers(0, 2), label="forks")
    draft_accuracy = data.draw(st.sampled_from([None, 0.0, 0.6, 1.0]), label="draft accuracy")
    rng = random.Random(data.draw(st.integers(0, 99), label="seed"))

    requests, expected = [], {}
    for i, (prompt, length, answer) in enumerate(zip(prompts, lengths, answers, strict=True)):
        family = [Request(10 * i + j, prompt, length, params=SamplingParams()) for j in range(1 + num_forks)]
        for member in family:
            expected[member.request_id] = answer
        family[0].adopt_forks(family[1:])
        requests.append(family[0])
    if data.draw(st.booleans(), label="as a list"):
        engine.add_all(requests)
    else:
        for request in requests:
            engine.add(request)
    members = [m for r in requests for m in (r, *r.forks)]

    steps = 0
    while engine.has_unfinished:
        steps += 1
        assert steps < 5000, "no end in sight"
        if draft_accuracy is not None:
            for member in engine.scheduler.running:
                rest = expected[member.request_id][member.num_output_tokens :][: rng.randint(0, 4)][:-1]
                member.draft_token_ids = [t if rng.random() < draft_accuracy else 3 for t in rest]
        engine.step()
        engine.scheduler.check_integrity()
    engine.scheduler.cache.check_integrity([])
    for member in members:
        assert member.error is None and member.output_token_ids == expected[member.request_id]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_preemption_really_happens_and_changes_nothing(small, kernels):
    if kernels == "native" and shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None:
        pytest.skip("no C++ compiler")
    stock, prompts, lengths, answers = small[1]
    needed = max(-(-(len(p) + n) // 2) for p, n in zip(prompts, lengths, strict=True))
    limits = {"blocks": needed + 6, "block_size": 2, "max_batch_tokens": 64, "max_sequences": 12}
    engine = make_engine(as_lfm2_cb(stock), **limits, kernels=kernels)
    assert (engine.runner.native is None) == (kernels == "torch")
    requests = [
        Request(i, p, n, params=SamplingParams()) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run(engine, requests)
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert [request.output_token_ids for request in requests] == answers


def test_a_shared_prefix_is_attended_to_once_and_changes_nothing(demo_stock, demo_tokenizer, monkeypatch):
    calls = []
    real = ragged_batch.cascade_attention

    def noted(*args, **kwargs):
        calls.append([len(prefix.rows) for prefix in args[-1]])
        return real(*args, **kwargs)

    monkeypatch.setattr(ragged_batch, "cascade_attention", noted)
    head = demo_tokenizer(" ".join(demo_prompts(60)))["input_ids"][:500]
    prompts = [head + demo_tokenizer(prompt)["input_ids"] for prompt in demo_prompts(6)]
    with ContinuousBatchingGenerator(demo_stock, cache_memory="64MiB", block_size=32) as generator:
        outputs = generator.generate(prompts, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert [6] in calls
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == stock_greedy(demo_stock, prompt, NEW)


def test_a_finished_request_leaves_in_its_step_and_the_next_enters_in_the_following(small):
    stock, prompts, *_ = small[0]
    engine = make_engine(as_lfm2_cb(stock), blocks=400, block_size=2, max_batch_tokens=400, max_sequences=1)
    first, second = (Request(i, prompts[i], 2, params=SamplingParams()) for i in range(2))
    engine.add(first)
    engine.add(second)
    assert [o.request for o in engine.step()] == [first] and engine.scheduler.running == [first]
    assert engine.step()[0].finished and engine.scheduler.running == []
    assert [o.request for o in engine.step()] == [second]


def test_logits_only_for_rows_that_are_sampled(small):
    stock, _prompts, *_ = small[0]
    engine = make_engine(as_lfm2_cb(stock), blocks=400, block_size=2, max_batch_tokens=8, max_sequences=4)
    shapes = []
    engine.runner.model.lm_head.register_forward_hook(lambda m, args, out: shapes.append(out.shape[0]))
    prompt = [5] * 20
    engine.add(Request(0, prompt, 2, params=SamplingParams()))
    while engine.has_unfinished:
        engine.step()
    assert shapes == [0, 0, 1, 1]  # two chunks of 8, one of 4 that samples, one decode
    engine.runner.model.lm_head._forward_hooks.clear()


def test_sampled_tokens_depend_on_the_requests_own_seed_only(demo_stock, references):
    prompts = [prompt for prompt, _ in references[:24]]
    options = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "max_new_tokens": 12, "seed": 5}
    with ContinuousBatchingGenerator(demo_stock, cache_memory="64MiB") as generator:
        whole = [output.token_ids for output in generator.generate(prompts, **options)]
    assert len({tuple(tokens) for tokens in whole}) > 20
    with ContinuousBatchingGenerator(demo_stock, cache_memory="64MiB", max_batch_tokens=50, max_sequences=3) as other:
        assert [output.token_ids for output in other.generate(prompts, **options)] == whole
        submitted = [other.submit(p, **{**options, "seed": 5}) for p in prompts[:1]]
        assert submitted[0].result(60).token_ids == whole[0]


@torch.no_grad()
def test_bf16_engine_error_is_no_larger_than_stocks(references):
    """Per-step logits of a packed bf16 engine against the fp32 network, beside stock bf16's own error."""
    stock = random_stock(3, conv_L_cache=3, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
    prompts = random_prompts(random.Random(0), 16, 40)
    exact = [stock(torch.tensor([p])).logits[0, -1] for p in prompts]
    stock = stock.to(torch.bfloat16)
    stock_error = sum(
        (stock(torch.tensor([p])).logits[0, -1].float() - e).abs().mean() for p, e in zip(prompts, exact, strict=False)
    )
    engine = make_engine(as_lfm2_cb(stock), blocks=100, block_size=16, max_batch_tokens=4096, max_sequences=16)
    for i, prompt in enumerate(prompts):
        engine.add(Request(i, prompt, 1, params=SamplingParams()))
    engine._drain_inbox()
    logits = engine.runner.run(engine.scheduler.schedule())
    our_error = sum((row - e).abs().mean() for row, e in zip(logits, exact, strict=True))
    assert 0 < our_error <= 1.1 * stock_error
