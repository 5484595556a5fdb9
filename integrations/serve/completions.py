"""`/v1/chat/completions` and `/v1/completions`: answers of several choices, as JSON or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from lfm2_cb.engine.sampler import TokenLogprobs
from lfm2_cb.requests.prompts import PromptError, read_prompts

from .answer_form import AnswerForm, schema_of_chat
from .choices import Choice, Completion, Delta
from .errors import RequestError
from .fields import CHAT, COMPLETION, Field, check_fields
from .messages import check_tools, messages_of_chat
from .parsers import make_parser
from .sampling import Sampling
from .served import Served
from .terms import Terms


class ChoicesEndpoint(ABC):
    """An endpoint: a request's body in, an answer out."""

    fields: Mapping[str, Field] = {}
    required = ""
    #: the `object` of an answer, of a piece of one, and what its id begins with
    kind, chunk_kind, id_prefix = "", "", ""

    def __init__(self, served: Served) -> None:
        self.served = served

    async def __call__(self, body: dict[str, Any], terms: Terms) -> Response:
        """Raises: RequestError."""
        check_fields(body, self.fields, self.required)
        model = self.served.adapter_of(body) or self.served.name
        options = body.get("stream_options")
        if options is not None and not body.get("stream"):
            raise RequestError("stream_options needs stream=true", "stream_options")
        completion = await self.start(body, terms)
        common = {"id": f"{self.id_prefix}{terms.request_id}", "created": int(time.time()), "model": model}
        answer = Answer(self, completion, common, bool((options or {}).get("include_usage")))
        return answer.as_events() if body.get("stream") else await answer.as_json()

    @abstractmethod
    async def start(self, body: dict[str, Any], terms: Terms) -> Completion:
        """Queue what a body asks for, its fields being of their kinds. Raises: RequestError."""

    @abstractmethod
    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        """A finished choice, without its index and finish_reason."""

    @abstractmethod
    def chunks(self, choice: Choice, delta: Delta, logprobs: Any) -> list[dict[str, Any]]:
        """The pieces of a choice that a delta is, likewise; at least one."""

    @abstractmethod
    def format_logprobs(self, entries: list[TokenLogprobs]) -> Any:
        """Log-probabilities in the endpoint's form."""

    def opening(self) -> dict[str, Any] | None:
        """What comes first of a choice in a stream."""
        return None

    def _token_text(self, token_id: int) -> str:
        return self.served.tokenizer.decode([token_id])


class Answer:
    """A completion on its way out."""

    def __init__(
        self, endpoint: ChoicesEndpoint, completion: Completion, common: dict[str, Any], with_usage: bool
    ) -> None:
        self.endpoint, self.completion, self.common, self.with_usage = endpoint, completion, common, with_usage

    def _logprobs(self, delta: Delta) -> Any:
        return self.endpoint.format_logprobs(delta.logprobs) if delta.logprobs else None

    async def as_json(self) -> JSONResponse:
        choices = [
            {
                "index": choice.index,
                "finish_reason": choice.whole.finish_reason,
                **self.endpoint.whole(choice, self._logprobs(choice.whole)),
            }
            for choice in await self.completion.run()
        ]
        return JSONResponse(
            {**self.common, "object": self.endpoint.kind, "choices": choices, "usage": self.completion.usage}
        )

    def as_events(self) -> StreamingResponse:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        opening = (
            self._opening()
        )  # comes with the first token: until then, another server may answer in this one's stead
        try:
            async for choice, delta in self.completion:
                if delta.items or delta.logprobs or delta.finish_reason:
                    *pieces, last = self.endpoint.chunks(choice, delta, self._logprobs(delta))
                    for piece in pieces:
                        yield opening + self._event([{"index": choice.index, "finish_reason": None, **piece}])
                        opening = ""
                    yield opening + self._event(
                        [{"index": choice.index, "finish_reason": delta.finish_reason, **last}]
                    )
                    opening = ""
        except RequestError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
            return
        if self.with_usage:
            yield self._event([], usage=self.completion.usage)
        yield "data: [DONE]\n\n"

    def _opening(self) -> str:
        if (opening := self.endpoint.opening()) is None:
            return ""
        openings = ({"index": choice.index, "finish_reason": None, **opening} for choice in self.completion.choices)
        return "".join(self._event([one]) for one in openings)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        chunk = {**self.common, "object": self.endpoint.chunk_kind, "choices": choices, **more}
        return f"data: {json.dumps(chunk)}\n\n"


