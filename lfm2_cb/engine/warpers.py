"""Logits processors over many rows at once.

Rows whose processors are of the same cheap kinds, in the same order, are processed together, with the results that
stock's classes give row by row. Once a top-k has run, only its candidates are carried on (`Scores.index`), so that
top-p and its like sort tens of values a row, not the vocabulary; and natively nothing is sorted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation import logits_process as stock

from ..ops.native import NativeKernels
from ..ops.sampling import MAX_CANDIDATES, nucleus, top_candidates


@dataclass
class Scores:
    """Scores of several rows: of the whole vocabulary, or of candidates, all others being -inf.

    values: `[rows, vocab]` or `[rows, candidates]` fp32.
    index: the candidates' token ids, or None. They ascend, but for those that stand for none and have -inf.
    native: the kernels to run with; None: torch.
    """

    values: torch.Tensor
    index: torch.Tensor | None = None
    native: NativeKernels | None = None

    def full(self, vocab_size: int) -> torch.Tensor:
        """`[rows, vocab]`."""
        if self.index is None:
            return self.values
        whole = self.values.new_full((len(self.values), vocab_size), -float("inf"))
        return whole.scatter_(1, self.index, self.values)


def can_batch(processors: Sequence[Any]) -> bool:
    """Whether all are of a kind that `process_rows` knows (exactly: a subclass may do anything)."""
    return all(type(p) in _STAGES and getattr(p, "prompt_ignore_length", None) is None for p in processors)


def stays_on_device(processors: Sequence[Any]) -> bool:
    """Whether `process_rows` asks nothing of the host for them: no token so far, and no value of the device."""
    return all(type(p) is stock.TemperatureLogitsWarper for p in processors)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values of the host as a tensor, copied in stream order; the host does not wait."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def signature(processors: Sequence[Any]) -> tuple[type, ...]:
    """Rows with equal signatures may be processed together."""
    return tuple(type(p) for p in processors)


def warping(processors: Sequence[Any]) -> tuple[float, int, float, float] | None:
    """Temperature, top-k, top-p and min-p of processors that are nothing but these (exactly), in stock's order; those
    that change nothing are 1, 0, 1 and 0. None: there are others, or one has unusual options."""
    found: list[Any] = [1.0, 0, 1.0, 0.0]
    last = -1
    for processor in processors:
        place = next((i for i, (kind, _) in enumerate(_WARPERS) if type(processor) is kind), -1)
        own = vars(processor)
        unusual = own.get("filter_value", -float("inf")) != -float("inf") or own.get("min_tokens_to_keep", 1) != 1
        if place <= last or unusual:
            return None
        found[place], last = own[_WARPERS[place][1]], place
    return tuple(found)  # type: ignore[return-value]  # of four


def process_rows(
    rows: Sequence[Sequence[Any]],
    histories: Sequence[Sequence[int]],
    scores: torch.Tensor,
    native: NativeKernels | None = None,
) -> Scores:
    """Apply each row's processors, all rows having the same signature.

    Args:
        rows: the processors of each row.
        histories: all tokens of each row so far.
        scores: `[rows, vocab]` fp32.
        native: the kernels to run with; None: torch.
    """
    current = Scores(scores, native=native)
    for stage in zip(*rows, strict=True):
        current = _STAGES[type(stage[0])](stage, histories, current)
    return current


def _column(stage: Sequence[Any], name: str, like: torch.Tensor) -> torch.Tensor:
    """One parameter of each row's processor, `[rows, 1]`."""
    return to_device([[getattr(p, name)] for p in stage], like.dtype, like.device)


def _temperature(stage: Sequence[Any], _: Any, scores: Scores) -> Scores:
    return replace(scores, values=scores.values / _column(stage, "temperature", scores.values))


