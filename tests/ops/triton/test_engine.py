"""The engine by the Triton kernels gives stock's tokens."""

import random

import pytest
import torch
from helpers import ours, random_prompts, random_stock

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.device_batch import DeviceBatch
from lfm2_cb.model.hybrid_cache import CachePlan, HybridCache
from lfm2_cb.model.ragged_batch import Row
from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.triton import TritonUnavailable

GREEDY = {"do_sample": False, "eos_token_id": None}


def expected(stock, prompts, count):
    device = stock.device
    outputs = [stock.generate(torch.tensor([p], device=device), max_new_tokens=count, **GREEDY)[0] for p in prompts]
    return [output[len(p) :].tolist() for output, p in zip(outputs, prompts, strict=True)]


@pytest.mark.parametrize("seed", [0, 2])
def test_greedy_tokens_equal_stock(device, seed):
    """Prompts cut into chunks, more than run at once: chunks, decodes, checkpoints, and states that are restored."""
    stock = random_stock(seed).to(device)
    prompts = random_prompts(random.Random(seed), 3, 25)
    prompts.append(prompts[0] + [7])  # begins with cached blocks
    options = {"cache_memory": "2MiB", "block_size": 8, "max_batch_tokens": 16, "max_sequences": 3}
    with ContinuousBatchingGenerator(stock, kernels="triton", **options) as generator:
        assert generator.engine.runner.kernels.triton is not None
        outputs = generator.generate(prompts, max_new_tokens=4, **GREEDY)
        generator.engine.scheduler.cache.check_integrity([])
    assert [output.token_ids for output in outputs] == expected(stock, prompts, 4)


def test_drafts_sampling_and_an_8_bit_cache(device):
    """What goes by torch, or by both: conv states of drafts, processors, quantised keys."""
    stock = random_stock(3).to(device)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8]]
    with ContinuousBatchingGenerator(stock, kernels="triton", cache_memory="2MiB", drafting="auto") as generator:
        outputs = generator.generate(prompts, max_new_tokens=6, **GREEDY)
    assert [output.token_ids for output in outputs] == expected(stock, prompts, 6)
    sampled = {"max_new_tokens": 3, "do_sample": True, "top_k": 10, "seed": 1, "eos_token_id": None}
    found = {}
    for kernels in ("torch", "triton"):
        options = {"kernels": kernels, "cache_memory": "2MiB", "cache_dtype": "int8"}
        with ContinuousBatchingGenerator(stock, **options) as generator:
            found[kernels] = [output.token_ids for output in generator.generate(prompts, **sampled)]
    assert found["torch"] == found["triton"]


def test_a_step_that_is_filled_again_is_at_its_addresses(device):
    """As a CUDA graph needs it; rows left over touch nothing."""
    model = ours(random_stock(0)).to(device)
    kernels = KernelSet.resolve("triton", model.device, model.dtype)
    plan = CachePlan(8, 4, 4, 0, 0, True)
    rng = random.Random(0)
    contexts = [[rng.randrange(3, 60) for _ in range(n)] for n in (5, 7, 3)]
    logits = {}
    with torch.inference_mode():
        for filled in (False, True):
            cache = HybridCache(model.config, plan, model.dtype, model.device)
            rows = [Row(ids[:-1], 0, [2 * i, 2 * i + 1], i) for i, ids in enumerate(contexts)]

            def forward(batch):
                state = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "state": batch}
                return model.model(**state, use_cache=False).last_hidden_state

            forward(DeviceBatch(rows, cache, model.config.conv_L_cache, kernels=kernels))
            last = [Row(ids[-1:], len(ids) - 1, [2 * i, 2 * i + 1], i, None, 1) for i, ids in enumerate(contexts)]
            if not filled:
                batch = DeviceBatch(last, cache, model.config.conv_L_cache, kernels=kernels)
                logits[filled] = forward(batch)
            else:
                sizes = {"num_rows": 4, "max_blocks": 6}
                batch = DeviceBatch(last[:1], cache, model.config.conv_L_cache, kernels=kernels, **sizes)
                address = batch.tables.device.data_ptr()
                assert batch.holds(last)
                batch.fill(last)
                assert batch.tables.device.data_ptr() == address
                logits[filled] = forward(batch)[:3]
            states = {i: x.clone() for i, x in cache.conv_states.items()}
            logits[filled, "states"] = torch.cat([x.flatten() for x in states.values()] or [torch.zeros(1)])
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[True, "states"], logits[False, "states"], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_had_is_refused_by_name(device):
    with pytest.raises(TritonUnavailable, match=r"kernels='triton' cannot be had: they are for no torch\.float64"):
        KernelSet.resolve("triton", device, torch.float64)
