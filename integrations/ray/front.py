"""What clients of a fleet talk to: it reads each request, has a replica chosen for it, and passes the answer on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lfm2_cb.integrations.serve.body import parse_object
from lfm2_cb.integrations.serve.errors import RequestError
from lfm2_cb.integrations.serve.gate import REQUEST_ID, Gate, Journal, Receive, Scope, Send, show_access_log
from lfm2_cb.integrations.serve.messages import (
    ChatPrompts,
    messages_of_chat,
    messages_of_response,
    tools_of_response,
)
from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lfm2_cb.loading import load_tokenizer
from lfm2_cb.requests.prompts import tokenize
from lfm2_cb.requests.tool_calls import CALL_END, CALL_START
from lfm2_cb.scheduling.prefix_hashes import prefix_hashes

from .fleet_metrics import FrontMetrics, merge_pages
from .replica import Call, Message
from .routing import Aim

#: replicas that a request is tried on, as one after another is lost
MAX_ATTEMPTS = 4

#: seconds that `/health` and `/metrics` wait for replicas
READING_SECONDS = 5.0

#: a replica that starts later would not have what these load
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

#: what is raised here when a replica is gone, or leaves
LOST = (RayActorError, WorkerCrashedError, TaskCancelledError, RayServeException)

logger = logging.getLogger("lfm2_cb.serve")


@dataclass(frozen=True)
class FrontOptions:
    """As in `build_app`, and:

    Attributes:
        model: whose tokenizer prompts are read with.
        block_size: of the replicas' caches.
        log_requests: a line a request on this process's stderr.
    """

    model: str
    name: str
    block_size: int
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    max_request_bytes: int = 4 * 2**20
    cors_origins: Sequence[str] = ()
    log_requests: bool = False


class PromptReader:
    """From a request to what the router gets with it.

    It reads prompts with the server's own code, so its hashes are those of the blocks that a replica will look up. A
    request that cannot be read is routed without hashes; the replica reports the error.
    """

    def __init__(self, options: FrontOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer(options.model, options.trust_remote_code)
        has_markers = {CALL_START, CALL_END} <= {*self._tokenizer.get_vocab()}
        self._prompts = ChatPrompts(self._tokenizer, options.chat_template_kwargs, writes_calls=has_markers)

    def aim(self, path: str, body: bytes) -> Aim:
        with suppress(Exception):
            request = parse_object(body)
            name = request.get("model")
            adapter = name if isinstance(name, str) and name != self._options.name else None
            hashes = prefix_hashes(self._token_ids(path, request), self._options.block_size, adapter or "")
            return Aim(tuple(hashes), adapter)
        return Aim()

    def _token_ids(self, path: str, request: dict[str, Any]) -> list[int]:
        tools = [] if request.get("tool_choice") == "none" else request.get("tools") or []
        if path == "/v1/chat/completions":
            return self._prompts.token_ids(request, messages_of_chat(request["messages"]), tools)
        if path == "/v1/responses":
            messages = messages_of_response(request["input"], request.get("instructions"))
            return self._prompts.token_ids(request, messages, tools_of_response(tools))
        if path == "/v1/completions":
            return tokenize(request["prompt"], self._tokenizer)[0]
        return []


class Forward:
    """The ASGI application that answers with a replica's answer."""

    def __init__(self, replicas: DeploymentHandle, reader: PromptReader, metrics: FrontMetrics) -> None:
        self._handle: Any = replicas.options(stream=True, method_name="handle")
        self._reader, self._metrics = reader, metrics
        self._one_thread = ThreadPoolExecutor(1)  # off the event loop, so that a long prompt delays no other answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, path = (await receive())["body"], scope["path"]
        aim = await asyncio.get_running_loop().run_in_executor(self._one_thread, self._reader.aim, path, body)
        await self.pass_on(_call(scope, body), aim, _Answer(scope, receive, send))

    async def pass_on(self, call: Call, aim: Aim, answer: _Answer) -> None:
        """Run a request on a replica, and on another one where that is lost before its first word."""
        for _ in range(MAX_ATTEMPTS):
            stream = self._handle.remote(call, aim=aim)
            try:
                async for messages in stream:
                    for message in messages:
                        await answer.add(message)
                return
            except BackPressureError:
                message = "too many requests are waiting; try again later"
                await answer.refuse(
                    RequestError(message, status=429, code="rate_limit_exceeded", headers={"Retry-After": "1"})
                )
                return
            except LOST as error:
                logger.warning(f"a replica was lost: {str(error).splitlines()[0]}")
                if answer.has_begun:
                    self._metrics.broken.inc()
                    await answer.break_off("the replica that was answering was lost; ask again")
                    return
                self._metrics.rerun.inc()
            finally:
                stream.cancel()
        await answer.refuse(RequestError("no replica could answer; try again later", status=503))


