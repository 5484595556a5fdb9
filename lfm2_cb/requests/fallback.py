"""Fallback to stock `generate()`, on our own model, for what only it can do (beams, guidance, internals)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..model.modeling import Lfm2CbForCausalLM
from ..scheduling.request import FinishReason, RequestMetrics
from .builder import sequence_seed
from .options import CallOptions, GenerateOptions, UnsupportedOptionError
from .outputs import RequestOutput
from .prompts import PromptError, check_prompt
from .stock import eos_token_ids, pad_token_id

logger = logging.get_logger("transformers.lfm2_cb")


def stock_arguments(generate_kwargs: dict[str, Any], streamer: Any) -> dict[str, Any]:
    """The arguments of a call without those that are ours. Raises: UnsupportedOptionError: one needs our engine."""
    ours = {field.name for field in dataclasses.fields(CallOptions)}
    for name in ("logprobs", "assistant_model", "structured", "sparse_prefill", "adapter", "chunks"):
        if generate_kwargs.get(name) is not None:
            raise UnsupportedOptionError(f"{name} cannot be combined with options that stock generate() must run")
    kept = {name: value for name, value in generate_kwargs.items() if name not in ours}
    return {**kept, "streamer": streamer}


def stock_generate(
    model: Lfm2CbForCausalLM,
    prompts: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    options: GenerateOptions,
    kwargs: dict[str, Any],
    index: int = 0,
) -> Any:
    """Call stock `generate()` with the user's own arguments; draws come from the call's seed."""
    logger.warning_once(f"{', '.join(options.left_to_stock)}: left to stock generate(), without continuous batching")
    call = options.call
    arguments = {
        "attention_mask": attention_mask,
        "logits_processor": list(call.logits_processor) or None,
        "stopping_criteria": list(call.stopping_criteria) or None,
        "prefix_allowed_tokens_fn": call.prefix_allowed_tokens_fn,
        "tokenizer": call.tokenizer,
        **kwargs,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sequence_seed(call.seed, index, 0))
        return model.generate(prompts.to(model.device), generation_config=generation_config, **arguments)


def stock_outputs(
    model: Lfm2CbForCausalLM,
    token_ids: Sequence[list[int] | PromptError],
    generation_config: Any,
    options: GenerateOptions,
    kwargs: dict[str, Any],
) -> list[RequestOutput]:
    """Stock `generate()`, one prompt after another. Raises: PromptError, unless `on_error="return"`."""
    checked = [_checked(i, ids, model, options) for i, ids in enumerate(token_ids)]
    outputs = []
    for i, ids in enumerate(checked):
        if isinstance(ids, PromptError):
            failed = RequestOutput([], [], None, FinishReason.ERROR, RequestMetrics(), ids)
            outputs += [failed] * (options.of_prompt(i).config.num_return_sequences or 1)
            continue
        config = generation_config[i] if isinstance(generation_config, (list, tuple)) else generation_config
        limit = {} if options.max_new_tokens is None else {"max_new_tokens": options.max_new_tokens[i]}
        prompt = torch.tensor([ids])
        result = stock_generate(model, prompt, torch.ones_like(prompt), config, options, {**kwargs, **limit}, index=i)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        outputs += [_output(ids, row, options.of_prompt(i).config) for row in sequences.tolist()]
    return outputs


def _checked(
    index: int, ids: list[int] | PromptError, model: Lfm2CbForCausalLM, options: GenerateOptions
) -> list[int] | PromptError:
    try:
        if isinstance(ids, PromptError):
            raise ids
        check_prompt(index, ids, model.config.vocab_size, model.config.max_position_embeddings)
    except PromptError as error:
        if options.call.on_error == "raise":
            raise
        return error
    return ids


def _output(prompt: Sequence[int], sequence: Sequence[int], config: GenerationConfig) -> RequestOutput:
    tokens, eos, pad = list(sequence[len(prompt) :]), eos_token_ids(config), pad_token_id(config)
    ends = [i for i, token in enumerate(tokens) if token in eos]
    if ends:
        return RequestOutput(list(prompt), tokens[: ends[0] + 1], None, FinishReason.STOP, RequestMetrics())
    while tokens and tokens[-1] == pad:
        tokens.pop()
    return RequestOutput(list(prompt), tokens, None, FinishReason.LENGTH, RequestMetrics())
