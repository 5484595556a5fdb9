"""Sampler: logits → tokens, each row by its own request's options, history and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: as transformers' `LogitsProcessor`: (`[1, length]` token ids so far, `[1, vocab]` fp32 scores) → scores
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: as transformers' `StoppingCriteria`: the same arguments → whether each row ends
StoppingCriterion = Callable[[torch.Tensor, Any], Any]


class BadLogits(ValueError):
    """A row's logits or processed scores leave nothing to choose from."""


@dataclass
class SamplingParams:
    """How one request's tokens are chosen, and when they end.

    Args:
        do_sample: draw from the distribution; else take the most likely token.
        seed: of this request's own random numbers, so that its draws depend on nobody else.
        eos_token_ids: tokens that end the request, themselves included in the output.
        processors: applied to the logits in order, before choosing.
        stopping_criteria: asked after every token.
    """

    do_sample: bool = False
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: Sequence[StoppingCriterion] = ()
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)


def history_tensor(token_ids: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """All tokens of one request as transformers' processors and criteria take them: `[1, length]` int64."""
    return torch.tensor([list(token_ids)], dtype=torch.long, device=device)


def process(params: SamplingParams, token_ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    """Apply the request's processors to `scores` `[vocab]`, given all its tokens so far."""
    history, row = history_tensor(token_ids, scores.device), scores.unsqueeze(0)
    for processor in params.processors:
        row = processor(history, row)
    return row.squeeze(0)


def draw(scores: torch.Tensor, rngs: Sequence[random.Random]) -> list[int | Exception]:
    """Draw one token a row from softmax(scores) `[rows, vocab]` with one uniform number of each row's own generator.

    By inversion of the cumulative distribution, in fp64: a token of probability 0 is never drawn.
    """
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
    total = cumulative[:, -1:]
    uniform = torch.tensor([[rng.random()] for rng in rngs], dtype=torch.float64, device=scores.device)
    # `right` steps over tokens that add nothing; rounding must not step over the last one that adds something.
    tokens = torch.searchsorted(
        cumulative, (uniform * total).clamp(max=total.nextafter(torch.zeros_like(total))), right=True
    )
    return _checked(tokens.squeeze(1), total.squeeze(1))


def take_best(scores: torch.Tensor) -> list[int | Exception]:
    """The most likely token of every row of `[rows, vocab]`."""
    best, tokens = scores.max(-1)
    return _checked(tokens, best)


def _checked(tokens: torch.Tensor, evidence: torch.Tensor) -> list[int | Exception]:
    """Tokens, or BadLogits where the value that chose one is not finite (NaN anywhere in a row shows in it)."""
    good = evidence.isfinite().tolist()
    return [token if ok else BadLogits("no finite logits") for token, ok in zip(tokens.tolist(), good, strict=True)]


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]]
) -> list[int | Exception]:
    """Choose the next token of every row.

    Args:
        logits: `[rows, vocab]` fp32.
        params: the options of each row.
        histories: each row's prompt and output so far.
    Returns:
        For every row its token, or what went wrong in it; no row's failure touches another.
    """
    if not any(p.do_sample or p.processors for p in params):
        return take_best(logits)
    scores: list[torch.Tensor] = []
    failures: dict[int, Exception] = {}
    for i, p in enumerate(params):
        row = logits[i]
        if p.processors:
            try:
                row = process(p, histories[i], row)
            except Exception as error:
                failures[i] = error
        scores.append(row)
    table = torch.stack(scores)
    tokens = take_best(table)
    sampled = [i for i, p in enumerate(params) if p.do_sample and i not in failures]
    if sampled:
        for i, token in zip(sampled, draw(table[sampled], [params[i].rng for i in sampled]), strict=True):
            tokens[i] = token
    for i, failure in failures.items():
        tokens[i] = failure
    return tokens
