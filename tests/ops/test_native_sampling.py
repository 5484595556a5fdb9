"""Choosing tokens by the native kernels beside torch and stock's warpers, by every instruction set."""

import random
import shutil

import numpy as np
import pytest
import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from lfm2_cb.engine.sampler import BadLogits, SamplingParams, draw, sample, take_best
from lfm2_cb.engine.warpers import process_rows
from lfm2_cb.ops.sampling import TokenMasks, masked, nucleus, top_candidates

pytestmark = pytest.mark.skipif(
    shutil.which(torch.utils.cpp_extension.get_cxx_compiler()) is None, reason="no C++ compiler"
)


def make_logits(kind: str, rows: int, size: int) -> torch.Tensor:
    x = torch.randn(rows, size)
    if kind == "flat":
        return 0.02 * x
    if kind == "peaked":
        return 12 * x
    if kind == "tied":  # a few values only, as low-precision logits have
        return (2 * x).round() / 2
    if kind == "masked":
        return x.masked_fill(torch.rand(rows, size) < 0.9, -float("inf"))
    return 3 * x


KINDS = pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "tied", "masked"])
SIZES = pytest.mark.parametrize("size", [1, 7, 50, 1000, 5003, 65536])


@SIZES
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_take_best(kernels, kind, size, dtype):
    logits = make_logits(kind, 5, size).to(dtype)
    logits[:, size // 2] = 0.0  # one that is not masked
    first = [row.index(max(row)) for row in logits.tolist()]
    assert take_best(logits, kernels) == first == take_best(logits)


def make_bits(rows: int, size: int, share: float) -> torch.Tensor:
    """Random masks, whose bits beyond the size are random too."""
    words = TokenMasks.words(size)
    chosen = (torch.rand(rows, words, 32) < share).long()
    return (chosen << torch.arange(32)).sum(-1).to(torch.int32)


def unpacked(bits: torch.Tensor, size: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")[:, :size]).bool()


@SIZES
@pytest.mark.parametrize("share", [0.001, 0.5, 0.97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks(kernels, size, share, dtype):
    logits = make_logits("tied" if share == 0.5 else "plain", 5, size).to(dtype)
    bits = make_bits(4, size, share)
    expected = logits.float()
    expected[:4][~unpacked(bits, size)] = -torch.inf
    assert torch.equal(masked(logits[:4], bits, kernels), expected[:4])
    assert torch.equal(masked(logits[:4], bits), expected[:4])

    masks = TokenMasks(bits, [0, 1, -1, 2, 3])
    order = [0, 1, 4, 2, 3]
    best = [max(row) for row in expected[order].tolist()]
    wanted = [row.index(top) for row, top in zip(expected[order].tolist(), best, strict=True)]
    for found in (take_best(logits[order], kernels, masks), take_best(logits[order], None, masks)):
        for place, place_wanted, top in zip(found, wanted, best, strict=True):
            assert isinstance(place, BadLogits) if top == -torch.inf else place == place_wanted


def test_nothing_allowed_and_nan(kernels):
    logits = torch.randn(3, 100)
    logits[0, 70] = torch.nan
    bits = torch.zeros(3, 4, dtype=torch.int32)
    bits[0, 0], bits[1, 2] = -1, 1 << 6
    found = take_best(logits, kernels, TokenMasks(bits, [0, 1, 2]))
    assert found[0] == int(logits[0, :32].argmax()) and found[1] == 70 and isinstance(found[2], BadLogits)
    bits[0, 2] = 1 << 6
    assert isinstance(take_best(logits, kernels, TokenMasks(bits, [0, 1, 2]))[0], BadLogits)


@SIZES
@KINDS
def test_top_k_keeps_what_stock_keeps(kernels, kind, size):
    logits = make_logits(kind, 5, size)
    ks = [1, 3, 50, 2, 200]
    scores = process_rows([[TopKLogitsWarper(k)] for k in ks], [[]] * 5, logits, kernels)
    expected = torch.cat([TopKLogitsWarper(k)(None, logits[i : i + 1]) for i, k in enumerate(ks)])
    assert torch.equal(scores.full(size), expected)
    if kind == "plain" and size == 65536:
        found = top_candidates(kernels, logits, ks)
        assert found is not None and found[0].shape[1] < 600  # and not all the vocabulary


@SIZES
@KINDS
def test_top_p_keeps_what_stock_keeps(kernels, kind, size):
    logits = make_logits(kind, 6, size)
    logits[:, size // 2] = 0.0
    ps = [0.9, 0.5, 0.999, 0.05, 0.0, 1.0]
    scores = process_rows([[TopPLogitsWarper(p)] for p in ps], [[]] * 6, logits, kernels)
    expected = torch.cat([TopPLogitsWarper(p)(None, logits[i : i + 1]) for i, p in enumerate(ps)])
    assert_same_but_for_ties(scores.full(size), expected)


def assert_same_but_for_ties(got, expected):
    """The same logits are kept; which of equal ones at the line is chance in stock's unstable sort."""
    line = got.masked_fill(got.isinf(), float("inf")).min(-1, keepdim=True).values
    assert torch.equal(*(x.masked_fill(x <= line, 0.0) for x in (got, expected)))
    ours, stocks = ((x == line).sum(-1) for x in (got, expected))
    assert ours.min() >= 1 and stocks.min() >= 1 and (ours - stocks).abs().max() <= 1


def test_the_nucleus_is_mostly_found_without_stock(kernels):
    _, rest = nucleus(kernels, make_logits("plain", 64, 65536), [0.9] * 64)
    assert len(rest) < 16
    _, rest = nucleus(kernels, make_logits("plain", 64, 65536).bfloat16().float(), [0.9] * 64)
    assert len(rest) < 4


def test_top_k_then_top_p(kernels):
    logits = make_logits("tied", 4, 65536)
    stages = [TopKLogitsWarper(50), TopPLogitsWarper(0.6)]
    expected = stages[1](None, stages[0](None, logits))
    assert_same_but_for_ties(process_rows([stages] * 4, [[]] * 4, logits, kernels).full(65536), expected)


@KINDS
@pytest.mark.parametrize("size", [2, 50, 65536])
def test_draws_as_torch_does(kernels, kind, size):
    """By the same uniform numbers: but where one falls within a rounding of a boundary."""
    logits = make_logits(kind, 40, size)
    logits[:, size // 2] = 0.0
    rngs = [[random.Random(i) for i in range(40)] for _ in range(2)]
    got, expected = draw(logits, rngs[0], kernels), draw(logits, rngs[1])
    assert sum(a != b for a, b in zip(got, expected, strict=True)) <= (kind == "flat")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_fails_alone(kernels, bad):
    logits = make_logits("plain", 3, 5000)
    if bad == -float("inf"):
        logits[1] = bad
    else:
        logits[1, 4000] = bad
    for processors in ([], [TopKLogitsWarper(5)], [TopPLogitsWarper(0.9)]):
        for do_sample in (False, True):
            params = [SamplingParams(do_sample, seed=i, processors=processors) for i in range(3)]
            tokens = sample(logits, params, [[1]] * 3, kernels)
            assert isinstance(tokens[1], BadLogits)
            assert [isinstance(token, int) for token in tokens] == [True, False, True]


def test_a_draw_does_not_depend_on_batch_mates(kernels):
    """Nor on how many candidates they have."""
    logits = torch.cat([make_logits("plain", 1, 65536), make_logits("tied", 1, 65536)])
    for k in (5, 50):
        params = [SamplingParams(True, seed=i, processors=[TopKLogitsWarper(k)]) for i in range(2)]
        together = [sample(logits, params, [[1]] * 2, kernels) for _ in range(50)]
        alone = [SamplingParams(True, seed=i, processors=[TopKLogitsWarper(k)]) for i in range(2)]
        for both in together:
            assert both == [sample(logits[i : i + 1], alone[i : i + 1], [[1]], kernels)[0] for i in range(2)]
