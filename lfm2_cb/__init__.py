"""Continuous batching for LFM2 inside transformers."""

from .model.configuration import Lfm2CbConfig
from .model.modeling import Lfm2CbForCausalLM, Lfm2CbModel
from .registration import disable, enable, register

register()

__all__ = ["Lfm2CbConfig", "Lfm2CbForCausalLM", "Lfm2CbModel", "disable", "enable"]