def _repetition_penalty(stage: Sequence[Any], histories: Sequence[Sequence[int]], scores: Scores) -> Scores:
    if scores.index is not None:  # never in stock's order: penalties come before warpers
        raise AssertionError("a repetition penalty after a top-k")
    longest = max(map(len, histories))
    # Short histories are filled up with a token they have anyway: each token is scaled once however often it occurs.
    ids = torch.tensor([[*h, *[h[0]] * (longest - len(h))] for h in histories], device=scores.values.device)
    seen, penalty = scores.values.gather(1, ids), _column(stage, "penalty", scores.values)
    scaled = scores.values.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))
    return replace(scores, values=scaled)


def _top_k(stage: Sequence[Any], _: Any, scores: Scores) -> Scores:
    ks = [min(p.top_k, scores.values.shape[1]) for p in stage]
    if scores.native is not None and scores.index is None and max(ks) <= MAX_CANDIDATES:
        found = top_candidates(scores.native, scores.values, ks)
        if found is not None:
            values, index = found
            return Scores(values.masked_fill(values < _kth(values, ks), -float("inf")), index, scores.native)
    values = scores.values
    most = max(ks)
    best, index = values.topk(min(most + 1, values.shape[1]), dim=-1)
    threshold = best.gather(1, torch.tensor([[k - 1] for k in ks], device=values.device))
    # Stock keeps all that tie with the k-th (bf16 logits tie often), and they may not all be among the candidates.
    if best.shape[1] > most and bool((best[:, -1:] >= threshold).any()):
        most = int((values >= threshold).sum(-1).max())
        best, index = values.topk(most, dim=-1)
    if scores.index is not None or most > MAX_CANDIDATES:
        return replace(scores, values=values.masked_fill(values < threshold, -float("inf")))
    index, order = index.sort(-1)
    best = best.gather(1, order)
    return Scores(best.masked_fill(best < threshold, -float("inf")), index, scores.native)


def _kth(values: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """Each row's k-th largest value, `[rows, 1]`."""
    return values.topk(max(ks), dim=-1).values.gather(1, torch.tensor([[k - 1] for k in ks], device=values.device))


def _top_p(stage: Sequence[Any], histories: Any, scores: Scores) -> Scores:
    plain = all(p.min_tokens_to_keep == 1 and p.filter_value == -float("inf") for p in stage)
    if scores.native is None or scores.index is not None or not plain:
        return _by_equal_parameters(stage, histories, scores)
    out, rest = nucleus(scores.native, scores.values, [p.top_p for p in stage])
    for i in rest:
        out[i] = stage[i](None, scores.values[i : i + 1])[0]
    return replace(scores, values=out)


def _by_equal_parameters(stage: Sequence[Any], _: Any, scores: Scores) -> Scores:
    """Call stock's own class once for all rows that share its parameters (it treats rows independently)."""
    groups: dict[Any, list[int]] = {}
    for i, p in enumerate(stage):
        groups.setdefault(tuple(sorted((k, v) for k, v in vars(p).items() if not k.startswith("_"))), []).append(i)
    if len(groups) == 1:
        return replace(scores, values=stage[0](None, scores.values))
    out = torch.empty_like(scores.values)
    for rows in groups.values():
        out[rows] = stage[rows[0]](None, scores.values[rows])
    return replace(scores, values=out)


#: in stock's order, with the option of each
_WARPERS = (
    (stock.TemperatureLogitsWarper, "temperature"),
    (stock.TopKLogitsWarper, "top_k"),
    (stock.TopPLogitsWarper, "top_p"),
    (stock.MinPLogitsWarper, "min_p"),
)
_STAGES: dict[type, Callable[[Sequence[Any], Sequence[Sequence[int]], Scores], Scores]] = {
    stock.TemperatureLogitsWarper: _temperature,
    stock.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    stock.TopKLogitsWarper: _top_k,
    stock.TopPLogitsWarper: _top_p,
    stock.MinPLogitsWarper: _by_equal_parameters,
}
