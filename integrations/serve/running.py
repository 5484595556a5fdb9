"""Running the application: the address it listens on, its messages, and its shutdown."""

from __future__ import annotations

import signal
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .app import build_app
from .gate import show_access_log

logger = transformers_logging.get_logger("transformers.lfm2_cb")


class Server(uvicorn.Server):
    """Uvicorn's, which prints where it listens, and for which SIGTERM and SIGINT are a regular end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            _say(f"{self.config.app.state.served.name} is served on http://{where}:{port} (Ctrl-C ends it)")  # type: ignore[union-attr]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; a second signal ends it at once. (Uvicorn's own raises the signal again at the end.)"""
        if self.should_exit:
            self.force_exit = True
            return
        limit = self.config.timeout_graceful_shutdown
        _say(f"{signal.Signals(sig).name}: no more requests are taken; those that run have {limit} s to finish")
        self.should_exit = True


def serve(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_requests: bool = True,
    shutdown_seconds: int = 30,
    **options: Any,
) -> None:
    """Serve a model until interrupted (SIGINT or SIGTERM).

    Args:
        port: 0: any that is free; the message at the start names it.
        log_requests: a line a request on stderr.
        shutdown_seconds: that running requests have to finish once interrupted; no others are taken meanwhile.
        options: as in `build_app`.
    Raises: OSError: the address cannot be listened on. ValueError, TypeError: as `build_app`.
    """
    with bind(host, port) as listener:  # first, before the model is loaded
        serve_on(listener, model, tokenizer, log_requests=log_requests, shutdown_seconds=shutdown_seconds, **options)


def serve_on(
    listener: socket.socket,
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    log_requests: bool = True,
    shutdown_seconds: int = 30,
    **options: Any,
) -> None:
    """As `serve`, on a socket from `bind`."""
    if shutdown_seconds < 0:
        raise ValueError(f"shutdown_seconds must be 0 or more, got {shutdown_seconds}")
    host = listener.getsockname()[0]
    if host not in ("127.0.0.1", "::1") and options.get("api_key") is None:
        logger.warning(f"lfm2_cb: serving on {host} without an API key: whoever reaches it can use it")
    app = build_app(model, tokenizer, **options)
    if log_requests:
        show_access_log()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=shutdown_seconds)
    Server(config).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address, which is not listened on yet. Raises: OSError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def _say(message: str) -> None:
    print(f"lfm2-cb: {message}", file=sys.stderr, flush=True)
