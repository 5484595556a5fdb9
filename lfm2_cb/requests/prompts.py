"""Prompts in every form that users pass → lists of token ids, validated here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """A prompt that cannot be run, with its index and the reason."""


def tokenize(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: a string, a chat (list of {"role", "content"}), a list or array of token ids, or a sequence of any of
            these (a `datasets` column too).
    Raises:
        PromptError: empty or of the wrong type; text without a tokenizer.
    """
    return [_or_raise(ids) for ids in read_prompts(prompts, tokenizer)]


class SegmentedPrompt(list[int]):
    """Token ids with where each segment ends, but the last. Read again, it stays what it is."""

    def __init__(self, segments: Sequence[Sequence[int]]) -> None:
        super().__init__(token for segment in segments for token in segment)
        self.ends = tuple(accumulate(len(segment) for segment in segments))[:-1]


def read_prompts(
    prompts: Any, tokenizer: PreTrainedTokenizerBase | None, chunks: Any = None
) -> list[list[int] | PromptError]:
    """As `tokenize`, but what is wrong with one prompt stands in its place.

    Args: chunks: True: each prompt is a list of segments, text or token ids; text: what separates those of texts. Each
        is tokenised by itself, so that its tokens are the same wherever it stands. Other prompts (chats, token ids)
        are read as ever, and their separators looked for among their tokens: see `segment_ends`.
    """
    if chunks is True:
        if isinstance(prompts, (str, Mapping)) or not hasattr(prompts, "__iter__"):
            raise PromptError("with chunks=True, prompts must be a list that holds a list of segments for each prompt")
        return [_read_segments(i, prompt, tokenizer) for i, prompt in enumerate(prompts)]
    if isinstance(chunks, str) and tokenizer is not None:
        texts = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
            return [_read_marked_text(i, text, tokenizer, chunks) for i, text in enumerate(texts)]
    if isinstance(prompts, str) or _is_chat(prompts) or _is_token_ids(prompts):
        prompts = [prompts]
    if isinstance(prompts, (Mapping, bytes)) or not hasattr(prompts, "__iter__"):
        raise PromptError(f"prompts must be strings, chats or lists of token ids, got {type(prompts).__name__}")
    return [_read_one(i, prompt, tokenizer) for i, prompt in enumerate(prompts)]


def _read_segments(index: int, segments: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int] | PromptError:
    if isinstance(segments, (str, Mapping)) or not isinstance(segments, Sequence) or _is_token_ids(segments):
        return PromptError(f"prompt {index} must be a list of segments with chunks=True, got {_describe(segments)}")
    parts: list[list[int]] = []
    for place, segment in enumerate(segments):
        whole = _read_one(index, segment, tokenizer)
        if isinstance(whole, PromptError):
            return whole
        if isinstance(segment, str) and tokenizer is not None:
            bare = tokenizer(segment, add_special_tokens=False)["input_ids"]
            if place == 0:  # what is put before every text stands there alone, as a segment of its own
                parts.append(whole[: len(whole) - len(bare)])
            whole = bare
        parts.append(whole)
    parts = [part for part in parts if part]
    return SegmentedPrompt(parts) if parts else PromptError(f"prompt {index} is empty: it has no tokens")


def _read_marked_text(
    index: int, text: str, tokenizer: PreTrainedTokenizerBase, separator: str
) -> list[int] | PromptError:
    if separator not in text:
        return PromptError(f"prompt {index} has no separator (chunks: {separator!r}) in its text")
    return _read_segments(index, [part for part in re.split(f"(?<={re.escape(separator)})", text) if part], tokenizer)


def segment_ends(index: int, ids: Sequence[int], separator: Sequence[int]) -> tuple[int, ...]:
    """Where segments end, each behind a separator. Raises: PromptError: there is none."""
    width = len(separator)
    ends = [i + width for i in range(len(ids) - width + 1) if list(ids[i : i + width]) == separator]
    if not ends:
        raise PromptError(f"prompt {index} has no separator (chunks: token ids {list(separator)}) among its tokens")
    return tuple(end for end in ends if end < len(ids))


def _or_raise(ids: list[int] | PromptError) -> list[int]:
    if isinstance(ids, PromptError):
        raise ids
    return ids


def _read_one(index: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int] | PromptError:
    try:
        return _tokenize_one(index, prompt, tokenizer)
    except PromptError as error:
        return error


