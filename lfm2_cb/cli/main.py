"""The `lfm2-cb` command: `generate`, `bench`, `info`, `plot`, `serve`.

Exit status: see `Status`.
"""

from __future__ import annotations

import argparse
import enum
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from .. import __version__
from ..engine.loop import BrokenError
from ..generator import ContinuousBatchingGenerator
from ..loading import describe_files
from ..ops.native import NativeUnavailable
from ..ops.triton import TritonUnavailable
from .bench import bench
from .flags import (
    Parser,
    UsageError,
    adapters_of,
    add_adapter_flags,
    add_engine_flags,
    add_generation_flags,
    add_model_flags,
    engine_options,
    generation_config,
    generation_options,
    load_from,
    positive,
)
from .info import describe
from .job import RECORD_FIELDS, Job
from .parquet_output import JSON, write_parquet
from .plot import plot
from .progress import Summary, make_progress
from .reader import open_source
from .rows import InputError, Source, check_first_rows
from .serve import add_serve_flags, serve
from .writer import JobFiles, OutputError, PipeFiles

#: raised where requested kernels are not available
UNAVAILABLE = (NativeUnavailable, TritonUnavailable)
INPUT_HELP = """JSONL, .parquet, .csv, .tsv, .txt (a prompt a line), a dataset's folder or id; "-": JSONL on standard
input. Run again, a job continues if its input is the same: files are compared first, rows of standard input one by
one (and further rows at its end are run too)"""
OUTPUT_HELP = """.jsonl; .parquet, made at the end of the .jsonl of that name (in the input's order); "-": JSONL on
standard output, without resuming"""
STATUS_HELP = """exit status: 0 done; 1 stopped (a full disk, a closed pipe), the same command continues; 2 a bad
option, model or input; 3 done, but for rows that could not be run (see the errors file); 130 Ctrl-C, the same command
continues"""


