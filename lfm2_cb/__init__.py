"""Continuous batching for LFM2 inside transformers."""

from .assets import demo_model_path
from .generator import ContinuousBatchingGenerator
from .hf.manager_config import Lfm2CbBatchingConfig
from .hf.registration import disable, enable, register
from .loading import default_dtype, load_model
from .model.configuration import Lfm2CbConfig
from .model.modeling import Lfm2CbForCausalLM, Lfm2CbModel, Lfm2CbMoeForCausalLM
from .requests.outputs import RequestEvent, RequestOutput
from .requests.structured import Structured
from .requests.tool_calls import ToolCall, parse_tool_calls

__version__ = "0.2.0.dev0"

register()

__all__ = [
    "ContinuousBatchingGenerator",
    "Lfm2CbBatchingConfig",
    "Lfm2CbConfig",
    "Lfm2CbForCausalLM",
    "Lfm2CbModel",
    "Lfm2CbMoeForCausalLM",
    "RequestEvent",
    "RequestOutput",
    "Structured",
    "ToolCall",
    "__version__",
    "default_dtype",
    "demo_model_path",
    "disable",
    "enable",
    "load_model",
    "parse_tool_calls",
]
