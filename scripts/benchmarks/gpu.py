"""On a machine with a CUDA card: parity with stock, and our engine beside others on the fixed workloads.

    bash scripts/gpu.sh                                        # ten minutes at most; the table is in gpu-results/
    bash scripts/gpu.sh --vllm /path/to/its/python --parts stock vllm
    python scripts/benchmarks/gpu.py --device cpu --model tiny --llama tiny --limit 4 8        # to try it out

Each part runs in processes of its own under a time limit of its own, and what it has found until then counts, so that
a part that hangs or fails costs no other part its results. They are written as they come: results.json, results.md,
and plots by part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import plots
from harness.report import markdown, table
from harness.workloads import STOCK_BATCHES

BENCHMARKS = Path(__file__).parent
REPOSITORY = BENCHMARKS.parents[1]
#: seconds that each part may take; together under ten minutes
LIMITS = {"parity": 120, "stock": 190, "generate_batch": 100, "vllm": 160}
TITLES = {
    "parity": "Parity with stock (tests with the marker gpu)",
    "stock": "Beside stock's static batches, the best of several sizes",
    "generate_batch": "Beside stock's generate_batch, on a Llama of the same size (it refuses LFM2)",
    "vllm": "Beside vLLM",
}
#: what was set out to be reached: part, workload (None: every one), by which engine's rate, and the least ratio
TARGETS = [
    ("stock", "ragged64", "stock", 6.0),
    ("stock", "single", "stock", 2.0),
    ("stock", None, "stock", 1.0),
    ("vllm", "ragged64", "vllm", 1.0),
]
#: a Llama for trying things out
TINY_LLAMA = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
#: seconds after which a process that was told to end is killed
GRACE = 5


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", default="gpu-results", help="folder for what is found (default: %(default)s)")
    add("--parts", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    add("--minutes", type=float, default=9.5, help="for all parts together (default: %(default)s)")
    add("--device", default="cuda", help='"cpu" tries the whole thing out (default: %(default)s)')
    add("--model", default="random-350m", help="as of compare.py")
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    add("--workloads", nargs="+", default=["single", "five", "ragged64", "prefix64", "long8"],
        choices=list(STOCK_BATCHES))  # fmt: skip
    add("--repeats", type=int, default=3)
    add("--stock-batch", type=int, nargs="+", default=[16, 64], help="sizes of stock's batches")
    add("--limit", type=int, nargs=2, metavar=("REQUESTS", "TOKENS"), help="cut workloads to these, to try it out")
    add("--cache-memory", default="8GiB")
    add("--vllm", default=os.environ.get("VLLM_PYTHON"), metavar="PYTHON", help="of an environment that has it")
    add("--llama", default="full", choices=["full", "tiny"], help="tiny: to try it out")
    return parser.parse_args(argv)


@dataclass
class Part:
    """One part of a run.

    Attributes: status: "done", "failed (1)", "stopped after 90 s", "not run: why". report: what its comparison found.
    """

    name: str
    status: str
    seconds: float = 0.0
    report: dict[str, Any] | None = None


def commands(name: str, args: argparse.Namespace, out: Path) -> list[list[str]]:
    """What a part runs, one after another."""
    if name == "parity":
        return [
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/parity/test_gpu.py"]
        ]
    compare = [sys.executable, str(BENCHMARKS / "compare.py"), "--device", args.device, "--model", args.model]
    compare += ["--dtype", args.dtype, "--cache-memory", args.cache_memory, "--json", str(out / f"{name}.json")]
    if args.limit:
        compare += ["--limit", *map(str, args.limit)]
    if name == "stock":
        sizes = ["--stock-batch", *map(str, args.stock_batch)]
        return [[*compare, "--workloads", *args.workloads, "--repeats", str(args.repeats), *sizes]]
    # Of the other engines, each of which takes its time to start, what is compared most.
    compare += ["--workloads", "single", "ragged64", "--repeats", "2", "--no-stock"]
    if name == "vllm":
        return [[*compare, "--peer", f"vllm={args.vllm or sys.executable}", "--checkpoint", str(out / "checkpoint")]]
    llama, runner = str(out / "llama"), str(BENCHMARKS / "peers" / "run_generate_batch.py")
    sizes = [json.dumps(TINY_LLAMA)] if args.llama == "tiny" else []
    peer = ["--peer", f"generate_batch={sys.executable}", "--peer-model", f"generate_batch={llama}"]
    return [[sys.executable, runner, llama, *sizes], [*compare, *peer]]


def why_not(name: str, args: argparse.Namespace) -> str | None:
    """Why a part cannot be run here; None: it can."""
    if name == "vllm" and not args.vllm and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; --vllm names a Python that has it"
    if name == "parity" and importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    return None


def run_part(name: str, args: argparse.Namespace, out: Path, seconds: float) -> Part:
    """Its commands, within so many seconds; their output goes to a log beside the results, and plots, where there is
    a matplotlib, too."""
    if (reason := why_not(name, args)) is not None:
        return Part(name, f"not run: {reason}")
    start, status = time.perf_counter(), "done"
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        for command in commands(name, args, out):
            left = seconds - (time.perf_counter() - start)
            code = run(command, log, left)
            if code is None:
                status = f"stopped after {seconds:.0f} s"
                break
            if code != 0:
                status = f"failed ({code}): see {name}.log"
                break
    path = out / f"{name}.json"
    report = json.loads(path.read_text("utf-8")) if path.is_file() else None
    if report and report.get("workloads") and importlib.util.find_spec("matplotlib"):
        plots.write(report, str(out / "plots" / name))
    return Part(name, status, time.perf_counter() - start, report)


def run(command: list[str], log: Any, seconds: float) -> int | None:
    """A command's exit status; None: it took longer, and was ended with all that it had started."""
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, politely first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def targets(parts: list[Part]) -> Iterator[list[str]]:
    """Rows of a table: what was to be reached, and what was."""
    reports = {part.name: part.report for part in parts if part.report}
    for part, workload, engine, least in TARGETS:
        found = reports.get(part, {}).get("workloads", {})
        ratios = {name: work["summary"]["ratios"].get(engine) for name, work in found.items()}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None and workload in (name, None)}
        what = f"{workload or 'every workload'}, at least {least:g} × {engine}"
        if not known:
            yield [what, "not measured", "–"]
            continue
        name, ratio = min(known.items(), key=lambda item: item[1])
        yield [what, f"{ratio:.2f} ×" + ("" if workload else f" ({name})"), "yes" if ratio >= least else "no"]


