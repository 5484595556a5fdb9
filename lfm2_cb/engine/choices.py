"""The tokens that a step's requests gain: the drafts that hold, one that is chosen, and whether that ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..ops.kernel_set import KernelSet
from ..scheduling.request import FinishReason, Request
from ..scheduling.scheduler import ScheduledRow
from .sampler import SamplingParams, history_tensor, sample


@dataclass(slots=True)
class TokenChoice:
    """The tokens chosen for one request in one step."""

    request: Request
    logits_row: int = 0  # first of its rows in the step's logits
    draft_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None  # set once the request ends
    error: Exception | None = None


def choose(rows: Sequence[ScheduledRow], logits: torch.Tensor, kernels: KernelSet) -> dict[int, TokenChoice]:
    """New tokens by request id. A draft is accepted while it is what would have been chosen anyway.

    That is rejection sampling for a draft that is certain of itself: each token is drawn from the true distribution,
    with the same random number as without drafts, so drafting changes no token.

    Args: rows: those that sample. logits: `[n, vocab]`, of each row its last known token's and its drafts', in order.
    """
    choices: list[TokenChoice] = []
    for row in rows:
        last = choices[-1] if choices else None
        start = last.logits_row + 1 + len(last.draft_token_ids) if last else 0
        choices.append(TokenChoice(row.request, start, row.request.draft_token_ids[: row.num_drafts]))
    active, depth = choices, 0
    while active:
        whole = len(active) == logits.shape[0]
        own_logits = logits if whole else logits[[choice.logits_row + depth for choice in active]]
        choose_one(active, own_logits, kernels)
        active = [
            choice
            for choice in active
            if choice.reason is None and choice.draft_token_ids[depth : depth + 1] == choice.token_ids[depth:]
        ]
        depth += 1
    return {choice.request.request_id: choice for choice in choices}


def choose_one(choices: Sequence[TokenChoice], logits: torch.Tensor, kernels: KernelSet) -> None:
    """Add one token to each choice from its row of `logits`, and note whether that ends its request."""
    histories = [choice.request.token_ids + choice.token_ids for choice in choices]
    params = [choice.request.params for choice in choices]
    extend(choices, histories, sample(logits, params, histories, kernels.native, kernels.triton))


def extend(choices: Sequence[TokenChoice], histories: Sequence[list[int]], tokens: Sequence[int | Exception]) -> None:
    """Add its token, or what went wrong, to each choice and to its history of prompt and output."""
    for choice, history, token in zip(choices, histories, tokens, strict=True):
        if isinstance(token, Exception):
            choice.reason, choice.error = FinishReason.ERROR, token
            continue
        choice.token_ids.append(token)
        history.append(token)
        try:
            choice.reason = end_reason(choice.request, history)
        except Exception as error:  # a user's stopping criterion
            choice.reason, choice.error = FinishReason.ERROR, error


def end_reason(request: Request, token_ids: list[int]) -> FinishReason | None:
    """Why the request ends with these tokens (prompt and output), or None if it goes on."""
    params: SamplingParams = request.params
    if token_ids[-1] in params.eos_token_ids:
        return FinishReason.STOP
    if params.constraint is not None and not params.eos_token_ids and params.constraint.is_complete(token_ids):
        return FinishReason.STOP  # there is no token to say so
    if params.stopping_criteria:
        history = history_tensor(token_ids)
        kept = params.trace.scores if params.trace is not None else []
        scores = tuple(row.unsqueeze(0) for row in kept) or None
        if any(bool(torch.as_tensor(ends(history, scores)).all()) for ends in params.stopping_criteria):
            return FinishReason.STOP
    if len(token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None
