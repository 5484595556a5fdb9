"""Stock ↔ fused weights: q+k+v and w1+w3 each become one matrix; everything else keeps its name.

Three doors lead from stock weights to ours, and one back:
- checkpoints: `weight_conversions()`, which `from_pretrained` applies and `save_pretrained` reverses;
- state dicts: `fuse_stock_names` lets `load_state_dict` take the stock names;
- live models: `adopt()` takes over a stock instance's parameters without a second copy.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import Lfm2ForCausalLM, PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

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
    return [WeightConverter(parts, fused, [StackParts()]) for fused, parts in FUSED.items()]


def adopt(stock: PreTrainedModel, model_class: type[Ours]) -> Ours:
    """One of our models over a live stock model's parameters; no second copy of them stays in memory.

    Unfused parameters are shared as they are. Fused ones are stacked layer by layer, and the stock parameters become
    views into the stack, so the stock model stays usable and in-place updates of either are seen by both.

    Args:
        stock: a `transformers.Lfm2ForCausalLM` with nothing swapped or wrapped in it.
    Raises:
        TypeError: a layer or weight is not stock's own (a quantised or adapter-wrapped model).
        ValueError: a parameter is on the meta device (offloaded by accelerate).
    """
    check_adoptable(stock)
    config = model_class.config_class(**{k: v for k, v in stock.config.to_dict().items() if k != "model_type"})
    config._attn_implementation = stock.config._attn_implementation
    with torch.device("meta"):
        model = model_class(config)
    source = dict(stock.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        for leaf in list(module._parameters):
            full_name = f"{name}.{leaf}"
            if isinstance(module, FusedLinear):
                parent = name.rpartition(".")[0]
                module.weight = _stack_in_place([source[f"{parent}.{part}.weight"] for part in module.parts])
            elif module._parameters[leaf] is not None:
                module._parameters[leaf] = source[full_name]
    rotary = model.model.rotary_emb
    for name, buffer in stock.model.rotary_emb.named_buffers():
        setattr(rotary, name, buffer)
    model.generation_config = stock.generation_config
    model.train(stock.training)
    return model


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
    return True


def _stack_in_place(parts: list[nn.Parameter]) -> nn.Parameter:
    """Stack parameters and turn each into a view of the stack."""
    with torch.no_grad():
        stacked = torch.cat([part.data for part in parts])
        for part, view in zip(parts, stacked.split([part.shape[0] for part in parts]), strict=True):
            part.data = view
    return nn.Parameter(stacked, requires_grad=parts[0].requires_grad)


def check_adoptable(stock: PreTrainedModel) -> None:
    """Raises: TypeError, ValueError: as `adopt`."""
    with torch.device("meta"):
        plain = Lfm2ForCausalLM(stock.config)
    found = dict(stock.named_modules())
    for name, module in plain.named_modules():
        kind = type(found.get(name))
        if name and kind is not type(module):
            raise TypeError(
                f"{name} is a {kind.__name__}, not a plain {type(module).__name__}: merge adapters and load without "
                "quantisation before handing the model to lfm2_cb"
            )
    for name, parameter in stock.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is offloaded (meta device); load the model whole to use lfm2_cb")
        if type(parameter.data) is not torch.Tensor:
            raise TypeError(f"{name} is a {type(parameter.data).__name__}: load without quantisation to use lfm2_cb")
