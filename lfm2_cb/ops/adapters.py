"""Low-rank changes of a linear layer's outputs, each row's by its own adapter: `y + B (A x)`, over rows grouped by it.

S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547): shrink to the rank, expand to the outputs, ranks mixed. An
adapter's matrices are read once for all its rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .linear.dense import is_in_place, tile_linear
from .native import NativeKernels, empty

#: inputs that lie side by side in `Delta.a`, and outputs in `Delta.b`
PANEL = 32
#: bytes: tensors of a `Delta` begin at multiples of it
ALIGNMENT = 64
#: int64 values that describe a `Delta` to the kernel: the addresses of its tensors, and its rank
FIELDS = 5
#: most rows of a task of the kernel's
TASK_ROWS = 16


class Delta(NamedTuple):
    """What an adapter does to the outputs of one stock layer: `y * ratio + expand(shrink(x)) + addend`, of which
    `expand(shrink(x))` is rounded to the model's dtype first, as PEFT's is.

    a: `[ceil(in / PANEL), rank, PANEL]`, `PANEL` inputs after another, with zeros beyond the last; b: the same of
    outputs; both in the model's dtype, and None where only biases change. ratio, addend: fp32
    `[ceil(out / PANEL) * PANEL]`, or None.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    ratio: torch.Tensor | None
    addend: torch.Tensor | None

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[1]

    def describe(self) -> list[int]:
        """The `FIELDS` of it."""
        return [0 if t is None else t.data_ptr() for t in self] + [self.rank]


