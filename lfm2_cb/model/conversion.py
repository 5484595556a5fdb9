"""Stock ↔ fused weights: q+k+v and w1+w3 each become one matrix, and a layer's experts two stacks (as in stock's own
model); everything else keeps its name.

Stock weights become ours in three ways, the first of which is reversible:
- checkpoints: `weight_conversions()`, which `from_pretrained` applies and `save_pretrained` reverses;
- state dicts: `fuse_stock_names` lets `load_state_dict` take the stock names;
- live models: `adopt()` takes over a stock instance's parameters without a second copy.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from ..ops.pointwise import RMSNorm
from .configuration import first_expert_layer
from .foreign_code import foreign_code
from .layers import FusedLinear

Ours = TypeVar("Ours", bound=PreTrainedModel)

#: fused parameter → the stock parameters it stacks along dim 0
FUSED = {
    "self_attn.qkv_proj.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "feed_forward.w13.weight": ["feed_forward.w1.weight", "feed_forward.w3.weight"],
}


class StackParts(Concatenate):
    """Stack stock matrices along dim 0; reverses to `SplitParts`, as the parts need not be equally tall."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__(dim)

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitParts()


class SplitParts(ConversionOps):
    """Undo `StackParts`, reading the heights from the `FusedLinear` that holds the matrix."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: PreTrainedModel,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        (tensors,) = input_dict.values()
        fused = tensors[0] if isinstance(tensors, list) else tensors
        stem, part = target_patterns[0].removesuffix(".weight").rpartition(".")[::2]
        holder = next(
            module
            for name, module in model.named_modules()
            if isinstance(module, FusedLinear) and part in module.parts and name.rpartition(".")[0].endswith(stem)
        )
        return {
            target: piece.contiguous()
            for target, piece in zip(target_patterns, fused.split(list(holder.parts.values())), strict=True)
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return StackParts()


def weight_conversions() -> list[WeightConverter]:
    """The conversions that `from_pretrained` applies and `save_pretrained` reverses; a fresh list a call."""
    fused = [WeightConverter(parts, whole, [StackParts()]) for whole, parts in FUSED.items()]
    experts = "feed_forward.experts"
    split = [f"{experts}.*.w1.weight", f"{experts}.*.w3.weight"]
    return [
        *fused,
        WeightConverter(split, f"{experts}.gate_up_proj", [MergeModulelist(dim=0), Concatenate(dim=1)]),
        WeightConverter(f"{experts}.*.w2.weight", f"{experts}.down_proj", [MergeModulelist(dim=0)]),
    ]


def adopt(stock: PreTrainedModel, model_class: type[Ours]) -> Ours:
    """One of our models over a live stock model's parameters; no second copy of them stays in memory.

    Unfused parameters are shared as they are. Fused ones are stacked layer by layer, and the stock parameters become
    views into the stack, so the stock model stays usable and in-place updates of either are seen by both.

    Args:
        stock: an `Lfm2ForCausalLM` or `Lfm2MoeForCausalLM` with nothing swapped, wrapped or hooked in it.
    Raises:
        TypeError: a layer or weight is not stock's own (a quantised or adapter-wrapped model), or has others' code on
            it (hooks, a patched `forward`), which would not be called.
        ValueError: a parameter is on the meta device (offloaded by accelerate).
    """
    check_plain(stock)
    config = model_class.config_class(**{k: v for k, v in stock.config.to_dict().items() if k != "model_type"})
    config._attn_implementation = stock.config._attn_implementation
    with torch.device("meta"):
        model = model_class(config)
    follow_stock(stock, model)
    model.generation_config = stock.generation_config
    model.train(stock.training)
    _stock_of[model] = weakref.ref(stock)
    return model


#: adopted model → the stock model whose weights it shares
_stock_of: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[PreTrainedModel]] = weakref.WeakKeyDictionary()


def stock_of(model: PreTrainedModel) -> weakref.ref[PreTrainedModel] | None:
    """The stock model that this one was made over by `adopt`; None: by something else."""
    return _stock_of.get(model)


def follow_stock(stock: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let an adopted model have the parameters, buffers and constants that its stock model has now."""
    source = dict(stock.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, FusedLinear):
            module.weight = _stack_in_place([source[f"{parent}.{part}.weight"] for part in module.parts])
            continue
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = source[f"{name}.{leaf}"]
        if isinstance(module, RMSNorm):
            module.eps = stock.get_submodule(name).variance_epsilon  # type: ignore[assignment]
        elif name.endswith("self_attn"):
            module.scaling = stock.get_submodule(name).scaling
    ours, theirs = model.get_submodule("model.rotary_emb"), rotary_of(stock)
    ours.attention_scaling = theirs.attention_scaling
    for name, buffer in theirs.named_buffers():
        setattr(ours, name, buffer)
    for owner, leaf, buffer in _expert_biases(stock):
        model.get_submodule(owner)._buffers[leaf] = buffer


