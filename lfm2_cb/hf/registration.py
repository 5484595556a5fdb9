"""Every change to transformers' registries, so that one file follows a transformers release.

`register()` runs at import and only adds: the `lfm2_cb` model type, its weight conversions, and the pipeline class
that steps aside unless it is asked for. `enable()` is what changes things for others, and `disable()` undoes it.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Lfm2Config
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..model.configuration import Lfm2CbConfig
from ..model.conversion import weight_conversions
from ..model.modeling import Lfm2CbForCausalLM, Lfm2CbModel
from ..model.quantization import QUANT_METHOD, Lfm2CbQuantizationConfig, Lfm2CbQuantizer
from . import methods

_stock_lfm2_class = transformers.Lfm2ForCausalLM

#: the methods of transformers' `ContinuousMixin`, which `hf/methods.py` has for our models
CONTINUOUS_BATCHING = (
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
    "continuous_batching_context_manager",
    "generate_batch",
)


class Lfm2CbForLfm2Checkpoints(Lfm2CbForCausalLM):
    """Our model under the stock configuration: what `enable()` puts in the place of `Lfm2ForCausalLM`.

    The Auto classes want a model whose `config_class` is the registered one. Saves as a stock checkpoint.
    """

    config_class = Lfm2Config

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; `config.json` names the stock class, so that anyone can load the result."""
        super().save_pretrained(*args, **kwargs)
        self.config.architectures = [_stock_lfm2_class.__name__]
        self.config.save_pretrained(args[0] if args else kwargs["save_directory"])


def register() -> None:
    """Add ours beside what transformers has. Called once at import; calling it again does nothing new."""
    AutoConfig.register(Lfm2CbConfig.model_type, Lfm2CbConfig, exist_ok=True)
    AutoModel.register(Lfm2CbConfig, Lfm2CbModel, exist_ok=True)
    AutoModelForCausalLM.register(Lfm2CbConfig, Lfm2CbForCausalLM, exist_ok=True)
    # Under the name of the class that holds the layers: whatever wraps it is converted, and no stock class ever is.
    # (A stock model that reads one of our saves takes over our model type, so that would not tell them apart.)
    register_checkpoint_conversion_mapping(Lfm2CbModel.__name__, weight_conversions(), overwrite=True)
    # (transformers' own decorators for this raise at the second call.)
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = Lfm2CbQuantizationConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = Lfm2CbQuantizer
    # A dotted string is resolved only when a text-generation pipeline is made; the class returns the stock pipeline
    # unless generator= is given. (`register_pipeline` would leave a mark in every saved config.)
    PIPELINE_REGISTRY.supported_tasks["text-generation"]["impl"] = "lfm2_cb.hf.pipeline.ContinuousBatchingPipeline"
    for name in CONTINUOUS_BATCHING:
        setattr(Lfm2CbForCausalLM, name, getattr(methods, name))


def enable() -> None:
    """Make stock `lfm2` checkpoints resolve to our class: Auto classes, `pipeline(model=path)`, `transformers serve`.
    Live stock LFM2s get the continuous-batching methods too (`generate_batch`, ...), over their own weights.

    Process-wide, and undone by `disable()`. Calling it twice is the same as once.
    """
    AutoModelForCausalLM.register(Lfm2Config, Lfm2CbForLfm2Checkpoints, exist_ok=True)
    transformers.Lfm2ForCausalLM = Lfm2CbForLfm2Checkpoints  # what `transformers serve` looks up
    for name in CONTINUOUS_BATCHING:
        setattr(_stock_lfm2_class, name, getattr(methods, name))


def disable() -> None:
    """Put everything that `enable()` changed back. Models already loaded stay as they are."""
    AutoModelForCausalLM._model_mapping._extra_content.pop(Lfm2Config, None)
    transformers.Lfm2ForCausalLM = _stock_lfm2_class
    for name in CONTINUOUS_BATCHING:
        if name in vars(_stock_lfm2_class):
            delattr(_stock_lfm2_class, name)  # what it inherits shows again
