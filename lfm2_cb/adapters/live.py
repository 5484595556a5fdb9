"""Stock LFM2 models in memory whose layers PEFT has wrapped: finds the stock model beneath, and its adapters.

The model is inside a `PeftModel`, or bare, as `generate_batch` of a `PeftModel` passes it and stock's `load_adapter`
leaves it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Lfm2ForCausalLM, Lfm2MoeForCausalLM, PreTrainedModel

from .adapter import PREFIX
from .peft_config import AdapterError
from .sources import Tensors

#: where PEFT's wrappers keep the layer that they stand for
INNER = ("base_layer", "original_module")


def is_peft(model: Any) -> bool:
    """Whether it is a `PeftModel`, or a stock LFM2 that PEFT has put layers into. (Without peft imported, there is
    none.)"""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    is_stock = type(model) in (Lfm2ForCausalLM, Lfm2MoeForCausalLM)
    return isinstance(model, peft.PeftModel) or (is_stock and bool(_tuned_layers(model)))


def wrapped_stock(model: Any) -> PreTrainedModel:
    """The stock model that has PEFT's layers in it. Raises: TypeError: it is no stock LFM2."""
    base = model.get_base_model() if isinstance(model, sys.modules["peft"].PeftModel) else model
    if not isinstance(base, (Lfm2ForCausalLM, Lfm2MoeForCausalLM)):
        raise TypeError(f"lfm2_cb runs LFM2 models, got a PeftModel over {type(base).__name__}")
    return base


def _tuned_layers(model: nn.Module) -> list[Any]:
    kind = _layer_kind()
    return [module for module in model.modules() if isinstance(module, kind)]


def _layer_kind() -> type:
    """The base class of PEFT's wrappers of layers."""
    return sys.modules["peft"].tuners.tuners_utils.BaseTunerLayer


def stock_within(model: Any) -> PreTrainedModel:
    """A stock model of the base's own parameters, without PEFT's layers; the parameters are shared.

    Raises: AdapterError: an adapter is merged into them. TypeError: the base is no stock LFM2.
    """
    base = wrapped_stock(model)
    merge_check(base)()
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


def merge_check(model: Any) -> Callable[[], None]:
    """A function that raises AdapterError while an adapter is merged into the model's weights, which the base shares:
    requests on the base would get the adapter, and those with the adapter would get it twice. Keeps nothing alive."""
    base = weakref.ref(wrapped_stock(model))

    def check() -> None:
        for name, layer in _named_layers(base()):
            if layer.merged_adapters:
                message = f"adapter {layer.merged_adapters[0]!r} is merged into {name}: call unmerge_adapter()"
                raise AdapterError(message)

    return check


def _named_layers(module: nn.Module | None, name: str = "") -> Iterator[tuple[str, Any]]:
    """PEFT's wrappers within a module, and their names. Adapters' own modules are skipped: most modules are theirs."""
    if module is None:
        return
    wraps = isinstance(module, _layer_kind())
    if wraps:
        yield name, module
    for leaf, child in module._modules.items():
        if not wraps or leaf in INNER:
            yield from _named_layers(child, f"{name}.{leaf}" if name else leaf)


def _inner(base: nn.Module, name: str) -> nn.Module:
    """The base's module of a name, below whatever wraps it."""
    module = base.get_submodule(name)
    while kept := next((leaf for leaf in INNER if leaf in module._modules), None):
        module = module.get_submodule(kept)
    return module


def adapters_of(model: Any) -> dict[str, Tensors]:
    """The current adapters of such a model by their names: copies."""
    peft = sys.modules["peft"]
    return {
        name: Tensors(
            config.to_dict(),
            {PREFIX + key.removeprefix(PREFIX): tensor for key, tensor in _state(peft, model, name).items()},
        )
        for name, config in model.peft_config.items()
    }


def _state(peft: Any, model: Any, name: str) -> dict[str, torch.Tensor]:
    return peft.get_peft_model_state_dict(model, adapter_name=name)


def active_adapter(model: Any) -> str | None:
    """The adapter that the model's own `generate()` runs with; None: the base.

    Raises: AdapterError: several, whose changes PEFT adds up.
    """
    layers = _tuned_layers(model)
    if not layers or layers[0].disable_adapters:
        return None
    names = layers[0].active_adapters
    if len(names) > 1:
        raise AdapterError(f"adapters {', '.join(map(repr, names))} are active together: choose one by adapter=")
    return names[0] if names else None
