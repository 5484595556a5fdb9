"""From OpenAI's messages and tools to a chat's token ids. What the model's chat template would drop is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lfm2_cb.requests.tool_calls import ToolCall, render_tool_calls

from .body import parse_object
from .errors import RequestError
from .fields import shown

#: role of a message → what the chat template is given. OpenAI's newer name for its system role is no template's.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

#: what else a message may have, by its role; a template has to make something of those in `RENDERED`
OPTIONAL = {
    "assistant": {"name", "tool_calls", "reasoning_content"},
    "tool": {"name", "tool_call_id"},
}
RENDERED = {"assistant": {"name", "tool_calls"}, "tool": set[str]()}

#: a message, and where it stands in the request: "messages[0]"
Placed = tuple[str, Any]

#: parts of a content that are text, in chats and in responses
TEXT_PARTS = {"text", "input_text", "output_text"}


class ChatPrompts:
    """Applies one tokenizer's chat template.

    Args:
        template_kwargs: variables of the template, for every request.
        writes_calls: tool calls that the template would drop are written as LFM2 writes them. (LFM2's own template
            drops them, and its model card shows them so.)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        writes_calls: bool = False,
    ) -> None:
        self._tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs or {})
        self._writes_calls = writes_calls

    def token_ids(self, body: Mapping[str, Any], messages: Sequence[Placed], tools: Sequence[Any]) -> list[int]:
        """The prompt that messages in OpenAI's form are for this model.

        Args:
            body: the request, for its options of the template.
            messages, tools: in the form of chat completions.
        Raises: RequestError.
        """
        continues = bool(body.get("continue_final_message"))
        opens = body.get("add_generation_prompt")
        if continues and opens:
            message = "continue_final_message cannot be combined with add_generation_prompt, which opens a new message"
            raise RequestError(message, "continue_final_message")
        options = {
            **self._template_kwargs,
            **(body.get("chat_template_kwargs") or {}),
            "continue_final_message": continues,
            "add_generation_prompt": not continues if opens is None else opens,
        }
        chat = [_message(message, place) for place, message in messages]
        param = messages[0][0].partition("[")[0]
        if continues and chat[-1]["role"] != "assistant":
            message = "continue_final_message: the final message is not the assistant's"
            raise RequestError(message, "continue_final_message")
        tool_list = check_tools(tools) or None
        ids = self._apply(chat, tool_list, options, param)
        if self._writes_calls and any("tool_calls" in one for one in chat):
            without_calls = [{key: value for key, value in one.items() if key != "tool_calls"} for one in chat]
            if ids == self._apply(without_calls, tool_list, options, param):
                chat = [_with_calls_written(one) for one in chat]
                ids = self._apply(chat, tool_list, options, param)
        if tool_list and ids == self._apply(chat, None, options, param):
            raise RequestError("tools: the model's chat template has no place for them", "tools")
        for i, one in enumerate(chat):
            for name in sorted(one.keys() & RENDERED.get(one["role"], {"name"})):
                without = [*chat[:i], {key: value for key, value in one.items() if key != name}, *chat[i + 1 :]]
                if ids == self._apply(without, tool_list, options, param):
                    place = f"{messages[i][0]}.{name}"
                    raise RequestError(f"{place}: the model's chat template has no place for it", place)
        return ids

    def _apply(
        self, chat: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any], param: str
    ) -> list[int]:
        try:
            return self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=True, return_dict=True, **options)[
                "input_ids"
            ]
        except Exception as error:  # a template is a program, and the chat its input
            raise RequestError(f"{param}: the model's chat template cannot take this: {error}", param) from error


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object, got {shown(message)}", place)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{place}.role")
    given = {name: value for name, value in message.items() if value is not None}
    for name in given:
        if name not in {"role", "content"} | OPTIONAL.get(role, {"name"}):
            name = f"{place}.{shown(name)[1:-1]}"
            raise RequestError(f"{name} is not supported here", name, code="unsupported_parameter")
    for name in given.keys() & {"name", "tool_call_id", "reasoning_content"}:
        if not isinstance(given[name], str):
            raise RequestError(f"{place}.{name} must be a string, got {shown(given[name])}", f"{place}.{name}")
    read = {**given, "role": ROLES[role]}
    if "tool_calls" in given:
        read["tool_calls"] = _tool_calls(given["tool_calls"], f"{place}.tool_calls")
    elif "content" not in given:
        raise RequestError(f"{place}.content is missing", f"{place}.content")
    return {**read, "content": _content(given.get("content", ""), f"{place}.content")}