class Status(enum.IntEnum):
    """How a command ended."""

    DONE = 0
    STOPPED = 1  # by a full disk, a closed pipe, ...; the same command continues
    REFUSED = 2  # a bad option, model or input, reported in one line; all that was run is written
    ROWS_FAILED = 3  # done, and there are rows that could not be run (all of them, perhaps): see the errors file
    INTERRUPTED = 130  # by Ctrl-C; the same command continues


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    try:
        make_parser().parse_args(arguments, args)
        return args.command(args)
    except KeyboardInterrupt:
        return _say(f"stopped{_advice(args)}", Status.INTERRUPTED)
    except (OutputError, BrokenError) as error:
        return _say(f"stopped: {error}{_advice(args)}", Status.STOPPED)
    except (ValueError, TypeError, OSError, MemoryError, torch.OutOfMemoryError, *UNAVAILABLE) as error:
        return _say(f"error: {' '.join(str(error).split())}", Status.REFUSED)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser("lfm2-cb", description="Continuous batching for LFM2.")
    parser.add_argument("--version", action="version", version=f"lfm2-cb {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{generate,bench,info,plot,serve}")
    generate = "answer the prompts of a file; resumable at any instant"
    _add_generate(commands.add_parser("generate", help=generate, description=generate, epilog=STATUS_HELP))
    _add_bench(commands.add_parser("bench", help="measure throughput and latency on ragged random prompts"))
    _add_info(commands.add_parser("info", help="what a model is, how it would run, and what memory it takes"))
    _add_plot(commands.add_parser("plot", help="draw a file that --trace has written"))
    serving = commands.add_parser("serve", help="an OpenAI-compatible server (needs an extra)")
    add_serve_flags(serving)
    serving.set_defaults(command=serve)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add = parser.add_argument
    add("--input", required=True, help=INPUT_HELP)
    add("--output", required=True, help=OUTPUT_HELP)
    add("--split", help="of a dataset")
    add("--column", help='of the prompts (text, chats or token ids); default: "prompt" or "messages"')
    add("--keep", nargs="+", default=[], metavar="COLUMN", help="columns carried over into the output")
    add("--ordered", action="store_true", help="write in the input's order; default: as rows complete")
    add("--overwrite", action="store_true", help="remove what is there, and start anew")
    add("--retry-errors", action="store_true", help="run the rows in the errors file again")
    add("--quiet", action="store_true", help="no progress bar")
    add("--live", action="store_true", help="a view of the engine instead of the bar, where stderr is a terminal")
    add_adapter_flags(parser, 'LoRA adapters; a row\'s column "adapter" names its own (none: the base)')
    add_generation_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(command=_generate)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--prompts", type=positive, default=64, help="how many (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=96, help="median, of ragged lengths (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="of every prompt (default: %(default)s)")
    parser.add_argument("--stock", action="store_true", help="also stock generate(), in static batches of 16")
    add_engine_flags(parser)
    parser.set_defaults(command=_bench)


def _add_info(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(command=_info)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="file that --trace or generator.trace() has written")
    parser.add_argument("--output", help="of the picture, .png, .svg or .pdf (default: the trace's name, .png)")
    parser.set_defaults(command=_plot)


def _generate(args: argparse.Namespace) -> int:
    if clash := sorted({*args.keep} & {*RECORD_FIELDS, *([JSON] if args.json_schema else [])}):
        raise UsageError(f"--keep {' '.join(clash)}: the output has its own field; rename the column")
    args.keep = list(dict.fromkeys(args.keep))
    _check_output(args)
    if args.quiet:
        disable_progress_bar()
    options, config = generation_options(args), generation_config(args)
    source = open_source(args.input, args.split, args.column, args.keep)
    source = check_first_rows(source, args.column, args.keep)
    to_pipe = args.output == "-"
    if to_pipe and (args.overwrite or args.retry_errors):
        raise UsageError("--overwrite and --retry-errors need a file as --output, not standard output")
    adapters = adapters_of(args)
    with _make_generator(args, adapters=adapters) as generator:
        resolved = generator.resolve(config, options, interface="lfm2-cb generate")
        job = Job(generator, resolved, args.column, args.keep, args.ordered, bool(adapters))
        job.check_options()
        files = PipeFiles(1) if to_pipe else _job_files(args, source, options, config)
        num_before = len(files.done)
        progress = make_progress(generator.engine, source.num_rows, num_before, quiet=args.quiet, live=args.live)
        try:
            summary = job.run(source, files, progress)
            if isinstance(files, JobFiles) and files.result is not None:
                files.sync()
                write_parquet(files.output, files.result, source, args.keep, args.json_schema is not None)
        finally:
            files.close()
    return _report(summary, num_before, files)


def _job_files(
    args: argparse.Namespace, source: Source, options: dict[str, Any], config: GenerationConfig | None
) -> JobFiles:
    output, result = Path(args.output), None
    named = ("model", "dtype", "weights", "cache_dtype", "sparse_prefill", "input", "column", "keep", "ordered")
    record = {
        **{name: getattr(args, name) for name in named},
        **{"model_files": describe_files(args.model), "input_identity": source.identity},
        **{"options": options, "generation_config": None if config is None else config.to_dict()},
        **{"format": output.suffix.removeprefix(".")},
    }
    if adapters := adapters_of(args):
        record["adapters"] = {name: describe_files(path) for name, path in adapters.items()}
    if output.suffix == ".parquet":
        output, result = output.with_suffix(".jsonl"), output
    return JobFiles(output, record, args.overwrite, args.retry_errors, result)


def _report(summary: Summary, num_before: int, files: JobFiles | PipeFiles) -> Status:
    rate = summary.num_output_tokens / max(summary.seconds, 1e-9)
    before = f" ({num_before:,} were done before)" if num_before else ""
    tokens = f"{summary.num_output_tokens:,} tokens in {summary.seconds:,.1f} s, {rate:,.0f} tok/s"
    where = f": {files.errors}" if files.num_errors and isinstance(files, JobFiles) else ""
    failed = f"{files.num_errors:,} rows could not be run{where}"
    status = Status.ROWS_FAILED if files.num_errors else Status.DONE
    return _say(f"{summary.num_rows:,} rows{before}, {tokens}; {failed}", status)


def _check_output(args: argparse.Namespace) -> None:
    """Raises: UsageError: it is the input, or has nowhere to be."""
    if args.output == "-":
        return
    output = Path(args.output)
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.suffix not in (".jsonl", ".ndjson", ".parquet"):
        raise UsageError(f"{output}: the output is JSON lines or Parquet; its name ends in .jsonl or .parquet")
    for path in (output, *(output.with_suffix(suffix) for suffix in (".jsonl", ".errors.jsonl", ".job.json"))):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} exists and is not a file; choose another --output")
        if path.exists() and os.path.exists(args.input) and path.samefile(args.input):
            raise UsageError(f"{path} is the input; choose another --output")


def _make_generator(args: argparse.Namespace, adapters: dict[str, str] | None = None) -> ContinuousBatchingGenerator:
    options = engine_options(args)  # errors in them are reported before the model is loaded
    return ContinuousBatchingGenerator(*load_from(args), **options, adapters=adapters)


def _bench(args: argparse.Namespace) -> int:
    with _make_generator(args) as generator:
        print(bench(generator, args.prompts, args.prompt_tokens, args.max_new_tokens, args.stock))
    return Status.DONE


def _info(args: argparse.Namespace) -> int:
    with _make_generator(args) as generator:
        print(describe(generator))
    return Status.DONE


def _plot(args: argparse.Namespace) -> int:
    output = args.output or str(Path(args.trace).with_suffix(".png"))
    plot(args.trace, output)
    return _say(f"drawn: {output}", Status.DONE)


def _advice(args: argparse.Namespace) -> str:
    return "; the same command goes on from here" if getattr(args, "output", "-") != "-" else ""


def _say(message: str, status: Status) -> Status:
    """Print one line to stderr, unless it is closed; returns `status`."""
    try:
        print(f"lfm2-cb: {message}", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # or the interpreter complains once more at its exit
    return status


__all__ = ["InputError", "UsageError", "main", "make_parser"]
