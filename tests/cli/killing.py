"""Kill a job with SIGKILL at random instants, run it again until it is done, and compare the files byte by byte.

python tests/cli/killing.py --times 50
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from pyarrow import parquet

import lfm2_cb
from lfm2_cb.cli.main import Status, main

#: the input has rows that cannot be run
DONE = Status.ROWS_FAILED
#: imports the package once; every job is forked from it, so that a kill falls into the job and not into imports
context = multiprocessing.get_context("forkserver")
FLAGS = ["--max-new-tokens", "12", "--no-do-sample", "--dtype", "float32", "--max-sequences", "8", "--quiet"]
FLAGS += ["--cache-memory", "8MiB", "--keep", "id"]


def write_input(path: Path, num_rows: int) -> None:
    prompts = Path(lfm2_cb.demo_model_path(), "prompts.jsonl").read_text("utf-8").splitlines()
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            row = {"id": f"row {i}", **json.loads(prompts[i % len(prompts)])}
            file.write("{ no row\n" if i % 17 == 5 else json.dumps(row) + "\n")


def command(folder: Path, name: str, ordered: bool) -> list[str]:
    """Ordered JSON lines, or Parquet (of JSON lines as they complete)."""
    output = folder / f"{name}.{'jsonl' if ordered else 'parquet'}"
    files = ["--input", str(folder / "in.jsonl"), "--output", str(output)]
    return ["generate", lfm2_cb.demo_model_path(), *files, *FLAGS, *(["--ordered"] if ordered else [])]


def job(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(main(arguments))


def run(arguments: list[str], kill_after: float | None = None) -> int:
    """Run one job in a process of its own; returns its exit status: `DONE`, or -9 where it was killed."""
    process = context.Process(target=job, args=(arguments,))
    process.start()
    process.join(kill_after)
    if process.exitcode is None and kill_after is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(300)
    assert process.exitcode is not None, "the job hangs"
    return process.exitcode


def read(folder: Path, name: str) -> list[list[str]]:
    """Lines of the answers and of the errors."""
    paths = [folder / f"{name}.jsonl", folder / f"{name}.errors.jsonl"]
    return [path.read_bytes().decode().splitlines() if path.exists() else [] for path in paths]


def tear(path: Path, rng: random.Random) -> None:
    """Cut into the last line, as a kill in the middle of a write does."""
    data = path.read_bytes() if path.exists() else b""
    if data.endswith(b"\n"):
        last = data.rfind(b"\n", 0, -1) + 1
        path.write_bytes(data[: rng.randrange(last, len(data))])


def kill_and_resume(
    folder: Path, seed: int, ordered: bool, seconds: float, reference: list[list[str]], most: int = 4
) -> int:
    """One job, killed at random instants until it has run through; returns how often it was killed.

    Args: seconds: that an uninterrupted run takes; most: kills, about.
    Raises: AssertionError: a row lost, doubled or changed.
    """
    rng, name, kills = random.Random(seed), f"out{seed}", 0
    arguments, output = command(folder, name, ordered), folder / f"out{seed}.jsonl"
    while True:
        status = run(arguments, rng.uniform(0.0, seconds) if kills < most else None)
        assert status in (DONE, -signal.SIGKILL), status
        if status == DONE and kills:
            break
        if status == DONE:  # it was quicker than the killer
            for path in folder.glob(f"{name}.*"):
                path.unlink()
            continue
        kills += 1
        if rng.random() < 0.5:
            tear(output, rng)
        known = output.read_bytes() if output.exists() else b""
        kept = known[: known.rfind(b"\n") + 1]
        if rng.random() < 0.3:
            assert run(arguments, rng.uniform(0.0, seconds)) in (DONE, -signal.SIGKILL)
            assert output.read_bytes().startswith(kept), "a finished row was lost"
            kills += 1
    assert output.read_bytes().startswith(kept), "a finished row was lost"
    found = read(folder, name)
    if ordered:
        assert found == reference, "the files differ"
    assert [sorted(lines) for lines in found] == [sorted(lines) for lines in reference], "the rows differ"
    suffixes = [".errors.jsonl", ".job.json", ".jsonl"]
    if not ordered:
        table = parquet.read_table(folder / f"{name}.parquet").to_pylist()
        assert table == [json.loads(line) for line in reference[0]], "the Parquet file differs"
        suffixes.append(".parquet")
    assert sorted(path.name for path in folder.glob(f"{name}.*")) == [f"{name}{suffix}" for suffix in suffixes]
    return kills


def kill_many(folder: Path, times: int, num_rows: int, seed: int = 0, most: int = 4) -> str:
    """`times` jobs, by turns to ordered JSON lines and to Parquet, killed until they run through: a summary."""
    context.set_forkserver_preload(["lfm2_cb.cli.main"])
    write_input(folder / "in.jsonl", num_rows)
    start = time.monotonic()
    assert run(command(folder, "reference", True)) == DONE
    seconds, reference = time.monotonic() - start, read(folder, "reference")
    assert sum(map(len, reference)) == num_rows and reference[1]
    kills = sum(kill_and_resume(folder, seed + i, i % 2 == 0, seconds, reference, most) for i in range(times))
    return (
        f"{times} jobs of {num_rows} rows ({seconds:.1f} s uninterrupted), {kills} kills, all files as they should be"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(kill_many(Path(temporary), args.times, args.rows, args.seed))
