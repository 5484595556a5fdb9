"""AdapterPool: an engine's adapters: all that are registered, by name, and those that are loaded for computing.

Of a registered adapter, only the name, shapes and keys are kept; its tensors stay at their source (a mapped file, or
a copy of a live model's). `scheduling.adapters` decides which adapters are loaded, under one budget of bytes; this
module loads and unloads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..model.modeling import Lfm2CbForCausalLM
from ..model.ragged_batch import Row
from ..ops.adapters import (
    FIELDS,
    Delta,
    Move,
    Routing,
    adapted_linear,
    add_deltas,
    has_adapted_linear,
    lay_out_all,
    reference_delta,
)
from ..ops.kernel_set import KernelSet
from ..ops.linear.table import DENSE, product
from ..ops.memory import zeros
from ..ops.native import NativeKernels
from .adapter import Adapter, read_adapter
from .peft_config import AdapterError
from .projections import Projection, projections_of
from .sources import Folder, Source

#: adapters in memory at once, at most: more than sequences run
MAX_PLACES = 4096


@dataclass
class Active:
    """An adapter in memory. deltas: by index of the part; head: `[vocab_size, hidden]`."""

    adapter: Adapter
    deltas: dict[int, Delta] = field(default_factory=dict)
    head: torch.Tensor | None = None


class AdapterPool:
    """Args: model: the engine's; max_places: adapters in memory at once, at most."""

    def __init__(self, model: Lfm2CbForCausalLM, max_places: int) -> None:
        self.model, self.max_places = model, max_places
        self._known: dict[str, Adapter] = {}
        self._projections: list[Projection] = []
        self._active: dict[int, Active] = {}  # by place
        self._spares: list[Active] = []  # unloaded, for their memory
        self._layers: dict[nn.Module, AdaptedLayer] = {}
        self._table: torch.Tensor | None = None

    # Names

    @property
    def names(self) -> list[str]:
        return list(self._known)

    @property
    def known(self) -> dict[str, Adapter]:
        """By name."""
        return dict(self._known)

    def load(
        self, name: str, source: str | os.PathLike[str] | Source, check: Callable[[Adapter], None] = lambda _: None
    ) -> None:
        """Make an adapter known, in the place of one that had its name. From any thread.

        Args: check: raises where there is no room for such an adapter.
        Raises: AdapterError: it cannot be applied, with the key. TypeError.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"an adapter's name must be text, got {name!r}")
        if isinstance(source, (str, os.PathLike)):
            try:
                source = Folder(source)
            except AdapterError as error:
                raise AdapterError(f"adapter {name!r}: {error}") from error
        if not self._projections:
            self._projections = projections_of(self.model)
        adapter = read_adapter(name, source, self.model, self._projections)
        check(adapter)
        self._known[name] = adapter

    def unload(self, name: str) -> None:
        """Forget a name; requests that have its adapter keep it. Raises: AdapterError: there is none."""
        if self._known.pop(name, None) is None:
            raise self._unknown(name)

    def get(self, name: str) -> Adapter:
        """Raises: AdapterError: there is none."""
        try:
            return self._known[name]
        except (KeyError, TypeError):
            raise self._unknown(name) from None

    def _unknown(self, name: Any) -> AdapterError:
        known = ", ".join(map(repr, self._known)) if 0 < len(self._known) <= 10 else f"{len(self._known)} others"
        return AdapterError(f"there is no adapter {name!r}" + (f" ({known} are loaded)" if self._known else ""))

    def prefetch(self, adapters: Iterable[Any]) -> None:
        """These will be brought in soon. From any thread."""
        for adapter in adapters:
            adapter.source.prefetch()

    # Places; between two steps only

    def fill(self, place: int, adapter: Adapter, native: NativeKernels | None = None) -> None:
        """Load an adapter into an empty place. Raises: AdapterError: it cannot be loaded.

        Args: native: what lays it out; None: torch.
        """
        tensors = adapter.source.read()
        active = self._room_for(adapter)
        moves: list[Move] = []
        for change in adapter.changes:
            moves += change.fill(active.deltas[change.part.index], tensors, self.model)
        lay_out_all(native, moves)
        if adapter.head is not None:
            assert active.head is not None
            active.head.copy_(tensors[adapter.head])
        self._put(place, active)

    def _room_for(self, adapter: Adapter) -> Active:
        """Memory for it: that of one just unloaded with the same layout (new memory is written twice), or new."""
        alike = [i for i, spare in enumerate(self._spares) if spare.adapter.layout == adapter.layout]
        if alike:
            return replace(self._spares.pop(alike[0]), adapter=adapter)
        self.return_spares()  # before there is new memory, or both together might be more than the budget
        dtype = self.model.dtype
        memory = zeros((adapter.num_bytes,), torch.uint8, self.model.device)
        active, start = Active(adapter), 0
        for change in adapter.changes:
            active.deltas[change.part.index] = change.shape.carve(memory, start, dtype)
            start += change.shape.num_bytes(dtype)
        if adapter.head is not None:
            shape = self.model.config.vocab_size, self.model.config.hidden_size
            active.head = memory[start:].view(dtype).view(shape)
        return active

    def clear(self, place: int) -> None:
        """Unload what is there. Its memory is kept for the next adapter of the same layout, until one of another
        layout is loaded or `return_spares`."""
        active = self._active.pop(place, None)
        if active is not None:
            self._descriptors()[place] = 0
            self._spares.append(active)

    def return_spares(self) -> None:
        """Give back the memory of unloaded adapters."""
        self._spares = []

    def follow_model(self, native: NativeKernels | None = None) -> None:
        """The base may have been changed: compute again what depends on it."""
        self._layers = {}
        for place, active in list(self._active.items()):
            if any(change.depends_on_base for change in active.adapter.changes):
                self.clear(place)
                self.fill(place, active.adapter, native)
        self.return_spares()

    def _put(self, place: int, active: Active) -> None:
        self._active[place] = active
        described = self._descriptors()[place].numpy()
        for index, delta in active.deltas.items():
            described[index] = delta.describe()

    def _descriptors(self) -> torch.Tensor:
        """int64 `[places, parts, FIELDS]`, which stays where it is."""
        if self._table is None:
            num_parts = sum(len(projection.parts) for projection in self._projections)
            self._table = zeros((self.max_places, num_parts, FIELDS), torch.int64, torch.device("cpu"))
        return self._table

    # A step

    def kernels_for(self, kernels: KernelSet, rows: Sequence[Row], num_rows: int = 0) -> KernelSet:
        """What the layers of a batch compute with: `kernels` themselves where no row has an adapter.

        Args: num_rows: of a batch that has more places than rows, as many.
        """
        places = [] if self.is_empty else [row.adapter for row in rows]
        if not any(place >= 0 for place in places):
            return kernels
        if not self._layers:
            head = self.model.get_output_embeddings()
            for projection in self._projections:
                module = self.model.get_submodule(projection.name)
                self._layers[module] = AdaptedLayer(projection, self._descriptors(), module is head)
        tokens, logits = [len(row.token_ids) for row in rows], [row.num_logits for row in rows]
        left_over = max(0, num_rows - len(rows))
        routes = [Routing(np.append(np.repeat(places, n), [-1] * left_over)) for n in (tokens, logits)]
        return AdaptedKernels(kernels, self._layers, self._active, *routes)

    @property
    def is_empty(self) -> bool:
        """Whether no adapter is in memory, so that no row can have one."""
        return not self._active

    def has_own_head(self, place: int) -> bool:
        """Whether its adapter has a head of its own, which no captured step can run."""
        return place >= 0 and self._active[place].head is not None


class AdaptedLayer:
    """One of our linear layers: its parts, and the descriptions of all adapters' changes of it."""

    def __init__(self, projection: Projection, table: torch.Tensor, is_head: bool) -> None:
        self.parts, self.is_head = projection.parts, is_head
        self.table = table[:, self.parts[0].index :]
        self.edges = torch.tensor([*(part.begin for part in self.parts), self.parts[-1].end])


