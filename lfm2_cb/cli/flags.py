"""Flags that the commands share: for the model, the engine (derived from `EngineConfig`) and generation."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..engine.config import EngineConfig
from ..loading import DTYPES, load_model, load_tokenizer, parse_device
from ..model.modeling import Lfm2CbForCausalLM
from ..model.quantization import WEIGHTS
from ..requests.options import CallOptions

#: generation options that have a flag, and their types; `--set` takes the others
GENERATION_FLAGS: dict[str, type] = {
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "num_return_sequences": int,
}


#: arguments of `generate()` that `--set` refuses: objects, and those that return more than text
NO_PLACE = {field.name for field in dataclasses.fields(CallOptions)} - {
    "seed",
    "priority",
    "use_prefix_cache",
    "sparse_prefill",
    "chunks",
    "recompute",
}
NO_PLACE |= {"generation_config", "return_dict_in_generate", "output_scores", "output_logits"}


class UsageError(ValueError):
    """Flags that are not understood or do not go together, or a file of options that cannot be read."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else does. Raises: UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists what there is)")


def positive(text: str) -> int:
    """A flag's type: 1 or more. Raises: argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, 1 or more, got {text!r}")
    return int(text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The model, and how it is loaded: `load_from(args)` does it."""
    add = parser.add_argument
    add("model", help="folder or id of an LFM2 checkpoint")
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: the checkpoint's own (default: auto)")
    add("--device", help='"cpu", "cuda", ... (default: CUDA where there is one)')
    add("--weights", choices=list(WEIGHTS), help="store the weights in 8 or 4 bits (default: unchanged)")
    add("--allow-pickle", action="store_true", help="also load *.bin weights, which can hold code")
    add("--trust-remote-code", action="store_true", help="run the code of a checkpoint's own tokenizer")


def add_adapter_flags(parser: argparse.ArgumentParser, help: str) -> None:
    """LoRA adapters by name: `adapters_of(args)` reads them."""
    parser.add_argument("--adapter", nargs="+", action="extend", default=[], metavar="NAME=PATH", help=help)


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Name → folder. Raises: UsageError."""
    adapters: dict[str, str] = {}
    for assignment in args.adapter:
        name, equals, path = assignment.partition("=")
        if not (name and equals and path) or name in adapters:
            raise UsageError(f"--adapter {assignment}: give NAME=PATH, each name once")
        adapters[name] = path
    return adapters


def load_from(args: argparse.Namespace) -> tuple[Lfm2CbForCausalLM, PreTrainedTokenizerBase]:
    """Model, on its device, and tokenizer. Raises: UsageError; what `load_model` and `load_tokenizer` raise."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parse_device(device)
    except ValueError as error:
        raise UsageError(f"--{str(error).replace(repr(device), device, 1)}") from error
    model = load_model(args.model, args.dtype, args.allow_pickle, args.weights, device)
    return model.eval(), load_tokenizer(args.model, args.trust_remote_code)


def add_engine_flags(parser: argparse.ArgumentParser, defaults: EngineConfig | None = None) -> None:
    """One flag for each option of the engine, with its default."""
    defaults = defaults or EngineConfig()
    group = parser.add_argument_group("engine")
    for option in dataclasses.fields(EngineConfig):
        kind, choices = option.metadata["type"], option.metadata["choices"]
        text, default = option.metadata["help"], getattr(defaults, option.name)
        if default is not None:
            text += f" (default: {default})"
        flag: dict[str, Any] = {"default": default, "help": text.replace("%", "%%")}
        if kind is bool:
            flag["action"] = argparse.BooleanOptionalAction
        else:
            flag |= {"type": kind, "choices": choices or None}
        group.add_argument(f"--{option.name.replace('_', '-')}", **flag)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `add_engine_flags` has parsed, by the names of `EngineConfig`. Raises: ValueError: a value out of range."""
    options = {option.name: getattr(args, option.name) for option in dataclasses.fields(EngineConfig)}
    EngineConfig(**options)
    return options


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Options of `generate()`, as flags or in a file."""
    add = parser.add_argument_group("generation").add_argument
    add("--generation-config", metavar="FILE", help="a generation_config.json; flags go before it")
    add("--do-sample", action=argparse.BooleanOptionalAction, default=None)
    add("--seed", type=int, default=0, help="of sampling, with each row's number (default: %(default)s)")
    add("--stop", nargs="+", metavar="TEXT", help="strings that end an answer")
    add("--json-schema", metavar="FILE", help="a JSON schema that every answer fits (needs the extra structured)")
    add("--chunks", metavar="TEXT", help="separator that ends each reusable segment of a prompt")
    add("--recompute", type=float, help="share of such segments' tokens that is recomputed, 0 to 1 (default: 0.15)")
    for name, kind in GENERATION_FLAGS.items():
        add(f"--{name.replace('_', '-')}", type=kind)
    add("--set", nargs="+", default=[], metavar="NAME=JSON", help="any other generation option")


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Generation options out of the flags. Raises: UsageError."""
    options: dict[str, Any] = {"seed": args.seed}
    options |= {name: getattr(args, name) for name in GENERATION_FLAGS if getattr(args, name) is not None}
    if args.do_sample is not None:
        options["do_sample"] = args.do_sample
    if args.stop:
        options["stop_strings"] = args.stop
    options |= {name: getattr(args, name) for name in ("chunks", "recompute") if getattr(args, name) is not None}
    if args.json_schema is not None:
        options["structured"] = _read_object(args.json_schema)
    for assignment in args.set:
        name, equals, value = assignment.partition("=")
        if not equals or name in options:
            raise UsageError(f"--set {assignment}: give NAME=JSON, each name once")
        if name in NO_PLACE:
            raise UsageError(f"--set {assignment}: {name} does not apply to an output file; leave it out")
        try:
            options[name] = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {assignment}: {value!r} is not JSON: {error}") from error
    return options


def generation_config(args: argparse.Namespace) -> GenerationConfig | None:
    """The file of `--generation-config`, if one is given. Raises: UsageError; OSError."""
    path = args.generation_config
    return None if path is None else GenerationConfig.from_dict(_read_object(path))


def _read_object(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises: UsageError; OSError."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data
