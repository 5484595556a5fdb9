"""What every request passes first: the key, the size limit, and the watch over whether its client is still there."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: answered without a key
OPEN_PATHS = {"/health"}


class Gate:
    """ASGI middleware.

    Args:
        api_key: expected as `Authorization: Bearer <key>`; None: everybody may come in.
        max_request_bytes: of a body; longer ones get 413 and are not read further.
        on_refusal: told the status of each request that is refused here.
    """

    def __init__(
        self, app: Any, api_key: str | None, max_request_bytes: int, on_refusal: Callable[[int], None]
    ) -> None:
        self.app, self.api_key, self.max_request_bytes, self.on_refusal = app, api_key, max_request_bytes, on_refusal

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            await self._refuse(send, 401, "missing or wrong API key (Authorization: Bearer ...)")
            return
        body = await self._read(headers, receive)
        if body is None:
            await self._refuse(send, 413, f"the request is longer than {self.max_request_bytes} bytes")
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

    async def _run(self, scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send) -> None:
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

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        self.on_refusal(status)
        body = json.dumps(error_body(status, message)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
