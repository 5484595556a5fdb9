"""The endpoints: stock's handlers, with `n`, `stop`, `logprobs` and each request's own sampling."""

from __future__ import annotations

import json
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, Modality, build_response_parser

from lfm2_cb.engine.sampler import TokenLogprobs
from lfm2_cb.requests.prompts import tokenize

from . import parameters
from .choices import Choice, Delta, GenerationFailed, Job
from .parameters import BadParameter, number


class RequestOptions(BaseHandler):
    """Checks a request by name, and builds its configuration; under all three endpoints."""

    honoured: set[str] = set()
    #: names of the limit, the first one given counting
    limits: tuple[str, ...] = ()

    def _validate_request(self, body: dict[str, Any]) -> None:
        parameters.check_names(body, self.honoured)
        parameters.check_forms(body)

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = True
    ) -> GenerationConfig:
        # Stock seeds the whole process, samples only where the model does by default, and has stop strings looked for
        # in every token; here it is done to the text.
        kept = {name: body[name] for name in body if name not in ("seed", "stop", "temperature", "top_p")}
        config = super()._build_generation_config(kept, model_generation_config, use_cb)
        limit = next((v for name in self.limits if (v := number(body, name, 1, 2**31, int)) is not None), None)
        if limit is not None or not body.get("generation_config"):
            config.max_new_tokens = limit  # none: the dispatcher knows what room there is
        parameters.apply_sampling(body, config)
        return config


class ChoicesHandler(RequestOptions):
    """Endpoints that answer with several choices, as JSON or as server-sent events."""

    kind = ""  # the `object` of the answer

    def _answer(self, body: dict[str, Any], job: Job, request_id: str, model_id: str) -> Answer:
        return Answer(self, body, job, {"id": request_id, "created": int(time.time()), "model": model_id})

    @abstractmethod
    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        """A finished choice, without its index and finish_reason."""

    @abstractmethod
    def chunk(self, choice: Choice, delta: Delta, logprobs: Any) -> dict[str, Any]:
        """A piece of a choice, likewise."""

    @abstractmethod
    def format_logprobs(self, entries: list[TokenLogprobs]) -> Any:
        """Log-probabilities in the endpoint's form."""

    def opening(self) -> dict[str, Any] | None:
        """What comes first of every choice in a stream."""
        return None

    def _token_text(self, token_id: int) -> str:
        return self.generation_state.dispatcher.tokenizer.decode([token_id])

    def _num_sequences(self, body: dict[str, Any]) -> int:
        return number(body, "n", 1, 2**16, int) or 1


class Answer:
    """A job on its way out."""

    def __init__(self, handler: ChoicesHandler, body: dict[str, Any], job: Job, common: dict[str, Any]) -> None:
        self.handler, self.job, self.common = handler, job, common
        options = body.get("stream_options") or {}
        self.with_usage = bool(options.get("include_usage"))

    def _logprobs(self, delta: Delta) -> Any:
        return self.handler.format_logprobs(delta.logprobs) if delta.logprobs else None

    async def as_json(self) -> JSONResponse:
        choices = [
            {
                "index": choice.index,
                "finish_reason": choice.whole.finish_reason,
                **self.handler.whole(choice, self._logprobs(choice.whole)),
            }
            for choice in await self.job.run()
        ]
        return JSONResponse({**self.common, "object": self.handler.kind, "choices": choices, "usage": self.job.usage})

    def as_events(self) -> StreamingResponse:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        opening = self.handler.opening()
        if opening is not None:
            for choice in self.job.choices:
                yield self._event([{"index": choice.index, "finish_reason": None, **opening}])
        try:
            async for choice, delta in self.job:
                if delta.items or delta.logprobs or delta.finish_reason:
                    piece = self.handler.chunk(choice, delta, self._logprobs(delta))
                    yield self._event([{"index": choice.index, "finish_reason": delta.finish_reason, **piece}])
        except GenerationFailed as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'server_error'}})}\n\n"
            return
        if self.with_usage:
            yield self._event([], usage=self.job.usage)
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self.handler.kind == "chat.completion" else self.handler.kind
        return f"data: {json.dumps({**self.common, 'object': kind, 'choices': choices, **more})}\n\n"


