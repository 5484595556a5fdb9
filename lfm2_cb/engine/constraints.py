"""Constraints: the tokens that may come next in a request whose output must match a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..ops.sampling import TokenMasks


class GrammarError(ValueError):
    """A grammar cannot be read or enforced, or rejects what it is used on."""


class Matcher(Protocol):
    """A grammar's state, as llguidance's `LLMatcher` has it. What goes wrong in it is said by `get_error()`."""

    def deep_copy(self) -> Matcher: ...
    def consume_tokens(self, token_ids: list[int]) -> bool: ...
    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None: ...
    def is_stopped(self) -> bool: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def get_error(self) -> str: ...


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        start: its state before any token; only copied.
        end_token_id: the token that stands for the end in its masks.
    """

    start: Matcher
    end_token_id: int


class Constraint:
    """One request's way through a grammar.

    It is asked with the request's tokens, and takes note of those that are new. Only accepted tokens ever come here:
    nothing has to be taken back, whatever is guessed, preempted or forked.

    Args:
        num_prompt_tokens: how many of the request's tokens are none of the grammar's business.
        eos_token_ids: tokens that end the request: allowed where the grammar may end, and nowhere else.
    """

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, eos_token_ids: Collection[int]) -> None:
        self.grammar, self.eos_token_ids = grammar, frozenset(eos_token_ids)
        self._matcher: Matcher | None = None  # copied when first asked: many requests wait before they run
        self._num_known = num_prompt_tokens

    def fill(self, token_ids: Sequence[int], words: np.ndarray) -> None:
        """Write what may follow these tokens (prompt and output) as bits: `[words]` int32, see `TokenMasks`.

        Raises: GrammarError: the output does not fit, or the grammar takes too long.
        """
        matcher = self._at(token_ids)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if error := matcher.get_error():
            raise GrammarError(_first_line(error))
        end = self.grammar.end_token_id
        if self.eos_token_ids == {end}:
            return
        bits = words.view(np.uint8)
        may_end = bits[end // 8] >> end % 8 & 1
        for token in (end, *self.eos_token_ids):
            if token // 8 < len(bits):
                byte, bit = token // 8, np.uint8(1 << token % 8)
                bits[byte] = bits[byte] | bit if may_end and token in self.eos_token_ids else bits[byte] & ~bit

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing but the end may follow. Raises: GrammarError."""
        return self._at(token_ids).is_stopped()

    def forced(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens to follow these that alone may, until the grammar leaves a choice. Raises: GrammarError."""
        return self._at(token_ids).compute_ff_tokens()

    def _at(self, token_ids: Sequence[int]) -> Matcher:
        if self._matcher is None:
            self._matcher = self.grammar.start.deep_copy()
        new = list(token_ids[self._num_known :])
        if new and not self._matcher.consume_tokens(new):
            raise GrammarError(_first_line(self._matcher.get_error()))
        self._num_known += len(new)
        return self._matcher


def fill_masks(
    constraints: Sequence[Constraint | None], histories: Sequence[Sequence[int]], vocab_size: int
) -> tuple[TokenMasks | None, dict[int, Exception]]:
    """The masks of a step's rows (None: no row has one), and what went wrong in a row: it may take nothing."""
    rows = [i for i, constraint in enumerate(constraints) if constraint is not None]
    if not rows:
        return None, {}
    bits = torch.zeros(len(rows), TokenMasks.words(vocab_size), dtype=torch.int32)
    mask_of, words = [-1] * len(constraints), bits.numpy()
    errors: dict[int, Exception] = {}
    for mask, row in enumerate(rows):
        mask_of[row] = mask
        try:
            constraints[row].fill(histories[row], words[mask])  # type: ignore[union-attr]
        except GrammarError as error:
            errors[row], words[mask] = error, 0
    return TokenMasks(bits, mask_of), errors


def _first_line(error: str) -> str:
    return f"structured: {error.strip().splitlines()[0] if error.strip() else 'the grammar cannot go on'}"
