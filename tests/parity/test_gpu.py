"""The engine runs where the model is: the same comparisons with stock, on CUDA."""

import random

import pytest
import torch
from helpers import random_prompts, random_stock

from lfm2_cb import ContinuousBatchingGenerator

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
