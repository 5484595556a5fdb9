"""What an answer has to look like: `response_format` (or `text.format`), `tools` and `tool_choice` of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lfm2_cb.engine.constraints import Grammar
from lfm2_cb.requests.structured import GrammarCompiler, Structured
from lfm2_cb.requests.tool_calls import CALL_END, CALL_START
from lfm2_cb.requests.tool_grammar import tool_grammar

from .errors import RequestError
from .fields import shown


@dataclass(frozen=True)
class AnswerForm:
    """What an answer has to look like.

    Attributes:
        tools: that the model is given, in the form of chat completions.
        enforced: what a grammar enforces, by the field that requires it; the last one is all of it.
        calls_are_enforced: the grammar's calls are in LFM2's form.
    """

    tools: Sequence[Any] = ()
    enforced: Sequence[tuple[str, Structured]] = ()

    @property
    def calls_are_enforced(self) -> bool:
        return bool(self.tools) and bool(self.enforced)

    @classmethod
    def of(
        cls, schema: Any, format_field: str, tools: Sequence[Any], body: Mapping[str, Any], markers: bool
    ) -> AnswerForm:
        """Args:
            schema: of the answer where no tool is called; None: text.
            format_field: the field that has it.
            tools: in the form of chat completions, and well-formed.
            body: the request, for `tool_choice` and `parallel_tool_calls`.
            markers: the tokenizer has LFM2's.
        Raises: RequestError.
        """
        form = cls._of(schema, format_field, tools, body, markers)
        for name in ("ignore_eos", "min_tokens"):
            if form.enforced and body.get(name):
                message = f"{name} cannot be combined with {form.enforced[-1][0]}: an answer ends where it is complete"
                raise RequestError(message, name)
        return form

    @classmethod
    def _of(
        cls, schema: Any, format_field: str, tools: Sequence[Any], body: Mapping[str, Any], markers: bool
    ) -> AnswerForm:
        choice, parallel = body.get("tool_choice") or "auto", body.get("parallel_tool_calls") is not False
        enforced = [] if schema is None else [(format_field, Structured.json_schema(schema))]
        if choice == "none" or (not tools and choice == "auto"):
            return cls((), enforced)
        if choice != "auto":
            called = _chosen(choice, tools)
            one = parallel and choice == "required"
            return cls(tools, [("tools", tool_grammar(called, parallel=one, markers=markers))])
        strict = any(tool["function"].get("strict") for tool in tools)
        if not (enforced or strict or not parallel):
            return cls(tools)
        try:
            grammar = tool_grammar(tools, required=False, parallel=parallel, markers=markers, answer=schema)
        except ValueError as error:
            field = "tools" if strict else "parallel_tool_calls"
            raise RequestError(f"{field} cannot be enforced: {error}", field) from error
        return cls(tools, [*enforced, ("tools", grammar)])


class FormCompiler:
    """Compiles the grammars of answers, in a thread.

    Args: eos_token_id: where the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_id: int | None) -> None:
        self._tokenizer, self._grammars = tokenizer, GrammarCompiler(vocab_size, eos_token_id)
        self.has_markers = {CALL_START, CALL_END} <= {*tokenizer.get_vocab()}

    async def compile(self, form: AnswerForm) -> Grammar | None:
        """Raises: RequestError: it cannot be enforced, and why."""
        grammar = None
        for field, structured in form.enforced:
            try:
                grammar = await asyncio.to_thread(self._grammars.compile, structured, self._tokenizer)
            except ValueError as error:  # a grammar's, or the extra is missing
                reason = str(error).removeprefix("structured: ")
                raise RequestError(f"{field}: {reason}", field, code="invalid_json_schema") from error
        return grammar


def schema_of_chat(response_format: Any) -> Any:
    """The JSON schema that `response_format` asks for; None: it asks for text. Raises: RequestError."""
    return _schema(response_format, "response_format", inner="json_schema")


def schema_of_response(text: Any) -> Any:
    """The same for `text` of a response. Raises: RequestError."""
    for name, value in (text or {}).items():
        if name != "format" and value is not None and (name, value) != ("verbosity", "medium"):
            where = f"text.{shown(name)[1:-1]}"
            raise RequestError(f"{where} is not supported here", where, code="unsupported_parameter")
    return _schema((text or {}).get("format"), "text.format", inner=None)


def _schema(asked: Any, place: str, inner: str | None) -> Any:
    """Args: inner: where in `asked` the schema and its name are."""
    kind = "text" if asked is None else asked.get("type") if isinstance(asked, dict) else asked
    if kind not in ("text", "json_object", "json_schema"):
        message = f'{place}.type must be "text", "json_object" or "json_schema", got {shown(kind)}'
        raise RequestError(message, f"{place}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = asked if inner is None else asked.get(inner)
    place = place if inner is None else f"{place}.{inner}"
    if not isinstance(named, dict):
        raise RequestError(f"{place} must be an object with a schema, got {shown(named)}", place)
    if not isinstance(named.get("schema"), dict):
        message = f"{place}.schema must be a JSON schema, got {shown(named.get('schema'))}"
        raise RequestError(message, f"{place}.schema")
    return named["schema"]


def _chosen(choice: Any, tools: Sequence[Any]) -> Sequence[Any]:
    """The tools that may be called where one has to be. Raises: RequestError."""
    if not tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice == "required":
        return tools
    name = (choice.get("function") or choice).get("name")
    called = [tool for tool in tools if tool["function"]["name"] == name]
    if not called:
        raise RequestError(f"tool_choice names {shown(name)}, and no tool is called so", "tool_choice")
    return called[:1]
