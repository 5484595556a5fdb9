"""Whatever users call prompts → lists of token ids, checked at the door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """A prompt that cannot be run, with its index and the reason."""


def tokenize(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: a string, a chat (list of {"role", "content"}), a list of token ids, or a sequence of any of these (a
            `datasets` column too).
    Raises:
        PromptError: empty or of the wrong type; text without a tokenizer.
    """
    if isinstance(prompts, str) or _is_chat(prompts) or _is_token_ids(prompts):
        prompts = [prompts]
    if isinstance(prompts, (dict, bytes)) or not hasattr(prompts, "__iter__"):
        raise PromptError(f"prompts must be strings, chats or lists of token ids, got {type(prompts).__name__}")
    prompts = list(prompts)
    if not prompts:
        return []
    if tokenizer is None and not all(_is_token_ids(p) for p in prompts):
        index = next(i for i, p in enumerate(prompts) if not _is_token_ids(p))
        if isinstance(prompts[index], str) or _is_chat(prompts[index]):
            raise PromptError(f"prompt {index} is text: give ContinuousBatchingGenerator a tokenizer, or token ids")
    return [_tokenize_one(i, prompt, tokenizer) for i, prompt in enumerate(prompts)]


def _tokenize_one(index: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        token_ids = tokenizer(prompt)["input_ids"]  # type: ignore[misc]  # tokenize() has checked that there is one
    elif _is_chat(prompt):
        token_ids = tokenizer.apply_chat_template(  # type: ignore[union-attr]
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    elif isinstance(prompt, torch.Tensor) and prompt.ndim == 1 and not prompt.is_floating_point():
        token_ids = prompt.tolist()
    elif _is_token_ids(prompt):
        token_ids = [int(token) for token in prompt]
    elif isinstance(prompt, Sequence) and len(prompt) == 0:
        token_ids = []
    else:
        raise PromptError(f"prompt {index} must be a string, a chat or a list of token ids, got {_describe(prompt)}")
    if not token_ids:
        raise PromptError(f"prompt {index} is empty: it has no tokens")
    return token_ids


def check_token_ids(token_ids: Sequence[Sequence[int]], vocab_size: int, max_position_embeddings: int) -> None:
    """Raises: PromptError: an id outside the vocabulary, or a prompt longer than the model's positions."""
    for i, ids in enumerate(token_ids):
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise PromptError(f"prompt {i} has token id {bad}, outside the vocabulary of {vocab_size}")
        if len(ids) >= max_position_embeddings:
            raise PromptError(
                f"prompt {i} has {len(ids)} tokens; the model's limit (max_position_embeddings) is "
                f"{max_position_embeddings}, at least one of them for the answer"
            )


def strip_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """The real tokens of each row of a left-padded `[batch, length]` batch.

    Raises: PromptError: padding on the right or inside, on which stock's own answers are wrong; a row of padding only.
    """
    if attention_mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the prompts {tuple(input_ids.shape)}"
        )
    mask = attention_mask.bool().cpu()
    rows = []
    for i, (ids, kept) in enumerate(zip(input_ids.cpu(), mask, strict=True)):
        if not kept.any():
            raise PromptError(f"prompt {i} is empty: its attention_mask is all zeros")
        first = int(kept.int().argmax())
        if not kept[first:].all():
            raise PromptError(f"prompt {i} is padded on the right or inside; pad on the left (padding_side='left')")
        rows.append(ids[first:].tolist())
    return rows


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _is_token_ids(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not value.is_floating_point() and value.dtype != torch.bool and len(value) > 0
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Sequence) or not value:
        return False
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _describe(value: Any) -> str:
    inner = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return type(value).__name__ + inner
