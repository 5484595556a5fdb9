"""Parquet in, Parquet out, over any number of actors."""

from __future__ import annotations

from typing import Any

import pyarrow.dataset
import ray
import ray.data

from .predictor import Lfm2CbPredictor


def generate_parquet(
    model: str,
    source: str | list[str],
    target: str,
    *,
    num_actors: int = 1,
    batch_size: int = 1024,
    num_cpus: float = 1,
    num_gpus: float = 0,
    **predictor_kwargs: Any,
) -> dict[str, int]:
    """Generate for every row of `source`, and write the rows with their answers to the folder `target`.

    Args:
        model: checkpoint path, readable on every node.
        source: Parquet files or folders, read by Ray (so local, or any file system it knows).
        num_actors: copies of the model, one engine each, wherever the cluster has room.
        batch_size: rows an actor takes at a time; several times the engine's `max_sequences`.
        num_cpus, num_gpus: what each actor reserves. On CPU its threads too.
        predictor_kwargs: of `Lfm2CbPredictor`.
    Returns: "rows" written, "errors" among them, "tokens" generated. The order of the rows is Ray's.
    Raises: ValueError: the actors would take every CPU of the cluster's nodes, and Ray could then read nothing.
    """
    if not ray.is_initialized():
        ray.init()
    cpus = ray.cluster_resources().get("CPU", 0)
    if num_actors * num_cpus > cpus - 1:  # Ray would wait for ever, silently
        raise ValueError(
            f"{num_actors} actors of {num_cpus} CPUs leave none of the cluster's {cpus:g} for reading and writing"
        )
    dataset = ray.data.read_parquet(source)
    if num_actors > 1:  # a small file is one block, and a block goes to one actor
        dataset = dataset.repartition(target_num_rows_per_block=batch_size)
    answers = dataset.map_batches(
        Lfm2CbPredictor,
        fn_constructor_kwargs={"model": model, **predictor_kwargs},
        batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
    )
    answers.write_parquet(target)
    written = pyarrow.dataset.dataset(target, format="parquet").to_table(columns=["finish_reason", "num_tokens"])
    errors = written["finish_reason"].to_pylist().count("error")
    return {"rows": len(written), "errors": errors, "tokens": sum(written["num_tokens"].to_pylist())}
