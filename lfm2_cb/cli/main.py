"""The `lfm2-cb` command: `generate`, `bench`, `info`, `serve`.

Exit status: 0 done (bad rows are in the errors file); 1 stopped, and can go on with the same command; 2 a bad option,
model or input, said in one line; 130 stopped by Ctrl-C, and can go on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ..engine.loop import BrokenError
from ..generator import ContinuousBatchingGenerator
from ..loading import DTYPES, describe_files, load_model, load_tokenizer
from ..model.hybrid_cache import CACHE_DTYPES
from ..model.quantization import WEIGHTS
from ..ops.native.library import KERNELS, NativeUnavailable
from ..requests.fallback import refuse
from ..scheduling.policies import POLICIES
from .bench import bench
from .info import describe
from .job import RECORD_FIELDS, Job
from .reader import InputError, open_source
from .writer import JobFiles, OutputError, PipeFiles

#: flags of `generate` that are generation options, with their types
OPTION_FLAGS: dict[str, type] = {
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "num_return_sequences": int,
}


class UsageError(ValueError):
    """Flags that do not go together, or a file of options that cannot be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # has a parser of its own
        return _serve(arguments[1:])
    args = make_parser().parse_args(arguments)
    try:
        return args.command(args)
    except KeyboardInterrupt:
        return _say(f"stopped{_advice(args)}", 130)
    except (OutputError, BrokenError) as error:
        return _say(f"stopped: {error}{_advice(args)}", 1)
    except (ValueError, TypeError, OSError, MemoryError, torch.OutOfMemoryError, NativeUnavailable) as error:
        return _say(f"error: {error}", 2)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lfm2-cb", description="Continuous batching for LFM2.")
    commands = parser.add_subparsers(required=True, metavar="{generate,bench,info,serve}")
    _add_generate(commands.add_parser("generate", help="answer the prompts of a file; resumable at any instant"))
    _add_bench(commands.add_parser("bench", help="measure throughput and latency on ragged random prompts"))
    _add_info(commands.add_parser("info", help="what a model is, how it would run, and what memory it takes"))
    commands.add_parser("serve", help="an OpenAI-compatible server (needs an extra)", add_help=False)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument
    add("--input", required=True, help='JSONL, .parquet, a dataset\'s folder or id; "-": JSONL on stdin')
    add("--output", required=True, help='JSONL; "-": stdout, without resuming')
    add("--split", help="of a dataset")
    add("--column", help='of the prompts (text, chats or token ids); default: "prompt" or "messages"')
    add("--keep", nargs="+", default=[], metavar="COLUMN", help="columns carried over into the output")
    add("--ordered", action="store_true", help="write in the input's order; default: as rows complete")
    add("--overwrite", action="store_true", help="remove what is there, and start anew")
    add("--retry-errors", action="store_true", help="run the rows in the errors file again")
    add("--quiet", action="store_true", help="no progress bar")
    add("--generation-config", metavar="FILE", help="a generation_config.json; flags go before it")
    add("--do-sample", action=argparse.BooleanOptionalAction, default=None)
    add("--seed", type=int, default=0, help="of sampling, with each row's number (default 0)")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end an answer")
    for name, kind in OPTION_FLAGS.items():
        add(f"--{name.replace('_', '-')}", type=kind)
    add("--set", nargs="+", default=[], metavar="NAME=JSON", help="any other generation option")
    parser.set_defaults(command=_generate)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=96, help="median; lengths are ragged")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of every prompt")
    parser.add_argument("--stock", action="store_true", help="also stock generate(), in static batches of 16")
    parser.set_defaults(command=_bench)


def _add_info(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.set_defaults(command=_info)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder or id of an LFM2 checkpoint")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own (default)")
    add("--weights", choices=list(WEIGHTS), help="store and stream them in so few bits; default: as the checkpoint is")
    add("--kernels", default="auto", choices=list(KERNELS), help="auto: native on a CPU with a C++ compiler")
    cache_dtypes = [name for name in CACHE_DTYPES if name]
    add(
        "--cache-dtype",
        choices=cache_dtypes,
        help="store K/V in 8 bits, for nearly twice the tokens; default: as it is",
    )
    add("--device", help='"cpu", "cuda", ...; default: CUDA where there is one')
    add("--cache-memory", default="2GiB")
    add("--max-batch-tokens", type=int, default=2048)
    add("--max-step-seconds", type=float, help="how long answers may wait while prompts are prefilled")
    add("--max-sequences", type=int, default=256)
    add("--block-size", type=int, default=64)
    add("--no-prefix-caching", action="store_true")
    add("--policy", default="fcfs", help=f"who runs next: {', '.join(POLICIES)}")
    add("--drafting", default="none", choices=["auto", "none"], help="guess tokens by prompt lookup where it pays")
    add("--allow-pickle", action="store_true", help="also load *.bin weights, which can hold code")
    add("--trust-remote-code", action="store_true", help="run the code of a checkpoint's own tokenizer")


