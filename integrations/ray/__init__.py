"""Ray Data: an actor that keeps an engine alive between batches, and a pipeline from Parquet to Parquet."""

from .parquet import generate_parquet
from .predictor import Lfm2CbPredictor

__all__ = ["Lfm2CbPredictor", "generate_parquet"]
