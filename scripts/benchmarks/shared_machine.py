"""What waiting costs: the engine alone on the machine, and beside a process that keeps every processor busy.

python scripts/benchmarks/shared_machine.py
python scripts/benchmarks/shared_machine.py --other PATH_OF_ANOTHER_CHECKOUT

One process for each value of OMP_WAIT_POLICY (and for each checkout), run in turn, the others stopped. Beside as many
busy threads as processors an engine's fair share is half of the machine, so "of its fair share" is 2 × its rate there
over its rate alone. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
POLICIES = ("unset", "PASSIVE", "ACTIVE")


class Engine:
    """An engine in a process of its own, stopped but when it runs."""

    def __init__(self, checkout: Path, policy: str, model: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(HERE)])
        if policy != "unset":
            environment["OMP_WAIT_POLICY"] = policy
        command = [sys.executable, __file__, "--serve", model]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=checkout, **pipes)
        self.says = self._answer()
        self.process.send_signal(signal.SIGSTOP)

    def run(self) -> float:
        """Output tokens a second of one run."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        rate = self._answer()["rate"]
        self.process.send_signal(signal.SIGSTOP)
        return rate

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def busy_processors():
    """A process with a thread for each processor that does nothing but work."""
    loop = "import os\nfor _ in range(os.cpu_count() - 1):\n    if os.fork() == 0: break\nwhile True: pass"
    neighbours = subprocess.Popen([sys.executable, "-c", loop], start_new_session=True)
    time.sleep(0.3)
    try:
        yield
    finally:
        os.killpg(neighbours.pid, signal.SIGKILL)
        neighbours.wait()


def serve(name: str) -> None:
    """The engine's process: a run for each line of its input."""
    import torch
    from harness.readings import run_ours
    from harness.workloads import equal_requests, load_model

    import lfm2_cb

    model = load_model(name, torch.bfloat16)
    workload = equal_requests(8, model.config.vocab_size, 48, 32)
    with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory="64MiB") as generator:
        run_ours(generator, workload)  # warm-up
        print(json.dumps({"package": lfm2_cb.__file__, "threads": torch.get_num_threads()}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"rate": run_ours(generator, workload).output_tokens_per_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random-350m", help="see harness/workloads.py")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES, metavar="POLICY")
    parser.add_argument("--other", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    checkouts = {"this": HERE.parents[1]} | ({"other": args.other.resolve()} if args.other else {})
    settings = [(tree, policy) for tree in checkouts for policy in args.policies]
    engines = {(tree, policy): Engine(checkouts[tree], policy, args.model) for tree, policy in settings}
    rates: dict[tuple[str, str, str], list[float]] = {}
    try:
        for _ in range(args.rounds):
            for key, engine in engines.items():
                rates.setdefault((*key, "alone"), []).append(engine.run())
            for key, engine in engines.items():
                with busy_processors():
                    rates.setdefault((*key, "beside"), []).append(engine.run())
    finally:
        for engine in engines.values():
            engine.process.kill()
            engine.process.wait()
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    print(f"{args.model}, bf16, {os.cpu_count()} processors ({names[0].split(': ')[1] if names else 'unknown'})")
    print("| checkout | OMP_WAIT_POLICY | alone, tok/s | beside a busy process | of its fair share |")
    print("|---|---|---|---|---|")
    for tree, policy in engines:
        alone, beside = (statistics.median(rates[tree, policy, how]) for how in ("alone", "beside"))
        print(f"| {tree} | {policy} | {alone:.1f} | {beside:.1f} | {2 * beside / alone:.2f} |")


if __name__ == "__main__":
    main()
