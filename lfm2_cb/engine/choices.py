"""The tokens that a step adds to its requests, accepted drafts and one chosen token, and whether a request ends."""

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
    draft_token_ids: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None  # set once the request ends
    error: Exception | None = None

    @property
    def history(self) -> list[int]:
        """The request's prompt and output, with the tokens chosen here; not to be changed."""
        known = self.request.token_ids
        return known + self.token_ids if self.token_ids else known


def choose(rows: Sequence[ScheduledRow], logits: torch.Tensor, kernels: KernelSet) -> dict[int, TokenChoice]:
    """New tokens by request id. A draft is accepted while it is what would have been chosen anyway.

    That is rejection sampling for a draft that is certain of itself: each token is drawn from the true distribution,
    with the same random number as without drafts, so drafting changes no token.

    Args: rows: those that sample. logits: `[n, vocab]`, of each row its last known token's and its drafts', in order.
    """
    choices: list[TokenChoice] = []
    logits_row = 0
    for row in rows:
        drafts = row.request.draft_token_ids[: row.num_drafts] if row.num_drafts else ()
        choices.append(TokenChoice(row.request, logits_row, drafts))
        logits_row += 1 + row.num_drafts
    active, depth = choices, 0
    while active:
        whole = len(active) == logits.shape[0]
        own_logits = logits if whole else logits[[choice.logits_row + depth for choice in active]]
        choose_one(active, own_logits, kernels)
        active = [
            choice
            for choice in active
            if choice.reason is None
            and len(choice.draft_token_ids) > depth
            and choice.draft_token_ids[depth] == choice.token_ids[depth]
        ]
        depth += 1
    return {choice.request.request_id: choice for choice in choices}


def choose_one(choices: Sequence[TokenChoice], logits: torch.Tensor, kernels: KernelSet) -> None:
    """Add one token to each choice from its row of `logits`, and note whether that ends its request."""
    params, histories = [choice.request.params for choice in choices], [choice.history for choice in choices]
    extend(choices, sample(logits, params, histories, kernels.native, kernels.triton))


def extend(choices: Sequence[TokenChoice], tokens: Sequence[int | Exception]) -> None:
    """Add its token, or what went wrong, to each choice, and note whether that ends its request."""
    for choice, token in zip(choices, tokens, strict=True):
        if isinstance(token, Exception):
            choice.reason, choice.error = FinishReason.ERROR, token
            continue
        choice.token_ids.append(token)
        try:
            choice.reason = end_reason(choice)
        except Exception as error:  # a user's stopping criterion
            choice.reason, choice.error = FinishReason.ERROR, error


def end_reason(choice: TokenChoice) -> FinishReason | None:
    """Why the request ends with the last token chosen, or None if it goes on."""
    request = choice.request
    params: SamplingParams = request.params
    if choice.token_ids[-1] in params.eos_token_ids:
        return FinishReason.STOP
    if params.constraint is not None and not params.eos_token_ids and params.constraint.is_complete(choice.history):
        return FinishReason.STOP  # there is no token to say so
    if params.stopping_criteria:
        history = history_tensor(choice.history)
        kept = params.trace.scores if params.trace is not None else []
        scores = tuple(row.unsqueeze(0) for row in kept) or None
        if any(bool(torch.as_tensor(ends(history, scores)).all()) for ends in params.stopping_criteria):
            return FinishReason.STOP
    if request.num_tokens + len(choice.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None
