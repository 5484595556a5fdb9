"""What the generator hands out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .engine.sampler import TokenLogprobs
from .scheduling.request import FinishReason, RequestMetrics


@dataclass
class RequestOutput:
    """One finished request.

    Attributes:
        prompt_token_ids: as computed, special tokens included.
        token_ids: generated, an end-of-sequence token included.
        text: the decoded `token_ids` without special tokens; None where the generator has no tokenizer.
        finish_reason: "stop", "length", "cancelled" or "error".
        metrics: times and what the cache saved.
        error: what went wrong, where `finish_reason` is "error".
        scores, logits: `[tokens, vocab]` fp32, where `output_scores`, `output_logits` asked for them.
        logprobs: one `TokenLogprobs` a token, where `logprobs=k` asked for them.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    metrics: RequestMetrics = field(repr=False)
    error: BaseException | None = None
    scores: torch.Tensor | None = field(default=None, repr=False)
    logits: torch.Tensor | None = field(default=None, repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)


@dataclass
class RequestEvent:
    """Something that a stream saw happen.

    Attributes:
        index: of the prompt (of the returned sequence, where `num_return_sequences` > 1: prompt × n + i).
        token_ids: the new tokens, in order; may be empty when `finished`.
        text: what they add to the decoded text; "" while a character is incomplete, None without a tokenizer.
        finished: whether this is the request's last event.
        finish_reason: set on the last event.
    """

    index: int
    token_ids: list[int]
    text: str | None
    finished: bool
    finish_reason: FinishReason | None = None
