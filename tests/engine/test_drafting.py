"""Speculative decoding: no guess changes a token, guesses are made where they pay, and nothing is kept."""

import functools
import itertools
import math
import random
from collections import Counter

import pytest
import torch
from helpers import demo_prompts, ours, random_moe, random_prompts, random_stock, stock_greedy
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.drafting import DraftTracker, PromptLookup, Speculation, StepTimes
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.request import Request


@pytest.fixture(scope="module")
def target():
    return random_stock(1, conv_L_cache=3, vocab_size=90)


@pytest.fixture(scope="module")
def stranger():
    """A smaller net that knows nothing of the target's."""
    return random_stock(2, conv_L_cache=4, vocab_size=90, num_hidden_layers=2, layer_types=["conv", "full_attention"])


def repetitive_prompts(n, seed=0):
    rng = random.Random(seed)
    phrase = random_prompts(rng, 1, 30)[0]
    return [(phrase + p + phrase)[: rng.randint(2, 60)] for p in random_prompts(rng, n, 20)]


def always_guess(engine, most=4):
    """Guess whatever it costs: whether it pays depends on this machine's clock."""
    engine.speculation._lengths = lambda requests, available: [min(most, a) for a in available]


def idle(generator):
    """Nothing is kept for anybody."""
    generator.engine.scheduler.cache.check_integrity([])
    for drafter in generator.engine._drafters.values():
        if isinstance(drafter, PromptLookup):
            assert not drafter._texts
        else:
            drafter.check_idle()


# The drafters


def brute_force(tokens, max_ngram, min_ngram, length):
    for n in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                return tokens[at + n : at + n + length]
    return []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 256, 65536, 2**24]), min_size=1, max_size=40), st.integers(1, 4), st.data())
def test_prompt_lookup_finds_the_longest_then_latest_match(tokens, max_ngram, data):
    lookup = PromptLookup(max_ngram, min_ngram=1)
    request = Request(0, tokens[: data.draw(st.integers(1, len(tokens)))], 100)
    lookup.propose([request], [3])  # what it remembers of a shorter text must not matter
    request.token_ids = list(tokens)
    assert lookup.propose([request], [5]) == [brute_force(tokens, max_ngram, 1, 5)]
    lookup.forget(request)
    assert not lookup._texts


# Tokens


def test_prompt_lookup_changes_no_token(target):
    prompts = repetitive_prompts(12)
    expected = [stock_greedy(target, p, 30) for p in prompts]
    with ContinuousBatchingGenerator(target, cache_memory="32MiB", block_size=8) as generator:
        always_guess(generator.engine)
        outputs = generator.generate(prompts, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=6)
        assert [o.token_ids for o in outputs] == expected
        speculation = generator.engine.speculation
        assert speculation.num_drafted > speculation.num_accepted > 20  # it really guessed, and was often right
        idle(generator)


@pytest.mark.parametrize("same", [True, False])
def test_an_assistant_changes_no_token(target, stranger, same):
    prompts = repetitive_prompts(12)
    expected = [stock_greedy(target, p, 20) for p in prompts]
    with ContinuousBatchingGenerator(target, cache_memory="32MiB", block_size=8, max_batch_tokens=64) as generator:
        always_guess(generator.engine)
        outputs = generator.generate(
            prompts, max_new_tokens=20, do_sample=False, assistant_model=target if same else stranger
        )
        assert [o.token_ids for o in outputs] == expected
        speculation = generator.engine.speculation
        assert speculation.num_drafted > 20
        if same:
            assert speculation.num_accepted == speculation.num_drafted  # its guesses are the target's own choices
        idle(generator)


