"""Sampler: logits → tokens, each row by its own request's options, history and random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..ops.native import NativeKernels
from ..ops.sampling import TokenMasks, best_places, draw_places, masked
from ..ops.triton import launching_on
from .constraints import Constraint, fill_masks
from .warpers import Scores, can_batch, process_rows, signature, stays_on_device, to_device, warping

if TYPE_CHECKING:  # what imports Triton is imported where a device is for it
    from ..ops.triton.kernels import TritonKernels

#: as transformers' `LogitsProcessor`: (`[1, length]` token ids so far, `[1, vocab]` fp32 scores) → scores
LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: as transformers' `StoppingCriteria`: (token ids, scores so far or None) → whether each row ends
StoppingCriterion = Callable[[torch.Tensor, Any], Any]


class BadLogits(ValueError):
    """A row's logits or processed scores leave nothing to choose from."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one generated token, under the model's own distribution (before any processor).

    Attributes:
        logprob: natural logarithm of the token's probability.
        top: the k likeliest token ids with their log-probabilities, likeliest first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Trace:
    """What a request asked to keep of each of its tokens. Grows with its own length, and ends with it."""

    keep_scores: bool = False
    keep_logits: bool = False
    num_logprobs: int | None = None
    scores: list[torch.Tensor] = field(default_factory=list)  # processed, `[vocab]` fp32
    logits: list[torch.Tensor] = field(default_factory=list)  # raw, `[vocab]` fp32
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, token: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        if self.keep_scores:
            self.scores.append(scores.clone())
        if self.keep_logits:
            self.logits.append(logits.clone())
        if self.num_logprobs is not None:
            logprobs = logits.log_softmax(-1)
            values, ids = logprobs.topk(self.num_logprobs)
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
            self.logprobs.append(TokenLogprobs(token, float(logprobs[token]), top))


@dataclass(slots=True)
class SamplingParams:
    """How one request's tokens are chosen, and when they end.

    Args:
        do_sample: draw from the distribution; else take the most likely token.
        seed: of this request's own random numbers, so that its draws do not depend on other requests.
        eos_token_ids: tokens that end the request, themselves included in the output.
        processors: applied to the logits in order, before choosing.
        stopping_criteria: asked after every token.
        trace: what to keep of each token, or None.
        constraint: which tokens may follow; no processor can make others follow. None: all.
    """

    do_sample: bool = False
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: Sequence[StoppingCriterion] = ()
    trace: Trace | None = None
    constraint: Constraint | None = None
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)


