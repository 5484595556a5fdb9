"""CaptureGuard: whether a model's forward may be captured, and whether its captured graphs are still valid."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..model.foreign_code import foreign_code

#: where the classes of a model come from that computes by its tensors alone
_OUR_PACKAGE = __name__.partition(".")[0]
_PLAIN_HOMES = (f"{_OUR_PACKAGE}.", "torch.nn.modules.")


class CaptureGuard:
    """A captured graph is valid while the model is unchanged. Before every step we check that its tensors are at the
    same addresses and that it has no hooks; after every `invalidate`, also that no module or parameter was replaced.

    Attributes: all_plain: every module's class is ours or torch's own, so that no state of its Python matters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._structure: list[object] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._hooks: list[Mapping[int, object]] = []
        self._is_patched = self.all_plain = False
        self._stale = True

    def invalidate(self) -> None:
        """The model may have been changed since the last step, as between two calls of `generate()`."""
        self._stale = True

    def has_changed(self) -> bool:
        """Whether the model has changed since the last call, so that its captured graphs must be dropped."""
        changed = False
        if self._stale and (structure := _structure_of(self._model)) != self._structure:
            self._note(structure)
            changed = True
        if self._addresses != list(map(torch.Tensor.data_ptr, self._tensors)):
            self._note(_structure_of(self._model))
            changed = True
        self._stale = False
        return changed

    def may_capture(self) -> bool:
        """Whether a forward does nothing that no capture sees: patched modules, hooks. (transformers leaves some that
        change no value.)"""
        if self._is_patched:
            return False
        return not any(self._hooks) or not (any(self._hooks[:2]) or any(map(foreign_code, self._model.modules())))

    def _note(self, structure: list[object]) -> None:
        self._structure = structure
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        modules = list(self._model.modules())
        self._is_patched = any("forward" in module.__dict__ for module in modules)
        self.all_plain = all(type(module).__module__.startswith(_PLAIN_HOMES) for module in modules)
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        for module in modules:
            self._hooks += module._forward_hooks, module._forward_pre_hooks


def _structure_of(model: nn.Module) -> list[object]:
    """A model's modules, tensors and constants, equal while they are the same objects."""
    found: list[object] = []
    for module in model.modules():
        own = module.__dict__
        found += id(module), module.__class__, "forward" in own
        found += own.get("eps"), own.get("scaling"), own.get("attention_scaling")
        found += own.get("top_k"), own.get("normalize"), own.get("scale")
        found += map(id, (*module._parameters.values(), *module._buffers.values()))
    return found
