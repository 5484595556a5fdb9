"""The application: stock's routes over our handlers, and `serve()`, which runs it."""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError
from prometheus_client import CONTENT_TYPE_LATEST
from transformers import AutoTokenizer, ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.utils import logging

from lfm2_cb.hf.methods import init_continuous_batching
from lfm2_cb.loading import as_lfm2_cb, load_model

from .choices import GenerationFailed
from .dispatch import Dispatcher, EngineState, OneModel
from .gate import Gate, error_body
from .handlers import ChatHandler, EventHandler, TextHandler
from .metrics import Metrics

logger = logging.get_logger("transformers.lfm2_cb")

#: of stock's routes, those that make sense with one model that stays
ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}


def build_app(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    api_key: str | None = None,
    max_queue: int = 256,
    max_request_bytes: int = 4 * 2**20,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    weights: str | None = None,
) -> FastAPI:
    """An ASGI application over one model, whose engine runs until the application is shut down.

    Args:
        model: one of ours, a live stock LFM2, or the path of a checkpoint (with its tokenizer).
        name: what clients call it; the path, or the model's own.
        api_key: asked of every request but `/health`. None: of nobody.
        max_queue: sequences that may wait; a request beyond it is answered with 429.
        max_request_bytes: of a request's body; 413 beyond.
        continuous_batching_config: the engine's limits; see `lfm2_cb.hf.manager_config`.
        weights: "int8" or "int4", as in `ContinuousBatchingGenerator`.
        chat_template_kwargs: given to the chat template of every request.
    """
    if isinstance(model, str):
        name = name or model
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
        model = load_model(model, weights=weights)
    else:
        model = as_lfm2_cb(model, weights)
    if tokenizer is None:
        raise ValueError("a loaded model needs its tokenizer")
    if max_queue < 1 or max_request_bytes < 1:
        raise ValueError("max_queue and max_request_bytes must be positive")
    manager = init_continuous_batching(model, model.generation_config, continuous_batching_config)
    manager.warmup()
    manager.start()
    metrics = Metrics(manager)
    dispatcher = Dispatcher(manager, tokenizer, max_queue, metrics)
    state = EngineState(dispatcher)
    models = OneModel(model, tokenizer, name or getattr(model.config, "name_or_path", "") or "lfm2")
    models.on_shutdown = state.shutdown
    app = build_server(
        models,
        chat_handler=ChatHandler(models, state, chat_template_kwargs),
        completion_handler=TextHandler(models, state),
        response_handler=EventHandler(models, state, chat_template_kwargs),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if route.path in ROUTES]

    @app.get("/metrics")
    def metrics_page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    def refused(status: int) -> None:
        metrics.refused.labels(str(status)).inc()

    def answer(status: int, error: Any, headers: Any = None) -> JSONResponse:
        refused(status)
        return JSONResponse(error_body(status, str(error)), status, headers)

    async def on_http(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, error.detail, error.headers)

    async def on_bad_request(_: Request, error: Exception) -> JSONResponse:
        return answer(400, error)

    async def on_failure(_: Request, error: Exception) -> JSONResponse:
        return answer(500, error)

    async def on_dead_engine(_: Request, error: CBWorkerDeadError) -> JSONResponse:
        return answer(503, error)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_bad_request)
    app.add_exception_handler(ValueError, on_bad_request)
    app.add_exception_handler(TemplateError, on_bad_request)
    app.add_exception_handler(GenerationFailed, on_failure)
    app.add_exception_handler(Exception, on_failure)
    app.add_exception_handler(CBWorkerDeadError, on_dead_engine)
    app.add_middleware(Gate, api_key=api_key, max_request_bytes=max_request_bytes, on_refusal=refused)
    return app


def serve(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    **options: Any,
) -> None:
    """Serve a model until interrupted; `options` as in `build_app`."""
    if host not in ("127.0.0.1", "localhost", "::1") and options.get("api_key") is None:
        logger.warning(f"lfm2_cb: serving on {host} without an API key: whoever reaches it can use it")
    app = build_app(model, tokenizer, **options)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=10)
