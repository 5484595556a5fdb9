"""Tool calls as LFM2 writes them, `<|tool_call_start|>[f(a="x"), g(b=1)]<|tool_call_end|>`: read out of answers, and
written into prompts. Some checkpoints write JSON between the markers, some leave the markers out.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CALL_START, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"

#: function → the names of its parameters, in order
Signatures = Mapping[str, Sequence[str]]

#: what has to be mended before Python reads it: strings (an open one goes to the end), names before "(" or "=", and
#: numbers that begin with a 0
_MENDED = re.compile(
    r"""(?P<prefix>[rR]?)(?P<string>"(?:\\.|[^"\\])*(?P<a>"|\Z)|'(?:\\.|[^'\\])*(?P<b>'|\Z))"""
    r"""|(?P<name>[^\W\d][\w.-]*)(?=\s*(?:\(|=(?!=)))"""
    r"""|(?<![\w.])0+(?=[1-9])""",
    re.DOTALL,
)
_ESCAPES = re.compile(r"\\(.)|[\x00-\x1f]", re.DOTALL)
#: a name that a call can be written with, and be read again
_NAME = re.compile(r"[^\W\d][\w.-]*")
_WORDS = {"true": True, "false": False, "null": None}


class BrokenCall(ValueError):
    """Text that is no list of tool calls."""


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments by name, as JSON has them (so text is Unicode, and numbers are finite)."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """What an answer says, and the tools that it calls.

    Args:
        text: decoded with its special tokens, where these mark calls.
        tools: as the model was given them, in OpenAI's form or flat. With them an answer that is nothing but calls
            of these is read without markers too, and arguments without names get theirs.
    Returns: the text beside the calls, and the calls, in order. A call that is broken stays text.
    """
    parser = ToolCallParser(tools)
    pieces = [*parser.add(text), *parser.finish()]
    return "".join(p for p in pieces if isinstance(p, str)), [p for p in pieces if isinstance(p, ToolCall)]


def render_tool_calls(calls: Sequence[ToolCall]) -> str:
    """Calls as LFM2 writes them, with its markers; as JSON where Python has no such names."""
    if all(_NAME.fullmatch(name) for call in calls for name in (call.name, *call.arguments)):
        written = [f"{c.name}({', '.join(f'{k}={_literal(v)}' for k, v in c.arguments.items())})" for c in calls]
    else:
        written = [json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls]
    return f"{CALL_START}[{', '.join(written)}]{CALL_END}"


class ToolCallParser:
    """The same for an answer that comes in pieces. Text is handed out once it is certain not to belong to a call.

    Args: tools: as in `parse_tool_calls`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._signatures = signatures(tools)
        self._text = ""  # not handed out yet
        self._inside = False  # after a start marker
        self._searched = 0  # of the text inside: no end marker begins before
        self._openings = [o for name in self._signatures for o in (f"[{name}(", f"{name}(")]
        self._openings += ['[{"name":', '{"name":'] if self._signatures else []

    def add(self, text: str) -> list[str | ToolCall]:
        """Text and calls that are certain by now."""
        self._text += text
        found: list[str | ToolCall] = []
        while True:
            if self._inside:
                end = self._end_of_block()
                if end is None:
                    return found
                found += self._read(self._text[:end], CALL_START, CALL_END)
                self._text, self._inside = self._text[end + len(CALL_END) :], False
            before, marker, after = self._text.partition(CALL_START)
            if not marker:
                return found + self._certain()
            found += [before] if before else []
            self._text, self._inside, self._openings, self._searched = after, True, [], 0

    def finish(self) -> list[str | ToolCall]:
        """What is held back, as no more text will come."""
        text, self._text = self._text, ""
        if self._inside:  # its end marker is missing
            self._inside = False
            return self._read(text, CALL_START, "")
        return self._read(text, "", "", known_only=True) if self._openings else _pieces(text)

    def _certain(self) -> list[str | ToolCall]:
        if self._openings:  # nothing is handed out yet: it may be calls without markers
            start = "".join(self._text[:256].split())
            if any(start.startswith(o) or o.startswith(start) for o in self._openings):
                return []
            self._openings = []
        text, sizes = self._text, range(min(len(CALL_START) - 1, len(self._text)), 0, -1)
        held = next((size for size in sizes if CALL_START.startswith(text[-size:])), 0)
        self._text = text[len(text) - held :]
        return _pieces(text[: len(text) - held])

    def _end_of_block(self) -> int | None:
        """Where the end marker is that ends the block: one within a string of an argument does not."""
        while (end := self._text.find(CALL_END, self._searched)) >= 0:
            if not _ends_in_string(self._text[:end]):
                return end
            self._searched = end + 1
        self._searched = max(self._searched, len(self._text) - len(CALL_END) + 1)
        return None

    def _read(self, block: str, before: str, after: str, known_only: bool = False) -> list[str | ToolCall]:
        """The calls in a block; the block as it was written, with what stood around it, where they are broken."""
        try:
            calls = read_calls(block, self._signatures)
        except BrokenCall:
            return _pieces(before + block + after)
        if known_only and any(call.name not in self._signatures for call in calls):
            return _pieces(block)
        return list(calls)