class ChatCompletions(ChoicesEndpoint):
    """`/v1/chat/completions`."""

    fields, required = CHAT, "messages"
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    async def start(self, body: dict[str, Any], terms: Terms) -> Completion:
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        served, n = self.served, body.get("n") or 1
        schema, tools = schema_of_chat(body.get("response_format")), check_tools(body.get("tools") or [])
        form = AnswerForm.of(schema, "response_format", tools, body, served.forms.has_markers)
        ids = served.prompts.token_ids(body, messages_of_chat(body["messages"]), form.tools)
        grammar = await served.forms.compile(form)
        return Completion(
            served.dispatcher,
            [ids],
            Sampling.of(body, served.model, ("max_completion_tokens", "max_tokens")),
            param="messages",
            n=n,
            logprobs=(body.get("top_logprobs") or 0) if body.get("logprobs") else None,
            streaming=bool(body.get("stream")),
            parsers=[
                make_parser(served.tokenizer, served.model, ids, form.tools, form.calls_are_enforced) for _ in range(n)
            ],
            grammar=grammar,
            adapter=self.served.adapter_of(body),
            priority=terms.priority,
            deadline=terms.deadline,
        )

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        message, calls = {"role": "assistant", **_content(choice.whole)}, choice.whole.tool_calls
        if calls:
            message["content"] = choice.whole.text if choice.whole.text.strip() else None
            message["tool_calls"] = [_call(call.name, call.arguments) for call in calls]
        return {"message": message, "logprobs": logprobs}

    def chunks(self, choice: Choice, delta: Delta, logprobs: Any) -> list[dict[str, Any]]:
        """Text, and each call as its name and then its arguments."""
        has_text = delta.text or delta.reasoning or not delta.tool_calls
        deltas: list[dict[str, Any]] = [_content(delta)] if has_text else []
        for index, call in enumerate(delta.tool_calls, len(choice.whole.tool_calls) - len(delta.tool_calls)):
            deltas.append({"tool_calls": [{"index": index, **_call(call.name, "")}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        return [{"delta": one, "logprobs": logprobs if i == 0 else None} for i, one in enumerate(deltas)]

    def format_logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._token_text(token_id)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}
                for entry in entries
            ]
        }


def _content(delta: Delta) -> dict[str, Any]:
    return {"content": delta.text, **({"reasoning_content": delta.reasoning} if delta.reasoning else {})}


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class Completions(ChoicesEndpoint):
    """`/v1/completions`; a prompt is a string, token ids, or a list of either."""

    fields, required = COMPLETION, "prompt"
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"

    async def start(self, body: dict[str, Any], terms: Terms) -> Completion:
        n = body.get("n") or 1
        if (body.get("best_of") or n) != n:
            raise RequestError("best_of other than n is not supported here", "best_of", code="unsupported_parameter")
        if body.get("echo") and body.get("logprobs") is not None:
            raise RequestError("echo with logprobs is not supported here", "echo", code="unsupported_parameter")
        try:
            prompts = [
                _checked(ids) for ids in read_prompts(body["prompt"], self.served.tokenizer, body.get("chunks"))
            ]
        except PromptError as error:
            raise RequestError(f"prompt: {error}", "prompt") from error
        return Completion(
            self.served.dispatcher,
            prompts,
            Sampling.of(body, self.served.model, ("max_tokens",)),
            param="prompt",
            n=n,
            logprobs=body.get("logprobs"),
            streaming=bool(body.get("stream")),
            openings=[text for text in self._texts(body["prompt"]) for _ in range(n)] if body.get("echo") else None,
            adapter=self.served.adapter_of(body),
            priority=terms.priority,
            deadline=terms.deadline,
        )

    def _texts(self, prompt: Any) -> list[str]:
        """Prompts as they are echoed."""
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return [one if isinstance(one, str) else self.served.tokenizer.decode(one) for one in prompts]

    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return {"text": choice.whole.text, "logprobs": logprobs}

    def chunks(self, choice: Choice, delta: Delta, logprobs: Any) -> list[dict[str, Any]]:
        return [{"text": delta.text, "logprobs": logprobs}]

    def format_logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._token_text(entry.token_id) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token_text(t): value for t, value in entry.top} for entry in entries],
            "text_offset": list(_offsets(texts)),
        }


def _checked(ids: list[int] | PromptError) -> list[int]:
    if isinstance(ids, PromptError):
        raise ids
    return ids


def _offsets(texts: list[str]) -> Iterator[int]:
    offset = 0
    for text in texts:
        yield offset
        offset += len(text)
