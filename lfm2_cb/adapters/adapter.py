"""Adapter: the layers of a model that it changes and its matrices for them, checked before anything is computed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..model.modeling import Lfm2CbForCausalLM
from ..ops.adapters import Delta, DeltaShape, Move
from .peft_config import HEAD, AdapterError, PeftConfig
from .projections import Part, Projection, base_bias, base_weight
from .sources import Source

PREFIX = "base_model.model."
A, B, B_BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
BIASES = (".base_layer.bias", ".bias")
#: PEFT saves the base's own head beside an adapter of it
BASE_HEAD = f"{PREFIX}{HEAD}.base_layer.weight"

_ids = itertools.count(1)


@dataclass(frozen=True)
class Change:
    """What an adapter has of one stock layer: keys of tensors, and the scale of the product."""

    projection: Projection
    part: Part
    rank: int = 0
    scale: float = 1.0
    b_bias: str | None = None
    magnitude: str | None = None
    bias: str | None = None
    of_biased: bool = False  # whether the base has a bias there

    @property
    def module(self) -> str:
        return PREFIX + self.part.name

    @property
    def depends_on_base(self) -> bool:
        return self.magnitude is not None or self.bias is not None

    @property
    def shape(self) -> DeltaShape:
        scales_bias = self.magnitude is not None and self.of_biased
        has_addend = self.b_bias is not None or self.bias is not None or scales_bias
        in_features, outputs = self.part.in_features, self.part.out_features
        return DeltaShape(in_features, outputs, self.rank, self.magnitude is not None, has_addend)

    @torch.inference_mode()
    def fill(self, delta: Delta, tensors: Mapping[str, torch.Tensor], model: Lfm2CbForCausalLM) -> list[Move]:
        """Put the vectors in their places, as far as they depend on the base computed by its weights as they are.

        Returns: the matrices, which are still to be laid out.
        """
        outputs, ratio = self.part.out_features, None
        if self.magnitude is not None:
            assert delta.ratio is not None
            ratio = delta.ratio[:outputs].copy_(self._ratio(tensors, model))
        if delta.addend is not None:
            addend = torch.zeros(outputs, device=delta.addend.device)
            if self.b_bias is not None:
                addend += self.scale * tensors[self.b_bias].to(addend)
            old = base_bias(model, self.projection)
            if old is not None and (self.bias is not None or ratio is not None):
                new = old if self.bias is None else tensors[self.bias].to(addend)
                addend += new - (old if ratio is None else ratio * old)
            delta.addend[:outputs] = addend
        if delta.a is None or delta.b is None:
            return []
        b, scale = tensors[self.module + B], self.scale
        if ratio is not None:
            b, scale = b.to(ratio) * scale * ratio[:, None], 1.0
        return [Move(delta.a, tensors[self.module + A].T), Move(delta.b, b, scale)]

    def _ratio(self, tensors: Mapping[str, torch.Tensor], model: Lfm2CbForCausalLM) -> torch.Tensor:
        """DoRA's magnitudes over the norms of the rows that they stand for (arXiv 2402.09353, equation 5)."""
        weight = base_weight(model, self.projection, self.part)
        product = tensors[self.module + B].to(weight) @ tensors[self.module + A].to(weight)
        magnitude = tensors[self.magnitude].to(weight)  # type: ignore[index]
        return magnitude / torch.linalg.norm(weight + self.scale * product, dim=1)


@dataclass(eq=False)
class Adapter:
    """An adapter as it was when it was loaded: another one of its name is another `Adapter`.

    Attributes:
        adapter_id: never used twice.
        changes: of the layers that it changes; head: the key of a head of its own.
        num_bytes: that it takes where it is computed with; layout: how these are laid out.
    """

    name: str
    source: Source
    changes: Sequence[Change]
    head: str | None
    dtype: torch.dtype
    num_bytes: int = 0
    adapter_id: int = field(default_factory=lambda: next(_ids))

    @property
    def layout(self) -> tuple[object, ...]:
        """Another's memory may be filled with this one where theirs are equal."""
        return (self.head is not None, *((change.part.index, change.shape) for change in self.changes))


def read_adapter(name: str, source: Source, model: Lfm2CbForCausalLM, projections: Sequence[Projection]) -> Adapter:
    """Lay out an adapter on a model; of its tensors only names and shapes are looked at.

    Raises: AdapterError: what cannot be applied, with the key.
    """
    try:
        return _read(name, source, model, projections)
    except AdapterError as error:
        raise AdapterError(f"adapter {name!r}: {error}") from error


