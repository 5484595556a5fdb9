"""What a trace costs: the same requests with one and without, strictly alternating in one process, ratios.

    python scripts/benchmarks/tracing.py
    python scripts/benchmarks/tracing.py --model tiny --rows 8 --tokens 8 --rounds 1

"within" is the time spent in the trace over the time of the runs, which a busy machine disturbs least. Without a
trace a step looks at one attribute, and "apart" is how far two runs without one lie apart: what can be told at all.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from harness.machine import facts
from harness.readings import run_ours
from harness.workloads import equal_requests, load_model

from lfm2_cb import ContinuousBatchingGenerator, default_dtype
from lfm2_cb.engine.tracing import Trace


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-350m", help="see harness/workloads.py")
    parser.add_argument("--rows", type=int, default=64, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt, and of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    model = load_model(args.model, default_dtype())
    workload = equal_requests(args.rows, model.config.vocab_size, args.tokens, args.tokens)
    inside = [0.0]

    def timed(trace: Trace, *step: object, add_step=Trace.add_step) -> None:
        start = time.perf_counter()
        add_step(trace, *step)
        inside[0] += time.perf_counter() - start

    seconds: dict[str, list[float]] = {"off": [], "on": [], "off again": []}
    options = {"cache_memory": "256MiB", "prefix_caching": False}
    with (
        ContinuousBatchingGenerator(model, **options) as generator,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Trace, "add_step", timed),
    ):
        run_ours(generator, workload)  # warm-up
        for _ in range(args.rounds):
            seconds["off"].append(run_ours(generator, workload).seconds)
            with generator.trace(Path(folder, "trace.json")):
                seconds["on"].append(run_ours(generator, workload).seconds)
            seconds["off again"].append(run_ours(generator, workload).seconds)
    pairs = list(zip(*seconds.values(), strict=True))
    found = facts()
    print(f"{args.model}, {args.rows} rows, {found['threads']} threads of {found['cpu']}, torch {torch.__version__}")
    print(f"on / off     {statistics.median(on / statistics.mean((a, b)) for a, on, b in pairs):.3f}")
    print(f"apart        {statistics.median(abs(b / a - 1) for a, _, b in pairs):.3f}")
    print(f"within       {inside[0] / sum(seconds['on']):.4f}")


if __name__ == "__main__":
    main()
