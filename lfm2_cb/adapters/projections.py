"""The linear layers that adapters may change: our fused layers, and the stock layers that each combines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..model.experts import Lfm2CbSparseMLP
from ..model.layers import FusedLinear
from ..model.modeling import Lfm2CbForCausalLM, class_for
from ..ops.linear import PackedLinear, QuantizedLinear


@dataclass(frozen=True)
class Part:
    """One stock layer, within ours: its outputs are rows `begin … end - 1` of our matrix.

    Attributes: name: stock's; index: its place among all parts of the model.
    """

    name: str
    index: int
    in_features: int
    begin: int
    end: int

    @property
    def out_features(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Projection:
    """One of our linear layers. name: ours, which is its only part's too where it holds one stock layer."""

    name: str
    parts: tuple[Part, ...]


def projections_of(model: Lfm2CbForCausalLM) -> list[Projection]:
    """All of a model, the head last, quantised or not. (Routers and experts are none.)"""
    with torch.device("meta"):
        plain = class_for(model.config)(model.config)
    routers = {module.gate for module in plain.modules() if isinstance(module, Lfm2CbSparseMLP)}
    found, count = [], 0
    for name, module in plain.named_modules():
        if not isinstance(module, PackedLinear) or module in routers:
            continue
        parent, _, leaf = name.rpartition(".")
        sizes = module.parts if isinstance(module, FusedLinear) else {leaf: module.out_features}
        parts, begin = [], 0
        for part, size in sizes.items():
            stock_name = f"{parent}.{part}" if parent else part
            parts.append(Part(stock_name, count, module.in_features, begin, begin + size))
            count, begin = count + 1, begin + size
        found.append(Projection(name, tuple(parts)))
    return found


def base_weight(model: Lfm2CbForCausalLM, projection: Projection, part: Part) -> torch.Tensor:
    """The base's matrix of a part, `[out, in]`, in fp32; quantised ones as they multiply."""
    module = model.get_submodule(projection.name)
    whole = module.dequantize(torch.float32) if isinstance(module, QuantizedLinear) else _weight(module)
    return whole[part.begin : part.end].detach().float()


def base_bias(model: Lfm2CbForCausalLM, projection: Projection) -> torch.Tensor | None:
    """The base's bias `[out]` in fp32 (of layers that hold one stock layer), where there is one."""
    bias = getattr(model.get_submodule(projection.name), "bias", None)
    return None if bias is None else bias.detach().float()


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight
