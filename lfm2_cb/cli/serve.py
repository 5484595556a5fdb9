"""`lfm2-cb serve`: its flags, and starting the server (which needs the `serve` extra)."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

from ..engine.config import EngineConfig
from ..hf.manager_config import Lfm2CbBatchingConfig, check_config
from .flags import (
    UsageError,
    adapters_of,
    add_adapter_flags,
    add_engine_flags,
    add_model_flags,
    engine_options,
    load_from,
    positive,
)

#: where the key is taken from if it is not on the command line, which other users of a machine can read
API_KEY_VARIABLE = "LFM2_CB_API_KEY"

#: earlier names of the engine's flags
_RENAMED = {"--page-size": "block_size", "--max-requests-per-batch": "max_sequences"}


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve` to a parser."""
    add_model_flags(parser)
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any that is free (default: %(default)s)")
    add("--name", help="what clients call the model (default: its path)")
    add("--api-key", help=f"asked of clients (default: ${API_KEY_VARIABLE}, if set)")
    add("--cors-origin", nargs="+", default=[], help='origins whose web pages may ask; "*": all (default: none)')
    add("--max-queue", type=int, default=256, help="sequences that may wait (default: %(default)s)")
    add("--max-request-bytes", type=int, default=4 * 2**20, help="size limit of a request (default: %(default)s)")
    add("--access-log", action=argparse.BooleanOptionalAction, default=True, help="a line a request on stderr")
    add(
        "--shutdown-seconds",
        type=int,
        default=30,
        help="that running requests have to finish after SIGTERM or Ctrl-C (default: %(default)s)",
    )
    add = parser.add_argument_group("fleet (needs the extra ray)").add_argument
    add(
        "--replicas", type=_replicas, default=1, help='engines behind one address, by Ray Serve; "2:8": as many as pay'
    )
    add("--address", help='of a Ray cluster to run on, as "auto" or "ray://HOST:10001" (default: one of this machine)')
    add("--cpus-per-replica", type=float, default=1, help="cores, and threads, of each (default: %(default)s)")
    add("--gpus-per-replica", type=float, default=0, help="of each (default: %(default)s)")
    add_adapter_flags(parser, "LoRA adapters; a request's model=NAME picks one")
    parser.add_argument(
        "--adapter-endpoints",
        action="store_true",
        help="let clients load and unload adapters, from any folder here (POST /v1/load_lora_adapter, as in vLLM)",
    )
    add_engine_flags(parser, EngineConfig.for_server())
    sizes = parser.add_argument_group("cache size, instead of --cache-memory").add_mutually_exclusive_group()
    add = sizes.add_argument
    add("--num-blocks", type=int, help="as so many blocks")
    add("--max-memory-percent", type=float, metavar="SHARE", help="as a share of the free memory, 0 to 1")
    for flag, name in _RENAMED.items():
        parser.add_argument(flag, dest=name, type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def serve(args: argparse.Namespace) -> int:
    """Serve by the parsed flags, until interrupted. Returns: the exit status.

    Raises: ValueError, TypeError, OSError: what is wrong with them; UsageError: the extra is missing.
    """
    try:
        server = importlib.import_module("lfm2_cb.integrations.serve")
    except ImportError as error:
        raise UsageError(f"lfm2-cb serve needs the extra: pip install 'lfm2-cb[serve]' ({error})") from error
    sizes = {name: getattr(args, name) for name in ("num_blocks", "max_memory_percent")}
    adapters = adapters_of(args)
    if args.replicas != 1 or args.address is not None:
        if args.adapter_endpoints:
            message = "a fleet has the adapters that it is started with (--adapter NAME=PATH)"
            raise UsageError(f"--adapter-endpoints cannot be combined with --replicas or --address: {message}")
        return _serve_fleet(args, sizes, adapters)
    config = Lfm2CbBatchingConfig.from_engine(EngineConfig(**engine_options(args)), **sizes)
    check_config(config)  # this and the address first, before the model is loaded
    with server.bind(args.host, args.port) as listener:
        model, tokenizer = load_from(args)
        server.serve_on(
            listener,
            model,
            tokenizer,
            **_server_options(args),
            continuous_batching_config=config,
            adapters=adapters,
            adapter_endpoints=args.adapter_endpoints,
        )
    return 0


def _server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a server and a fleet of servers share."""
    return {
        "name": args.name or args.model,
        "api_key": args.api_key or os.environ.get(API_KEY_VARIABLE),
        "cors_origins": args.cors_origin,
        "max_queue": args.max_queue,
        "max_request_bytes": args.max_request_bytes,
        "log_requests": args.access_log,
        "shutdown_seconds": args.shutdown_seconds,
    }


def _serve_fleet(args: argparse.Namespace, sizes: dict[str, Any], adapters: dict[str, str]) -> int:
    try:
        fleet = importlib.import_module("lfm2_cb.integrations.ray.serve")
    except ImportError as error:
        message = f"--replicas and --address need an extra: pip install 'lfm2-cb[ray,serve]' ({error})"
        raise UsageError(message) from error
    fleet.serve_fleet(
        args.model,
        host=args.host,
        port=args.port,
        address=args.address,
        replicas=args.replicas,
        cpus_per_replica=args.cpus_per_replica,
        gpus_per_replica=args.gpus_per_replica,
        **_server_options(args),
        dtype=args.dtype,
        weights=args.weights,
        device=args.device,
        allow_pickle=args.allow_pickle,
        trust_remote_code=args.trust_remote_code,
        adapters=adapters,
        **sizes,
        **engine_options(args),
    )
    return 0


def _replicas(text: str) -> int | tuple[int, int]:
    """A flag's type: a number, or the fewest and the most. Raises: argparse.ArgumentTypeError."""
    fewest, colon, most = text.partition(":")
    if not colon:
        return positive(text)
    if positive(fewest) > positive(most):
        raise argparse.ArgumentTypeError(f"must be MIN and MAX replicas, got {text!r}")
    return positive(fewest), positive(most)
