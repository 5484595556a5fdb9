"""Ray Data: an actor that keeps an engine alive between batches, and a pipeline from Parquet to Parquet.

Ray Serve: `serve.build_deployment`, a fleet of engines behind one address.
"""

from typing import Any

__all__ = ["Lfm2CbPredictor", "generate_parquet"]


def __getattr__(name: str) -> Any:
    """The replicas of a fleet start without Ray Data, which takes seconds to import."""
    if name == "Lfm2CbPredictor":
        from .predictor import Lfm2CbPredictor

        return Lfm2CbPredictor
    if name == "generate_parquet":
        from .parquet import generate_parquet

        return generate_parquet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