def history_tensor(token_ids: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """All tokens of one request as transformers' processors and criteria take them: `[1, length]` int64."""
    return torch.tensor([list(token_ids)], dtype=torch.long, device=device)


def process(params: SamplingParams, token_ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    """Apply the request's processors to `scores` `[1, vocab]`, given all its tokens so far: the readable reference."""
    history = history_tensor(token_ids, scores.device)
    for processor in params.processors:
        scores = processor(history, scores)
    return scores


def draw(
    scores: torch.Tensor,
    rngs: Sequence[random.Random],
    native: NativeKernels | None = None,
    index: torch.Tensor | None = None,
) -> list[int | Exception]:
    """Draw one place a row from softmax(scores) `[rows, n]` with one uniform number of each row's own generator.

    Args: index: `[rows, n]`, what each place stands for; None: itself.

    By inversion of the cumulative distribution, summed in fp64: a place of probability 0 is never drawn.
    """
    return _checked(*_drawn(scores, rngs, native, index))


def _drawn(
    scores: torch.Tensor, rngs: Sequence[random.Random], native: NativeKernels | None, index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the values that chose them, `[rows]` each."""
    numbers = [rng.random() for rng in rngs]
    if native is not None:
        drawn = draw_places(native, scores, numbers)
        return _tokens_at(drawn.clamp_min(0), index), torch.where(drawn < 0, torch.nan, 0.0)
    cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
    total = cumulative[:, -1:]
    uniform = to_device(numbers, torch.float64, scores.device).unsqueeze(1)
    # `right` steps over places that add nothing; rounding must not step over the last one that adds something.
    target = (uniform * total).clamp(max=total.nextafter(torch.zeros_like(total)))
    places = torch.searchsorted(cumulative, target, right=True)
    return _tokens_at(places.squeeze(1), index), total.squeeze(1)


def take_best(
    scores: torch.Tensor,
    native: NativeKernels | None = None,
    masks: TokenMasks | None = None,
    index: torch.Tensor | None = None,
) -> list[int | Exception]:
    """The most likely place, of those that it may take, of every row of `[rows, n]`; of equal ones natively the first.

    Args: scores: fp32 or bf16. index: as in `draw`.
    """
    return _checked(*_best(scores, native, masks, index))


def _best(
    scores: torch.Tensor, native: NativeKernels | None, masks: TokenMasks | None, index: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the values that chose them, `[rows]` each."""
    if native is not None:
        places, best = best_places(native, scores, masks)
        return _tokens_at(places, index), best
    if masks is not None:
        rows = [row for row, mask in enumerate(masks.mask_of) if mask >= 0]
        scores = scores.float().clone()
        scores[rows] = masked(scores[rows], masks.bits[[masks.mask_of[row] for row in rows]])
    best, places = scores.max(-1)
    return _tokens_at(places, index), best


def _tokens_at(places: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return places if index is None else index.gather(1, places.unsqueeze(1)).squeeze(1)


def _checked(tokens: torch.Tensor, evidence: torch.Tensor) -> list[int | Exception]:
    """Tokens, or BadLogits where the value that chose one is not finite (NaN anywhere in a row shows in it)."""
    if not tokens.is_cpu:
        return tokens_of(_finite(tokens, evidence).tolist())  # in one transfer
    chosen = zip(tokens.tolist(), evidence.tolist(), strict=True)
    return tokens_of([token if math.isfinite(value) else -1 for token, value in chosen])


def tokens_of(chosen: Sequence[int]) -> list[int | Exception]:
    """Tokens, or BadLogits where there is -1."""
    return [token if token >= 0 else BadLogits("no finite logits") for token in chosen]


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    native: NativeKernels | None = None,
    triton: TritonKernels | None = None,
) -> list[int | Exception]:
    """Choose the next token of every row.

    Args:
        logits: `[rows, vocab]` in the model's dtype.
        params: the options of each row.
        histories: each row's prompt and output so far.
        native, triton: the kernels to run with; None: torch. By Triton's are chosen, in one transfer of tokens, the
            rows that `needs_no_host`, by the random numbers that they would have otherwise.
    Returns:
        For every row its token, or what went wrong in it; no row's failure touches another.
    """
    if triton is None:
        return _sample(logits, params, histories, native)
    chosen = [i for i, p in enumerate(params) if needs_no_host(p, triton)]
    rest = sorted(set(range(len(params))).difference(chosen))
    own_logits = logits[chosen] if rest else logits
    tokens = tokens_of(_choose_by(triton, own_logits, [params[i] for i in chosen]).tolist()) if chosen else []
    others = _sample(logits[rest], [params[i] for i in rest], [histories[i] for i in rest], native) if rest else []
    token_of = dict(zip((*chosen, *rest), (*tokens, *others), strict=True))
    return [token_of[i] for i in range(len(params))]


def _choose_by(triton: TritonKernels, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Tokens of rows that all `needs_no_host`, int64 `[rows]` on the device, for `tokens_of`."""
    choices = [
        (*options, p.rng.random() if p.do_sample else -1.0)
        for p in params
        if (options := warping(p.processors)) is not None  # of all
    ]
    with launching_on(logits.device):
        return triton.choose(logits, triton.pack_choices(choices, logits.device))


def _sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    native: NativeKernels | None,
) -> list[int | Exception]:
    masks, failed = fill_masks([p.constraint for p in params], histories, logits.shape[-1])
    if any(p.do_sample or p.processors or p.trace for p in params):
        tokens = _process_and_choose(logits, params, histories, masks, native)
    else:
        tokens = take_best(logits, native, masks)
    if masks is None:
        return tokens
    for i, p in enumerate(params):
        if p.constraint is not None and isinstance(tokens[i], BadLogits):
            tokens[i] = BadLogits("structured: the grammar and the other options leave no token with a finite logit")
    return [failed.get(i, token) for i, token in enumerate(tokens)]


def _process_and_choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    masks: TokenMasks | None,
    native: NativeKernels | None,
) -> list[int | Exception]:
    mask_of = [-1] * len(params) if masks is None else masks.mask_of
    groups: dict[object, list[int]] = {}
    for i, p in enumerate(params):
        groups.setdefault((signature(p.processors), mask_of[i] >= 0) if can_batch(p.processors) else i, []).append(i)
    tokens: list[int | Exception] = [0] * len(params)
    for key, rows in groups.items():
        members = [params[i] for i in rows]
        own_logits = logits if len(rows) == len(params) else logits[rows]
        bits = None if masks is None or mask_of[rows[0]] < 0 else masks.bits[[mask_of[i] for i in rows]]
        allowed = own_logits.float() if bits is None else masked(own_logits, bits, native)
        try:
            if isinstance(key, tuple):
                known = [histories[i] for i in rows]
                scores = process_rows([p.processors for p in members], known, allowed, native)
            else:
                scores = Scores(process(members[0], histories[rows[0]], allowed.clone()))
                if bits is not None:  # a processor may have put something in place of -inf
                    scores = Scores(masked(scores.values, bits))
            chosen = _choose(scores, members)
        except Exception as error:  # a user's processor, alone in its group
            chosen = [error] * len(rows)
        for j, (i, token) in enumerate(zip(rows, chosen, strict=True)):
            tokens[i] = token
            trace = params[i].trace
            if trace is not None and not isinstance(token, Exception):
                trace.add(token, own_logits[j].float(), scores.full(logits.shape[-1])[j])
    return tokens


def _choose(scores: Scores, params: Sequence[SamplingParams]) -> list[int | Exception]:
    sampled = [j for j, p in enumerate(params) if p.do_sample]
    tokens: list[int | Exception] = [0] * len(params)
    if len(sampled) < len(params):
        tokens = take_best(scores.values, scores.native, index=scores.index)
    if sampled:
        values, index = scores.values, scores.index
        if len(sampled) < len(params):
            values, index = values[sampled], None if index is None else index[sampled]
        drawn = draw(values, [params[j].rng for j in sampled], scores.native, index)
        for j, token in zip(sampled, drawn, strict=True):
            tokens[j] = token
    return tokens


def needs_no_host(params: SamplingParams, triton: TritonKernels | None = None) -> bool:
    """Whether a token can be chosen where the logits are, whatever the tokens before it."""
    if params.constraint is not None or params.trace is not None:
        return False
    if triton is None:
        return stays_on_device(params.processors)
    return (params.do_sample or not params.processors) and warping(params.processors) is not None


def choose_on_device(
    logits: torch.Tensor, params: Sequence[SamplingParams], triton: TritonKernels | None = None
) -> torch.Tensor:
    """What `sample` chooses for rows that all `needs_no_host`, left on the device: int64 `[rows]`, for `tokens_of`.

    The host waits for nothing.
    """
    if triton is not None:
        return _choose_by(triton, logits, params)
    if not any(p.do_sample or p.processors for p in params):
        return _finite(*_best(logits, None, None, None))
    groups: dict[object, list[int]] = {}
    for i, p in enumerate(params):
        groups.setdefault((signature(p.processors), p.do_sample), []).append(i)
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    for rows in groups.values():
        members, index = [params[i] for i in rows], to_device(rows, torch.long, logits.device)
        scores = process_rows([p.processors for p in members], [()] * len(rows), logits[index].float()).values
        rngs = [p.rng for p in members]
        drawn = members[0].do_sample
        tokens[index] = _finite(*(_drawn(scores, rngs, None, None) if drawn else _best(scores, None, None, None)))
    return tokens


def _finite(tokens: torch.Tensor, evidence: torch.Tensor) -> torch.Tensor:
    """Tokens, and -1 where the value that chose one is not finite."""
    return torch.where(evidence.isfinite(), tokens, -1)
