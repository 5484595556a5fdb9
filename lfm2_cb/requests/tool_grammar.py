"""The grammar of tool calls: LFM2's form, with arguments that match each tool's schema.

A call is written in Python, `f(a="x", b=True)`, where its names allow that and its schema is a list of properties;
their values are JSON but for True, False and None, as the models write them. Else all calls are written in JSON.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .structured import Structured
from .tool_calls import CALL_END, CALL_START

#: of a schema that is a list of properties; the rest of its words restrict these further
_PLAIN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_SAYS_NOTHING = {"title", "description", "default", "examples", "strict"}
#: where a schema keeps what it refers to
_SHARED = ("$defs", "definitions")
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool = True,
    parallel: bool = True,
    markers: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> Structured:
    """Answers that call tools.

    Args:
        tools: those that may be called, in OpenAI's form or flat; parameters are JSON schemas of objects.
        required: the answer is calls and nothing else; else it may be text or `answer`, or have calls between text.
        parallel: several calls at once may be made.
        markers: the tokenizer has LFM2's marker tokens (else the list stands alone, without any).
        answer: a JSON schema of the answer where no tool is called; only without `required`.
    Raises: ValueError: optional calls cannot be distinguished from text without markers.
    """
    if not (required or markers or answer is not None):
        raise ValueError("the tokenizer has no tokens that mark tool calls, so they cannot be told from text")
    functions = [tool.get("function", tool) for tool in tools]
    schemas = [(function["name"], dict(function.get("parameters") or {})) for function in functions]
    in_python = all(_fits_python(name, schema) for name, schema in schemas)
    start, end = (CALL_START, CALL_END) if markers else ("", "")
    repeated = '(", " call)*' if parallel else ""
    rules = [f'calls: {start} "[" call {repeated} "]" {end}'.strip()]
    rules += [f"call: {' | '.join(f'call_{i}' for i in range(len(schemas)))}"]
    for i, (name, schema) in enumerate(schemas):
        rules += _python_call(i, name, schema) if in_python else [f"call_{i}: {_json(_json_call(name, schema))}"]
    if required:
        rules.insert(0, "start: calls")
    elif answer is None:
        rules[:0] = ["start: TEXT (calls TEXT)?", r"TEXT: /(.|\n)*/"]
    else:
        rules[:0] = ["start: calls | answer", f"answer: {_json(answer)}"]
    return Structured.grammar("\n".join(rules))


def _fits_python(name: str, schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    return (
        schema.keys() <= _PLAIN | _SAYS_NOTHING
        and schema.get("type", "object") == "object"
        and isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
        and {*required} <= properties.keys()
        and all(word.isidentifier() and not keyword.iskeyword(word) for word in (name, *properties))
    )


def _python_call(i: int, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Rules of `call_i`: properties in their order, those that need not be there maybe left out.

    `first_i_k` is what may follow from property k on where no argument stands before, `more_i_k` where one does.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    shared = {key: schema[key] for key in _SHARED if key in schema}
    yield f"call_{i}: {_text(f'{name}(')} first_{i}_0 {_text(')')}"
    for k, (key, value) in enumerate(properties.items()):
        skips = key not in required
        yield f"value_{i}_{k}: {_value(value, shared)}"
        yield f"first_{i}_{k}: {_text(f'{key}=')} value_{i}_{k} more_{i}_{k + 1}" + f" | first_{i}_{k + 1}" * skips
        yield f"more_{i}_{k}: {_text(f', {key}=')} value_{i}_{k} more_{i}_{k + 1}" + f" | more_{i}_{k + 1}" * skips
    yield from (f'{rule}_{i}_{len(properties)}: ""' for rule in ("first", "more"))


def _value(schema: Any, shared: Mapping[str, Any]) -> str:
    said = schema.keys() - _SAYS_NOTHING if isinstance(schema, dict) else set()
    if said == {"type"} and schema["type"] in ("boolean", "null"):
        return '"True" | "False"' if schema["type"] == "boolean" else '"None"'
    return _json({**shared, **schema} if isinstance(schema, dict) and said else schema if schema is False else {})


def _json_call(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    shared = {key: schema.pop(key) for key in _SHARED if key in schema}
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    call = {"name": {"const": name}, "arguments": {"type": "object", **schema}}
    return {"type": "object", "properties": call, "required": [*call], "additionalProperties": False, **shared}


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACED} if isinstance(schema, dict) else schema)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
