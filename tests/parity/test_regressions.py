"""The LFM2 bugs that others had, one test each, named after the reports."""

import random

import pytest
import torch
from helpers import ours, random_prompts, random_stock, stock_greedy

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.hybrid_cache import CachePlan, HybridCache
from lfm2_cb.model.ragged_batch import RaggedBatch, Row


@torch.no_grad()
def forward_packed(model, cache, rows):
    batch = RaggedBatch(rows, cache, model.config.conv_L_cache)
    hidden = model.model(batch.input_ids, position_ids=batch.position_ids, state=batch, use_cache=False)
    return model.lm_head(hidden.last_hidden_state[batch.logits_index])


def make_cache(model, block_size=4, blocks=40, slots=6):
    plan = CachePlan(blocks, block_size, slots, 0, 0, checkpoints=True)
    return HybridCache(model.config, plan, torch.float32, torch.device("cpu"))


def logits_of(model, ids):
    """Every token's logits of one prompt on its own, without a cache."""
    return model(torch.tensor([ids])).logits[0]


# The ordinary forward. (`conv_bias=False`: with a bias, stock's padding is not silent, and ours equals stock's.)

PROMPTS = [[5, 9, 13, 8, 30], [7, 7, 4, 21, 40, 33, 9, 12], [50]]


