"""Incremental decoding of tokens to text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class IncrementalDecoder:
    """Text of one request, piece by piece; the pieces add up to the decoded whole.

    Decodes a window that starts at the last safe point only, so a piece costs the same however long the text is, and
    holds back what may still change (a character of several tokens).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window_start = 0  # tokens before are done with
        self._read_until = 0  # tokens before have been handed out as text

    def add(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Take new tokens; return the text that is certain by now (all of it when `finished`)."""
        self._token_ids.extend(token_ids)
        before = self._decode(self._window_start, self._read_until)
        now = self._decode(self._window_start, len(self._token_ids))
        if now.endswith("\ufffd") and not finished:
            return ""
        self._window_start, self._read_until = self._read_until, len(self._token_ids)
        return now[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)
