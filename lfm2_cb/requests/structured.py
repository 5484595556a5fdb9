"""Structured output: the format that a user asks of an answer, compiled for the engine by llguidance.

llguidance is MIT, has no dependencies, and refuses what it cannot enforce (others let answers pass that do not fit).
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.constraints import Grammar, GrammarError

#: compiled grammars kept, the last used; one takes some ten to hundreds of KB
MAX_GRAMMARS = 256
#: tokenizers prepared for grammars and kept; each takes a few MB
MAX_TOKENIZERS = 4
#: rules of llama.cpp's EBNF (GBNF)
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_JSON_STYLES = {
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "any": {"whitespace_flexible": True},
}


class StructuredUnavailable(ImportError, ValueError):
    """The extra that compiles grammars is not installed."""


@dataclass(frozen=True)
class Structured:
    """What an answer has to look like. Make one with a method below; a dict or a pydantic class in its place means
    `json_schema` of it. A plain string is not taken: it could be any of these.

    Attributes:
        kind: "json", "regex" or "grammar".
        text: the schema as JSON, the regex, or the Lark grammar.
        style: of JSON, as `whitespace` of `json_schema`.
    """

    kind: str
    text: str
    style: str = "spaced"

    @classmethod
    def json_schema(cls, schema: Any, whitespace: str = "spaced") -> Structured:
        """JSON that fits a schema.

        Args:
            schema: a dict, `True` (any JSON), or a pydantic class. A dict means what JSON Schema says: without
                `"additionalProperties": false` an object may have other properties too, and models do ramble. A class
                means its own fields, but where it says `extra="allow"`.
            whitespace: "spaced": as `json.dumps` writes it, which models are used to, and which leaves them no room to
                ramble; "compact": none; "any": wherever JSON allows it, without end if the model likes.
        Raises: TypeError; ValueError.
        """
        if hasattr(schema, "model_json_schema"):
            schema = _closed(schema.model_json_schema())
        if not isinstance(schema, (dict, bool)):
            raise TypeError(f"a JSON schema is a dict or a pydantic class, got {type(schema).__name__}")
        if whitespace not in _JSON_STYLES:
            raise ValueError(f"whitespace must be one of {', '.join(map(repr, _JSON_STYLES))}, got {whitespace!r}")
        try:
            return cls("json", json.dumps({} if schema is True else schema), whitespace)
        except (TypeError, ValueError) as error:
            raise ValueError(f"this JSON schema is not valid JSON: {error}") from error

    @classmethod
    def regex(cls, pattern: str) -> Structured:
        """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", _text(pattern, "a regex"))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Structured:
        """One of some strings."""
        if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise ValueError(f"choices must be non-empty strings, at least one, got {choices!r}")
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
        return cls("grammar", f"start: {alternatives}")

    @classmethod
    def grammar(cls, text: str) -> Structured:
        """Text of a context-free grammar, in Lark's syntax with a rule `start`, or llama.cpp's with a rule `root`."""
        return cls("grammar", _text(text, "a grammar"))

    @classmethod
    def read(cls, value: Any) -> Structured:
        """One of these, or what means one. Raises: TypeError; ValueError."""
        if isinstance(value, Structured):
            return value
        if isinstance(value, dict) or hasattr(value, "model_json_schema"):
            return cls.json_schema(value)
        raise TypeError(
            "structured must be a Structured, a JSON schema as a dict, or a pydantic class, for the call or as a list "
            f"with one (or None) a prompt, got {type(value).__name__}"
        )


