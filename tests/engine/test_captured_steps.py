"""Decode steps run from a captured graph: the tokens of the model as it is now, whatever has been done to it."""

import random
import shutil

import pytest
import torch
from helpers import ours, random_prompts, random_stock, stock_greedy
from torch import nn

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine import captured_steps, sharing
from lfm2_cb.engine.captured_steps import CapturedSteps
from lfm2_cb.engine.runner import ModelRunner
from lfm2_cb.ops.native import CapturedGraph, arena
from lfm2_cb.ops.native.call_list import CallList
from lfm2_cb.ops.native.instruction_sets import TILE_ISAS

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="needs a C++ compiler"
)
GREEDY = {"do_sample": False, "eos_token_id": None}


@pytest.fixture
def replayed(monkeypatch):
    """One entry for each replayed step."""
    steps = []
    replay = CapturedGraph.replay
    monkeypatch.setattr(CapturedGraph, "replay", lambda self: (steps.append(1), replay(self))[1])
    return steps


@pytest.mark.parametrize("seed", range(8))
def test_random_nets_give_stocks_tokens(seed, replayed):
    """Any shape of net, answers of any lengths, block boundaries crossed at any time, a cache too small for all."""
    rng, stock = random.Random(seed), random_stock(seed)
    prompts = random_prompts(rng, 9, 30)
    lengths = [rng.randint(1, 40) for _ in prompts]
    options = {"block_size": rng.choice([2, 5, 16]), "prefix_caching": rng.random() < 0.7}
    expected = [stock_greedy(stock, p, n) for p, n in zip(prompts, lengths, strict=True)]
    with ContinuousBatchingGenerator(stock, cache_memory="1MiB", max_sequences=rng.randint(1, 9), **options) as g:
        g.engine.runner.captured.rows_together = 1 + seed % 4
        for _ in range(2):  # the second time from the prefix cache, and from graphs of before
            outputs = [
                g.generate([p], max_new_tokens=n, **GREEDY)[0] for p, n in zip(prompts[:2], lengths, strict=False)
            ]
            assert [o.token_ids for o in outputs] == expected[:2]
            outputs = list(g.generate(prompts, max_new_tokens=lengths, **GREEDY))
            assert [o.token_ids for o in outputs] == expected
        # From the checkpoints that decodes left at the ends of their blocks.
        more = [p + e[:-1] for p, e in zip(prompts, expected, strict=True)]
        assert [o.token_ids for o in g.generate(more, max_new_tokens=1, **GREEDY)] == [e[-1:] for e in expected]
    assert len(replayed) > 20


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_captured_steps_give_the_bits_of_those_that_are_not(weights, dtype, cache_dtype, replayed):
    model = random_stock(3).to(dtype)
    options = {"weights": weights, "cache_dtype": cache_dtype, "cache_memory": "4MiB", "block_size": 8}
    prompts = random_prompts(random.Random(1), 20, 12)
    results = []
    for capturing in (False, True):
        with ContinuousBatchingGenerator(model, **options) as generator:
            generator.engine.runner.capturing = capturing
            results.append(
                generator.generate(
                    prompts, max_new_tokens=12, output_logits=True, return_dict_in_generate=True, **GREEDY
                )
            )
            assert bool(replayed) == capturing
    for plain, captured in zip(*results, strict=True):
        assert plain.token_ids == captured.token_ids
        assert all(map(torch.equal, plain.logits, captured.logits))


