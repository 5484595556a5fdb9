"""The application: OpenAI's routes, and a few beside, over one model and its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from transformers import ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase

from lfm2_cb import __version__
from lfm2_cb.adapters.live import adapters_of, is_peft, stock_within
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.hf.methods import init_continuous_batching
from lfm2_cb.loading import as_lfm2_cb, check_same_device, load_model, load_tokenizer

from .adapters import LoadAdapter, UnloadAdapter
from .answer_form import FormCompiler
from .body import parse_object
from .completions import ChatCompletions, Completions
from .dispatch import Dispatcher
from .errors import RequestError
from .gate import REQUEST_ID, Gate, Journal
from .messages import ChatPrompts
from .metrics import Metrics
from .responses import Responses
from .served import Served
from .terms import Terms
from .tokens import Detokenize, Tokenize

#: what `/` shows: one page over /metrics, without anything from elsewhere
STATUS_PAGE = Path(__file__).with_name("status.html")

#: an endpoint: a request's body and terms in, an answer out; it raises RequestError
Endpoint = Callable[[dict[str, Any], Terms], Awaitable[Response]]


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
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    cors_origins: Sequence[str] = (),
    adapters: Mapping[str, Any] | None = None,
    adapter_endpoints: bool = False,
) -> FastAPI:
    """An ASGI application over one model, whose engine runs until the application is shut down.

    Args:
        model: one of ours, a live stock LFM2, the path of a checkpoint (with its tokenizer), or a live `PeftModel`
            over stock LFM2, whose adapters are served too.
        name: what clients call it; the path, or the model's own.
        api_key: required of every request but `/health`. None: of none.
        max_queue: sequences that may wait; a request beyond it is answered with 429.
        max_request_bytes: of a request's body; 413 beyond.
        continuous_batching_config: the engine's limits; see `lfm2_cb.hf.manager_config`. None: the generation
            config's, or else a server's (`EngineConfig.for_server`).
        chat_template_kwargs: given to the chat template of every request.
        weights: "int8" or "int4", as in `ContinuousBatchingGenerator`.
        dtype, device: of a checkpoint, as in `load_model`; a live model is served where it is.
        cors_origins: origins whose pages browsers let in; "*": all. None are by default.
        adapters: LoRA adapters, name → folder, or a live `PeftModel` that has one of this name: a request's `model`
            picks one.
        adapter_endpoints: let clients load and unload adapters, from any folder that the server can read.
    Raises: ValueError, TypeError, OSError: an option, or a model that cannot be served.
    """
    if max_queue < 1 or max_request_bytes < 1:
        raise ValueError("max_queue and max_request_bytes must be positive")
    if isinstance(model, str):
        name = name or model
        tokenizer = tokenizer or load_tokenizer(model)
        model = load_model(model, dtype, weights=weights, device=device)
    if is_peft(model):
        adapters, model = {**adapters_of(model), **(adapters or {})}, stock_within(model)
    model = as_lfm2_cb(model, weights)
    check_same_device(model.device, device)
    if tokenizer is None:
        raise ValueError("a loaded model needs its tokenizer")
    name = name or getattr(model.config, "name_or_path", "") or "lfm2"
    if name in (adapters or {}):
        raise ValueError(f"adapter {name!r}: it is the model's own name")
    config = continuous_batching_config or getattr(model.generation_config, "continuous_batching_config", None)
    config = config or Lfm2CbBatchingConfig.from_engine(EngineConfig.for_server())
    manager = init_continuous_batching(model, model.generation_config, config)
    for adapter, source in (adapters or {}).items():
        manager.generator.load_adapter(adapter, source)
    manager.warmup()
    manager.start()
    metrics = Metrics(manager)
    dispatcher = Dispatcher(manager, tokenizer, max_queue, metrics)
    forms = FormCompiler(tokenizer, model.config.vocab_size, _first(model.config.eos_token_id))
    prompts = ChatPrompts(tokenizer, chat_template_kwargs, writes_calls=forms.has_markers)
    served = Served(name, model, tokenizer, dispatcher, prompts, forms)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        dispatcher.shutdown()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.served = served
    endpoints: dict[str, Endpoint] = {
        "/v1/chat/completions": ChatCompletions(served),
        "/v1/completions": Completions(served),
        "/v1/responses": Responses(served),
        "/tokenize": Tokenize(served),
        "/detokenize": Detokenize(served),
    }
    if adapter_endpoints:
        endpoints["/v1/load_lora_adapter"] = LoadAdapter(served)
        endpoints["/v1/unload_lora_adapter"] = UnloadAdapter(served)
    for path, endpoint in endpoints.items():
        app.add_route(path, _route(endpoint), ["POST"])
    _add_readings(app, served, metrics)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_middleware(Gate, api_key=api_key, max_request_bytes=max_request_bytes)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(Journal, on_refusal=lambda status: metrics.refused.labels(str(status)).inc())
    return app


def _add_readings(app: FastAPI, served: Served, metrics: Metrics) -> None:
    """Add what is there to be looked at."""

    def models(_: Request) -> Response:
        listed = [served.describe(), *map(served.describe, served.adapters)]
        return JSONResponse({"object": "list", "data": listed})

    def model(request: Request) -> Response:
        try:
            adapter = served.adapter_of({"model": request.path_params["name"]})
        except RequestError as error:
            return error.response()
        return JSONResponse(served.describe(adapter))

    def health(_: Request) -> Response:
        if (problem := served.dispatcher.problem()) is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": problem}, 503)

    def versions(_: Request) -> Response:
        return JSONResponse({"version": __version__, "transformers": version("transformers")})

    def metrics_page(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    def status_page(_: Request) -> Response:
        return HTMLResponse(STATUS_PAGE.read_text("utf-8"))

    app.add_route("/", status_page, ["GET"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{name:path}", model, ["GET"])
    app.add_route("/health", health, ["GET"])
    app.add_route("/version", versions, ["GET"])
    app.add_route("/metrics", metrics_page, ["GET"])


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _route(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await endpoint(parse_object(await request.body()), Terms.of(request))
        except RequestError as error:
            return error.response()
        except RecursionError:  # parsed it was, just so
            return RequestError("the request is nested too deeply", code="invalid_json").response()

    return handle


async def _on_http(request: Request, error: Exception) -> Response:
    """No such path, or none for this method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {ascii(request.url.path)[1:-1]}"
    code, message = {
        404: ("unknown_url", f"there is no {asked} here"),
        405: ("method_not_allowed", f"{asked}: this path takes another method"),
    }.get(error.status_code, (None, str(error.detail)))
    return RequestError(message, status=error.status_code, code=code, headers=error.headers).response()
