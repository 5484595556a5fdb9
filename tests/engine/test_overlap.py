"""Steps launched before the tokens of the step before are read, on a device that is made up: the same tokens, and the
same cache."""

import itertools
import math
import random

import pytest
import torch
from engine.recorded_graphs import RecordedGraphs
from helpers import ours, random_prompts, random_stock
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine import overlap, padded_steps, runner
from lfm2_cb.engine.loop import EngineLoop
from lfm2_cb.engine.sampler import BadLogits


class LateReadback:
    """Values that are there when they are waited for, and not before."""

    def __init__(self, device, values):
        self._device, self._values, self._is_read = device, values.clone(), False
        self._device.num_launched += 1

    def wait(self):
        assert not self._is_read, "read twice"
        self._is_read = True
        device = self._device
        device.num_read += 1
        device.num_ahead += device.num_launched > device.num_read
        assert device.num_launched - device.num_read <= 1, "more than one step ahead"
        if device.fails:
            raise device.fails.pop()
        return self._values.tolist()

    def may_follow(self):
        return not self._device.is_other_stream


class LateDevice:
    """Attributes: num_ahead: steps whose tokens were read with another step launched already."""

    def __init__(self):
        self.num_launched = self.num_read = self.num_ahead = 0
        self.fails, self.is_other_stream = [], False

    def start(self, values):
        return LateReadback(self, values)


@pytest.fixture
def late(monkeypatch):
    """Every engine made with kernels="torch" runs on this."""
    return install(monkeypatch)


def install(patch):
    device = LateDevice()
    patch.setattr(padded_steps, "FIRST_TOKENS", 16)
    patch.setattr(runner, "graphs_for", lambda kernels, device: RecordedGraphs())
    patch.setattr(overlap, "transfer_for", lambda _: device)
    return device


def generator_of(model, **options):
    options = {"kernels": "torch", "cache_memory": "4MiB", "max_sequences": 6, "block_size": 4, **options}
    return ContinuousBatchingGenerator(model, **options)


def tight(model, num_blocks, **options):
    """A generator whose cache has so many blocks."""
    with generator_of(model, **options) as generator:
        plan = generator.engine.plan
    memory = (plan.num_slots + 1) * plan.bytes_per_state + num_blocks * plan.bytes_per_block
    return generator_of(model, **options, cache_memory=memory)


def known_tokens(generator):
    """What the prefix cache holds: the tokens of each block, with all before them."""
    pool = generator.engine.scheduler.cache.pool
    blocks = {block.content_id: block for block in pool.known_blocks()}

    def whole(block):
        parent, tokens = block.key
        return (*(whole(blocks[parent]) if parent in blocks else ()), *tokens)

    return sorted(map(whole, blocks.values()))


GREEDY = {"do_sample": False, "eos_token_id": None}
MODELS, ALONE = {}, {}


def alone(seed, number, prompt, options):
    """A request's tokens with nobody else there, without graphs, each step read before the next.

    Args: number: how many were submitted before it; its draws depend on that.
    """
    key = (seed, number, tuple(prompt), repr(options))
    if key not in ALONE:
        reference = MODELS[seed][1]
        reference._num_submitted = itertools.count(number)
        output = reference.submit(prompt, **options).result()
        ALONE[key] = output.token_ids, output.finish_reason
    return ALONE[key]


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_schedule_gives_the_same_tokens(data):
    """Greedy and drawn; ends at any token; requests that come, are cancelled and are preempted while others run; those
    that begin as an ended one did, its last token included."""
    seed, rng = data.draw(st.integers(0, 2)), random.Random(data.draw(st.integers(0, 999)))
    if seed not in MODELS:
        model = ours(random_stock(seed))
        MODELS[seed] = model, generator_of(model, prefix_caching=False)
    model = MODELS[seed][0]
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        patch.setattr(EngineLoop, "run_in_background", lambda loop: None)  # steps are made here
        num_blocks = data.draw(st.sampled_from([12, 20, 400]))
        options = {"max_sequences": data.draw(st.integers(1, 6)), "block_size": data.draw(st.sampled_from([2, 4]))}
        with tight(model, num_blocks, **options) as generator:
            handles = []
            for _ in range(data.draw(st.integers(1, 4))):
                for prompt in random_prompts(rng, data.draw(st.integers(1, 4)), 8):
                    if handles and rng.random() < 0.4:  # goes on from what another has come to
                        handle, before, _ = rng.choice(handles)
                        answer = handle.result().token_ids if handle.done() else []
                        prompt = [*(before + answer)[:12], 3]
                    asked = {"max_new_tokens": rng.choice([1, 2, 5, 9]), "do_sample": rng.random() < 0.5}
                    asked["eos_token_id"] = rng.sample(range(3, 60), rng.choice([1, 6, 12]))
                    if asked["do_sample"]:
                        more = {"temperature": rng.choice([0.7, 1.0]), "top_k": rng.choice([0, 0, 0, 5])}
                        asked |= {"seed": rng.randrange(99), **more}
                    handles.append((generator.submit(prompt, **asked), prompt, asked))
                for _ in range(data.draw(st.integers(0, 9))):
                    generator.loop.drive_once(rng.choice([None, None, None, lambda: None]))
                    generator.engine.scheduler.check_integrity()
                if data.draw(st.booleans()):
                    rng.choice(handles)[0].cancel()
            for number, (handle, prompt, asked) in enumerate(handles):
                output, (tokens, reason) = handle.result(), alone(seed, number, prompt, asked)
                if output.finish_reason == "cancelled":
                    assert output.token_ids == tokens[: len(output.token_ids)]
                else:
                    assert (output.token_ids, output.finish_reason) == (tokens, reason), (prompt, asked)
            generator.engine.scheduler.cache.check_integrity([])


