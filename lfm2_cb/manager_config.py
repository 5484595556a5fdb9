"""The path that `Lfm2CbBatchingConfig` had: now `lfm2_cb.Lfm2CbBatchingConfig`."""

from .hf.manager_config import Lfm2CbBatchingConfig

__all__ = ["Lfm2CbBatchingConfig"]
