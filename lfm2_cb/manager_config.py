"""The former import path of `Lfm2CbBatchingConfig`: use `lfm2_cb.Lfm2CbBatchingConfig`."""

from .hf.manager_config import Lfm2CbBatchingConfig

__all__ = ["Lfm2CbBatchingConfig"]
