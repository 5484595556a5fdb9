"""The roofline: how quickly this machine could run the engine's own steps, bound by bytes or arithmetic alone.

Of every step we note what it cannot do without: the weights once, the keys and values of the blocks that its rows
read (a shared block once), and the arithmetic of its tokens. Its best time is the larger of bytes over bandwidth and
operations over the processor's own matrix rate, both measured in the same run by a small native probe (`probe.cpp`),
not by a library that may be slow itself.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_cxx_compiler

from lfm2_cb.engine.engine import Engine

PROBE = Path(__file__).with_name("probe.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")


@dataclass(frozen=True)
class Step:
    """What one step of the engine had to do.

    Attributes:
        tokens: through the layers. heads: rows of logits. pairs: attended (query, key). blocks: read, each once.
    """

    tokens: int
    heads: int
    pairs: int
    blocks: int


@dataclass(frozen=True)
class NotedRows:
    """The rows of a step, as they were noted before it ran.

    Attributes: tables: each row's block ids, of which the first are those that it reads: a request's own list, as it
        only grows behind these (but for rows with drafts, which may be taken back).
    """

    starts: list[int]
    num_tokens: list[int]
    heads: int
    tables: list[list[int]]

    def as_step(self, block_size: int) -> Step:
        read: set[int] = set()
        pairs = 0
        for start, count, table in zip(self.starts, self.num_tokens, self.tables, strict=True):
            pairs += count * start + count * (count + 1) // 2
            read.update(table[: -(-(start + count) // block_size)])
        return Step(sum(self.num_tokens), self.heads, pairs, len(read))


@contextmanager
def steps_of(engine: Engine) -> Iterator[list[Step]]:
    """Within, note every step of the engine: the list has them at the end. Some 0.1 ms for 256 rows."""
    steps: list[Step] = []
    noted: list[NotedRows] = []
    run = engine.runner.run

    def noting(rows):
        starts, num_tokens = [row.start for row in rows], [row.num_tokens for row in rows]
        heads = sum([1 + row.num_drafts for row in rows if row.samples])
        tables = [row.request.block_table[:] if row.num_drafts else row.request.block_table for row in rows]
        noted.append(NotedRows(starts, num_tokens, heads, tables))
        return run(rows)

    engine.runner.run = noting  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.runner.run
        steps += [rows.as_step(engine.config.block_size) for rows in noted]


@functools.cache
def _probe() -> ctypes.CDLL | None:
    """None: there is no compiler here."""
    compiler = shutil.which(get_cxx_compiler())
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "probe.so")
        subprocess.run([compiler, *FLAGS, str(PROBE), "-o", str(library)], check=True, capture_output=True)
        loaded = ctypes.CDLL(str(library))
    for name in ("floating_rate", "bytes_rate", "read_rate"):
        function = getattr(loaded, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_double]
    return loaded


def rates(seconds: float) -> dict[str, float]:
    """Of this moment, on as many threads as torch has: "probe_read_gb_per_s"; "probe_tflop_per_s" (bf16 where the
    processor multiplies it, else fp32); "probe_int8_top_per_s", where it multiplies bytes. Empty: no compiler.

    Args: seconds: for each.
    """
    probe, threads = _probe(), torch.get_num_threads()
    if probe is None:
        return {}
    found = {
        "probe_read_gb_per_s": probe.read_rate(threads, seconds),
        "probe_tflop_per_s": probe.floating_rate(threads, seconds),
        "probe_int8_top_per_s": probe.bytes_rate(threads, seconds),
    }
    return {name: rate for name, rate in found.items() if rate}


def roofline_seconds(
    steps: Sequence[Step],
    machine: dict[str, float],
    weight_bytes: int,
    block_bytes: int,
    token_flops: int,
    head_flops: int,
    pair_flops: int,
    weights: str | None = None,
) -> float | None:
    """The roofline's time of these steps; None where the machine's rates are not known.

    Args:
        weight_bytes: read by every step. block_bytes: of one block's keys and values, all layers.
        token_flops, head_flops, pair_flops: of one token in the matrices, one row in the head, one attended pair.
        weights: "int8" or "int4": the matrices' arithmetic is in bytes.
    """
    if "probe_tflop_per_s" not in machine:
        return None
    bandwidth, rate = machine["probe_read_gb_per_s"] * 1e9, machine["probe_tflop_per_s"] * 1e12
    linear_rate = machine.get("probe_int8_top_per_s", rate / 1e12) * 1e12 if weights else rate
    total = 0.0
    for step in steps:
        linear = (token_flops * step.tokens + head_flops * step.heads) / linear_rate
        total += max((weight_bytes + block_bytes * step.blocks) / bandwidth, linear + pair_flops * step.pairs / rate)
    return total