def read_calls(text: str, known: Signatures | None = None) -> list[ToolCall]:
    """A list of calls, in Python or in JSON, or one call. Raises: BrokenCall."""
    try:
        try:
            value = json.loads(text, parse_constant=_refuse, parse_float=_float)
        except ValueError:
            return _read_python(text.strip(), known or {})
        return [_from_json(call) for call in (value if isinstance(value, list) and value else [value])]
    except BrokenCall:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of Python's parser too
        raise BrokenCall(f"no tool calls: {error}") from error


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The names of tools and of their parameters."""
    functions = [tool.get("function", tool) for tool in tools]
    properties = {f["name"]: (f.get("parameters") or {}).get("properties") for f in functions}
    return {name: list(given) if isinstance(given, dict) else [] for name, given in properties.items()}


def _pieces(text: str) -> list[str | ToolCall]:
    return [text] if text else []


def _ends_in_string(text: str) -> bool:
    last = deque(_MENDED.finditer(text), maxlen=1)
    return bool(last) and last[0]["string"] is not None and not (last[0]["a"] or last[0]["b"])


# JSON


def _from_json(call: Any) -> ToolCall:
    """`{"name": ..., "arguments": {...}}`, by any of the names that models give these."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise BrokenCall("a call has no name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", parse_constant=_refuse, parse_float=_float)
    if not isinstance(arguments, dict):
        raise BrokenCall("a call's arguments are not an object")
    return ToolCall(_unicode(call["name"]), _unicode(arguments))


def _refuse(name: str) -> None:
    raise BrokenCall(f"{name} is not JSON")


def _float(text: str | float) -> float:
    """A finite number: what is beyond fp64 becomes the largest there is."""
    value = float(text)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _unicode(value: Any) -> Any:
    """The same with halves of surrogate pairs joined, as JSON escapes write them, and what stands alone replaced."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_unicode(entry) for entry in value]
    if isinstance(value, dict):
        return {_unicode(name): _unicode(entry) for name, entry in value.items()}
    return value


# Python


def _read_python(text: str, known: Signatures) -> list[ToolCall]:
    names: list[str] = []
    body = ast.parse(_MENDED.sub(lambda match: _mend(match, names), text), mode="eval").body

    def plain(name: str) -> str:
        return names[int(name[6:-2])] if re.fullmatch(r"__odd_\d+__", name) else name

    calls = body.elts if isinstance(body, (ast.List, ast.Tuple)) else [body]
    if not calls:
        raise BrokenCall("an empty list")
    return [_from_python(call, plain, known) for call in calls]


def _mend(match: re.Match[str], names: list[str]) -> str:
    """What models write and Python does not read: keywords and dashes in names, line breaks in strings, 07."""
    if name := match["name"]:
        if all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            return name
        names.append(name)
        return f"__odd_{len(names) - 1}__"
    string = match["string"] or ""
    return match["prefix"] + string if match["prefix"] else _ESCAPES.sub(_mend_escape, string)


def _mend_escape(match: re.Match[str]) -> str:
    escaped = match[1]
    if escaped is None:
        return f"\\x{ord(match[0]):02x}"
    if escaped == "/":  # as in JSON
        return "/"
    return match[0] if escaped in "\\'\"abfnrtvxuUN01234567\n" else f"\\{match[0]}"


def _from_python(node: ast.expr, plain: Callable[[str], str], known: Signatures) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise BrokenCall("not a call")
    name = plain(ast.unparse(node.func))
    parameters = known.get(name, ())
    if len(node.args) > len(parameters):
        raise BrokenCall(f"{name}: arguments without names")
    arguments = {parameter: _value(arg) for parameter, arg in zip(parameters, node.args, strict=False)}
    for argument in node.keywords:
        if argument.arg is None or (key := plain(argument.arg)) in arguments:
            raise BrokenCall(f"{name}: an argument has no name, or is given twice")
        arguments[key] = _value(argument.value)
    return ToolCall(name, _unicode(arguments))


def _value(node: ast.expr) -> Any:
    """A literal of Python or of JSON."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
        return _float(node.value) if isinstance(node.value, float) else node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        return dict(_entries(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise BrokenCall("an argument is not a literal")


def _entries(node: ast.Dict) -> Iterator[tuple[str, Any]]:
    for key, entry in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            raise BrokenCall("a key is not a string")
        yield key.value, _value(entry)


def _literal(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False)
