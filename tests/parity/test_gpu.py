"""The engine runs where the model is: the same comparisons with stock, on CUDA."""

import random
import warnings

import pytest
import torch
from helpers import random_prompts, random_stock

from lfm2_cb import ContinuousBatchingGenerator, demo_model_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 17}], ids=str
)
def test_greedy_tokens_equal_stock_on_cuda(seed, options):
    stock = random_stock(seed).cuda()
    prompts = random_prompts(random.Random(seed), 20, 30)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", block_size=8, max_batch_tokens=50) as generator:
        outputs = generator.generate(prompts, **kwargs)
        generator.engine.scheduler.cache.check_integrity([])
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = stock.generate(torch.tensor([prompt], device="cuda"), **kwargs)[0, len(prompt) :].tolist()
        assert output.token_ids == expected


def test_a_tensor_stays_on_its_device_and_sampling_is_reproducible():
    stock = random_stock(3).cuda()
    ids = torch.randint(3, 60, (4, 9), device="cuda")
    kwargs = {"max_new_tokens": 6, "do_sample": True, "top_k": 10, "seed": 1, "eos_token_id": None}
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB") as generator:
        first, again = generator.generate(ids, **kwargs), generator.generate(ids, **kwargs)
    assert first.device == ids.device and first.shape == (4, 15) and torch.equal(first, again)


@pytest.mark.parametrize("seed", range(4))
def test_steps_by_cuda_graphs_give_the_tokens_of_those_without(seed):
    """Batches that shrink and grow; the graphs are really used."""
    stock, rng = random_stock(seed).cuda(), random.Random(seed)
    prompts, lengths = random_prompts(rng, 12, 30), [rng.randint(1, 40) for _ in range(12)]
    options = {"max_new_tokens": lengths, "do_sample": False, "eos_token_id": None}
    with ContinuousBatchingGenerator(stock, cache_memory="16MiB", block_size=16, prefix_caching=False) as generator:
        runner = generator.engine.runner
        captured = [o.token_ids for o in generator.generate(prompts, **options)]
        assert runner.captured.num_graphs == len(runner.captured.sizes)
        runner.capturing = False
        assert captured == [o.token_ids for o in generator.generate(prompts, **options)]


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_runs_and_depends_on_nobody_else(dtype, cache_dtype):
    stock = random_stock(3).to("cuda", dtype)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with ContinuousBatchingGenerator(stock, cache_memory="16MiB", cache_dtype=cache_dtype) as generator:
        first = [o.token_ids for o in generator.generate([[5, 6, 7]] * 3, **options)]
        assert first[0] == first[1] == first[2] and len(first[0]) == 8


def test_a_decode_step_waits_for_the_device_once():
    with ContinuousBatchingGenerator(random_stock(3).cuda(), cache_memory="16MiB") as generator:
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
        generator.generate([[5, 6, 7], [8, 9]], **options)  # compiles, and captures
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                generator.generate([[5, 6, 7], [8, 9]], **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing" in str(w.message)]
    assert len(waits) <= 40 + 40, waits[0]  # one a decode step, and what the prefill takes


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_weights_are_refused(weights):
    with pytest.raises(ValueError, match="runs on CPUs only"):
        ContinuousBatchingGenerator(demo_model_path(), weights=weights, device="cuda")


def test_a_cache_larger_than_the_card_is_refused_and_a_share_is_taken():
    with pytest.raises(MemoryError, match="are free on cuda"):
        ContinuousBatchingGenerator(random_stock(3).cuda(), cache_memory="100TB")
    with ContinuousBatchingGenerator(random_stock(3).cuda(), cache_memory="1%", max_sequences=4) as generator:
        assert generator.generate([[5, 6]], max_new_tokens=2)[0].finish_reason is not None