def test_steps_are_launched_ahead(late):
    """All but the second, which the graphs are captured for, the one for whose length they are captured again, and
    what would come after the last."""
    model, prompts = ours(random_stock(1)), random_prompts(random.Random(1), 4, 9)
    with generator_of(model) as generator:
        generator.generate(prompts, max_new_tokens=20, **GREEDY)
        assert late.num_launched == late.num_read == 20 and late.num_ahead == 17
        late.num_launched = late.num_read = late.num_ahead = 0
        generator.generate(prompts, max_new_tokens=20, **GREEDY)
        assert late.num_launched == 20 and late.num_ahead == 19


def needs_history(generator, prompts):
    generator.generate(prompts, max_new_tokens=9, repetition_penalty=1.3, **GREEDY)


def keeps_scores(generator, prompts):
    generator.generate(prompts, max_new_tokens=9, logprobs=2, **GREEDY)


def guesses(generator, prompts):
    generator.generate(prompts, max_new_tokens=9, prompt_lookup_num_tokens=3, **GREEDY)


def holds_between_steps(generator, prompts):
    handles = [generator.submit(prompt, max_new_tokens=9, **GREEDY) for prompt in prompts]
    while not all(handle.done() for handle in handles):
        generator.loop.drive_once(lambda: None)


def on_another_stream(generator, prompts):
    generator.engine.overlap._transfer.is_other_stream = True
    generator.generate(prompts, max_new_tokens=9, **GREEDY)


def without_graphs(generator, prompts):
    generator.engine.runner.capturing = False
    generator.generate(prompts, max_new_tokens=9, **GREEDY)


def with_others_waiting(generator, prompts):
    """While there is a place, as those that wait may be let in in any step."""
    generator.engine.scheduler.policy.opens = lambda running: not running
    generator.submit(prompts[0], max_new_tokens=9, **GREEDY)
    generator.loop.drive_once()
    generator.submit(prompts[1], max_new_tokens=1, **GREEDY).result()


@pytest.mark.parametrize(
    "ask",
    [
        needs_history, keeps_scores, guesses, holds_between_steps, on_another_stream, without_graphs,
        with_others_waiting,
    ],
)  # fmt: skip
def test_steps_that_need_the_host_are_not(ask, late, monkeypatch):
    monkeypatch.setattr(EngineLoop, "run_in_background", lambda loop: None)
    with generator_of(ours(random_stock(1))) as generator:
        ask(generator, [[5, 6, 7, 5, 6, 7], [9]])
        assert late.num_ahead == 0 and late.num_launched == late.num_read


@pytest.mark.parametrize("length", range(6, 14))
def test_a_dropped_row_leaves_nothing_in_the_cache(length, late, monkeypatch):
    """A request that ends, by its last token, where the dropped row fills a block; others go on from there."""
    model, (prompt, other) = ours(random_stock(2)), random_prompts(random.Random(4), 2, 9)

    def run(generator):
        whole = generator.generate([prompt], max_new_tokens=length, **GREEDY)[0].token_ids
        generator.engine.scheduler.cache.clear()
        ended = generator.generate([prompt, other], max_new_tokens=40, do_sample=False, eos_token_id=whole[-1:])
        known = known_tokens(generator)
        again = [prompt + o.token_ids + [7, 8] for o in ended]
        after = generator.generate(again, max_new_tokens=5, **GREEDY)
        generator.engine.scheduler.cache.check_integrity([])
        return [o.token_ids for o in (*ended, *after)], known, [o.metrics.num_cached_tokens for o in after]

    with generator_of(model) as generator:
        found = run(generator)
    assert late.num_ahead > length // 2
    monkeypatch.setattr(overlap, "transfer_for", lambda device: None)
    with generator_of(model) as generator:
        assert found == run(generator)


def test_a_step_that_fails_late_ends_its_requests_alone(late):
    with generator_of(ours(random_stock(1))) as generator:
        expected = generator.generate([[5, 6, 7]], max_new_tokens=20, **GREEDY)[0].token_ids
        late.fails.append(RuntimeError("device"))
        failed = generator.generate([[5, 6, 7], [8]], max_new_tokens=20, **GREEDY)
        assert [str(output.error) for output in failed] == ["device", "device"]
        assert generator.generate([[5, 6, 7]], max_new_tokens=20, **GREEDY)[0].token_ids == expected
        generator.engine.scheduler.cache.check_integrity([])


def test_logits_that_are_no_numbers_end_their_request_alone(late):
    model = ours(random_stock(1, tie_word_embeddings=False))
    with generator_of(model, prefix_caching=False, block_size=32) as generator:
        first, second = (o.token_ids for o in generator.generate([[5, 6, 7], [8, 9]], max_new_tokens=12, **GREEDY))
        bad = next(token for token in first[2:] if token not in (*second, 5, 6, 7, 8, 9))
        with torch.no_grad():
            model.model.embed_tokens.weight[bad] = math.nan
        handles = [generator.submit(prompt, max_new_tokens=12, **GREEDY) for prompt in ([5, 6, 7], [8, 9])]
        failed = handles[0].result()
        assert isinstance(failed.error, BadLogits) and failed.token_ids == first[: first.index(bad) + 1]
        assert handles[1].result().token_ids == second
        generator.engine.scheduler.cache.check_integrity([])
