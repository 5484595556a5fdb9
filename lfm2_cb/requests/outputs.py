"""The generator's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..engine.sampler import TokenLogprobs, Trace
from ..scheduling.request import FinishReason, Request, RequestMetrics
from .stock import pad_token_id


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
        error: what went wrong, where that is "error".
    """

    index: int
    token_ids: list[int]
    text: str | None
    finished: bool
    finish_reason: FinishReason | None = None
    error: BaseException | None = None


def as_request_output(request: Request, text: str | None) -> RequestOutput:
    """A finished request, with its decoded text."""
    assert request.finish_reason is not None
    trace: Trace = request.params.trace or Trace()
    return RequestOutput(
        request.prompt_token_ids,
        request.output_token_ids,
        text,
        request.finish_reason,
        request.metrics,
        request.error,
        torch.stack(trace.scores) if trace.scores else None,
        torch.stack(trace.logits) if trace.logits else None,
        trace.logprobs if trace.num_logprobs is not None else None,
    )


def as_stock_output(
    prompts: torch.Tensor, requests: Sequence[Request], members: Sequence[Request], config: GenerationConfig
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Finished requests for a `[batch, length]` tensor of prompts, as stock `generate()` returns them.

    Args: requests: one a prompt; members: those and their forks, in order.
    Raises: RuntimeError: one of them failed.
    """
    failed = next((m for m in members if m.finish_reason is FinishReason.ERROR), None)
    if failed is not None:
        raise RuntimeError(f"generation failed: {failed.error!r}") from failed.error
    answers = [torch.tensor(member.output_token_ids, dtype=torch.long) for member in members]
    pad = pad_token_id(config)
    padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=0 if pad is None else pad)
    counts = torch.tensor([1 + request.num_siblings for request in requests])
    repeated = prompts.repeat_interleave(counts.to(prompts.device), dim=0)
    sequences = torch.cat([repeated, padded.to(prompts.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    traces = [member.params.trace or Trace() for member in members]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_step([trace.scores for trace in traces]) if config.output_scores else None,
        logits=_by_step([trace.logits for trace in traces]) if config.output_logits else None,
    )


def _by_step(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per-request lists of `[vocab]` → stock's tuple of `[requests, vocab]`, one a step."""
    nothing = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(
        torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(max(map(len, rows)))
    )