@functools.cache
def prompts_and_stocks_answers(target, seed, new):
    prompts = repetitive_prompts(8, seed=seed)
    return prompts, [stock_greedy(target, p, new) for p in prompts]


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_guesses_under_preemption_and_prefix_hits(target, stranger, data):
    """A tight cache, shared prefixes, forks, both drafters, always guessing: tokens stay stock's."""
    new = 16
    prompts, expected = prompts_and_stocks_answers(target, data.draw(st.integers(0, 3), label="prompts"), new)
    block_size = data.draw(st.sampled_from([1, 4, 16]), label="block size")
    needed = max(-(-(len(p) + new) // block_size) for p in prompts)
    config = EngineConfig(
        data.draw(st.sampled_from([3, 30, 400]), label="max_batch_tokens"),
        data.draw(st.sampled_from([2, 8]), label="max_sequences"),
        2**26,
        block_size,
    )
    engine = Engine(as_lfm2_cb(target), config)
    blocks = needed + data.draw(st.integers(0, needed), label="spare blocks")
    engine.scheduler.cache = CacheManager(blocks, block_size, engine.plan.num_slots)
    always_guess(engine)
    drafters = [engine.prompt_lookup(2), engine.assistant(as_lfm2_cb(stranger)), engine.assistant(as_lfm2_cb(target))]
    requests = []
    for i, prompt in enumerate(prompts):
        family = [Request(2 * i + j, prompt, new, params=SamplingParams()) for j in range(2)]
        for member in family:
            member.draft_tracker = DraftTracker(
                data.draw(st.sampled_from(drafters), label=f"drafter of {member.request_id}")
            )
        family[0].adopt_forks(family[1:])
        requests += family
        engine.add(family[0])
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    for request in requests:
        assert request.error is None and request.output_token_ids == expected[request.request_id // 2]
    for drafter in drafters[1:]:
        drafter.check_idle()


def test_sampling_processors_stops_and_streams_are_what_they_are_without(demo_stock, demo_tokenizer):
    prompts = demo_prompts(5)
    options = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 6,
        "stop_strings": ["."],
        "max_new_tokens": 40,
        "num_return_sequences": 2,
        "seed": 3,
    }
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="64MiB") as generator:
        plain = generator.generate(prompts, **options)
        assert generator.engine.speculation.num_drafted == 0
        always_guess(generator.engine)
        drafted = generator.generate(prompts, prompt_lookup_num_tokens=5, max_matching_ngram_size=1, **options)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
        assert generator.engine.speculation.num_drafted > 0
        streamed = [[] for _ in plain]
        for event in generator.stream(prompts, prompt_lookup_num_tokens=5, **options):
            streamed[event.index] += event.token_ids
        assert streamed == [o.token_ids for o in plain]
        idle(generator)


def test_the_sampled_distribution_is_the_models_own(target):
    """Chi-square of the second token against its exact distribution, which guesses must not bend."""
    prompt, draws = [5, 6, 7, 8] * 4 + list(range(3, 60)), 1500
    with ContinuousBatchingGenerator(target, cache_memory="64MiB") as generator:
        always_guess(generator.engine)
        options = {"do_sample": True, "top_k": 0, "temperature": 0.25, "num_return_sequences": draws, "seed": 1}
        outputs = generator.generate(
            [prompt], max_new_tokens=4, prompt_lookup_num_tokens=3, max_matching_ngram_size=1, **options
        )
        speculation = generator.engine.speculation
        assert speculation.num_drafted > draws and speculation.num_accepted > 10
    statistic, cells = 0.0, 0
    for first, count in Counter(o.token_ids[0] for o in outputs).most_common(6):
        with torch.no_grad():
            logits = target(torch.tensor([[*prompt, first]])).logits[0, -1].double()
        expected = count * (logits / 0.25).softmax(-1)
        seen = Counter(o.token_ids[1] for o in outputs if o.token_ids[0] == first)
        likely = [t for t in range(len(expected)) if expected[t] >= 5]
        rest = count - float(expected[likely].sum())
        statistic += sum((seen[t] - float(expected[t])) ** 2 / float(expected[t]) for t in likely)
        statistic += (count - sum(seen[t] for t in likely) - rest) ** 2 / max(rest, 1.0)
        cells += len(likely)
    assert cells >= 4
    assert statistic < cells + 4 * math.sqrt(2 * cells)  # mean + 4 standard deviations; the seed is fixed


# When it pays


def speculation_with(seconds):
    speculation = Speculation(times=StepTimes())
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        speculation.times.add(tokens, seconds(tokens))
    return speculation


def running(n, max_tokens=10):
    lookup = PromptLookup()
    requests = [Request(i, [1, 2, 3, 1, 2], 100) for i in range(n)]
    for request in requests:
        request.draft_tracker = DraftTracker(lookup, max_tokens)
    return requests


def learn(speculation, requests, right):
    for _ in range(20):
        for request in requests:
            speculation.judged(request, 4, 4 if right else 0)


def test_few_rows_draft_further_the_better_it_goes():
    speculation, requests = speculation_with(lambda tokens: 0.1 + 0.0001 * tokens), running(1)
    assert 1 <= speculation._lengths(requests, [10])[0] < 10
    learn(speculation, requests, right=True)
    assert speculation._lengths(requests, [10]) == [10]
    learn(speculation, requests, right=False)
    assert speculation._lengths(requests, [10])[0] <= 1


def test_a_batch_that_fills_the_machine_does_not_draft():
    speculation, requests = speculation_with(lambda tokens: 0.001 * tokens), running(64)
    assert sum(speculation._lengths(requests, [10] * 64)) == 0
    memory_bound = speculation_with(lambda tokens: 0.1 + 0.0001 * tokens)
    assert sum(memory_bound._lengths(requests, [10] * 64)) > 0


def test_what_never_pays_is_tried_ever_more_seldom():
    speculation, (request,) = speculation_with(lambda tokens: 0.001 * tokens), running(1)
    tries = []
    for step in range(400):
        (length,) = speculation._lengths([request], [10])
        request.draft_tracker.idle = 0 if length else request.draft_tracker.idle + 1
        if length:
            tries.append(step)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert len(tries) >= 3 and gaps == sorted(gaps) and gaps[-1] >= 2 * gaps[0]


def test_step_times_interpolate_and_shrug_off_an_interruption():
    times = StepTimes()
    assert times(5) is None
    times.add(10, 1.0)
    times.add(20, 2.0)
    assert times(15) == pytest.approx(1.5) and times(1) == 1.0 and times(99) == 2.0
    times.add(10, 50.0)
    assert times(10) < 2.0


def test_tokens_that_read_more_weights_are_expected_to_take_longer():
    times = StepTimes(lambda num_tokens: 100.0 + 10 * num_tokens)
    times.add(10, 1.0)
    assert times(10) == 1.0 and times(5) == pytest.approx(0.75) and times(30) == pytest.approx(2.0)
    times.add(30, 3.0)  # what was measured counts
    assert times(30) == 3.0 and times(20) == pytest.approx(2.0)


def test_the_engine_knows_what_its_model_reads():
    model = ours(random_moe(1, num_experts=16, num_experts_per_tok=2, num_dense_layers=0))
    with ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        times = generator.engine.speculation.times
        times.add(1, 1.0)
        assert times(1) == 1.0 < times(2) < times(4) < times(64)


# The door


def test_options_that_cannot_be_are_named(target, demo_stock):
    with ContinuousBatchingGenerator(target, cache_memory="32MiB") as generator:
        for kwargs, message in (
            ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens must be a positive integer"),
            ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -2}, "max_matching_ngram_size must be"),
            ({"prompt_lookup_num_tokens": 3, "assistant_model": target}, "cannot be used together"),
            ({"assistant_model": demo_stock}, "vocabulary of 4096 tokens"),
            ({"assistant_model": target, "num_beams": 2}, "assistant_model cannot be combined with"),
            ({"assistant_early_exit": 2}, "assistant_early_exit"),
        ):
            with pytest.raises(ValueError, match=message):
                generator.generate([[5, 6]], max_new_tokens=2, **kwargs)
        with pytest.raises(TypeError, match="lfm2_cb runs LFM2 models, got Linear"):
            generator.generate([[5, 6]], max_new_tokens=2, assistant_model=torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match="drafting must be 'auto' or 'none'"):
            ContinuousBatchingGenerator(target, drafting="always")
        assert generator.generate([[5, 6]], max_new_tokens=2)[0].finish_reason == "length"


def test_an_assistant_that_fails_is_left_out(target, stranger, caplog):
    prompts = repetitive_prompts(4)
    with ContinuousBatchingGenerator(target, cache_memory="32MiB") as generator:
        broken = as_lfm2_cb(stranger)
        handle = broken.model.register_forward_hook(lambda *_: 1 / 0)
        try:
            outputs = generator.generate(prompts, max_new_tokens=9, do_sample=False, assistant_model=broken)
        finally:
            handle.remove()
        assert [o.token_ids for o in outputs] == [stock_greedy(target, p, 9) for p in prompts]
        idle(generator)