class AdaptedKernels(KernelSet):
    """The kernels of a batch whose rows have adapters: a linear layer's outputs are changed after it has run.

    A batch without any has an engine's own `KernelSet`, and nothing here is run.
    """

    def __init__(
        self,
        kernels: KernelSet,
        layers: dict[nn.Module, AdaptedLayer],
        active: dict[int, Active],
        tokens: Routing,
        logits: Routing,
    ) -> None:
        super().__init__(kernels.native, kernels.triton)
        self._layers, self._active = layers, active
        self._tokens, self._logits = tokens, logits

    def put(self, places: Sequence[int]) -> None:
        """Other rows in the place of those before, no more than they were, each with logits."""
        self._tokens.put(places)
        self._logits.put(places)

    def linear(self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        layer = self._layers.get(module)
        if layer is None:
            return super().linear(module, x, residual)
        y = self._multiply_with_deltas(module, x, layer)
        if y is None:
            y = super().linear(module, x)
            routing = self._logits if layer.is_head else self._tokens
            if layer.is_head:
                self._replace_heads(y, x, routing)
            self._add_deltas(y, x, layer, routing)
        return y if residual is None else self.add(y, residual)

    def linear_swiglu(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if module in self._layers:  # the gates and values are changed
            return self._gate(self.linear(module, x))
        return super().linear_swiglu(module, x)

    def _fused_mlp(
        self, w13: nn.Module, w2: nn.Module, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        return None if w13 in self._layers or w2 in self._layers else super()._fused_mlp(w13, w2, x, residual)

    def _multiply_with_deltas(self, module: nn.Module, x: torch.Tensor, layer: AdaptedLayer) -> torch.Tensor | None:
        """The layer's outputs by one kernel, where there is one."""
        product = None if layer.is_head else self._dense_product(module, x)
        if self.native is None or product is None or not has_adapted_linear(self.native, product, x):
            return None
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        return adapted_linear(self.native, x, weight, bias, layer.table, layer.edges, self._tokens)

    def _add_deltas(self, y: torch.Tensor, x: torch.Tensor, layer: AdaptedLayer, routing: Routing) -> None:
        if self.native is not None and x.dtype == y.dtype and y.is_contiguous():
            add_deltas(self.native, y, x.contiguous(), layer.table, layer.edges, routing)
        else:
            self._add_by_torch(y, x, layer, routing)

    def _replace_heads(self, y: torch.Tensor, x: torch.Tensor, routing: Routing) -> None:
        for place, rows in routing.groups.items():
            if (head := self._active[place].head) is not None:
                index = torch.from_numpy(rows).to(x.device)
                inputs = x[index]
                y[index] = _multiply(self.native, inputs, head)

    def _add_by_torch(self, y: torch.Tensor, x: torch.Tensor, layer: AdaptedLayer, routing: Routing) -> None:
        for place, rows in routing.groups.items():
            index, deltas = torch.from_numpy(rows).to(x.device), self._active[place].deltas
            for part in layer.parts:
                if (delta := deltas.get(part.index)) is not None:
                    outputs = slice(part.begin, part.end)
                    y[index, outputs] = reference_delta(y[index, outputs], x[index], delta)


def _multiply(native: NativeKernels | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`."""
    return x @ weight.T if native is None else product(DENSE, x.dtype, native.isa, len(x))(native, x, weight, None)
