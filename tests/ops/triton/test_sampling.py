"""Tokens chosen on the device are those that the sampler chooses on a CPU with the same numbers."""

import random

import pytest
import torch
from transformers.generation import logits_process as stock

from lfm2_cb.engine.sampler import BadLogits, SamplingParams, Trace, sample
from lfm2_cb.ops.triton import sampling
from lfm2_cb.ops.triton.kernels import TritonKernels
from lfm2_cb.ops.triton.sampling import Choice

KERNELS = TritonKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def params_of(choice, seed):
    """The same for the sampler."""
    if choice.uniform < 0:
        return SamplingParams()
    processors = [stock.TemperatureLogitsWarper(choice.temperature)]
    processors += [stock.TopKLogitsWarper(choice.top_k)] if choice.top_k else []
    processors += [stock.TopPLogitsWarper(choice.top_p)] if choice.top_p < 1 else []
    processors += [stock.MinPLogitsWarper(choice.min_p)] if choice.min_p else []
    return SamplingParams(do_sample=True, seed=seed, processors=processors)


def random_choice(rng, vocab):
    if rng.random() < 0.3:
        return Choice()
    return Choice(
        rng.choice([0.3, 0.7, 1.0, 1.7]),
        rng.choice([0, 0, 0, 1, 5, 20, vocab, vocab + 5]),
        rng.choice([1.0, 1.0, 0.95, 0.6, 0.1]),
        rng.choice([0.0, 0.0, 0.05, 0.5]),
        0.0,
    )


@pytest.mark.parametrize("tile", [32, 4096])
def test_equals_the_sampler(device, tile, monkeypatch):
    """Rows with and without each option, over one tile or many; with ties where logits are in 16 bits."""
    monkeypatch.setattr(sampling, "TILE", tile)
    for seed in range(100):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rows, vocab = rng.choice([1, 1, 1, 2]), rng.randint(2, 48)
        logits = (rng.choice([1, 4]) * torch.randn(rows, vocab, generator=generator)).to(DTYPES[seed % 3])
        choices = [random_choice(rng, vocab) for _ in range(rows)]
        params = [params_of(choice, 10 * seed + i) for i, choice in enumerate(choices)]
        numbers = [random.Random(10 * seed + i).random() for i in range(rows)]
        drawn = [c._replace(uniform=u) if c.uniform >= 0 else c for c, u in zip(choices, numbers, strict=True)]
        got = KERNELS.choose(logits.to(device), KERNELS.pack_choices(drawn, device))
        assert got.dtype == torch.int64 and got.device.type == device.type
        for i, token in enumerate(got.tolist()):
            expected = sample(logits[i : i + 1].float(), [params[i]], [[0]])[0]
            # Of equal logits at top-p's line stock's sort leaves to chance which are left out.
            assert logits[i, token] == logits[i, expected], (seed, i, choices[i])
            if logits.dtype == torch.float32 or choices[i].top_p == 1:
                assert token == expected or choices[i].uniform < 0, (seed, i, choices[i])


def test_greedy_takes_the_first_of_equals_and_no_row_that_is_not_finite(device):
    inf = float("inf")
    rows = [[1, 3, 3, 2], [-inf] * 4, [1, float("nan"), 2, 0], [0, inf, 1, 1], [-inf, -inf, -2, -inf]]
    logits = torch.tensor(rows, device=device)
    for uniform in (-1.0, 0.5):
        choices = KERNELS.pack_choices([Choice(top_k=1, uniform=uniform)] * len(rows), device)
        got = KERNELS.choose(logits, choices).tolist()
        assert got[0] in ([1] if uniform < 0 else [1, 2]) and got[1:] == [-1, -1, -1, 2]


def test_the_sampler_has_the_device_choose_what_needs_nothing_else(device, monkeypatch):
    """With the same seeds the tokens that it chooses by itself, whatever shares a step; in one transfer of tokens."""
    batches, choose = [], KERNELS.choose
    monkeypatch.setattr(TritonKernels, "choose", lambda _, *a: (batches.append(len(a[0])), choose(*a))[1])
    unusual = stock.TopPLogitsWarper(0.6, min_tokens_to_keep=3)
    reversed_order = [stock.TopKLogitsWarper(9), stock.TemperatureLogitsWarper(0.5)]

    def rows():
        plain = [
            params_of(Choice(0.7, 5, 0.9, 0.05, 0.0), 1),
            SamplingParams(),
            SamplingParams(do_sample=True, seed=2),
        ]
        others = [
            SamplingParams(processors=[stock.RepetitionPenaltyLogitsProcessor(1.3)]),
            SamplingParams(do_sample=True, seed=3, processors=[stock.TopKLogitsWarper(4), lambda ids, x: x / 2]),
            SamplingParams(do_sample=True, seed=4, processors=[unusual]),
            SamplingParams(do_sample=True, seed=5, trace=Trace(keep_scores=True)),
            SamplingParams(do_sample=True, seed=6, processors=reversed_order),
        ]
        return plain + others

    generator = torch.Generator().manual_seed(0)
    for order in ([0, 1, 2], [3, 0, 4, 1, 5, 6, 2, 7], [3, 4]):
        ours, expected = ([rows()[i] for i in order] for _ in range(2))
        for _ in range(3):
            logits = 3 * torch.randn(len(order), 40, generator=generator).to(device)
            histories = [[1, 2, 3]] * len(order)
            assert sample(logits, ours, histories, None, KERNELS) == sample(logits, expected, histories)
    assert batches == [3] * 6  # a step's plain rows at once
    failed = sample(torch.full((1, 4), float("nan"), device=device), [SamplingParams()], [[1]], None, KERNELS)
    assert isinstance(failed[0], BadLogits)


def test_frequencies_are_the_distribution(device):
    """Evenly spread numbers choose each token as often as it is likely."""
    logits, count = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]], device=device), 60
    numbers = [Choice(uniform=(i + 0.5) / count) for i in range(count)]
    got = KERNELS.choose(logits.expand(count, -1).contiguous(), KERNELS.pack_choices(numbers, device))
    shares = got.bincount(minlength=5).double() / count
    torch.testing.assert_close(shares, logits[0].double().softmax(0), rtol=0, atol=1.01 / count)
