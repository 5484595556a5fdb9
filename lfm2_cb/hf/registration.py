"""Every change to transformers' registries, so that one file follows a transformers release.

`register()` runs at import and only adds: the `lfm2_cb` model type, its weight conversions, and the pipeline class
that steps aside unless it is asked for. `enable()` is what changes things for others, and `disable()` undoes it.
"""

from __future__ import annotations

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Lfm2Config
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from ..model.configuration import Lfm2CbConfig
from ..model.conversion import weight_conversions
from ..model.modeling import Lfm2CbForCausalLM, Lfm2CbModel, Lfm2CbMoeForCausalLM, Lfm2CbMoeModel, StockCheckpoints
from ..model.quantization import QUANT_METHOD, Lfm2CbQuantizationConfig, Lfm2CbQuantizer
from . import methods

#: the methods of transformers' `ContinuousMixin`, which `hf/methods.py` has for our models
CONTINUOUS_BATCHING = (
    "init_continuous_batching",
    "destroy_cached_continuous_batching_manager",
    "continuous_batching_context_manager",
    "generate_batch",
)


class Lfm2CbForLfm2Checkpoints(StockCheckpoints, Lfm2CbForCausalLM):
    """Our model under the stock configuration: what `enable()` puts in the place of `Lfm2ForCausalLM`.

    The Auto classes require a model whose `config_class` is the registered one. Saves as a stock checkpoint.
    """

    config_class = Lfm2Config
    stock_class = "Lfm2ForCausalLM"


#: stock class → ours, under the stock configuration, which `enable()` puts in its place
ENABLED = {
    transformers.Lfm2ForCausalLM: Lfm2CbForLfm2Checkpoints,
    transformers.Lfm2MoeForCausalLM: Lfm2CbMoeForCausalLM,
}


def register() -> None:
    """Add ours beside what transformers has. Called once at import; calling it again does nothing new."""
    AutoConfig.register(Lfm2CbConfig.model_type, Lfm2CbConfig, exist_ok=True)
    AutoModel.register(Lfm2CbConfig, Lfm2CbModel, exist_ok=True)
    AutoModelForCausalLM.register(Lfm2CbConfig, Lfm2CbForCausalLM, exist_ok=True)
    # Under the name of the class that holds the layers: whatever wraps it is converted, and no stock class ever is.
    # (A stock model that reads one of our saves takes over our model type, so that would not tell them apart.)
    for model_class in (Lfm2CbModel, Lfm2CbMoeModel):
        register_checkpoint_conversion_mapping(model_class.__name__, weight_conversions(), overwrite=True)
    # (transformers' own decorators for this raise at the second call.)
    AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = Lfm2CbQuantizationConfig
    AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = Lfm2CbQuantizer
    # A dotted string is resolved only when a text-generation pipeline is made; the class returns the stock pipeline
    # unless generator= is given. (`register_pipeline` would leave a mark in every saved config.)
    PIPELINE_REGISTRY.supported_tasks["text-generation"]["impl"] = "lfm2_cb.hf.pipeline.ContinuousBatchingPipeline"
    for name in CONTINUOUS_BATCHING:
        setattr(Lfm2CbForCausalLM, name, getattr(methods, name))


def enable() -> None:
    """Make stock `lfm2` and `lfm2_moe` checkpoints resolve to our classes: Auto classes, `pipeline(model=path)`,
    `transformers serve`. Live stock LFM2s get the continuous-batching methods too (`generate_batch`, ...), over their
    own weights.

    Process-wide, and undone by `disable()`. Calling it twice is the same as once.
    """
    for stock, ours in ENABLED.items():
        AutoModelForCausalLM.register(ours.config_class, ours, exist_ok=True)
        setattr(transformers, stock.__name__, ours)  # what `transformers serve` looks up
        for name in CONTINUOUS_BATCHING:
            setattr(stock, name, getattr(methods, name))


def disable() -> None:
    """Put everything that `enable()` changed back. Models already loaded stay as they are."""
    for stock, ours in ENABLED.items():
        AutoModelForCausalLM._model_mapping._extra_content.pop(ours.config_class, None)
        setattr(transformers, stock.__name__, stock)
        for name in CONTINUOUS_BATCHING:
            if name in vars(stock):
                delattr(stock, name)  # what it inherits shows again
