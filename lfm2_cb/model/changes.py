"""Changes to a model after its engine was made: applied where possible, otherwise refused by an error that names them.

`KernelSet` calls our own modules once they have been changed, so most changes take effect without further work.
Exceptions: hooks or patched methods on a stock model's modules, which our layers replace and never call; the same on a
module of which only the weights are read; and a dtype, device or vocabulary other than the engine was made for.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .conversion import check_plain, follow_stock, stock_of
from .foreign_code import foreign_code
from .modeling import Lfm2CbForCausalLM, Lfm2CbShortConv

NEW_GENERATOR = "make a new ContinuousBatchingGenerator of the model"


class ModelChanged(RuntimeError):
    """The model is no longer one that this engine can run; the message says what was changed, and what to do."""


class ModelWatch:
    """Looks at an engine's model, and at the stock model whose weights it shares, before requests are taken.

    A look takes 0.2 ms for a model of 16 layers, 0.4 ms with its stock model (thread CPU time on a Xeon with AMX), and
    is taken once a submission: a step does not look.
    """

    def __init__(self, model: Lfm2CbForCausalLM) -> None:
        self._model, self._stock = model, stock_of(model)
        self._placement = {name: (p.dtype, p.device) for name, p in model.named_parameters()}
        self._vocab_size = model.config.vocab_size
        self._checked: Look | None = None
        self._followed = Look(*self._models())

    def check(self) -> None:
        """Raises: ModelChanged. From any thread: it only reads."""
        models = self._models()
        look = Look(*models)
        if look != self._checked:
            for model in models:
                self._check_placement(model)
            self._check_code(*models)
            self._checked = look

    def follow(self) -> bool:
        """Take over what the last `check` has seen. Between two steps only.

        Returns: whether the model's answers may be others than at the last time, so that no cached state holds.
        """
        if self._checked is None or self._checked == self._followed:
            return False
        models = self._models()
        if len(models) > 1:
            follow_stock(models[1], models[0])
        self._checked = self._followed = Look(*models)
        return True

    def _models(self) -> list[PreTrainedModel]:
        stock = self._stock() if self._stock is not None else None
        return [self._model] if stock is None else [self._model, stock]

    def _check_placement(self, model: PreTrainedModel) -> None:
        if model.config.vocab_size != self._vocab_size:
            sizes = f"{self._vocab_size} tokens, and now has {model.config.vocab_size}"
            raise ModelChanged(f"the model had a vocabulary of {sizes}: {NEW_GENERATOR}")
        for name, parameter in model.named_parameters():
            dtype, device = self._placement.get(name, (parameter.dtype, parameter.device))
            if parameter.dtype != dtype:
                raise ModelChanged(f"{name} is {parameter.dtype}, but was {dtype}: cast it back, or {NEW_GENERATOR}")
            if parameter.device != device:
                where = f"{name} is on {parameter.device}, but was on {device}"
                raise ModelChanged(f"{where}: move it back, or {NEW_GENERATOR}")

    def _check_code(self, model: PreTrainedModel, stock: PreTrainedModel | None = None) -> None:
        if stock is not None:
            try:
                check_plain(stock)
            except (TypeError, ValueError) as error:
                raise ModelChanged(f"the model was changed after it was passed to lfm2_cb: {error}") from error
        if found := foreign_code(model):
            raise ModelChanged(f"the model has {found}, which the engine never calls: put it on model.model or below")
        for name, module in model.named_modules():
            if isinstance(module, Lfm2CbShortConv) and not _only_weights_matter(module.conv):
                raise ModelChanged(
                    f"{name}.conv was replaced, patched or hooked ({type(module.conv).__name__}), and lfm2_cb reads "
                    "its weight only: merge adapters, or use stock generate()"
                )


class Look:
    """A snapshot of what must not change in a model; equal to an earlier one while nothing has."""

    def __init__(self, *models: PreTrainedModel) -> None:
        self._facts: list[object] = []
        self._tensors: list[torch.Tensor | None] = []  # kept, so that no other takes their addresses
        for model in models:
            self._facts.append(model.config.vocab_size)
            modules: list[nn.Module] = [model]
            for module in modules:  # which grows as children are found
                self._note(module)
                modules += [child for child in module._modules.values() if child is not None]

    def _note(self, module: nn.Module) -> None:
        own, facts = module.__dict__, self._facts
        facts += module, module.__class__, own.get("forward"), own.get("eps"), own.get("variance_epsilon")
        facts += own.get("scaling"), own.get("attention_scaling")
        facts += own.get("top_k"), own.get("normalize"), own.get("scale")
        facts += (*own["_forward_pre_hooks"], *own["_forward_hooks"])
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            self._tensors.append(tensor)
            if tensor is not None:
                version = 0 if tensor.is_inference() else tensor._version
                facts += id(tensor), tensor.data_ptr(), version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Look) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


def _only_weights_matter(conv: nn.Module) -> bool:
    return type(conv).forward is nn.Conv1d.forward and foreign_code(conv) is None
