"""Segments of prompts taken up at other places."""

import copy

import pytest
import torch

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.ops.attention.kv_blocks import gather
from lfm2_cb.requests.prompts import PromptError, SegmentedPrompt, read_prompts

GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 8}
SIZES = {"cache_memory": "64MiB", "max_batch_tokens": 600, "max_sequences": 8}


@pytest.fixture(scope="module")
def segments():
    """Of lengths that are and are not whole blocks; the last is a question."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(10, 4000, (n,), generator=generator).tolist() for n in (200, 128, 333, 70, 9, 25)]


@pytest.fixture(scope="module", params=["torch", "native"])
def generator(request, demo_stock):
    with ContinuousBatchingGenerator(demo_stock, kernels=request.param, **SIZES) as generator:
        yield generator


def joined(parts):
    return [token for part in parts for token in part]


def test_all_recomputed_is_a_fresh_prefill(generator, segments):
    order = [segments[i] for i in (2, 0, 1, 3, 5)]
    fresh = generator.generate([joined(order)], use_prefix_cache=False, logprobs=0, **GREEDY)[0]
    whole = generator.generate([order], chunks=True, recompute=1.0, logprobs=0, **GREEDY)[0]
    assert whole.token_ids == fresh.token_ids and whole.logprobs == fresh.logprobs
    part = generator.generate([order], chunks=True, recompute=0.15, logprobs=0, **GREEDY)[0]
    assert part.logprobs != fresh.logprobs and part.metrics.num_cached_tokens > 0.7 * sum(map(len, order[:4]))
    assert fresh.metrics.num_cached_tokens == whole.metrics.num_cached_tokens == 0


def without_attention(stock):
    """The model with its attention layers switched off: they add nothing to the residual."""
    model = copy.deepcopy(stock)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.out_proj.weight.data.zero_()
    return model


def state_of(generator, prompt, **options):
    """K/V in the prompt's blocks, the conv state behind it, and its first token's log-probability."""
    engine = generator.engine
    submission = generator.enqueue([prompt], generator.resolve(None, {**GREEDY, "logprobs": 0, **options}))
    (request,) = submission.requests
    while not request.num_output_tokens:
        engine.step()
    cache, size = engine.runner.cache, request.num_prompt_tokens
    blocks = torch.tensor(request.block_table)
    kv = [gather(blocks_of[i], blocks, size) for i in cache.keys for blocks_of in (cache.keys, cache.values)]
    conv = [states[cache.slot_row(request.state_slot)].clone() for states in cache.conv_states.values()]
    gaps = request.gaps
    generator.run(submission)
    engine.scheduler.check_integrity()
    return kv, conv, request.params.trace.logprobs[0], gaps


@pytest.mark.parametrize("order", [(2, 0, 1, 5), (0, 3, 2, 4, 1, 5), (1, 1, 4, 1, 5)])
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("max_batch_tokens", [600, 37])
def test_a_moved_segment_is_exact_where_attention_is_switched_off(
    demo_stock, segments, order, kernels, max_batch_tokens
):
    """So K/V, which hang on the conv states of every position, and the last conv states, equal those computed in place
    once as many tokens are computed again as the convolutions reach back."""
    prompt = [segments[i] for i in order]
    options = {**SIZES, "max_batch_tokens": max(max_batch_tokens, 400 if kernels == "torch" else 350)}
    with ContinuousBatchingGenerator(without_attention(demo_stock), kernels=kernels, **options) as generator:
        fresh = state_of(generator, joined(prompt), use_prefix_cache=False)
        generator.engine.scheduler.max_batch_tokens = max_batch_tokens

        reused = state_of(generator, SegmentedPrompt(prompt), chunks=True, recompute=0.0)
    assert sum(end - start for start, end in reused[3]) > 0.75 * sum(len(s) for s in prompt if len(s) > 64)
    for got, expected in zip(reused[0] + reused[1], fresh[0] + fresh[1], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_fewer_first_tokens_would_not_do(demo_stock, segments):

    prompt = [segments[i] for i in (2, 0, 1, 5)]
    with ContinuousBatchingGenerator(without_attention(demo_stock), kernels="torch", **SIZES) as generator:
        fresh = state_of(generator, joined(prompt), use_prefix_cache=False)
        state_of(generator, SegmentedPrompt(prompt), chunks=True)
        generator.engine._chunks.warm_up //= 4
        reused = state_of(generator, SegmentedPrompt(prompt), chunks=True, recompute=0.0)
    worst = max(float((a - b).abs().max()) for a, b in zip(reused[0], fresh[0], strict=True))
    assert worst > 1e-3


def test_more_recomputed_is_nearer_to_a_fresh_prefill(generator, segments):

    prompt = [segments[i] for i in (2, 0, 1, 3, 5)]
    fresh = state_of(generator, joined(prompt), use_prefix_cache=False)
    errors = []
    for share in (0.0, 0.3, 0.7):
        kv, _, _, gaps = state_of(generator, SegmentedPrompt(prompt), chunks=True, recompute=share)
        errors.append(sum(float((a - b).norm()) for a, b in zip(kv, fresh[0], strict=True)))
        taken = sum(end - start for start, end in gaps)
        assert share == 0 or abs(1 - taken / 731 - share) < 0.08
    assert errors[0] > errors[1] > errors[2]


def test_many_prompts_at_once_and_what_the_order_of_prompts_does(generator, segments):
    """What is taken up does not depend on which prompt came first, nor on who shares the batch."""
    orders = [(2, 0, 1, 5), (0, 2, 1, 5), (1, 3, 2, 0, 5), (3, 2, 5)]
    prompts = [[segments[i] for i in order] for order in orders]
    together = [output.token_ids for output in generator.generate(prompts, chunks=True, **GREEDY)]
    generator.engine.forget_cached()
    alone = [generator.generate([prompt], chunks=True, **GREEDY)[0].token_ids for prompt in reversed(prompts)]
    assert together == alone[::-1]
    generator.engine.scheduler.check_integrity()


def test_a_preempted_request_takes_up_its_segments_again(generator, segments):
    prompt = [segments[i] for i in (2, 0, 1, 5)]
    expected = generator.generate([prompt], chunks=True, **GREEDY)[0].token_ids

    options = generator.resolve(None, {**GREEDY, "chunks": True})
    submission = generator.enqueue([SegmentedPrompt(prompt)], options)
    for _ in range(4):
        generator.engine.step()
    (request,) = generator.engine.scheduler.running
    generator.engine.scheduler.preempt(request)
    assert generator.run(submission)[0].token_ids == expected


def test_several_sequences_of_a_prompt(generator, segments):
    prompt = [segments[i] for i in (2, 0, 5)]
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 3, "seed": 1}
    outputs = generator.generate([prompt], chunks=True, **options)
    again = generator.generate([prompt], chunks=True, **options)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in again] and len(outputs) == 3


def test_segments_in_text_and_by_separator(demo_stock, demo_tokenizer):
    texts = ["It was a truth " * 30, "She had been " * 30, "What then?"]
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, **SIZES) as generator:
        in_list = generator.generate([texts], chunks=True, **GREEDY)[0]
        marked = ["It was a truth " * 30 + "###", "She had been " * 30 + "###", "What then?"]
        by_text = generator.generate(["".join(marked)], chunks="###", **GREEDY)[0]
        assert in_list.metrics.num_cached_tokens > 0 and by_text.metrics.num_cached_tokens > 0
        assert by_text.token_ids == generator.generate([marked], chunks=True, **GREEDY)[0].token_ids
        mark = [7, 7]
        ids = [[5] * 150 + mark, [6] * 150 + mark, [9] * 9]
        by_ids = generator.generate([joined(ids)], chunks=mark, **GREEDY)[0]
        assert by_ids.metrics.num_cached_tokens > 0
        assert by_ids.token_ids == generator.generate([ids], chunks=True, **GREEDY)[0].token_ids
        (event, *_) = generator.stream([texts], chunks=True, **GREEDY)
        assert event.token_ids == in_list.token_ids[:1]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5, 6]], {"chunks": True}, "must be a list of segments"),
        ([[5, 6]], {"chunks": [9]}, "prompt 0 has no separator"),
        ([[5, 6]], {"chunks": []}, "chunks must be True"),
        ([[[5], [6]]], {"chunks": True, "recompute": 1.5}, "recompute must be a number from 0 to 1"),
        ([[[5], [6]]], {"chunks": True, "num_beams": 2}, "chunks cannot be combined with"),
    ],
)
def test_what_is_wrong_is_said(generator, prompts, options, message):
    with pytest.raises((PromptError, ValueError), match=message):
        generator.generate(prompts, **{**GREEDY, **options})


def test_it_needs_the_caches_checkpoints(demo_stock):
    with (
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB", prefix_caching=False) as generator,
        pytest.raises(ValueError, match="chunks needs prefix_caching"),
    ):
        generator.generate([[[5], [6]]], chunks=True)


def test_what_begins_every_prompt_is_a_segment_by_itself(demo_stock, demo_tokenizer):
    """So a document that comes first is the same segment as one that comes later: of text, and of token ids."""
    text = "It was a truth " * 30 + "###" + "She had been " * 30 + "###What then?"
    mark = demo_tokenizer("###", add_special_tokens=False)["input_ids"]
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, **SIZES) as generator:

        def segments_of(prompt, chunks):
            (ids,) = read_prompts([prompt], demo_tokenizer, chunks)
            (request,) = generator.builder.build([ids], generator.resolve(None, {**GREEDY, "chunks": chunks}))
            return request.prompt_token_ids, request.segments

        ids, ends = segments_of(text, "###")
        assert ids[0] == demo_tokenizer.bos_token_id and ends[0] == 1 and len(ends) == 3
        assert segments_of(ids, mark) == segments_of(ids, "###") == (ids, ends)
        assert segments_of([ids[: ends[1]], ids[ends[1] : ends[2]], ids[ends[2] :]], True) == (ids, ends)
        (read_again,) = read_prompts([read_prompts([text], demo_tokenizer, "###")[0]], None)
        assert read_again.ends == ends
        with pytest.raises(PromptError, match=r"prompt 0 has no separator \(chunks: '@@'\) in its text"):
            generator.generate([text], chunks="@@", **GREEDY)
