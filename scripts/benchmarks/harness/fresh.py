"""What only a fresh process can tell: peak memory of one engine, and how long it takes to the first token.

`measure(job)` starts one and gives what it found; `python -m harness.fresh` is that process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .peers import peak_rss_mb

SCRIPTS = Path(__file__).parents[1]


def measure(job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run a job in a fresh process. Raises: RuntimeError: it failed; its words are on standard error."""
    job = {**job, "started": time.time()}
    # A script finds what lies beside it; a module that is started by -m finds what is on the path.
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "harness.fresh"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"{job['kind']} in a fresh process ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def memory(
    model: str, dtype: str, weights: str | None, workload: list, cache_memory: int, engine: str, batch_size: int
) -> dict[str, Any]:
    """Peak resident memory of one engine that loads a checkpoint and runs one workload.

    Args: weights: low-bit ones of ours. engine: "ours" or "stock". batch_size: of stock.
    Returns: in MB (10^6 bytes) "peak_rss_mb"; "imports_mb" and "loaded_mb", the peak before the model and before its
    first step; "weights_mb"; for ours "limit_mb": weights × 1.25 + cache budget + 500 MB.
    """
    job = {"kind": "memory", "model": model, "dtype": dtype, "weights": weights, "workload": workload}
    found = measure(job | {"cache_memory": cache_memory, "engine": engine, "batch_size": batch_size})
    if engine == "ours":
        found["limit_mb"] = 1.25 * found["weights_mb"] + cache_memory / 1e6 + 500
    return found


def startup(job: dict[str, Any], repeats: int, with_build: bool = True) -> dict[str, Any]:
    """How long a fresh process takes, in seconds.

    Args: job: its "model", "dtype", "weights" and "cache_memory".
    Returns: "imported_s" from the process's start; "first_token_s" from there on, `from_pretrained` included; both
    medians with the native kernels built before. "native_build_s": building them into an empty cache, once.
    """
    runs = [measure(job | {"kind": "startup"}) for _ in range(repeats + 1)][1:]  # the first may have to build
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if with_build:
        with tempfile.TemporaryDirectory(prefix="lfm2-cb-cache-") as empty:
            found |= measure({"kind": "build"}, XDG_CACHE_HOME=empty)
    return found


# In the fresh process


def _memory(job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    import lfm2_cb

    from .readings import run_ours, run_stock

    imports, dtype = peak_rss_mb(), getattr(torch, job["dtype"])
    workload = [(prompt, length) for prompt, length in job["workload"]]
    if job["engine"] == "ours":
        model = lfm2_cb.load_model(job["model"], dtype, weights=job["weights"])
        weights = sum(parameter.nbytes for parameter in model.parameters())
        with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory=job["cache_memory"]) as generator:
            loaded = peak_rss_mb()
            run_ours(generator, workload)
    else:
        stock = transformers.Lfm2ForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
        weights, loaded = sum(parameter.nbytes for parameter in stock.parameters()), peak_rss_mb()
        run_stock(stock, workload, job["batch_size"])
    peaks = {"peak_rss_mb": peak_rss_mb(), "imports_mb": imports, "loaded_mb": loaded}
    return peaks | {"weights_mb": weights / 1e6}


def _startup(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    import lfm2_cb

    imported = time.time()
    model = lfm2_cb.load_model(job["model"], getattr(torch, job["dtype"]), weights=job["weights"])
    loaded = time.time()
    with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory=job["cache_memory"]) as generator:
        next(generator.stream([list(range(10, 26))], max_new_tokens=2, do_sample=False, eos_token_id=None))
        first = time.time()
    return {"imported_s": imported - job["started"], "loaded_s": loaded - imported, "first_token_s": first - imported}


def _build(job: dict[str, Any]) -> dict[str, Any]:
    from lfm2_cb.ops.native import library as native

    start = time.perf_counter()
    native.load()
    return {"native_build_s": time.perf_counter() - start}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    result = {"memory": _memory, "startup": _startup, "build": _build}[job["kind"]](job)
    print(json.dumps(result))