class GrammarCompiler:
    """Compiles what an answer has to look like, each once while it is among the last that were used.

    Args: vocab_size: of the model; a tokenizer may have fewer tokens. eos_token_id: where a tokenizer has none.
    """

    def __init__(self, vocab_size: int, eos_token_id: int | None = None) -> None:
        self._vocab_size, self._eos_token_id = vocab_size, eos_token_id
        self._views: OrderedDict[int, tuple[Any, Any]] = OrderedDict()  # by id: the tokenizer, and its view
        self._grammars: OrderedDict[tuple[int, Structured], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile_all(self, value: Any, tokenizer: Any) -> Grammar | list[Grammar | None] | None:
        """The option `structured`: one for the call, or one (or None) a prompt. Grammars are returned as given.

        Raises: TypeError; ValueError: it cannot be enforced, and why. StructuredUnavailable: the extra is missing.
        """
        if isinstance(value, (list, tuple)):
            return [self._compiled(entry, tokenizer) for entry in value]
        return self._compiled(value, tokenizer)

    def _compiled(self, value: Any, tokenizer: Any) -> Grammar | None:
        if value is None or isinstance(value, Grammar):
            return value
        return self.compile(Structured.read(value), tokenizer)

    def compile(self, structured: Structured, tokenizer: Any) -> Grammar:
        """Raises: ValueError: it cannot be enforced, and why. StructuredUnavailable: the extra is missing."""
        with self._lock:
            known, key = self._grammars, (id(tokenizer), structured)
            view = self._view_of(tokenizer)
            if key not in known:
                known[key] = _compile(structured, view)
            known.move_to_end(key)
            if len(known) > MAX_GRAMMARS:
                known.popitem(last=False)
            return known[key]

    def _view_of(self, tokenizer: Any) -> Any:
        """llguidance's view of a tokenizer. It is kept with the tokenizer, so that no other can get its id."""
        views, key = self._views, id(tokenizer)
        if key not in views:
            views[key] = tokenizer, self._view(tokenizer)
        views.move_to_end(key)
        if len(views) > MAX_TOKENIZERS:
            gone, _ = views.popitem(last=False)
            for stale in [stale for stale in self._grammars if stale[0] == gone]:
                del self._grammars[stale]
        return views[key][1]

    def _view(self, tokenizer: Any) -> Any:
        if tokenizer is None:
            raise ValueError("structured needs a tokenizer: give one to the generator, or tokenizer= with the call")
        hf = _llguidance("llguidance.hf")
        end = getattr(tokenizer, "eos_token_id", None)
        end = self._eos_token_id if end is None else end
        if end is None:
            raise ValueError("structured needs an end-of-sequence token, and neither tokenizer nor model has one")
        try:
            return hf.from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=end)
        except ValueError as error:
            raise ValueError(f"structured: this tokenizer cannot be used: {error}") from error


def _compile(structured: Structured, tokenizer: Any) -> Grammar:
    matcher = _llguidance("llguidance").LLMatcher
    if structured.kind == "json":
        grammar = matcher.grammar_from_json_schema(structured.text, defaults=_JSON_STYLES[structured.style])
    elif structured.kind == "regex":
        grammar = matcher.grammar_from_regex(structured.text)
    else:
        grammar = matcher.grammar_from_lark(_as_lark(structured.text))
    start = matcher(tokenizer, grammar, log_level=0)
    problems = [start.get_error()] if start.is_error() else start.get_grammar_warnings()
    if problems:
        what = {"json": "JSON schema"}.get(structured.kind, structured.kind)
        raise GrammarError(f"structured: this {what} cannot be enforced: {'; '.join(problems).strip()}")
    return Grammar(start, tokenizer.eos_token)


def _as_lark(text: str) -> str:
    if not _GBNF.search(text):
        return text
    try:
        return _llguidance("llguidance.gbnf_to_lark").gbnf_to_lark(text)
    except Exception as error:  # its parser raises what it likes
        raise GrammarError(f"structured: this grammar cannot be read: {error}") from error


def _llguidance(name: str) -> Any:
    """A module of the extra, which is imported only once it is needed. Raises: StructuredUnavailable."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StructuredUnavailable(
            f"structured needs the extra: pip install 'lfm2-cb[structured]' ({error})"
        ) from error


def _closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than it names, but where it says so."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        if schema.get("type") == "object":
            closed.setdefault("additionalProperties", False)
    return closed


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{what} is a non-empty string, got {value!r}")
    return value
