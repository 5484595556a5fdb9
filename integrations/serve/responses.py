"""`/v1/responses`: an answer as a `response` object, or as the events by which one comes to be."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .answer_form import AnswerForm, schema_of_response
from .choices import Completion
from .errors import RequestError
from .fields import RESPONSE, check_fields
from .messages import check_tools, messages_of_response, tools_of_response
from .parsers import make_parser
from .sampling import Sampling
from .served import Served
from .terms import Terms


class Responses:
    """`/v1/responses`."""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, RESPONSE, "input")
        served = self.served
        adapter = served.adapter_of(body)
        if body.get("stream_options") is not None and not body.get("stream"):
            raise RequestError("stream_options needs stream=true", "stream_options")
        tools = check_tools(tools_of_response(body.get("tools") or []))
        form = AnswerForm.of(
            schema_of_response(body.get("text")), "text.format", tools, body, served.forms.has_markers
        )
        ids = self._prompt(body, form.tools)
        grammar = await served.forms.compile(form)
        completion = Completion(
            served.dispatcher,
            [ids],
            Sampling.of(body, served.model, ("max_output_tokens",)),
            param="input",
            streaming=bool(body.get("stream")),
            parsers=[make_parser(served.tokenizer, served.model, ids, form.tools, form.calls_are_enforced)],
            grammar=grammar,
            adapter=adapter,
            priority=terms.priority,
            deadline=terms.deadline,
        )
        growing = GrowingResponse(body, terms.request_id, adapter or served.name)
        if body.get("stream"):
            return StreamingResponse(self._events(growing, completion), media_type="text/event-stream")
        async for _, delta in completion:
            for item in delta.items:
                growing.add(item)
        growing.end(completion)
        return JSONResponse(growing.response)

    def _prompt(self, body: dict[str, Any], tools: Sequence[Any]) -> list[int]:
        """The input's token ids; with `truncation` "auto" without its oldest turns, where it is too long. A turn
        begins with what the user says, and system messages stay. Raises: RequestError."""
        messages = messages_of_response(body["input"], body.get("instructions"))

        def ids_from(start: int) -> list[int]:
            kept = [one for i, one in enumerate(messages) if i >= start or _role(one[1]) in ("system", "developer")]
            return self.served.prompts.token_ids(body, kept, tools)

        ids, room = ids_from(0), self.served.dispatcher.num_positions - (body.get("max_output_tokens") or 1)
        if body.get("truncation") != "auto" or len(ids) <= room:
            return ids
        turns = [i for i, (_, message) in enumerate(messages) if _role(message) == "user"]
        first = bisect_left(turns, True, key=lambda start: len(ids_from(start)) <= room)
        return ids_from(turns[first]) if first < len(turns) else ids

    async def _events(self, growing: GrowingResponse, completion: Completion) -> AsyncIterator[str]:
        opening = _as_text(growing.begin())  # comes with the first token, as in completions
        try:
            async for _, delta in completion:
                if events := [event for item in delta.items for event in growing.add(item)]:
                    yield opening + _as_text(events)
                    opening = ""
        except RequestError as error:
            yield opening + _as_text(growing.fail(error))
        else:
            yield opening + _as_text(growing.end(completion))


class GrowingResponse:
    """A `response` object that grows by pieces of text, reasoning and tool calls, and the events that say so."""

    def __init__(self, body: dict[str, Any], request_id: str, model: str) -> None:
        self._request_id, self._num_events = request_id, 0
        self._open: dict[str, Any] | None = None  # the item that grows now
        given = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "safety_identifier")
        self.response: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "store": False,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "text": {"format": {"type": "text"}, **(body.get("text") or {})},
            "truncation": body.get("truncation") or "disabled",
            **{name: body.get(name) for name in given},
        }

    def begin(self) -> list[dict[str, Any]]:
        return [
            self._event(kind, response={**self.response, "output": []})
            for kind in ("response.created", "response.in_progress")
        ]

    def add(self, piece: str | ToolCall) -> list[dict[str, Any]]:
        """Take in a piece of a choice (`choices.Delta.items`). Returns: its events."""
        if isinstance(piece, ToolCall):
            return [*self._close(), *self._call(piece)]
        kind = "reasoning" if isinstance(piece, ReasoningText) else "message"
        events = []
        if self._open is None or self._open["type"] != kind:
            events += [*self._close(), *self._start(kind)]
        assert self._open is not None
        self._open["content"][0]["text"] += piece
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        return [*events, self._part_event(name, delta=str(piece))]

    def end(self, completion: Completion) -> list[dict[str, Any]]:
        """Say how the answer ended, and what it took."""
        cut = completion.choices[0].whole.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        events = []
        if not any(item["type"] != "reasoning" for item in self.response["output"]):
            events += [*self._close(), *self._start("message")]  # there is always something to look at
        events += self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        usage = completion.usage
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: RequestError) -> list[dict[str, Any]]:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        said = {"code": error.code, "message": error.message, "param": error.param}
        return [self._event("error", **said), self._event("response.failed", response=self.response)]

    # Items

    @property
    def _place(self) -> int:
        return len(self.response["output"]) - 1

    def _start(self, kind: str) -> Iterator[dict[str, Any]]:
        prefix, part = ("rs", _reasoning("")) if kind == "reasoning" else ("msg", _text(""))
        item_id = f"{prefix}_{self._request_id}_{self._place + 1}"
        item: dict[str, Any] = {"id": item_id, "type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._place, item=dict(item))
        self._open = {**item, "content": [part]}
        self.response["output"][-1] = self._open
        if kind == "message":
            yield self._part_event("response.content_part.added", part=dict(part))

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if (item := self._open) is None:
            return
        item["status"], part = status, item["content"][0]
        if item["type"] == "message":
            yield self._part_event("response.output_text.done", text=part["text"])
            yield self._part_event("response.content_part.done", part=part)
        else:
            yield self._part_event("response.reasoning_text.done", text=part["text"])
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        item_id = f"call_{self._request_id}_{self._place + 1}"
        item = {"id": item_id, "call_id": item_id, "type": "function_call", "status": "completed"}
        item |= {"name": call.name, "arguments": call.arguments}
        self.response["output"].append(item)
        place, arguments = self._place, {"output_index": self._place, "item_id": item_id}
        growing = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=place, item=growing)
        yield self._event("response.function_call_arguments.delta", **arguments, delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **arguments, **done)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        assert self._open is not None
        if kind.startswith("response.output_text"):
            more["logprobs"] = []
        return self._event(kind, item_id=self._open["id"], output_index=self._place, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **more}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _as_text(events: list[dict[str, Any]]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