def pad(prompts, side):
    """Ids, mask and positions `[batch, length]`, the padding made of ordinary tokens."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), 11)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        at = slice(width - len(prompt), width) if side == "left" else slice(len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", range(4))
def test_transformers_41790_rows_of_a_padded_batch_are_what_they_are_alone(seed, side):
    """The convolution once ran over the padding of a batch."""
    model = ours(random_stock(seed, conv_bias=False))
    ids, mask, positions = pad(PROMPTS, side)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(logits[row][mask[row].bool()], logits_of(model, prompt), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_46773_the_mask_counts_at_batch_one_too(side):
    model = ours(random_stock(4, conv_bias=False))
    ids, mask, positions = (x[:1] for x in pad(PROMPTS, side))
    got = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    torch.testing.assert_close(got, logits_of(model, PROMPTS[0]), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("ends", [[2, 5, 8], [2, 4, 6, 8], [7, 8]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_transformers_47087_the_mask_counts_in_a_cached_continuation(seed, ends):
    """The padding of two rows reaches into the later chunks. (A chunk of one token is never masked, as in stock.)"""
    model = ours(random_stock(seed, conv_bias=False))
    ids, mask, positions = pad(PROMPTS, "left")
    cache, start, logits = None, 0, []
    for end in ends:
        chunk = {"input_ids": ids[:, start:end], "position_ids": positions[:, start:end]}
        out = model(**chunk, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, end
        logits.append(out.logits)
    for row, prompt in enumerate(PROMPTS):
        got = torch.cat(logits, dim=1)[row][mask[row].bool()]
        torch.testing.assert_close(got, logits_of(model, prompt), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("turns", [[6, 3], [6, 2, 4], [1, 5], [7, 1, 6]], ids=str)
@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_transformers_42017_45513_46741_a_later_turn_of_several_tokens_on_a_filled_cache(kernel, turns):
    """ "The cache is filled" once meant "one token comes", whatever came."""
    kinds = ["conv", "full_attention", "conv"]
    model = ours(random_stock(4, conv_L_cache=kernel, num_hidden_layers=3, layer_types=kinds))
    conversation = [5, 9, 13, 8, 30, 6, 11, 12, 4, 44, 10, 8, 9, 17][: sum(turns)]
    cache, start, logits = None, 0, []
    for length in turns:
        out = model(torch.tensor([conversation[start : start + length]]), past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + length
        logits.append(out.logits[0])
    torch.testing.assert_close(torch.cat(logits), logits_of(model, conversation), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("drafts_from", ["prompt lookup", "assistant model"])
@pytest.mark.parametrize("kernel", [2, 3, 5])
def test_transformers_46937_assisted_decoding_does_not_diverge(kernel, drafts_from):
    """Refused drafts once stayed in the conv state."""
    stock, assistant = random_stock(12, conv_L_cache=kernel), random_stock(12, conv_L_cache=kernel)
    assistant.model.layers[1].feed_forward.w2.weight.mul_(0.5)  # right now and then
    helper = {"prompt_lookup_num_tokens": 3} if drafts_from == "prompt lookup" else {"assistant_model": assistant}
    prompt = [5, 9, 13, 8, 5, 9, 13, 8, 5, 9]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, **helper}
    answer = ours(stock).generate(torch.tensor([prompt]), **options)
    assert answer[0, len(prompt) :].tolist() == stock_greedy(stock, prompt, 20)


# The engine's forward


@torch.no_grad()
@pytest.mark.parametrize("seed", range(10))
def test_transformers_46588_46633_packed_sequences_do_not_leak(seed):
    """The convolution once ran on from one packed sequence into the next."""
    model = ours(random_stock(seed))
    prompts = random_prompts(random.Random(seed), 5, 9)
    rows = [Row(ids, 0, [3 * i, 3 * i + 1, 3 * i + 2], i, None, len(ids)) for i, ids in enumerate(prompts)]
    got = forward_packed(model, make_cache(model), rows)
    expected = torch.cat([logits_of(model, ids) for ids in prompts])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_vllm_56196_a_chunk_shorter_than_the_kernel_keeps_the_shared_state(kernel):
    """Two requests restore one checkpoint and go on by one token each; the checkpoint stays as it was."""
    kinds = ["conv", "full_attention", "conv"]
    model = ours(random_stock(6, conv_L_cache=kernel, num_hidden_layers=3, layer_types=kinds))
    cache = make_cache(model)
    prefix = [5, 9, 13, 8]
    forward_packed(model, cache, [Row(prefix, 0, [0], 0)])
    row = cache.checkpoint_row(0)
    before = {i: states[row].clone() for i, states in cache.conv_states.items()}
    branches = [[20, 21, 22], [30, 31, 32]]
    for step in range(3):
        rows = [
            Row([branch[step]], 4 + step, [0, 1 + i], 1 + i, 0 if step == 0 else None, 1)
            for i, branch in enumerate(branches)
        ]
        got = forward_packed(model, cache, rows)
        expected = torch.stack([logits_of(model, prefix + branch[: step + 1])[-1] for branch in branches])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for i, states in cache.conv_states.items():
        assert torch.equal(states[row], before[i])


def test_sglang_23975_state_slots_are_not_request_ids():
    """Request ids run far past the number of slots; answers stay their own."""
    stock = random_stock(8)
    prompts = random_prompts(random.Random(0), 40, 12)
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", max_sequences=3) as generator:
        outputs = generator.generate(prompts, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == stock_greedy(stock, prompt, 4)


def test_mlx_1946_an_answer_does_not_depend_on_its_neighbours():
    stock = random_stock(9)
    rng = random.Random(1)
    prompt = random_prompts(rng, 1, 20)[0]
    alone = stock_greedy(stock, prompt, 12)
    for size in (1, 2, 7, 20):
        others = random_prompts(rng, size, 30)
        with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
            outputs = generator.generate([*others, prompt], max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert outputs[-1].token_ids == alone


def test_llama_cpp_16278_cached_tokens_are_reported_at_every_size():
    stock = random_stock(10)
    prefix = [random.Random(2).randrange(3, 60) for _ in range(64)]
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", block_size=4) as generator:
        for size in (4, 5, 8, 13, 63, 64):
            prompt = [*prefix[:size], 7]
            (output,) = generator.generate([prompt], max_new_tokens=3, do_sample=False, eos_token_id=None)
            assert output.token_ids == stock_greedy(stock, prompt, 3)
        (again,) = generator.generate([[*prefix, 7]], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert again.metrics.num_cached_tokens == 64