class _Answer:
    """An answer on its way to a client; it has begun once something was sent that cannot be taken back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Message | None = None
        self._num_events = 0
        self.has_begun = False

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = _without_id(message)  # the journal adds it
            return
        if not self.has_begun:
            assert self._start is not None
            self.has_begun = True
            await self._send(self._start)
        self._num_events += message.get("body", b"").count(b"event: ")
        await self._send(message)

    async def refuse(self, error: RequestError) -> None:
        if not self.has_begun:
            await error.response()(self._scope, self._receive, self._send)

    async def break_off(self, problem: str) -> None:
        """End what has begun, with an event where it is a stream."""
        body = RequestError(problem, status=503).body
        text = f"data: {json.dumps(body)}\n\n"
        if self._scope["path"] == "/v1/responses":
            event = {"type": "error", "sequence_number": self._num_events, **body["error"]}
            text = f"event: error\ndata: {json.dumps(event)}\n\n"
        assert self._start is not None
        is_stream = any(value.startswith(b"text/event-stream") for _, value in self._start["headers"])
        last = {"type": "http.response.body", "body": text.encode() if is_stream else b"", "more_body": False}
        await self._send(last)


class Front:
    """The class of Ray Serve's ingress deployment."""

    def __init__(self, replicas: DeploymentHandle, options: FrontOptions) -> None:
        self._replicas, self._metrics = replicas, FrontMetrics()
        self._forward = Forward(replicas, PromptReader(options), self._metrics)
        self._num_running, self._is_draining = 0, False
        self._idle = asyncio.Event()
        if options.log_requests:
            show_access_log()
        app: Any = Gate(self._answer, options.api_key, options.max_request_bytes)
        if options.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=list(options.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID],
            )
        self._app = Journal(app, on_refusal=lambda status: self._metrics.refused.labels(str(status)).inc())

    async def __call__(self, request: Request) -> Response:
        return _Through(self._app)

    async def drain(self) -> None:
        """Take no more requests, and wait for those that run."""
        self._is_draining = True
        if self._num_running:
            await self._idle.wait()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_draining:
            error = RequestError("the server is shutting down", status=503, headers={"Connection": "close"})
            await error.response()(scope, receive, send)
            return
        self._num_running += 1
        try:
            answers = {"/metrics": self._metrics_page, "/health": self._health}
            answers |= dict.fromkeys(ADAPTER_PATHS, _refuse_adapters)
            answer = answers.get(scope["path"], self._forward)
            await answer(scope, receive, send)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def _metrics_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        pages: dict[str, str] = {}
        with suppress(*LOST, TimeoutError):
            asked = self._replicas.broadcast("metrics_page")
            found = await asked.results_async(timeout_s=READING_SECONDS, return_exceptions=True)
            pages = dict(result for result in found if not isinstance(result, BaseException))
        page = self._metrics.page() + merge_pages(pages)
        await Response(page, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whether a replica answers."""
        try:
            async with asyncio.timeout(READING_SECONDS):
                await self._forward.pass_on(_call(scope, b""), Aim(), _Answer(scope, receive, send))
        except TimeoutError:
            await JSONResponse({"status": "unhealthy", "reason": "no replica answers"}, 503)(scope, receive, send)


async def _refuse_adapters(scope: Scope, receive: Receive, send: Send) -> None:
    message = f"{scope['path']}: a fleet has the adapters that it was started with (adapters=, --adapter NAME=PATH)"
    await RequestError(message, status=404, code="unknown_url").response()(scope, receive, send)


class _Through(Response):
    """What has Ray Serve run an ASGI application on a request."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: Message) -> None:
            await send(_without_id(message))  # Ray Serve adds the request's id, and has given it to us

        await self._app(scope, receive, send_once)


def _without_id(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [pair for pair in message["headers"] if pair[0] != REQUEST_ID.encode()]}


def _call(scope: Scope, body: bytes) -> Call:
    kept = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
    given = {name: scope[name] for name in kept if name in scope}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != REQUEST_ID.encode()]
    headers.append((REQUEST_ID.encode(), scope["state"]["request_id"].encode()))
    return Call({**given, "headers": headers, "client": scope.get("client")}, body)