class DeltaShape(NamedTuple):
    """What a `Delta` has room for."""

    in_features: int
    out_features: int
    rank: int
    has_ratio: bool
    has_addend: bool

    def num_bytes(self, dtype: torch.dtype) -> int:
        return sum(_aligned(size) for size in self._sizes(dtype))

    def carve(self, memory: torch.Tensor, start: int, dtype: torch.dtype) -> Delta:
        """A delta in `num_bytes` of memory (uint8) from `start` on, an aligned place."""
        tensors, (inputs, outputs) = [], self._panels()
        shapes = (inputs, self.rank, PANEL), (outputs, self.rank, PANEL), (outputs * PANEL,), (outputs * PANEL,)
        kinds = (dtype, dtype, torch.float32, torch.float32)
        for size, shape, kind in zip(self._sizes(dtype), shapes, kinds, strict=True):
            tensors.append(memory[start : start + size].view(kind).view(shape) if size else None)
            start += _aligned(size)
        return Delta(*tensors)

    def _sizes(self, dtype: torch.dtype) -> tuple[int, int, int, int]:
        matrices = [panels * PANEL * self.rank * dtype.itemsize for panels in self._panels()]
        vector = 4 * PANEL * self._panels()[1]
        return *matrices, vector * self.has_ratio, vector * self.has_addend  # type: ignore[return-value]

    def _panels(self) -> tuple[int, int]:
        """Of inputs and of outputs."""
        return -(-self.in_features // PANEL), -(-self.out_features // PANEL)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(matrix: torch.Tensor) -> torch.Tensor:
    """B `[out, rank]`, or A turned, `[in, rank]`, as a `Delta` has it. The torch reference."""
    size, rank = matrix.shape
    whole = matrix.new_zeros(-(-size // PANEL) * PANEL, rank)
    whole[:size] = matrix
    return whole.view(-1, PANEL, rank).transpose(1, 2)


class Move(NamedTuple):
    """A matrix `[size, rank]` that is to be laid out in `panels`, multiplied by `scale`. (A is moved turned.)"""

    panels: torch.Tensor
    matrix: torch.Tensor
    scale: float = 1.0


def lay_out_all(native: NativeKernels | None, moves: Sequence[Move]) -> None:
    """Of each move `panels.copy_(lay_out(matrix * scale))`, the product in fp32: an adapter's matrices in one call.

    native: None: by torch, as where the panels are on a device or in another dtype than fp32 or bf16.
    """
    kinds = {move.panels.dtype for move in moves}
    if native is None or not kinds or not kinds <= _MOVED or any(move.panels.device.type != "cpu" for move in moves):
        for panels, matrix, scale in moves:
            panels.copy_(lay_out(matrix.to(panels.device, torch.float32) * scale))
        return
    described = torch.zeros(len(moves), 8, dtype=torch.int64)
    fields, kept = described.numpy(), []
    for i, (panels, matrix, scale) in enumerate(moves):
        if matrix.dtype not in _MOVED:
            matrix = matrix.float()
        if 1 not in matrix.stride():
            matrix = matrix.contiguous()
        kept.append(matrix)
        is_bf16 = matrix.dtype == torch.bfloat16
        fields[i, :7] = panels.data_ptr(), matrix.data_ptr(), *matrix.shape, *matrix.stride(), is_bf16
        fields[i, 7:].view(np.float64)[0] = scale
    native.call("lay_out_adapter", described, len(moves), kinds == {torch.bfloat16})


#: dtypes that the kernel reads and writes
_MOVED = frozenset((torch.float32, torch.bfloat16))


def _as_it_was(panels: torch.Tensor, size: int) -> torch.Tensor:
    """`[rank, size]` in fp32."""
    return panels.float().transpose(0, 1).flatten(1)[:, :size]


def reference_delta(y: torch.Tensor, x: torch.Tensor, delta: Delta) -> torch.Tensor:
    """The torch reference. Args: y `[rows, out]`, the base's outputs; x `[rows, in]`. Returns: `[rows, out]`."""
    outputs = y.shape[-1]
    changed = y.float() if delta.ratio is None else y.float() * delta.ratio[:outputs]
    if delta.a is not None and delta.b is not None:
        expanded = x.float() @ _as_it_was(delta.a, x.shape[-1]).T @ _as_it_was(delta.b, outputs)
        changed = changed + expanded.to(y.dtype)
    if delta.addend is not None:
        changed = changed + delta.addend[:outputs]
    return changed.to(y.dtype)


class Routing:
    """Which rows of a batch have which adapter, in tensors that stay where they are when other rows are `put`.

    Attributes:
        groups: place of each adapter → its rows, ascending.
        order: int64 `[rows]`: all rows that have an adapter, by adapter.
        tasks: int64 `[1 + rows, 3]`: how many tasks there are (in the first), then of each the adapter's place, and
            the run of `order` that it is for: first and count.

    Args: places: of each row's adapter; below 0: it has none.
    """

    def __init__(self, places: Sequence[int] | np.ndarray) -> None:
        self.order = torch.zeros(len(places), dtype=torch.int64)
        self.tasks = torch.zeros(1 + len(places), 3, dtype=torch.int64)
        self.put(places)

    def put(self, places: Sequence[int] | np.ndarray) -> None:
        """Other rows, no more than there were at first."""
        rows = np.asarray(places)
        order = np.argsort(rows, kind="stable")
        order = order[np.searchsorted(rows[order], 0) :]
        self.groups: dict[int, np.ndarray] = {}
        tasks, first = [], 0
        for place, count in zip(*np.unique(rows[order], return_counts=True), strict=True):
            self.groups[int(place)] = order[first : first + count]
            num_tiles = -(-count // TASK_ROWS)
            edges = first + np.arange(num_tiles + 1) * count // num_tiles
            tasks += [(place, begin, end - begin) for begin, end in itertools.pairwise(edges)]
            first += count
        self.order.numpy()[: len(order)] = order
        self.tasks.numpy()[0, 0] = len(tasks)
        if tasks:
            self.tasks.numpy()[1 : 1 + len(tasks)] = tasks


def add_deltas(
    native: NativeKernels, y: torch.Tensor, x: torch.Tensor, table: torch.Tensor, edges: torch.Tensor, routing: Routing
) -> None:
    """`reference_delta` for all rows that have an adapter, in place in y; sums in fp32, rounded once.

    Args:
        y: `[rows, out]`; x `[rows, in]`; both fp32 or both bf16, contiguous.
        table: int64 `[places, parts of the model, FIELDS]`, from the first part of this layer on: `Delta.describe` of
            each; zeros: none.
        edges: int64 `[parts + 1]`: where the parts of this layer begin among its outputs, and the end.
    """
    shape = *x.shape[-1:], y.shape[-1], len(edges) - 1, table.stride(0)
    native.call("add_deltas", x, y, table, edges, routing.order, routing.tasks, *shape, x.dtype == torch.bfloat16)


#: instruction sets by which a product with the deltas of many adapters takes less than one after the other: where
#: matrix units compute it, memory has no time left
ADAPTED_LINEAR_ISAS = frozenset(("zen4",))


def has_adapted_linear(native: NativeKernels, product: Callable[..., torch.Tensor], x: torch.Tensor) -> bool:
    """Whether `adapted_linear` takes the place of a product of x, with `add_deltas` after it."""
    return native.isa in ADAPTED_LINEAR_ISAS and product is tile_linear and is_in_place(x)


def adapted_linear(
    native: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor,
    edges: torch.Tensor,
    routing: Routing,
) -> torch.Tensor:
    """`in_place_tile_linear` and `add_deltas` after it, in one: of each row, the same bits.

    Args: x `[rows, in]`; weight `[out, in]`, contiguous; bias `[out]`; all bf16. The others are as in `add_deltas`.
    Returns: `[rows, out]`.
    """
    y = empty((len(x), len(weight)), x.dtype)
    described, shape = (table, edges, routing.order, routing.tasks), (*x.shape, len(weight))
    native.call(
        "tile_adapted_linear_bf16",
        x.contiguous(),
        weight,
        bias,
        y,
        *described,
        *shape,
        len(edges) - 1,
        table.stride(0),
    )
    return y