def test_one_graph_serves_several_numbers_of_rows():
    stock = random_stock(4)
    prompts = random_prompts(random.Random(0), 12, 8)
    lengths = list(range(3, 15))
    expected = [stock_greedy(stock, p, n) for p, n in zip(prompts, lengths, strict=True)]
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", block_size=4) as generator:
        captured: CapturedSteps = generator.engine.runner.captured
        captured.rows_together = 5
        outputs = list(generator.generate(prompts, max_new_tokens=lengths, **GREEDY))
        assert [o.token_ids for o in outputs] == expected
        assert {key.num_rows for key in captured._graphs} == {1, 2, 3, 4, 5, 10, 15}


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_whose_rows_share_prefixes_give_the_bits_of_those_that_are_not(
    dtype, cache_dtype, replayed, monkeypatch
):
    """Where they can be captured (tiles, bf16), and where they cannot, which keeps no other step from it."""
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 1)
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model, rng = random_stock(3, **sizes).to(dtype), random.Random(4)
    heads = [[rng.randrange(10, 90) for _ in range(length)] for length in (70, 33)]
    prompts = [heads[i % 3] + p if i % 3 < 2 else p for i, p in enumerate(random_prompts(rng, 14, 20))]
    options = {"cache_memory": "4MiB", "block_size": 16, "cache_dtype": cache_dtype}
    results = []
    for capturing in (False, True):
        with ContinuousBatchingGenerator(model, **options) as generator:
            runner = generator.engine.runner
            runner.capturing = capturing
            outputs = generator.generate(
                prompts,
                max_new_tokens=[3 + 2 * i for i in range(14)],  # some steps have as many rows as the last
                output_logits=True,
                return_dict_in_generate=True,
                **GREEDY,
            )
            results.append([(o.token_ids, torch.cat(list(o.logits))) for o in outputs])
            kinds = {key.sharing for key in runner.captured._graphs}
            can_share = runner.native.isa in TILE_ISAS and dtype == torch.bfloat16
            assert kinds == (({True, False} if can_share else {False}) if capturing else set())
    assert replayed
    for (plain, logits), (captured, same) in zip(*results, strict=True):
        assert plain == captured and torch.equal(logits, same)