class ChatHandler(ChoicesHandler, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    honoured, limits, kind = parameters.CHAT, ("max_completion_tokens", "max_tokens"), "chat.completion"

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse | StreamingResponse:
        self._validate_request(body)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadParameter("messages must be a list of at least one message")
        model_id, model, tokenizer = self._resolve_model(body)
        tools = body.get("tools")
        try:
            messages = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadParameter(f"messages are not in OpenAI's form: {error!r}") from error
        template_kwargs = {**self.chat_template_kwargs, **(body.get("chat_template_kwargs") or {})}
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tools=tools, tokenize=True, return_dict=True, **template_kwargs
        )["input_ids"]
        n, streaming = self._num_sequences(body), bool(body.get("stream"))
        top = number(body, "top_logprobs", 0, parameters.MAX_TOP_LOGPROBS, int) or 0
        job = Job(
            self.generation_state.dispatcher,
            [ids],
            self._build_generation_config(body, model.generation_config),
            n=n,
            stops=parameters.stop_strings(body),
            logprobs=top if body.get("logprobs") else None,
            streaming=streaming,
            parsers=[build_response_parser(tokenizer, model, ids, tools=tools) for _ in range(n)],
        )
        answer = self._answer(body, job, request_id, model_id)
        return answer.as_events() if streaming else await answer.as_json()

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", **self._content(choice.whole)}, "logprobs": logprobs}

    def chunk(self, choice: Choice, delta: Delta, logprobs: Any) -> dict[str, Any]:
        content = self._content(delta)
        calls = content.get("tool_calls", [])
        first = len(choice.whole.tool_calls) - len(calls)
        for place, call in enumerate(calls, first):
            call["index"] = place
        return {"delta": content, "logprobs": logprobs}

    def _content(self, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            content["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.tool_calls
            ]
        return content

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


class TextHandler(ChoicesHandler, CompletionHandler):
    """`/v1/completions`; a prompt is a string, token ids, or a list of either."""

    honoured, limits, kind = parameters.COMPLETION, ("max_tokens",), "text_completion"

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse | StreamingResponse:
        self._validate_request(body)
        model_id, model, tokenizer = self._resolve_model(body)
        prompts = tokenize(body.get("prompt") or [], tokenizer)
        if not prompts:
            raise BadParameter("prompt must not be empty")
        streaming = bool(body.get("stream"))
        job = Job(
            self.generation_state.dispatcher,
            prompts,
            self._build_generation_config(body, model.generation_config),
            n=self._num_sequences(body),
            stops=parameters.stop_strings(body),
            logprobs=number(body, "logprobs", 0, parameters.MAX_TOP_LOGPROBS, int),
            streaming=streaming,
        )
        answer = self._answer(body, job, request_id, model_id)
        return answer.as_events() if streaming else await answer.as_json()

    def whole(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return {"text": choice.whole.text, "logprobs": logprobs}

    def chunk(self, choice: Choice, delta: Delta, logprobs: Any) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": logprobs}

    def format_logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        texts = [self._token_text(entry.token_id) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token_text(t): value for t, value in entry.top} for entry in entries],
            "text_offset": list(_offsets(texts)),
        }


class EventHandler(RequestOptions, ResponseHandler):
    """`/v1/responses`: stock's, but JSON unless a stream is asked for, as in OpenAI's."""

    honoured, limits = parameters.RESPONSE, ("max_output_tokens",)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> JSONResponse | StreamingResponse:
        if not body.get("input"):
            raise BadParameter("input must not be empty")
        return await super().handle_request({**body, "stream": bool(body.get("stream"))}, request_id)


def _offsets(texts: list[str]) -> Iterator[int]:
    offset = 0
    for text in texts:
        yield offset
        offset += len(text)