def write(parts: list[Part], args: argparse.Namespace, out: Path) -> None:
    """results.json and results.md of what has been found so far."""
    scratch = out / "results.json.part"
    scratch.write_text(json.dumps({"options": vars(args), "parts": [asdict(p) for p in parts]}, indent=1), "utf-8")
    os.replace(scratch, out / "results.json")
    shown = ["# On a GPU" if args.device != "cpu" else "# Tried out on a CPU", "", *_overview(parts)]
    for part in parts:
        if part.report:
            shown += ["", f"## {TITLES[part.name]}", "", markdown(part.report)]
    (out / "results.md").write_text("\n".join(shown) + "\n", "utf-8")


def _overview(parts: list[Part]) -> list[str]:
    rows = [[TITLES[part.name], part.status, f"{part.seconds:.0f}"] for part in parts]
    return [table(["part", "status", "s"], rows), "", table(["asked for", "reached", "holds"], targets(parts))]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA card here: nothing was run", file=sys.stderr)
        return 2
    out = Path(args.out).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    until, parts = time.perf_counter() + 60 * args.minutes, []
    for name in args.parts:
        parts.append(run_part(name, args, out, min(LIMITS[name], until - time.perf_counter())))
        print(f"{TITLES[name]}: {parts[-1].status} ({parts[-1].seconds:.0f} s)", flush=True)
        write(parts, args, out)
    print((out / "results.md").read_text("utf-8"))
    return 0 if all(part.status == "done" or part.status.startswith("not run") for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