def _generate(args: argparse.Namespace) -> int:
    if clash := sorted({*args.keep} & {*RECORD_FIELDS}):
        raise UsageError(f"--keep {' '.join(clash)}: the output has fields of that name")
    _check_output(args)
    options = _options(args)
    source = open_source(args.input, args.split, args.column, args.keep)
    to_pipe = args.output == "-"
    if to_pipe and (args.overwrite or args.retry_errors):
        raise UsageError("--overwrite and --retry-errors go with an output file")
    config = None if args.generation_config is None else _generation_config(args.generation_config)
    named = ("model", "weights", "cache_dtype", "input", "column", "keep", "ordered")
    record = {
        **{name: getattr(args, name) for name in named},
        **{"dtype": args.dtype, "model_files": describe_files(args.model), "input_identity": source.identity},
        **{"options": options, "generation_config": None if config is None else config.to_dict()},
    }
    if args.quiet:
        disable_progress_bar()
    with _make_generator(args) as generator:
        resolved = generator.resolve(config, options)
        refuse(resolved, "lfm2-cb generate")
        job = Job(generator, resolved, args.column, args.keep, args.ordered)
        files = PipeFiles(1) if to_pipe else JobFiles(Path(args.output), record, args.overwrite, args.retry_errors)
        num_before = len(files.done)
        try:
            summary = job.run(source, files, progress_bar=not args.quiet)
        finally:
            files.close()
    rate = summary.num_output_tokens / max(summary.seconds, 1e-9)
    before = f" ({num_before:,} were done before)" if num_before else ""
    errors = f"; {files.num_errors:,} rows could not be run" if files.num_errors else ""
    where = f": {files.errors}" if errors and isinstance(files, JobFiles) else ""
    tokens = f"{summary.num_output_tokens:,} tokens in {summary.seconds:,.1f} s, {rate:,.0f} tok/s"
    return _say(f"{summary.num_rows:,} rows{before}, {tokens}{errors}{where}", 0)


def _check_output(args: argparse.Namespace) -> None:
    """Raises: UsageError: it is the input, or has nowhere to be."""
    if args.output == "-":
        return
    output = Path(args.output)
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}")
    if output.suffix not in (".jsonl", ".ndjson"):
        raise UsageError(f"{output}: the output is JSON lines; give it a name that ends in .jsonl")
    for path in (output, output.with_suffix(".errors.jsonl"), output.with_suffix(".job.json")):
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is there, and no file")
        if path.exists() and os.path.exists(args.input) and path.samefile(args.input):
            raise UsageError(f"{path} is the input")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Generation options out of the flags. Raises: UsageError."""
    options: dict[str, Any] = {"seed": args.seed}
    options |= {name: getattr(args, name) for name in OPTION_FLAGS if getattr(args, name) is not None}
    if args.do_sample is not None:
        options["do_sample"] = args.do_sample
    if args.stop:
        options["stop_strings"] = args.stop
    for assignment in args.set:
        name, equals, value = assignment.partition("=")
        if not equals or name in options:
            raise UsageError(f"--set {assignment}: it takes NAME=JSON, and no name twice")
        try:
            options[name] = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {assignment}: {value!r} is not JSON: {error}") from error
    return options


def _generation_config(path: str) -> GenerationConfig:
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no object")
    return GenerationConfig.from_dict(data)


def _make_generator(args: argparse.Namespace) -> ContinuousBatchingGenerator:
    model = load_model(args.model, args.dtype, args.allow_pickle, args.weights)
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    try:
        model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:  # torch built without it, or no such device
        raise UsageError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    return ContinuousBatchingGenerator(
        model.eval(),
        tokenizer,
        max_batch_tokens=args.max_batch_tokens,
        max_sequences=args.max_sequences,
        cache_memory=args.cache_memory,
        block_size=args.block_size,
        prefix_caching=not args.no_prefix_caching,
        policy=args.policy,
        drafting=args.drafting,
        kernels=args.kernels,
        cache_dtype=args.cache_dtype,
        max_step_seconds=args.max_step_seconds,
    )


def _bench(args: argparse.Namespace) -> int:
    with _make_generator(args) as generator:
        print(bench(generator, args.prompts, args.prompt_tokens, args.max_new_tokens, args.stock))
    return 0


def _info(args: argparse.Namespace) -> int:
    with _make_generator(args) as generator:
        print(describe(generator))
    return 0


def _serve(arguments: Sequence[str]) -> int:
    name = "lfm2_cb.integrations.serve"
    try:
        server = importlib.import_module(name)
    except ImportError as error:
        return _say(f"error: lfm2-cb serve needs the extra: pip install 'lfm2-cb[serve]' ({error})", 2)
    parser = argparse.ArgumentParser("lfm2-cb serve", description="An OpenAI-compatible server.")
    server.add_serve_arguments(parser)
    server.main(parser.parse_args(arguments))
    return 0


def _advice(args: argparse.Namespace) -> str:
    return "; the same command goes on from here" if getattr(args, "output", "-") != "-" else ""


def _say(message: str, status: int) -> int:
    """One line to stderr, if anybody reads it; returns `status`."""
    try:
        print(f"lfm2-cb: {message}", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # or the interpreter complains once more at its exit
    return status


__all__ = ["InputError", "UsageError", "main", "make_parser"]
