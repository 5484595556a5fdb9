"""Parses an answer's text into plain text, reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ToolCall, build_response_parser, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

from lfm2_cb.requests.text import IncrementalDecoder
from lfm2_cb.requests.tool_calls import CALL_END, CALL_START, ToolCallParser


class AnswerParser(Protocol):
    """Takes an answer's text in pieces, and gives items: text, `ReasoningText` or `ToolCall`s, in order."""

    def decoder(self, tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
        """What makes the text that this parser reads."""

    def begin(self) -> list[Any]:
        """Items that are there before any text."""

    def add(self, text: str) -> list[Any]: ...

    def finish(self) -> list[Any]:
        """The items of what is held back, as no more text will come."""


class PlainText:
    """An answer that is nothing but text."""

    def decoder(self, tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
        return IncrementalDecoder(tokenizer)

    def begin(self) -> list[Any]:
        return []

    def add(self, text: str) -> list[Any]:
        return [text] if text else []

    def finish(self) -> list[Any]:
        return []


class TemplateParser:
    """Parses by the response template that comes with a tokenizer."""

    def __init__(self, parser: ResponseParser) -> None:
        self._parser = parser

    def decoder(self, tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
        return DecoderWithSpecialTokens(tokenizer)

    def begin(self) -> list[Any]:
        return response_events_to_chunks(self._parser.initial_events)

    def add(self, text: str) -> list[Any]:
        return response_events_to_chunks(list(self._parser.feed(text)) if text else [])

    def finish(self) -> list[Any]:
        with suppress(ValueError, RuntimeError):  # cut within something structured, as by max_tokens
            return response_events_to_chunks(self._parser.finalize()[1])
        return []


class Lfm2Calls:
    """Parses tool calls as LFM2 writes them. Args: tools: as in `parse_tool_calls`."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._parser = ToolCallParser(tools)

    def decoder(self, tokenizer: PreTrainedTokenizerBase) -> IncrementalDecoder:
        return DecoderWithCallMarkers(tokenizer)

    def begin(self) -> list[Any]:
        return []

    def add(self, text: str) -> list[Any]:
        return self._items(self._parser.add(text))

    def finish(self) -> list[Any]:
        return self._items(self._parser.finish())

    def _items(self, found: Iterable[Any]) -> list[Any]:
        return [
            one if isinstance(one, str) else ToolCall(one.name, json.dumps(one.arguments, ensure_ascii=False))
            for one in found
        ]


def make_parser(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    prompt: Sequence[int],
    tools: Sequence[Any],
    in_lfm2s_form: bool,
) -> AnswerParser:
    """The parser of an answer to this prompt.

    Args:
        tools: that the model was given.
        in_lfm2s_form: a grammar enforces that calls are written so, whatever the tokenizer's template has.
    """
    own = None if in_lfm2s_form else build_response_parser(tokenizer, model, prompt, tools=list(tools) or None)
    if own is not None:
        return TemplateParser(own)
    return Lfm2Calls(tools) if tools else PlainText()


class DecoderWithSpecialTokens(IncrementalDecoder):
    """For a parser that looks for them."""

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self._token_ids[start:end], skip_special_tokens=False)


class DecoderWithCallMarkers(IncrementalDecoder):
    """Leaves out special tokens, but those that mark tool calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._hidden = {id_ for id_, token in added if token.special and token.content not in (CALL_START, CALL_END)}

    def _decode(self, start: int, end: int) -> str:
        shown = [token for token in self._token_ids[start:end] if token not in self._hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False)
