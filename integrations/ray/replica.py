"""What one replica of a fleet runs: an engine behind the server's own application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lfm2_cb.integrations.serve import build_app
from lfm2_cb.integrations.serve.served import Served
from ray import serve

from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.engine.engine import Engine
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.loading import load_model, load_tokenizer
from lfm2_cb.scheduling.prefix_hashes import PrefixSketch
from lfm2_cb.scheduling.request import root_content_id

Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Call:
    """An HTTP request, read whole: the part of its ASGI scope that can travel, and its body."""

    scope: dict[str, Any]
    body: bytes


@dataclass(frozen=True)
class ReplicaOptions:
    """How a replica loads its model, and serves it.

    Attributes:
        engine: options of `EngineConfig.for_server`.
        sizes: `num_blocks` or `max_memory_percent`, instead of the engine's `cache_memory`.
        server: options of `build_app`, but the key, which the front checks.
        stuck_seconds: a step that takes longer is stuck.
    """

    model: str
    dtype: str | None = "auto"
    weights: str | None = None
    device: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    stuck_seconds: float = 120.0

    def config(self) -> Lfm2CbBatchingConfig:
        """Raises: ValueError, TypeError: an option that the engine does not take."""
        return Lfm2CbBatchingConfig.from_engine(EngineConfig.for_server(**self.engine), **self.sizes)


class RoutingReport:
    """What a replica tells the router: its cached blocks, the adapters in its memory, and its number of requests."""

    def __init__(self) -> None:
        self._sketch: PrefixSketch | None = None

    def read(self, engine: Engine) -> dict[str, Any]:
        """`sketch` as `unpack` takes it, `adapters` by name, `load` in requests. From any thread."""
        scheduler, known = engine.scheduler, engine.adapters.known
        if self._sketch is None or self._sketch.pool is not scheduler.cache.pool:
            self._sketch = PrefixSketch(scheduler.cache.pool)
        salts = {"": None, **known}
        roots = {root_content_id(engine.config.sparse_prefill, adapter): name for name, adapter in salts.items()}
        present = {*scheduler.adapters.present}
        return {
            "sketch": self._sketch.read(roots),
            "adapters": [name for name, adapter in known.items() if adapter.adapter_id in present],
            "load": len(scheduler.running) + scheduler.num_waiting,
        }


class Replica:
    """The class of Ray Serve's deployment."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(options.model, options.dtype, options.allow_pickle, options.weights, device).eval()
        tokenizer = load_tokenizer(options.model, options.trust_remote_code)
        self._app = build_app(model, tokenizer, continuous_batching_config=options.config(), **options.server)
        self._served: Served = self._app.state.served
        self._report = RoutingReport()
        self._name = serve.get_replica_context().replica_id.unique_id

    async def handle(self, call: Call, aim: Any = None) -> AsyncIterator[list[Message]]:
        """The ASGI messages of the answer, as many at once as there are. Cancelling it cancels the request.

        Args: aim: for the router, which has read it.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        received = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            if not received:
                await asyncio.Event().wait()  # a client that leaves shows in this call's being cancelled
            return received.pop()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        running = asyncio.ensure_future(self._app({**call.scope, "state": {}}, receive, send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                if some := [message for message in batch if message is not None]:
                    yield some
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def metrics_page(self) -> tuple[str, str]:
        """This replica's name, and its `/metrics` page."""
        return self._name, self._served.dispatcher.metrics.page().decode()

    # What Ray Serve asks from time to time

    async def check_health(self) -> None:
        """Raises: RuntimeError: the engine is dead, or a step is stuck. Ray Serve then starts another replica."""
        if (problem := self._served.dispatcher.problem(self._options.stuck_seconds)) is not None:
            raise RuntimeError(problem)

    def record_routing_stats(self) -> dict[str, Any]:
        """For the router."""
        processor = self._served.dispatcher.manager.batch_processor
        return {} if processor is None else self._report.read(processor.engine)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How full this replica is: 1 where its sequences, or its cache, are all taken; more where others wait."""
        processor = self._served.dispatcher.manager.batch_processor
        if processor is None:
            return {"pressure": 0.0}
        scheduler = processor.engine.scheduler
        pool, queued = scheduler.cache.pool, len(scheduler.running) + scheduler.num_waiting
        taken = 1 - pool.num_free / pool.num_blocks
        if scheduler.running:  # those that wait will take as much as those that run
            taken *= queued / len(scheduler.running)
        return {"pressure": max(queued / scheduler.max_sequences, taken)}

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.dispatcher.shutdown()
