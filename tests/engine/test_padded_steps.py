"""Decode steps replayed from device graphs, here recorded operators: stock's tokens, and nobody's cache touched."""

import random

import pytest
import torch
from engine.recorded_graphs import RecordedGraphs
from helpers import ours, random_moe, random_prompts, random_stock, stock_greedy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine import padded_steps, runner
from lfm2_cb.engine.loop import EngineLoop
from lfm2_cb.model.padded_batch import PaddedDecodeBatch
from lfm2_cb.model.ragged_batch import Row
from lfm2_cb.ops.kernel_set import REFERENCE

GREEDY = {"do_sample": False, "eos_token_id": None}


@pytest.fixture
def graphs(monkeypatch):
    """Every engine made with kernels="torch" captures with these."""
    made = RecordedGraphs()
    monkeypatch.setattr(padded_steps, "FIRST_TOKENS", 32)
    monkeypatch.setattr(runner, "graphs_for", lambda kernels, device: made)
    return made


def generator_of(model, **options):
    return ContinuousBatchingGenerator(
        model, **{"kernels": "torch", "cache_memory": "4MiB", "max_sequences": 6, **options}
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_nets_give_stocks_tokens(seed, graphs):
    """Batches that shrink and grow, rows that outgrow the first graphs, a cache too small for all, prefixes shared."""
    rng, stock = random.Random(seed), random_stock(seed)
    prompts = random_prompts(rng, 7, 20)
    prompts[1] = prompts[0] + prompts[1]
    lengths = [rng.randint(1, 20) for _ in prompts]
    options = {"block_size": rng.choice([2, 5, 16]), "prefix_caching": rng.random() < 0.7}
    expected = [stock_greedy(stock, p, n) for p, n in zip(prompts, lengths, strict=True)]
    with generator_of(stock, cache_memory="1MiB", max_sequences=rng.randint(2, 7), **options) as generator:
        for _ in range(2):
            outputs = list(generator.generate(prompts, max_new_tokens=lengths, **GREEDY))
            assert [o.token_ids for o in outputs] == expected
        # From the checkpoints that decodes left at the ends of their blocks.
        more = [p + e[:-1] for p, e in zip(prompts, expected, strict=True)]
        assert [o.token_ids for o in generator.generate(more, max_new_tokens=1, **GREEDY)] == [
            e[-1:] for e in expected
        ]
        generator.engine.scheduler.cache.check_integrity([])
        sizes = generator.engine.runner.captured.sizes
    assert graphs.captured[: len(sizes)] == sizes[::-1] and len(graphs.replayed) > 20
    assert len(graphs.captured) <= 3 * len(sizes)


STOCKS = {}


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_schedule_gives_stocks_tokens(data):
    """Requests that come while others run, are cancelled, and end at any time."""
    seed = data.draw(st.integers(0, 2))
    stock, rng = STOCKS.setdefault(seed, random_stock(seed)), random.Random(data.draw(st.integers(0, 99)))
    waves = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        made = RecordedGraphs()
        patch.setattr(runner, "graphs_for", lambda kernels, device: made)
        patch.setattr(padded_steps, "FIRST_TOKENS", 8)
        patch.setattr(EngineLoop, "run_in_background", lambda loop: None)  # steps are made here
        options = {"max_batch_tokens": data.draw(st.integers(8, 40)), "max_sequences": data.draw(st.integers(1, 8))}
        with generator_of(stock, block_size=data.draw(st.sampled_from([3, 8])), **options) as generator:
            handles = []
            for count in waves:
                for prompt in random_prompts(rng, count, 12):
                    length = rng.randint(1, 9)
                    handles.append((generator.submit(prompt, max_new_tokens=length, **GREEDY), prompt, length))
                for _ in range(data.draw(st.integers(0, 6))):
                    generator.loop.drive_once()
                if data.draw(st.booleans()):
                    handles[rng.randrange(len(handles))][0].cancel()
            for handle, prompt, length in handles:
                output = handle.result()
                expected = stock_greedy(stock, prompt, length)
                if output.finish_reason != "cancelled":
                    assert output.token_ids == expected
                else:
                    assert output.token_ids == expected[: len(output.token_ids)]
            generator.engine.scheduler.cache.check_integrity([])
    assert all(size >= 1 for size in made.replayed)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_padded_rows_write_to_nobodys_cache(cache_dtype, checkpoints, graphs):
    options = {"block_size": 4, "prefix_caching": checkpoints, "cache_dtype": cache_dtype, "cache_memory": "1MiB"}
    with generator_of(random_stock(3), **options) as generator, torch.inference_mode():
        engine = generator.engine.runner
        cache = engine.cache
        tensors = [*cache.keys.values(), *cache.values.values()]
        tensors = [t for kv in tensors for t in ((kv.values, kv.scale) if cache_dtype else (kv,))]
        for tensor in (*tensors, *cache.conv_states.values()):
            tensor.random_(1, 7)
        for states in cache.conv_states.values():
            states[0] = 0
        before = [t.clone() for t in (*tensors, *cache.conv_states.values())]
        # Three rows in a graph of four; the second is the last token of its block.
        tables = [[5, 2], [7], [1, 9, 4]]
        starts, slots = [6, 3, 9], [0, 4, 2]
        rows = [Row([11 + i], starts[i], tables[i], slots[i], num_logits=1) for i in range(3)]
        logits = engine.forward(rows)
        assert logits.shape[0] == 3 and graphs.replayed == [4]
        for after, known in zip(tensors, before, strict=False):
            written = {(int(b), int(o)) for b, _, o in (after != known).flatten(3).any(-1).nonzero()}
            assert written <= {(2, 2), (7, 3), (4, 1), (cache.scratch_block, 0)} and len(written) >= 3
        rows_written = {1 + slot for slot in slots} | {cache.scratch_row}
        rows_written |= {cache.checkpoint_row(7)} if checkpoints else set()
        for after, known in zip(cache.conv_states.values(), before[len(tensors) :], strict=True):
            assert set((after != known).flatten(1).any(1).nonzero().flatten().tolist()) == rows_written


def test_the_inputs_are_copied_into_tensors_that_stay(graphs):
    with generator_of(random_stock(3), block_size=4) as generator:
        cache = generator.engine.runner.cache
        width = generator.model.config.hidden_size
        embeds = torch.zeros(4, width)
        batch = PaddedDecodeBatch(cache, 3, REFERENCE, num_rows=4, max_blocks=3, inputs_embeds=embeds)
        fields = batch._inputs.on_device
        addresses = {name: tensor.data_ptr() for name, tensor in fields.items()}
        hosts = set()
        for count in (1, 4, 2, 3, 1):
            hosts.add(id(batch._inputs.host()))
            batch.fill([Row([20 + i], 5 + i, [3, i, 6], i, num_logits=1) for i in range(count)])
            assert {name: tensor.data_ptr() for name, tensor in fields.items()} == addresses
            assert fields["input_ids"].tolist() == [20 + i for i in range(count)] + [0] * (4 - count)
            assert fields["position_ids"].tolist() == [5 + i for i in range(count)] + [0] * (4 - count)
            assert fields["kv_lens"].tolist() == [6 + i for i in range(count)] + [1] * (4 - count)
            s = cache.scratch_block
            tables = [[3, i, 6 if i == 3 else s] for i in range(count)] + [[s] * 3] * (4 - count)
            assert fields["block_table"].tolist() == tables
        assert len(hosts) == 2  # one is filled while the other is still being copied


def negate(model):
    model.model.layers[0].feed_forward.w2.weight.data = -model.model.layers[0].feed_forward.w2.weight.data


def change_in_place(model):
    model.model.layers[0].feed_forward.w2.weight.data.neg_()


def hook(model):
    model.model.layers[0].feed_forward.register_forward_hook(lambda module, args, output: output * 3)


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * -1.5


def inject(model):
    model.model.layers[0].feed_forward.w2 = Scaled(model.model.layers[0].feed_forward.w2)


def another_class(model):
    layer = model.model.layers[0].feed_forward.w2
    layer.__class__ = type(
        "Negated", (type(layer),), {"forward": lambda self, x: -type(self).__base__.forward(self, x)}
    )


@pytest.mark.parametrize(
    ("change", "replays"),
    [(negate, True), (change_in_place, True), (hook, False), (inject, False), (another_class, False)],
)
def test_what_is_done_to_a_model_between_two_calls_counts(change, replays, graphs):
    model, prompts = ours(random_stock(5)), random_prompts(random.Random(2), 5, 9)
    with generator_of(model, prefix_caching=False) as generator:
        before = [o.token_ids for o in generator.generate(prompts, max_new_tokens=9, **GREEDY)]
        assert graphs.replayed
        graphs.replayed.clear()
        change(model)
        after = [o.token_ids for o in generator.generate(prompts, max_new_tokens=9, **GREEDY)]
        assert bool(graphs.replayed) == replays
        generator.engine.runner.capturing = False
        assert after == [o.token_ids for o in generator.generate(prompts, max_new_tokens=9, **GREEDY)] != before


@pytest.mark.parametrize("failing", ["experts", "memory"])
def test_what_cannot_be_captured_runs_as_it_is_and_says_so_once(failing, graphs, monkeypatch):
    stock = random_moe(0, num_dense_layers=0) if failing == "experts" else random_stock(0)
    if failing == "memory":

        def full(compute):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

        monkeypatch.setattr(graphs, "capture", full)
    said = []
    monkeypatch.setattr(padded_steps.logger, "warning", lambda text, *args: said.append(text % args))
    prompts = random_prompts(random.Random(2), 3, 9)
    expected = [stock_greedy(stock, p, 6) for p in prompts]
    with generator_of(stock) as generator:
        for _ in range(2):
            assert [o.token_ids for o in generator.generate(prompts, max_new_tokens=6, **GREEDY)] == expected
        assert generator.engine.runner.captured.num_graphs == 0
    assert len(said) == 1 and said[0].endswith(
        "Tried to allocate 2.00 GiB." if failing == "memory" else "aten.bincount.default"
    )


def test_drafts_and_sampling_beside_decodes(graphs):
    """Steps with guesses are no decodes, and run as they are, on the states that replayed steps left."""
    stock, prompt = random_stock(1), [5, 6, 7, 5, 6, 7, 5, 6]
    expected = stock_greedy(stock, prompt, 30)
    options = {"do_sample": True, "top_k": 7, "seed": 3, "max_new_tokens": 9, "eos_token_id": None}
    with generator_of(stock, drafting="auto") as generator:
        assert generator.generate([prompt], max_new_tokens=30, **GREEDY)[0].token_ids == expected
    with generator_of(stock) as generator:
        sampled = [o.token_ids for o in generator.generate([prompt, [9, 8]], **options)]
        generator.engine.runner.capturing = False
        assert sampled == [o.token_ids for o in generator.generate([prompt, [9, 8]], **options)]
    assert graphs.replayed


def test_nothing_is_captured_where_nothing_can():
    assert runner.graphs_for("auto", torch.device("cpu")) is None
    assert runner.graphs_for("torch", torch.device("cuda")) is None
