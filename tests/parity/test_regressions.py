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
    return model(torch.tensor([ids])).logits[0]


@torch.no_grad()
def test_transformers_41790_padded_batches_need_the_padding_mask():
    stock = random_stock(4, conv_bias=False)
    model = ours(stock)
    ids = [5, 9, 13, 8, 30]
    padded = torch.tensor([[0, 0, 0, *ids], [3, 4, 5, *ids]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = model(padded, attention_mask=mask, position_ids=positions).logits[0, 3:]
    torch.testing.assert_close(got, logits_of(model, ids), atol=1e-4, rtol=0)


@torch.no_grad()
def test_transformers_46773_the_mask_counts_at_batch_one_too():
    model = ours(random_stock(4, conv_bias=False))
    ids = [5, 9, 13, 8]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = model(torch.tensor([[7, 7, *ids]]), attention_mask=mask, position_ids=positions).logits[0, 2:]
    torch.testing.assert_close(got, logits_of(model, ids), atol=1e-4, rtol=0)


@torch.no_grad()
def test_transformers_47087_the_mask_counts_in_a_cached_continuation():
    stock = random_stock(4, conv_bias=False)
    model = ours(stock)
    whole = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    caches = [None, None]
    for a, b in ((0, 2), (2, 6), (6, 9)):  # row 0's padding reaches into the second chunk
        args = {"attention_mask": mask[:, :b], "use_cache": True}
        expected = stock(whole[:, a:b], past_key_values=caches[0], **args)
        got = model(whole[:, a:b], past_key_values=caches[1], **args)
        caches = [expected.past_key_values, got.past_key_values]
        real = mask[:, a:b].bool()
        torch.testing.assert_close(got.logits[real], expected.logits[real], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(5))
def test_transformers_42017_and_45513_a_second_turn_on_a_filled_cache(seed):
    """A multi-token prefill on a populated cache must not take the single-token path."""
    model = ours(random_stock(seed))
    first, second = [5, 9, 13, 8, 30, 6], [11, 12, 4]
    turn = model(torch.tensor([first]), use_cache=True)
    got = model(torch.tensor([second]), past_key_values=turn.past_key_values, use_cache=True).logits[0]
    torch.testing.assert_close(got, logits_of(model, first + second)[len(first) :], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(10))
def test_transformers_46588_packed_sequences_do_not_leak(seed):
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
    model = ours(
        random_stock(6, conv_L_cache=kernel, layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3)
    )
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
