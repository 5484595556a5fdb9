"""The protocol of a peer's runner, which knows nothing of lfm2_cb.

The runner is started with one argument, JSON of {"model": folder, "threads", "max_batch_tokens", "max_sequences",
"cache_memory": bytes, "dtype", "prefix_caching", "device"}. It answers one line {"ready": {name: fact}} when it can
run. Then, for each line [[prompt token ids, output tokens], ...] that it reads, it runs them all, greedily and to
exactly those lengths, and answers {"seconds": s, "times": [[seconds of each token from the start], ...]}. It ends with
its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Work = list[tuple[list[int], int]]
#: runs the work; calls back with the index of a request and how many tokens it has gained (and maybe when, as
#: `time.perf_counter()` said; else now)
Run = Callable[[Work, Callable[..., None]], None]


def main(start: Callable[[dict[str, Any]], tuple[Run, dict[str, Any]]]) -> None:
    """Args: start: loads the engine; returns what runs the work, and facts about the engine."""
    # Answers have the real standard output for themselves; what the engine prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    run, facts = start(json.loads(sys.argv[1]))
    answer({"ready": facts})
    for line in sys.stdin:
        work = [(prompt, length) for prompt, length in json.loads(line)]
        times: list[list[float]] = [[] for _ in work]
        began = time.perf_counter()

        def gained(index: int, count: int, at: float | None = None, times=times, began=began) -> None:
            times[index] += [(time.perf_counter() if at is None else at) - began] * count

        run(work, gained)
        answer({"seconds": time.perf_counter() - began, "times": times})
