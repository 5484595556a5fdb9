"""Every touch of transformers' registries and private names, so that one file follows a transformers release.

`register()` runs at import and only adds: the `lfm2_cb` model type, its weight conversions, and the pipeline class
that steps aside unless it is asked for. `enable()` is what changes things for others, and `disable()` undoes it.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, Lfm2Config, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.pipelines import PIPELINE_REGISTRY

from .model.configuration import Lfm2CbConfig
from .model.conversion import weight_conversions
from .model.modeling import Lfm2CbForCausalLM, Lfm2CbModel

_stock_lfm2_class = transformers.Lfm2ForCausalLM


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
    for name in (Lfm2CbConfig.model_type, Lfm2CbForLfm2Checkpoints.__name__):
        register_checkpoint_conversion_mapping(name, weight_conversions(), overwrite=True)
    # A dotted string is resolved only when a text-generation pipeline is made; the class returns the stock pipeline
    # unless generator= is given. (`register_pipeline` would leave a mark in every saved config.)
    PIPELINE_REGISTRY.supported_tasks["text-generation"]["impl"] = "lfm2_cb.pipeline.ContinuousBatchingPipeline"


def enable() -> None:
    """Make stock `lfm2` checkpoints resolve to our class: Auto classes, `pipeline(model=path)`, `transformers serve`.

    Process-wide, and undone by `disable()`. Calling it twice is the same as once.
    """
    AutoModelForCausalLM.register(Lfm2Config, Lfm2CbForLfm2Checkpoints, exist_ok=True)
    transformers.Lfm2ForCausalLM = Lfm2CbForLfm2Checkpoints  # what `transformers serve` looks up


def disable() -> None:
    """Put everything that `enable()` changed back. Models already loaded stay as they are."""
    AutoModelForCausalLM._model_mapping._extra_content.pop(Lfm2Config, None)
    transformers.Lfm2ForCausalLM = _stock_lfm2_class


def resolve_generation_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, **kwargs: Any
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The `GenerationConfig` that stock `generate()` would use (model and global defaults applied).

    Returns: the config, and the keyword arguments that are not generation options.
    """
    return model._prepare_generation_config(generation_config, **kwargs)
