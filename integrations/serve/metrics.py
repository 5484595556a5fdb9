"""Prometheus metrics of one server."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lfm2_cb.hf.manager import Lfm2CbManager
from lfm2_cb.hf.manager_outputs import BatchProcessor, CbGenerationOutput

#: upper bounds in seconds
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters and histograms of finished sequences, and gauges of the engine. Times are the engine's own."""

    def __init__(self, manager: Lfm2CbManager) -> None:
        self.registry = registry = CollectorRegistry()
        name = "lfm2_cb"
        self.finished = Counter(f"{name}_sequences", "Finished sequences", ["finish_reason"], registry=registry)
        self.refused = Counter(f"{name}_refused", "Requests answered with an error", ["status"], registry=registry)
        self.prompt = Counter(f"{name}_prompt_tokens", "Prompt tokens of finished sequences", registry=registry)
        self.cached = Counter(f"{name}_cached_prompt_tokens", "Those the prefix cache held", registry=registry)
        self.generated = Counter(f"{name}_generated_tokens", "Tokens generated", registry=registry)
        self.first = Histogram(
            f"{name}_time_to_first_token_seconds", "TTFT, from arrival", buckets=FIRST_TOKEN, registry=registry
        )
        self.between = Histogram(
            f"{name}_inter_token_seconds", "ITL, between two tokens", buckets=BETWEEN_TOKENS, registry=registry
        )
        self.whole = Histogram(
            f"{name}_sequence_seconds", "From arrival to the last token", buckets=WHOLE, registry=registry
        )

        def of_engine(read: Callable[[BatchProcessor], float]) -> Callable[[], float]:
            return lambda: 0 if manager.batch_processor is None else read(manager.batch_processor)

        def used(processor: BatchProcessor) -> float:
            pool = processor.engine.scheduler.cache.pool
            return 1 - pool.num_free / pool.num_blocks

        def running_tokens(processor: BatchProcessor) -> int:
            return sum(request.num_output_tokens for request in list(processor.engine.scheduler.running))

        for label, text, read in (
            ("queue_depth", "Sequences waiting for their first step", lambda p: len(p.scheduler.waiting_requests)),
            ("running", "Sequences running", lambda p: len(p.scheduler.active_requests)),
            ("running_tokens", "Tokens that running sequences have generated so far", running_tokens),
            ("cache_usage", "Share of cache blocks that running sequences hold", used),
            ("drafted_tokens", "Tokens guessed since the start", lambda p: p.engine.speculation.num_drafted),
            ("accepted_tokens", "Those that were right", lambda p: p.engine.speculation.num_accepted),
        ):
            Gauge(f"{name}_{label}", text, registry=registry).set_function(of_engine(read))

    def observe(self, output: CbGenerationOutput) -> None:
        """Take note of a sequence's last output."""
        self.finished.labels(output.finish_reason).inc()
        self.prompt.inc(len(output.prompt_ids))
        self.cached.inc(output.num_cached_tokens)
        self.generated.inc(len(output.generated_tokens))
        if output.timestamps:
            self.first.observe(output.timestamps[0] - output.created_time)
            self.whole.observe(output.timestamps[-1] - output.created_time)
            for earlier, later in pairwise(output.timestamps):
                self.between.observe(later - earlier)

    def page(self) -> bytes:
        return generate_latest(self.registry)
