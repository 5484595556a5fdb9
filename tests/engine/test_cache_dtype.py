"""`cache_dtype="int8"`: K/V in 8 bits, and everything else as it is with the cache in the model's dtype."""

import math
import random

import pytest
import torch
from helpers import demo_prompts, ours, random_prompts, random_stock
from torch.nn import functional as F

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.model.hybrid_cache import CachePlan
from lfm2_cb.model.ragged_batch import Row
from lfm2_cb.ops.attention.kv_blocks import Int8Blocks
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.request import Request

NEW = 8


@pytest.fixture(scope="module")
def prompts(demo_tokenizer):
    return [demo_tokenizer(prompt)["input_ids"] for prompt in demo_prompts(12)]


def tokens(model, prompts, cache_dtype="int8", calls=1, **options):
    """Greedy tokens of the last of some equal calls."""
    arguments = {"cache_memory": "64MiB", "block_size": 16, "cache_dtype": cache_dtype, **options}
    with ContinuousBatchingGenerator(model, **arguments) as generator:
        for _ in range(calls):
            outputs = generator.generate(prompts, do_sample=False, eos_token_id=None, max_new_tokens=NEW)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(demo_stock, prompts):
    """Each prompt's tokens on its own, uncut, by the torch reference, with nothing cached before it."""
    options = {"kernels": "torch", "prefix_caching": False}
    return [tokens(demo_stock, [prompt], **options)[0] for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 17, "max_sequences": 5},
        {"calls": 2},
        {"calls": 2, "kernels": "torch", "block_size": 3},
        {"drafting": "auto"},
        {"policy": "batch"},
    ],
    ids=["together", "in chunks", "from the cache", "from the cache, torch", "drafted", "another policy"],
)
def test_tokens_do_not_depend_on_how_they_are_computed(demo_stock, prompts, alone, options):
    assert tokens(demo_stock, prompts, **options) == alone


def test_preempted_requests_say_the_same(demo_stock, prompts, alone):
    size = 8
    engine = Engine(as_lfm2_cb(demo_stock), EngineConfig(64, 8, 2**26, size, cache_dtype="int8"))
    blocks = max(-(-(len(prompt) + NEW) // size) for prompt in prompts) + 2
    engine.scheduler.cache = CacheManager(blocks, size, engine.plan.num_slots, True)
    requests = [Request(i, prompt, NEW, params=SamplingParams()) for i, prompt in enumerate(prompts)]
    engine.add_all(requests)
    while engine.has_unfinished:
        engine.step()
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert [request.output_token_ids for request in requests] == alone


def test_forks_take_their_scales_along():
    """A prompt that ends inside a block: every fork goes on in a copy of it, as if it had run alone."""
    model = ours(random_stock(3))
    config = EngineConfig(cache_memory=2**23, block_size=4, cache_dtype="int8", max_sequences=8)
    for prompt in random_prompts(random.Random(0), 6, 11):
        with ContinuousBatchingGenerator(model, cache_memory="8MiB", block_size=4, cache_dtype="int8") as generator:
            options = {"do_sample": True, "max_new_tokens": NEW, "eos_token_id": None, "seed": 1}
            sampled = {"num_return_sequences": 3, "output_logits": True, "return_dict_in_generate": True}
            forks = generator.generate([prompt], **options, **sampled)
        for fork in forks:
            ids = prompt + fork.token_ids[:-1]
            row = Row(ids, 0, list(range(-(-len(ids) // 4))), 0, num_logits=NEW)
            torch.testing.assert_close(fork.logits, Engine(model, config).runner.forward([row]), atol=1e-3, rtol=0)


def test_an_assistant_has_such_a_cache_too(demo_stock, prompts, alone):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="64MiB", cache_dtype="int8") as generator:
        outputs = generator.generate(
            prompts[:6], do_sample=False, eos_token_id=None, max_new_tokens=NEW, assistant_model=demo_stock
        )
        (drafter,) = generator.engine._drafters.values()
        assert [output.token_ids for output in outputs] == alone[:6]
        assert all(isinstance(blocks, Int8Blocks) for blocks in drafter.runner.cache.keys.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perplexity_stays_and_logits_move_little(demo_stock, prompts, dtype):
    model = as_lfm2_cb(demo_stock)
    model = type(model)(model.config).eval().to(dtype) if dtype != torch.float32 else model
    if dtype != torch.float32:
        model.load_state_dict(as_lfm2_cb(demo_stock).state_dict())

    def score(cache_dtype):
        config = EngineConfig(cache_memory=2**26, cache_dtype=cache_dtype, max_sequences=4)
        runner, nats, count = Engine(model, config).runner, 0.0, 0
        for ids in prompts:
            logits = runner.forward([Row(ids, 0, list(range(-(-len(ids) // 64))), 0, num_logits=len(ids))])
            nats += F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item()
            count += len(ids) - 1
        return math.exp(nats / count)

    full, low = score(None), score("int8")
    assert low != full and abs(low / full - 1) < 0.005


def test_a_wrong_name_is_refused(demo_stock):
    for wrong in ("int4", "fp8", torch.int8, 8):
        with pytest.raises(ValueError, match="cache_dtype must be 'int8' or None"):
            ContinuousBatchingGenerator(demo_stock, cache_dtype=wrong)


def test_nothing_changes_without_it(demo_stock, prompts):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="64MiB") as generator:
        assert generator.engine.plan.cache_dtype is None
        assert all(blocks.dtype == torch.float32 for blocks in generator.engine.runner.cache.keys.values())
    plan = CachePlan.from_budget(
        demo_stock.config, 2**24, block_size=4, num_slots=2, dtype=torch.float32, checkpoints=True
    )
    assert "int8" not in str(plan)
