"""A fleet of engines on Ray Serve: the application to deploy, and the command that serves it."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from lfm2_cb.integrations.serve import bind
from ray import serve as ray_serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.request_router import RequestRouter

from lfm2_cb.adapters.peft_config import AdapterError
from lfm2_cb.adapters.sources import Folder
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.loading import load_tokenizer

from .autoscaling import wanted_replicas
from .front import Front, FrontOptions
from .replica import Replica, ReplicaOptions
from .routing import PrefixRequestRouter

#: of the application on Ray Serve
NAME = "lfm2-cb"

#: bytes of Ray's object store, which holds nothing but messages on their way
OBJECT_STORE_BYTES = 100 * 2**20

#: seconds between two looks at whether a replica is well
HEALTH_SECONDS = 5.0


def build_deployment(
    model: str,
    *,
    replicas: int | tuple[int, int] = 2,
    fronts: int = 1,
    name: str | None = None,
    api_key: str | None = None,
    max_queue: int = 256,
    max_request_bytes: int = 4 * 2**20,
    cors_origins: Sequence[str] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
    dtype: str | None = "auto",
    weights: str | None = None,
    device: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    adapters: Mapping[str, str] | None = None,
    cpus_per_replica: float = 1,
    gpus_per_replica: float = 0,
    request_router: type[RequestRouter] = PrefixRequestRouter,
    report_seconds: float = 2.0,
    stuck_seconds: float = 120.0,
    shutdown_seconds: float = 30.0,
    upscale_delay_seconds: float = 10.0,
    downscale_delay_seconds: float = 300.0,
    log_requests: bool = False,
    num_blocks: int | None = None,
    max_memory_percent: float | None = None,
    **engine_options: Any,
) -> ray_serve.Application:
    """The server as an application of Ray Serve: `serve.run(build_deployment(path, replicas=4))`.

    Args:
        model: a checkpoint that every node can read by this path or id.
        replicas: engines; as a pair, the fewest and the most between which their number follows the load.
        fronts: processes that read requests and route them.
        name, api_key, max_request_bytes, cors_origins, chat_template_kwargs, dtype, weights: as in `build_app`.
        max_queue: sequences that may wait at each replica, and requests at each front.
        device: None: CUDA where Ray gave the replica a GPU.
        allow_pickle, trust_remote_code: as in `load_model`, `load_tokenizer`.
        adapters: LoRA adapters, name → folder that every node can read: a request's `model` picks one.
        cpus_per_replica, gpus_per_replica: which Ray reserves; torch takes as many threads as CPUs.
        request_router: which chooses the replica of each request.
        report_seconds: between two reports of what each replica has cached and how it is.
        stuck_seconds: a step that takes longer is stuck, and its replica replaced.
        shutdown_seconds: that requests have to finish on a replica which is to go.
        upscale_delay_seconds, downscale_delay_seconds: how long the load has to ask for more or fewer replicas.
        log_requests: a line a request on the fronts' stderr.
        num_blocks, max_memory_percent: the cache's size instead of `cache_memory`, as in `Lfm2CbBatchingConfig`.
        engine_options: of `EngineConfig.for_server`, by its names.
    Raises: ValueError, TypeError: an option out of range. OSError: no tokenizer there. AdapterError.
    """
    fewest, most = replicas if isinstance(replicas, tuple) else (replicas, replicas)
    if not 1 <= fewest <= most:
        raise ValueError(f"replicas must be 1 or more, or such a pair in order, got {replicas!r}")
    if fronts < 1 or max_queue < 1 or max_request_bytes < 1:
        raise ValueError("fronts, max_queue and max_request_bytes must be positive")
    if shutdown_seconds < 0:
        raise ValueError(f"shutdown_seconds must be 0 or more, got {shutdown_seconds}")
    name = name or model
    load_tokenizer(model, trust_remote_code)  # a checkpoint that cannot be read is reported before anything is started
    _check_adapters(adapters or {}, name)
    engine = EngineConfig.for_server(**engine_options)
    if engine.trace is not None:
        raise ValueError("trace goes with one replica, and without Ray: several would write one file")
    options = ReplicaOptions(
        model=model,
        dtype=dtype,
        weights=weights,
        device=device,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        engine=engine_options,
        sizes={"num_blocks": num_blocks, "max_memory_percent": max_memory_percent},
        server={
            "name": name,
            "max_queue": max_queue,
            "max_request_bytes": max_request_bytes,
            "chat_template_kwargs": chat_template_kwargs,
            "adapters": dict(adapters or {}),
        },
        stuck_seconds=stuck_seconds,
    )
    options.config()
    front = FrontOptions(
        model=model,
        name=name,
        block_size=engine.block_size,
        trust_remote_code=trust_remote_code,
        chat_template_kwargs=chat_template_kwargs or {},
        api_key=api_key,
        max_request_bytes=max_request_bytes,
        cors_origins=tuple(cors_origins),
        log_requests=log_requests,
    )
    scaling: dict[str, Any] = {"num_replicas": fewest}
    if fewest < most:
        scaling = {"autoscaling_config": _autoscaling(fewest, most, upscale_delay_seconds, downscale_delay_seconds)}
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    routing: dict[str, Any] = {
        "request_router_class": request_router,
        "request_routing_stats_period_s": report_seconds,
    }
    engines: Any = ray_serve.deployment(
        Replica,
        name="engine",
        ray_actor_options={"num_cpus": cpus_per_replica, "num_gpus": gpus_per_replica},
        max_ongoing_requests=engine.max_sequences + max_queue,
        max_queued_requests=max_queue,
        request_router_config=RequestRouterConfig(**routing),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=shutdown_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=2,
        logging_config=quiet,
        **scaling,
    )
    entrance: Any = ray_serve.deployment(
        Front,
        name="front",
        num_replicas=fronts,
        ray_actor_options={"num_cpus": 0},  # it waits, mostly; the replicas' CPUs are theirs
        max_ongoing_requests=100_000,  # the replicas' limits are the fleet's
        graceful_shutdown_timeout_s=shutdown_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )
    return entrance.bind(engines.bind(options), front)


def _check_adapters(adapters: Mapping[str, str], name: str) -> None:
    for adapter, path in adapters.items():
        if adapter == name:
            raise ValueError(f"adapter {adapter!r}: it is the model's own name")
        try:
            Folder(path)
        except AdapterError as error:
            raise AdapterError(f"adapter {adapter!r}: {error}") from error


def _autoscaling(fewest: int, most: int, up: float, down: float) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=fewest,
        max_replicas=most,
        initial_replicas=fewest,
        upscale_delay_s=up,
        downscale_delay_s=down,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
        policy=AutoscalingPolicy(policy_function=wanted_replicas),
    )


def serve_fleet(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    address: str | None = None,
    shutdown_seconds: float = 30.0,
    **options: Any,
) -> None:
    """Serve a model by several replicas until interrupted (SIGINT or SIGTERM).

    Args:
        port: 0: any that is free; the message at the start names it.
        address: of a running Ray cluster ("auto", "ray://…"); None: one is started here, for as long as this runs.
        shutdown_seconds: that running requests have to finish once interrupted; no others are taken meanwhile.
        options: as in `build_deployment`.
    Raises: OSError: the address cannot be listened on, or no cluster is there. ValueError, TypeError: as
        `build_deployment`.
    """
    with bind(host, port) as listener:  # first, before anything is started
        port = listener.getsockname()[1]
    application = build_deployment(model, shutdown_seconds=shutdown_seconds, **options)
    interrupted = threading.Event()
    _start_ray(address, options)
    try:
        http = {"host": host, "port": port, "request_timeout_s": None}
        ray_serve.start(proxy_location="HeadOnly" if address is None else "EveryNode", http_options=http)
        handle = ray_serve.run(application, name=NAME, route_prefix="/")
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda *_: interrupted.set())
        where = f"[{host}]" if ":" in host else host
        _say(f"{options.get('name') or model} is served on http://{where}:{port} (Ctrl-C ends it)")
        interrupted.wait()
        _say(f"no more requests are taken; those that run have {shutdown_seconds:.0f} s to finish")
        try:
            handle.broadcast("drain").results(timeout_s=shutdown_seconds)
        except Exception as error:
            _say(f"not all requests were finished: {type(error).__name__}")
        ray_serve.delete(NAME)
        if address is None:
            ray_serve.shutdown()
    finally:
        ray.shutdown()


def _start_ray(address: str | None, options: dict[str, Any]) -> None:
    if address is not None:
        try:
            ray.init(address=address)
        except (ConnectionError, RuntimeError) as error:
            raise OSError(f"no cluster answers at {address}: {error}") from error
        return
    replicas = options.get("replicas", 2)
    most = replicas[1] if isinstance(replicas, tuple) else replicas
    ray.init(
        num_cpus=math.ceil(most * options.get("cpus_per_replica", 1)),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.WARNING,
    )


def _say(message: str) -> None:
    print(f"lfm2-cb: {message}", file=sys.stderr, flush=True)
