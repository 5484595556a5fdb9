"""python -m lfm2_cb.integrations.ray MODEL IN.parquet OUT_FOLDER --actors 2 --max-new-tokens 64"""

import argparse
import json
import math
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from lfm2_cb.integrations.ray import generate_parquet

from lfm2_cb.engine.config import EngineConfig


def main() -> int:
    parser = argparse.ArgumentParser(
        description=generate_parquet.__doc__.splitlines()[0] if generate_parquet.__doc__ else None
    )
    parser.add_argument("model")
    parser.add_argument("source", help="Parquet file or folder with a column of prompts")
    parser.add_argument("target", help="folder for the rows with their answers")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--cpus-per-actor", type=float, default=1)
    parser.add_argument("--gpus-per-actor", type=float, default=0)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--do-sample", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cache-memory", default=EngineConfig.cache_memory, help="of each actor's engine")
    parser.add_argument("--address", help="of a running cluster; without, one is started here")
    args = parser.parse_args()
    if args.address is None:  # one CPU more than the actors take, for reading and writing
        ray.init(num_cpus=math.ceil(args.actors * args.cpus_per_actor) + 1, include_dashboard=False)
    else:
        ray.init(address=args.address)
    generation = {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample, "seed": args.seed}
    report = generate_parquet(
        args.model,
        args.source,
        args.target,
        num_actors=args.actors,
        batch_size=args.batch_size,
        num_cpus=args.cpus_per_actor,
        num_gpus=args.gpus_per_actor,
        prompt_column=args.prompt_column,
        generation_kwargs=generation,
        generator_kwargs={"cache_memory": args.cache_memory},
    )
    print(json.dumps(report))
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