class Scaled(nn.Module):
    """An adapter around a layer, as PEFT injects them: the layer's own weight stays where it is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * -1.5


def replace_parameter(model):
    layer = model.model.layers[0].feed_forward.w2
    layer.weight = nn.Parameter(-layer.weight.detach())


def swap_data(model):
    model.model.layers[0].feed_forward.w2.weight.data = -model.model.layers[0].feed_forward.w2.weight.data


def change_in_place(model):
    model.model.layers[0].feed_forward.w2.weight.data.neg_()


def assign_state_dict(model):
    model.load_state_dict({k: v.clone() * 0.7 for k, v in model.state_dict().items()}, assign=True)


def inject(model):
    model.model.layers[0].feed_forward.w2 = Scaled(model.model.layers[0].feed_forward.w2)


def hook(model):
    model.model.layers[0].feed_forward.register_forward_hook(lambda module, args, output: output * 3)


def replace_forward(model):
    layer = model.model.layers[0].feed_forward
    inner = layer.forward
    layer.forward = lambda *args: -inner(*args)


@pytest.mark.parametrize(
    "change", [replace_parameter, swap_data, change_in_place, assign_state_dict, inject, hook, replace_forward]
)
def test_what_is_done_to_a_model_between_two_calls_counts(change):
    model, prompts = ours(random_stock(5)), random_prompts(random.Random(2), 5, 9)
    with ContinuousBatchingGenerator(model, cache_memory="4MiB", prefix_caching=False) as generator:
        before = [o.token_ids for o in generator.generate(prompts, max_new_tokens=15, **GREEDY)]
        assert generator.engine.runner.captured._graphs
        change(model)
        after = [o.token_ids for o in generator.generate(prompts, max_new_tokens=15, **GREEDY)]
    with ContinuousBatchingGenerator(model, cache_memory="4MiB", prefix_caching=False) as fresh:
        fresh.engine.runner.capturing = False
        assert after == [o.token_ids for o in fresh.generate(prompts, max_new_tokens=15, **GREEDY)] != before


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_embedding_of_another_class_is_asked(weights, replayed):
    options = {"cache_memory": "4MiB", "prefix_caching": False}
    with ContinuousBatchingGenerator(random_stock(5), weights=weights, **options) as generator:
        embedding = generator.model.model.embed_tokens

        class Negated(type(embedding)):
            def forward(self, input):
                return -super().forward(input)

        answers = []
        for kind, capturing in ((type(embedding), True), (Negated, True), (Negated, False)):
            embedding.__class__, generator.engine.runner.capturing = kind, capturing
            outputs = generator.generate([[7, 8, 9]], max_new_tokens=15, **GREEDY)
            answers.append(outputs[0].token_ids)
    assert replayed and answers[0] != answers[1] == answers[2]


def test_a_hook_registered_in_the_middle_of_an_answer_sees_every_step_from_then_on():
    model, seen = ours(random_stock(5)), []
    with ContinuousBatchingGenerator(model, cache_memory="4MiB") as generator:
        for i, _ in enumerate(generator.stream([7, 8, 9], max_new_tokens=20, **GREEDY)):
            if i == 9:
                handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        assert len(seen) >= 9
        handle.remove()
        count = len(seen)
        generator.generate([[7, 8, 9]], max_new_tokens=5, **GREEDY)
        assert len(seen) == count and generator.engine.runner.captured._graphs


def test_graphs_and_their_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(captured_steps, "MOST_ROWS", 6)
    stock = random_stock(4)
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", block_size=4) as generator:
        captured: CapturedSteps = generator.engine.runner.captured
        sizes = []
        for _ in range(3):
            prompts = random_prompts(random.Random(0), 12, 8)
            generator.generate(prompts, max_new_tokens=list(range(3, 63, 5)), **GREEDY)
            sizes.append((len(captured._graphs), generator.engine.runner.arena.num_bytes))
        assert sizes[0] == sizes[1] == sizes[2] and sizes[0][0] == 6


def test_a_change_of_threads_is_another_capturing():
    stock, threads = random_stock(4), torch.get_num_threads()
    prompts = random_prompts(random.Random(3), 3, 8)
    expected = [stock_greedy(stock, p, 9) for p in prompts]
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
        try:
            for n in (1, 3, 1):
                torch.set_num_threads(n)
                assert [o.token_ids for o in generator.generate(prompts, max_new_tokens=9, **GREEDY)] == expected
        finally:
            torch.set_num_threads(threads)
        assert {key[1] for key in generator.engine.runner.captured._graphs} == {1, 3}


def test_kernels_torch_records_nothing():
    with ContinuousBatchingGenerator(random_stock(4), cache_memory="4MiB", kernels="torch") as generator:
        generator.generate([[5, 6]], max_new_tokens=4, **GREEDY)
        assert generator.engine.runner.captured is None and ModelRunner.capturing


def test_steps_of_many_tokens_use_the_same_memory_again_and_compute_the_same(monkeypatch):
    """Whatever of it is left from the step before."""
    monkeypatch.setattr(arena, "LARGE", 1)
    stock, rng = random_stock(4), random.Random(8)
    prompts = random_prompts(rng, 12, 90)
    expected = [stock_greedy(stock, p, 6) for p in prompts]
    sizes = []
    options = {"cache_memory": "8MiB", "max_batch_tokens": 64, "prefix_caching": False}
    with ContinuousBatchingGenerator(stock, **options) as generator:
        for _ in range(3):
            assert [o.token_ids for o in generator.generate(prompts, max_new_tokens=6, **GREEDY)] == expected
            sizes.append(generator.engine.runner.arena.num_bytes)
    assert 0 < sizes[0] == sizes[1] == sizes[2]


def test_prompts_are_one_run_of_native_calls_where_nobody_looks(monkeypatch):
    counts = []
    run = CallList.run
    monkeypatch.setattr(CallList, "run", lambda self, native: (counts.append(len(self)), run(self, native))[1])
    stock, seen = random_stock(1), []
    prompts = random_prompts(random.Random(0), 3, 20)
    expected = [stock_greedy(stock, p, 1) for p in prompts]
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB") as generator:
        outputs = generator.generate(prompts, max_new_tokens=1, **GREEDY)
        assert [o.token_ids for o in outputs] == expected
        assert len(counts) == 2 and min(counts) >= 1 and sum(counts) > 10  # before and after the rows of the logits
        layer = generator.model.model.layers[0]
        handle = layer.register_forward_hook(lambda *args: seen.append(args[2].numpy().copy()))
        outputs = generator.generate(prompts, max_new_tokens=1, **GREEDY)
        handle.remove()
        assert [o.token_ids for o in outputs] == expected
    assert len(counts) == 2 and len(seen) == 1  # a hook may look without an operation, so nothing was put off
