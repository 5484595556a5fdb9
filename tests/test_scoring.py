"""Scorer against stock's logits, one sequence at a time."""

import random

import pytest
import torch
from helpers import ours, random_stock

from lfm2_cb.requests.prompts import PromptError
from lfm2_cb.scoring import Scorer, TokenTree


@torch.no_grad()
def stock_scores(stock, context, continuation):
    logits = stock(torch.tensor([[*context, *continuation][:-1]])).logits[0, -len(continuation) :]
    target = torch.tensor(continuation)
    logprobs = logits.log_softmax(-1)[torch.arange(len(target)), target]
    return logprobs, bool((logits.argmax(-1) == target).all())


def sharing_pairs(rng, count):
    """Pairs that begin alike at many depths: within contexts, within continuations, one inside another, twice."""
    roots = [[rng.randrange(3, 60) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    pairs = []
    for _ in range(count):
        root = rng.choice(roots)
        context = root[: rng.randint(1, len(root))] + [rng.randrange(3, 6) for _ in range(rng.randint(0, 3))]
        pairs.append((context, [rng.randrange(3, 6) for _ in range(rng.randint(1, 6))]))
    return pairs + pairs[:2]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_batch_tokens", [1, 50, 10_000])
def test_scores_are_stocks(seed, max_batch_tokens):
    stock = random_stock(seed)
    pairs = sharing_pairs(random.Random(seed), 25)
    scores = Scorer(ours(stock), max_batch_tokens).score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        logprobs, is_greedy = stock_scores(stock, context, continuation)
        torch.testing.assert_close(torch.tensor(score.token_logprobs), logprobs, atol=1e-4, rtol=0)
        assert score.is_greedy == is_greedy


def test_greedy_continuations_are_known_as_such():
    stock = random_stock(3)
    prompt = [5, 9, 4, 33]
    answer = stock.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=None, max_new_tokens=6)[0, 4:]
    right = answer.tolist()
    wrong = [*right[:-1], right[-1] + 1 if right[-1] + 1 < stock.config.vocab_size else 0]
    scores = Scorer(ours(stock)).score([(prompt, right), (prompt, wrong)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_what_is_shared_is_computed_once():
    tree = TokenTree()
    for index, sequence in enumerate([[1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [7]]):
        tree.add(index, sequence)
    assert tree.token_ids == [1, 2, 3, 4, 5, 7] and tree.positions == [0, 1, 2, 3, 2, 0]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5]]


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([10_000], [1]), ([1], [-1]), ([1] * 4097, [1])])
def test_what_cannot_be_scored_is_named(pair):
    with pytest.raises(PromptError, match="pair 1"):
        Scorer(ours(random_stock(0))).score([([5], [6]), pair])


def test_nothing_to_score():
    assert Scorer(ours(random_stock(0))).score([]) == []