def _tokenize_one(index: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if tokenizer is None and (isinstance(prompt, str) or _is_chat(prompt)):
        raise PromptError(f"prompt {index} is text: give ContinuousBatchingGenerator a tokenizer, or token ids")
    if isinstance(prompt, str):
        check_unicode(index, prompt)
        token_ids = tokenizer(prompt)["input_ids"]  # type: ignore[misc]
    elif _is_chat(prompt):
        for text in (value for message in prompt for value in message.values()):
            check_unicode(index, text)
        token_ids = tokenizer.apply_chat_template(  # type: ignore[union-attr]
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    elif isinstance(prompt, (torch.Tensor, np.ndarray)) and prompt.ndim == 1 and _is_integral(prompt):
        token_ids = prompt.tolist()
    elif isinstance(prompt, SegmentedPrompt):
        token_ids = prompt
    elif _is_token_ids(prompt):
        token_ids = [int(token) for token in prompt]
    elif isinstance(prompt, Sequence) and len(prompt) == 0:
        token_ids = []
    else:
        raise PromptError(f"prompt {index} must be a string, a chat or a list of token ids, got {_describe(prompt)}")
    if not token_ids:
        raise PromptError(f"prompt {index} is empty: it has no tokens")
    return token_ids


def check_unicode(index: int, text: Any) -> None:
    """Raises: PromptError: half of a surrogate pair (as JSON can hold, and no text), on which tokenizers fail."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"prompt {index} is not valid text: a lone surrogate {text[error.start]!r} at character {error.start}"
            ) from None


def check_token_ids(token_ids: Sequence[Sequence[int]], vocab_size: int, max_position_embeddings: int) -> None:
    """Check each prompt; see `check_prompt`."""
    for i, ids in enumerate(token_ids):
        check_prompt(i, ids, vocab_size, max_position_embeddings)


def check_prompt(index: int, ids: Sequence[int], vocab_size: int, max_position_embeddings: int) -> None:
    """Raises: PromptError: an id outside the vocabulary, or a prompt longer than the model's positions."""
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise PromptError(f"prompt {index} has token id {bad}, outside the vocabulary of {vocab_size}")
    if len(ids) >= max_position_embeddings:
        raise PromptError(
            f"prompt {index} has {len(ids)} tokens; the model's limit (max_position_embeddings) is "
            f"{max_position_embeddings}, at least one of them for the answer"
        )


def unwrap(prompts: Any, input_ids: Any = None, attention_mask: Any = None) -> tuple[Any, Any]:
    """Prompts and their mask, out of what a tokenizer returns or by stock's names. A 2-d array becomes a tensor.

    Raises: PromptError: no prompts, or twice.
    """
    if (prompts is None) == (input_ids is None):
        raise PromptError("give the prompts once: as the first argument, or as input_ids")
    if prompts is None:
        prompts = input_ids
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        prompts = prompts["input_ids"]
    if isinstance(prompts, np.ndarray) and prompts.ndim > 1:
        prompts = torch.from_numpy(prompts)
    if isinstance(prompts, torch.Tensor) and attention_mask is not None:
        attention_mask = torch.as_tensor(attention_mask)
    return prompts, attention_mask


def strip_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """The real tokens of each row of a left-padded `[batch, length]` batch.

    Raises: PromptError: padding on the right or inside, on which stock's own answers are wrong; a row of padding only.
    """
    if attention_mask.shape != input_ids.shape:
        raise PromptError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the prompts {tuple(input_ids.shape)}"
        )
    mask = attention_mask.bool().cpu()
    return [_strip_one(i, ids, kept) for i, (ids, kept) in enumerate(zip(input_ids.cpu(), mask, strict=True))]


def strip_lists(token_ids: Sequence[list[int] | PromptError], attention_mask: Any) -> list[list[int] | PromptError]:
    """As `strip_padding`, for prompts in lists, each with its own mask."""
    masks = attention_mask.tolist() if isinstance(attention_mask, (torch.Tensor, np.ndarray)) else list(attention_mask)
    if masks and not isinstance(masks[0], (Sequence, torch.Tensor, np.ndarray)):
        masks = [masks]  # one prompt's, as a tokenizer gives it for one text
    if len(masks) != len(token_ids):
        raise PromptError(f"attention_mask has {len(masks)} rows for {len(token_ids)} prompts")
    stripped: list[list[int] | PromptError] = []
    for i, (ids, mask) in enumerate(zip(token_ids, masks, strict=True)):
        if isinstance(ids, PromptError):
            stripped.append(ids)
        elif len(ids) != len(mask):
            raise PromptError(f"prompt {i} has {len(ids)} tokens, and its attention_mask {len(mask)}")
        else:
            stripped.append(_strip_one(i, torch.tensor(ids), torch.as_tensor(mask).bool()))
    return stripped


def _strip_one(index: int, ids: torch.Tensor, kept: torch.Tensor) -> list[int]:
    if not kept.any():
        raise PromptError(f"prompt {index} is empty: its attention_mask is all zeros")
    first = int(kept.int().argmax())
    if not kept[first:].all():
        raise PromptError(f"prompt {index} is padded on the right or inside; pad on the left (padding_side='left')")
    return ids[first:].tolist()


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _is_token_ids(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim == 1 and len(value) > 0 and _is_integral(value)
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Sequence) or not value:
        return False
    return all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in value)


def _is_integral(array: torch.Tensor | np.ndarray) -> bool:
    """Whether it can hold token ids. (An empty array has no kind worth asking for.)"""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu" or not array.size
    return not (array.is_floating_point() or array.is_complex() or array.dtype == torch.bool) or not array.numel()


def _describe(value: Any) -> str:
    inner = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return type(value).__name__ + inner