def _read(name: str, source: Source, model: Lfm2CbForCausalLM, projections: Sequence[Projection]) -> Adapter:
    config, left = PeftConfig.of(source.config), dict(source.shapes)
    changes: list[Change] = []
    for projection in projections:
        found = (_change(projection, part, config, left, model) for part in projection.parts)
        changes += [change for change in found if change is not None]
    head = _own_head(config, left, model)
    if BASE_HEAD in left:
        _check_same_head(source, model)
        del left[BASE_HEAD]
    _check_conv_biases(source, left, model)
    if left:
        key = min(left)
        raise AdapterError(f"{key} cannot be applied: it belongs to no layer of this model that an adapter may change")
    if not changes and head is None:
        raise AdapterError("it changes nothing")
    adapter = Adapter(name, source, changes, head, model.dtype)
    adapter.num_bytes = sum(change.shape.num_bytes(model.dtype) for change in changes)
    if head is not None:
        adapter.num_bytes += model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize
    return adapter


def _change(
    projection: Projection, part: Part, config: PeftConfig, left: dict[str, tuple[int, ...]], model: Lfm2CbForCausalLM
) -> Change | None:
    """What there is of one layer, taken out of `left`."""
    module, outputs = PREFIX + part.name, (part.out_features,)
    has_bias = base_bias(model, projection) is not None
    bias = next((key for end in BIASES if has_bias and (key := module + end) in left), None)
    if bias is not None:
        _take(left, bias, outputs)
    if not config.targets(part.name):
        return None if bias is None else Change(projection, part, bias=bias, of_biased=True)
    rank = config.rank(part.name)
    _take(left, module + A, (rank, part.in_features))
    _take(left, module + B, (part.out_features, rank))
    b_bias = module + B_BIAS if module + B_BIAS in left else None
    if b_bias is not None:
        _take(left, b_bias, outputs)
    magnitude = next((module + end for end in MAGNITUDES if module + end in left), None)
    if config.use_dora != (magnitude is not None):
        raise AdapterError(
            f"use_dora={config.use_dora}, and {module}{MAGNITUDES[0]} is {'' if magnitude else 'not '}there"
        )
    if magnitude is not None:
        _take(left, magnitude, outputs)
    return Change(projection, part, rank, config.scale(part.name), b_bias, magnitude, bias, has_bias)


def _take(left: dict[str, tuple[int, ...]], key: str, expected: tuple[int, ...]) -> None:
    """Raises: AdapterError: it is not there, or of another shape."""
    found = left.pop(key, None)
    if found is None:
        raise AdapterError(f"{key} is missing")
    if found != expected:
        raise AdapterError(f"{key} has shape {[*found]}, but this model and its configuration require {[*expected]}")


def _own_head(config: PeftConfig, left: dict[str, tuple[int, ...]], model: Lfm2CbForCausalLM) -> str | None:
    if others := config.modules_to_save - {HEAD}:
        raise AdapterError(f"modules_to_save={sorted(others)} cannot be applied, only {HEAD}")
    if HEAD not in config.modules_to_save:
        return None
    key = f"{PREFIX}{HEAD}.weight"
    _take(left, key, (model.config.vocab_size, model.config.hidden_size))
    return key


def _check_same_head(source: Source, model: Lfm2CbForCausalLM) -> None:
    """Raises: AdapterError: the head that it was trained on is not the base's."""
    saved, weight = source.read()[BASE_HEAD], model.lm_head.weight
    if not weight.is_floating_point():
        return  # quantised from it
    if saved.shape != weight.shape or not torch.equal(saved.to(weight), weight):
        raise AdapterError(f"{BASE_HEAD} is not this base's head: it cannot be applied")


def _check_conv_biases(source: Source, left: dict[str, tuple[int, ...]], model: Lfm2CbForCausalLM) -> None:
    """`bias="all"` saves those of the short convolutions too. Raises: AdapterError: one is not the base's."""
    keys = {f"{PREFIX}{name}": p for name, p in model.named_parameters() if name.endswith(".conv.conv.bias")}
    saved = source.read() if keys.keys() & left.keys() else {}
    for key in keys.keys() & left.keys():
        if left.pop(key) != keys[key].shape or not torch.equal(saved[key].to(keys[key]), keys[key].data):
            raise AdapterError(f"{key} differs from the base's: a trained bias of a convolution cannot be applied")
