"""A live `PeftModel` over stock LFM2: the stock model that it wraps, and its adapters."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import Lfm2ForCausalLM, Lfm2MoeForCausalLM, PreTrainedModel

from .peft_config import AdapterError
from .sources import Tensors

#: where PEFT's wrappers keep the layer that they stand for
INNER = ("base_layer", "original_module")


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`. (Nobody can hand us one without having imported peft.)"""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def stock_within(model: Any) -> PreTrainedModel:
    """A stock model of the base's own parameters, without PEFT's layers; the parameters are shared.

    Raises: AdapterError: an adapter is merged into them. TypeError: the base is no stock LFM2.
    """
    base = model.get_base_model()
    if not isinstance(base, (Lfm2ForCausalLM, Lfm2MoeForCausalLM)):
        raise TypeError(f"lfm2_cb runs LFM2 models, got a PeftModel over {type(base).__name__}")
    for name, module in base.named_modules():
        if getattr(module, "merged_adapters", None):
            raise AdapterError(f"adapter {module.merged_adapters[0]!r} is merged into {name}: call unmerge_adapter()")
    with torch.device("meta"):
        stock = type(base)(base.config)
    for name, module in stock.named_modules():
        inner = _inner(base, name)
        for leaf in module._parameters:
            if module._parameters[leaf] is not None:
                module._parameters[leaf] = inner._parameters[leaf]
        for leaf in module._buffers:
            module._buffers[leaf] = inner._buffers[leaf]
        for leaf in ("variance_epsilon", "scaling", "attention_scaling"):
            if leaf in inner.__dict__:
                setattr(module, leaf, inner.__dict__[leaf])
    stock.generation_config = base.generation_config
    return stock.train(base.training)


def _inner(base: nn.Module, name: str) -> nn.Module:
    """The base's module of a name, below whatever wraps it."""
    module = base.get_submodule(name)
    while kept := next((leaf for leaf in INNER if leaf in module._modules), None):
        module = module.get_submodule(kept)
    return module


def adapters_of(model: Any) -> dict[str, Tensors]:
    """The adapters of a PeftModel by their names, as they are now: copied."""
    peft = sys.modules["peft"]
    return {
        name: Tensors(config.to_dict(), peft.get_peft_model_state_dict(model, adapter_name=name))
        for name, config in model.peft_config.items()
    }