def rotary_of(model: PreTrainedModel) -> nn.Module:
    """The rotary embedding of a stock model, or one of ours."""
    return model.get_submodule("model.pos_emb" if isinstance(model, Lfm2MoeForCausalLM) else "model.rotary_emb")


def _expert_biases(model: PreTrainedModel) -> list[tuple[str, str, torch.Tensor]]:
    """The buffers `expert_bias` of a model, ours or stock's: of each its owner's name, its own, and itself."""
    named = ((*name.rpartition(".")[::2], buffer) for name, buffer in model.named_buffers())
    return [(owner, leaf, buffer) for owner, leaf, buffer in named if leaf == "expert_bias"]


def still_adopted(stock: PreTrainedModel, model: PreTrainedModel) -> bool:
    """Whether `stock`'s parameters still live where `model`'s do (`.to()` and friends move them away)."""
    if stock.config.vocab_size != model.config.vocab_size:
        return False  # `resize_token_embeddings` keeps the parameters and changes their shape
    source = dict(stock.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, FusedLinear):
            parent = name.rpartition(".")[0]
            parts = [source.get(f"{parent}.{part}.weight") for part in module.parts]
            views = module.weight.split(list(module.parts.values()))
            if any(p is None or p.data_ptr() != view.data_ptr() for p, view in zip(parts, views, strict=True)):
                return False
        elif any(source.get(f"{name}.{leaf}") is not p for leaf, p in module._parameters.items() if p is not None):
            return False
    biases = zip(_expert_biases(stock), _expert_biases(model), strict=True)
    return all(theirs is ours for (*_, theirs), (*_, ours) in biases)


def _stack_in_place(parts: list[nn.Parameter]) -> nn.Parameter:
    """Stack parameters and turn each into a view of the stack; none is copied where they lie end to end already."""
    height, start = sum(part.shape[0] for part in parts), parts[0].data_ptr()
    ends = itertools.accumulate((part.nbytes for part in parts), initial=start)
    storage = parts[0].untyped_storage()
    lie_together = all(part.is_contiguous() and part.data_ptr() == end for part, end in zip(parts, ends, strict=False))
    if lie_together and all(part.untyped_storage().data_ptr() == storage.data_ptr() for part in parts):
        stacked = parts[0].data.as_strided((height, *parts[0].shape[1:]), parts[0].stride())
        return nn.Parameter(stacked, requires_grad=parts[0].requires_grad)
    with torch.no_grad():
        stacked = torch.cat([part.data for part in parts])
        for part, view in zip(parts, stacked.split([part.shape[0] for part in parts]), strict=True):
            part.data = view
    return nn.Parameter(stacked, requires_grad=parts[0].requires_grad)


def check_plain(stock: PreTrainedModel) -> None:
    """Raises: TypeError, ValueError: as `adopt`."""
    found = dict(stock.named_modules())
    num_dense = first_expert_layer(stock.config)
    for name, kind in _stock_classes(tuple(stock.config.layer_types), num_dense).items():
        module = found.get(name)
        if type(module) is not kind:
            raise TypeError(
                f"{name} is a {type(module).__name__}, not a plain {kind.__name__}: merge adapters and load without "
                "quantisation before handing the model to lfm2_cb"
            )
    for name, module in found.items():
        if code := foreign_code(module):
            raise TypeError(
                f"{name or 'the model'} has {code}, which lfm2_cb would not call (its fused layers stand in for "
                "stock's): remove it, or hand over an Lfm2CbForCausalLM, on which hooks are called"
            )
    for name, parameter in stock.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is offloaded (meta device); load the model whole to use lfm2_cb")
        if type(parameter.data) is not torch.Tensor:
            raise TypeError(f"{name} is a {type(parameter.data).__name__}: load without quantisation to use lfm2_cb")


@functools.lru_cache(maxsize=8)
def _stock_classes(layer_types: tuple[str, ...], num_dense_layers: int | None) -> dict[str, type[nn.Module]]:
    """The classes of a stock model's modules, by name. num_dense_layers: None of a model without experts."""
    fields = {
        "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 8,
        "num_hidden_layers": len(layer_types), "layer_types": list(layer_types),
    }  # fmt: skip
    with torch.device("meta"):
        if num_dense_layers is None:
            model = Lfm2ForCausalLM(Lfm2Config(**fields))
        else:
            fields |= {"num_experts": 2, "moe_intermediate_size": 8, "num_dense_layers": num_dense_layers}
            model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**fields))
    return {name: type(module) for name, module in model.named_modules() if name}
