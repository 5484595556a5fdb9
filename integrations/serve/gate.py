"""What every request passes first: its id and its line in the log, the key, the size limit, and the watch over whether
its client is still there."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from .errors import RequestError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]

#: answered without a key (the status page is empty until it has one)
OPEN_PATHS = {"/", "/health"}

REQUEST_ID = "x-request-id"

#: a line a request at INFO; the `lfm2-cb serve` command shows them
access_log = logging.getLogger("lfm2_cb.serve.access")
logger = logging.getLogger("lfm2_cb.serve")


def show_access_log() -> None:
    """On this process's stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


class Journal:
    """ASGI middleware, the outermost: gives each request its id (the client's own, where it sends one), answers with
    it, logs the request once it is over, and answers whatever went wrong further in with a 500.

    Args: on_refusal: called with the status of each answer that is an error.
    """

    def __init__(self, app: Any, on_refusal: Callable[[int], None]) -> None:
        self.app, self.on_refusal = app, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _client_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status, complete = time.perf_counter(), 0, False

        async def noting_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (REQUEST_ID.encode(), request_id.encode())]
                message = {**message, "headers": headers}
                if status >= 400:
                    self.on_refusal(status)
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:  # by the server, whose time to finish what runs is over
            if status == 0:
                message = "the server is shutting down"
                await RequestError(message, status=503).response()(scope, receive, noting_send)
        except Exception:
            # Were it raised further, the connection would be closed with no word of it, and the client's next
            # request lost.
            logger.exception(f"request {request_id} failed")
            if status == 0:
                message = f"the server failed to answer; its log has request {request_id}"
                await RequestError(message, status=500).response()(scope, receive, noting_send)
        finally:
            seconds = time.perf_counter() - started
            ending = "" if complete else " (the client left)"
            client, path = (scope.get("client") or ("-",))[0], ascii(scope["path"])[1:-1]
            access_log.info(
                f"{client} {scope['method']} {path} {status or '-'} {seconds:.3f} s, request {request_id}{ending}"
            )


def _client_id(scope: Scope) -> str | None:
    """The id that the client gave its request, if it is one that can be repeated anywhere."""
    given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else None


class Gate:
    """ASGI middleware.

    Args:
        api_key: expected as `Authorization: Bearer <key>`; None: everybody may come in.
        max_request_bytes: of a body; longer ones get 413 and are not read further.
    """

    def __init__(self, app: Any, api_key: str | None, max_request_bytes: int) -> None:
        self.app, self.api_key, self.max_request_bytes = app, api_key, max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        unread = {"Connection": "close"}  # what was sent is not taken in, so nothing can follow it
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            message, asked = "missing or wrong API key (Authorization: Bearer ...)", {"WWW-Authenticate": "Bearer"}
            refusal = RequestError(message, status=401, code="invalid_api_key", headers={**unread, **asked})
            await refusal.response()(scope, receive, send)
            return
        body = await self._read(headers, receive)
        if body is None:
            message = f"the request is longer than {self.max_request_bytes} bytes"
            await RequestError(message, status=413, headers=unread).response()(scope, receive, send)
            return
        await self._run(scope, body, receive, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        if self.api_key is None:
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.api_key.encode())

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body, or None where it is too long."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_request_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.max_request_bytes:
                return None
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return bytes(body)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application, and cancel it once the client is gone."""
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        running = asyncio.ensure_future(self.app(scope, messages.get, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_gone = leaving.done()
            leaving.cancel()
            if not running.done():
                running.cancel()
            with suppress(asyncio.CancelledError):
                try:
                    await running
                except Exception:
                    if not is_gone:
                        raise


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
