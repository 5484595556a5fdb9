"""`lfm2-cb serve`: its flags, and the server that they ask for (which needs an extra)."""

from __future__ import annotations

import argparse
import importlib
import os

from ..engine.config import EngineConfig
from ..hf.manager_config import Lfm2CbBatchingConfig, check_config
from .flags import UsageError, add_engine_flags, add_model_flags, engine_options, load_from

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
    add_engine_flags(parser, EngineConfig.for_server())
    sizes = parser.add_argument_group("cache size, instead of --cache-memory").add_mutually_exclusive_group()
    add = sizes.add_argument
    add("--num-blocks", type=int, help="as so many blocks")
    add("--max-memory-percent", type=float, metavar="SHARE", help="as a share of the free memory, 0 to 1")
    for flag, name in _RENAMED.items():
        parser.add_argument(flag, dest=name, type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def serve(args: argparse.Namespace) -> int:
    """Serve as the parsed flags say, until interrupted. Returns: the exit status.

    Raises: ValueError, TypeError, OSError: what is wrong with them; UsageError: the extra is missing.
    """
    try:
        server = importlib.import_module("lfm2_cb.integrations.serve")
    except ImportError as error:
        raise UsageError(f"lfm2-cb serve needs the extra: pip install 'lfm2-cb[serve]' ({error})") from error
    sizes = {name: getattr(args, name) for name in ("num_blocks", "max_memory_percent")}
    config = Lfm2CbBatchingConfig.from_engine(EngineConfig(**engine_options(args)), **sizes)
    check_config(config)  # this and the address first: before a model is loaded for nothing
    with server.bind(args.host, args.port) as listener:
        model, tokenizer = load_from(args)
        server.serve_on(
            listener,
            model,
            tokenizer,
            name=args.name or args.model,
            api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
            cors_origins=args.cors_origin,
            max_queue=args.max_queue,
            max_request_bytes=args.max_request_bytes,
            log_requests=args.access_log,
            shutdown_seconds=args.shutdown_seconds,
            continuous_batching_config=config,
        )
    return 0
