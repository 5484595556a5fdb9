"""Other engines on the same work, each in a process and a Python of its own: see ../peers/common.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from .readings import Reading, reading
from .workloads import Workload

RUNNERS = Path(__file__).parents[1] / "peers"


def known_peers() -> list[str]:
    return sorted(path.stem.removeprefix("run_") for path in RUNNERS.glob("run_*.py"))


class PeerFailed(RuntimeError):
    """The peer's process has ended; says how. What it printed is on our standard error."""


class Peer:
    """A peer's process, stopped between two runs: one that waits for its input may still poll (vLLM does, a thousand
    times a second), in the way of whoever runs.

    Args: python: of the environment that the peer is installed in. options: as ../peers/common.py has them.
    Attributes: facts: what the peer says about itself, and "start_seconds".
    Raises: ValueError: no runner of that name. PeerFailed: it did not start.
    """

    def __init__(self, name: str, python: str, options: dict[str, Any]) -> None:
        runner = RUNNERS / f"run_{name}.py"
        if not runner.is_file():
            raise ValueError(f"--peer {name}: the peers are {', '.join(known_peers())}")
        self.name, start = name, time.perf_counter()
        # A group of its own is stopped with all that it starts; the system ends a stopped one whose parent is gone.
        self._process = subprocess.Popen(
            [python, str(runner), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.facts: dict[str, Any] = self._answer()["ready"] | {"start_seconds": time.perf_counter() - start}
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, workload: Workload) -> Reading:
        """Raises: PeerFailed; RuntimeError: answers of wrong lengths."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # its end shows in that it does not answer
            print(json.dumps(workload), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return reading(workload, answer["seconds"], answer["times"])

    def peak_rss_mb(self) -> float | None:
        """Of this one process, so far. None where the system does not say."""
        return peak_rss_mb(self.pid)

    def close(self) -> int:
        """Returns: its exit status."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        return self._process.returncode

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.name} ended with status {self._process.wait()} instead of answering")
        return json.loads(line)


def peak_rss_mb(pid: int | str = "self") -> float | None:
    """Largest resident memory of a living process, MB (of 10^6 bytes). `getrusage` would count its parent's too."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text("utf-8").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM")), None)