def _content(content: Any, place: str, kinds: Collection[str] = TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or a list of parts, got {shown(content)}", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            message = (
                f"{place}[{i}] is not text ({shown(part if kind is None else kind)}), and the model reads text only"
            )
            raise RequestError(message, f"{place}[{i}]", code="unsupported_content")
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"{place}[{i}].text must be a string, got {shown(part.get('text'))}", f"{place}[{i}].text"
            )
        texts.append(part["text"])
    return " ".join(texts)  # as in transformers serve


def _with_calls_written(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls in its content, before the text."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    if not functions:
        return message
    written = render_tool_calls([ToolCall(function["name"], function["arguments"]) for function in functions])
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": written + message["content"]}


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Their arguments as objects, which templates walk through."""
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list, got {shown(calls)}", place)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{i}] must be a function call with its name", f"{place}[{i}]")
        arguments, where = function.get("arguments", "{}"), f"{place}[{i}].function.arguments"
        if isinstance(arguments, str):
            arguments = parse_object(arguments or "{}", where, where)
        if not isinstance(arguments, dict):
            raise RequestError(f"{where} must be a JSON object in a string, got {shown(arguments)}", where)
        read.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return read


def check_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools in the form of chat completions, as they are. Raises: RequestError."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f'{place}.type must be "function", got {shown(kind)}', f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{place}.function must be an object with a name", f"{place}.function")
    if not isinstance(function.get("parameters") or {}, dict):
        where = f"{place}.function.parameters"
        raise RequestError(f"{where} must be a JSON schema, got {shown(function['parameters'])}", where)
    if not isinstance(function.get("strict") or False, bool):
        where = f"{place}.function.strict"
        raise RequestError(f"{where} must be true or false, got {shown(function['strict'])}", where)
    return tool


# The items of responses


def messages_of_chat(messages: Sequence[Any]) -> list[Placed]:
    """The messages of a chat completion, with their places."""
    return [(f"messages[{i}]", message) for i, message in enumerate(messages)]


def messages_of_response(items: Any, instructions: str | None) -> list[Placed]:
    """Messages of chat completions out of the `input` and `instructions` of a response. Raises: RequestError."""
    messages: list[Placed] = [("instructions", {"role": "system", "content": instructions})] if instructions else []
    if isinstance(items, str) or all(isinstance(item, dict) and item.get("type") in TEXT_PARTS for item in items):
        return [*messages, ("input", {"role": "user", "content": items})]
    reasoning = None
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":  # belongs to the message that comes next
            reasoning = _content(item.get("content") or [], f"{place}.content", {"reasoning_text"})
            continue
        if kind == "function_call" and messages and "tool_calls" in messages[-1][1]:
            messages[-1][1]["tool_calls"] += _message_of_item(item, kind, place)["tool_calls"]
            continue
        message = _message_of_item(item, kind, place)
        if reasoning and message.get("role") == "assistant":
            message["reasoning_content"], reasoning = reasoning, None
        messages.append((place, message))
    return messages


def _message_of_item(item: Any, kind: Any, place: str) -> dict[str, Any]:
    if kind == "message":
        if unknown := item.keys() - {"type", "id", "status", "role", "content"}:
            name = f"{place}.{shown(min(unknown))[1:-1]}"
            raise RequestError(f"{name} is not supported here", name, code="unsupported_parameter")
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    message = f"{place} is of a type that is not supported here: {shown(item if kind is None else kind)}"
    raise RequestError(message, f"{place}.type", code="unsupported_content")


def tools_of_response(tools: Sequence[Any]) -> list[Any]:
    """Tools in the flat form of responses, as those of chat completions."""
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]
