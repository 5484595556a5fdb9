"""`lfm2-cb serve`."""

from __future__ import annotations

import argparse
import os

#: where the key is taken from if it is not on the command line, which other users of a machine can read
API_KEY_VARIABLE = "LFM2_CB_API_KEY"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `main` to a parser."""
    parser.add_argument("model", help="path of an LFM2 checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--name", help="what clients call the model (default: its path)")
    parser.add_argument("--api-key", help=f"asked of clients (default: ${API_KEY_VARIABLE}, if set)")
    parser.add_argument("--max-queue", type=int, default=256, help="sequences that may wait (default: %(default)s)")
    parser.add_argument(
        "--max-request-bytes", type=int, default=4 * 2**20, help="size limit of a request (default: %(default)s)"
    )
    group = parser.add_argument_group("engine", "fields of transformers' ContinuousBatchingConfig, and ours")
    group.add_argument("--page-size", type=int, help="tokens a cache block")
    group.add_argument("--num-blocks", type=int, help="cache blocks")
    group.add_argument("--max-batch-tokens", type=int, help="tokens computed a step")
    group.add_argument("--max-requests-per-batch", type=int, help="sequences running at once")
    group.add_argument("--max-memory-percent", type=float, help="share of free memory for the cache, 0 to 1")
    group.add_argument("--weights", choices=["int8", "int4"], help="quantise while loading")
    group.add_argument("--kernels", choices=["auto", "native", "torch"])
    group.add_argument("--cache-dtype", choices=["int8"], help="store K/V in 8 bits")
    group.add_argument("--max-step-seconds", type=float, help="how long answers may wait while prompts are prefilled")


def main(args: argparse.Namespace) -> None:
    """Serve as the parsed arguments say, until interrupted."""
    from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig

    from .app import serve

    sizes = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_memory_percent")
    given = {name: getattr(args, name) for name in (*sizes, "kernels", "cache_dtype", "max_step_seconds")}
    serve(
        args.model,
        weights=args.weights,
        host=args.host,
        port=args.port,
        name=args.name,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE),
        max_queue=args.max_queue,
        max_request_bytes=args.max_request_bytes,
        continuous_batching_config=Lfm2CbBatchingConfig(**{name: v for name, v in given.items() if v is not None}),
    )
