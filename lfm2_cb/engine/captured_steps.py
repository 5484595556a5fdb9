"""CapturedSteps: decode steps replayed from a captured graph instead of run through the model's Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers.utils import logging

from ..adapters.pool import AdaptedKernels, AdapterPool
from ..model.decode_batch import BlockTables, DecodeBatch
from ..model.hybrid_cache import HybridCache
from ..model.modeling import Lfm2CbForCausalLM
from ..model.ragged_batch import RaggedBatch, Row
from ..ops.kernel_set import KernelSet
from ..ops.native import Arena, CapturedGraph
from ..ops.native.instruction_sets import TILE_ISAS
from .capture_guard import CaptureGuard

logger = logging.get_logger("transformers.lfm2_cb")

#: most sequences of a captured step without tiles for bf16: beyond, Python is a small part of a step, and few steps
#: have as many rows as one before
MOST_ROWS = 64
#: where bf16 is multiplied by tiles, sixteen rows at a time, steps of more rows than this, however many, are
#: captured with their number rounded up to a multiple of it: one graph then serves most steps. (2 cores of a Xeon with
#: AMX, bf16, a 350M model, medians of 8, ms from Python, captured exactly and rounded up: 18 rows 44.3, 33.8 and 33.9;
#: 61 rows 67.4, 57.8 and 57.8; 100 rows 99.6, 80.7 and 79.6; 180 rows 148.8, 129.6 and 131.8.)
ROWS_TOGETHER = 8


class GraphKey(NamedTuple):
    """Which steps a graph is for."""

    num_rows: int
    num_threads: int
    sharing: bool  # rows share prefixes
    adapted: bool  # rows have adapters


class CapturedSteps:
    """One graph for each number of rows that a step has had, some together, their intermediates in one arena; and
    others for steps whose rows share prefixes, or have adapters.

    A graph holds while the model is what it was, by a `CaptureGuard`. A model that does anything but native calls (an
    adapter, a hook) is not captured at all.

    Args:
        compute: the forward of a batch that is captured, to logits `[rows, vocab_size]`.
        arena: for the intermediates.
        adapters: those that rows may have, where any may.

    Attributes: rows_together: beyond so many, one graph is for as many numbers of rows.
    """

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        cache: HybridCache,
        kernels: KernelSet,
        compute: Callable[[RaggedBatch], torch.Tensor],
        arena: Arena,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._model, self._cache, self._kernels, self._compute = model, cache, kernels, compute
        self._arena, self._adapters = arena, adapters
        self._graphs: dict[GraphKey, tuple[DecodeBatch, CapturedGraph]] = {}
        self._tables = BlockTables(cache.plan.num_slots, 0)
        self._guard = CaptureGuard(model)
        has_tiles = kernels.native is not None and kernels.native.isa in TILE_ISAS and model.dtype == torch.bfloat16
        self.rows_together = ROWS_TOGETHER if has_tiles else 1
        self._refused: set[bool] = set()  # steps that no capture could hold: without shared prefixes, and those with

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def invalidate(self) -> None:
        """The model may have been changed since the last step, as between two calls of `generate()`."""
        self._guard.invalidate()

    def run(self, rows: Sequence[Row], shared: Sequence[tuple[list[int], int]] = ()) -> torch.Tensor | None:
        """Logits `[rows, vocab_size]`, to be read before the next step; None: the rows must be run otherwise.

        Args: shared: as in `RaggedBatch`.
        """
        if (len(rows) > MOST_ROWS and self.rows_together == 1) or not all(map(DecodeBatch.is_decode, rows)):
            return None
        places: list[int] = []
        if self._adapters is not None and not self._adapters.is_empty:
            places = [row.adapter for row in rows]
        adapted = any(place >= 0 for place in places)
        key = GraphKey(self._num_rows(len(rows)), torch.get_num_threads(), bool(shared), adapted)
        if not self._can_capture(key.sharing) or (adapted and self._have_own_heads(places)):
            return None
        self._make_room(rows)
        batch, graph = self._graphs.get(key, (None, None))
        if batch is None or graph is None:
            return self._capture(key, rows, shared)[: len(rows)]
        batch.fill(rows, shared)
        if isinstance(batch.kernels, AdaptedKernels):
            batch.kernels.put(places)
        self._embed(batch)
        logits = graph.replay()
        return logits if len(rows) == key.num_rows else logits[: len(rows)]

    def _num_rows(self, count: int) -> int:
        """Rows of the graph that runs so many."""
        return count if count < self.rows_together else -(-count // self.rows_together) * self.rows_together

    def _make_room(self, rows: Sequence[Row]) -> None:
        """For the longest, in the tables that all graphs read."""
        longest = max([row.start for row in rows]) // self._cache.plan.block_size + 1
        if longest > self._tables.width:
            self._graphs.clear()
            self._tables = BlockTables(self._cache.plan.num_slots, 2 * longest)

    def _have_own_heads(self, places: Sequence[int]) -> bool:
        assert self._adapters is not None
        return any(map(self._adapters.has_own_head, places))

    def _embed(self, batch: DecodeBatch) -> None:
        self._kernels.embed(self._model.model.embed_tokens, batch.input_ids, batch.inputs_embeds)

    def _capture(self, key: GraphKey, rows: Sequence[Row], shared: Sequence[tuple[list[int], int]]) -> torch.Tensor:
        kernels = self._kernels
        if self._adapters is not None:
            kernels = self._adapters.kernels_for(kernels, rows, key.num_rows)
        batch = DecodeBatch(
            rows,
            self._cache,
            self._model.config.conv_L_cache,
            kernels,
            num_rows=key.num_rows,
            tables=self._tables,
            inputs_embeds=torch.empty(key.num_rows, self._model.config.hidden_size, dtype=self._model.dtype),
            shared=shared,
        )
        self._embed(batch)
        assert self._kernels.native is not None
        graph = CapturedGraph(self._kernels.native, self._arena)
        logits = graph.capture(lambda: self._compute(batch))
        if graph.not_captured is None:
            self._graphs[key] = batch, graph
        else:
            kind = "with shared prefixes " if key.sharing else ""
            logger.info("lfm2_cb: decode steps %sare not captured, because of %s", kind, graph.not_captured)
            self._refused.add(key.sharing)
        return logits

    def is_plain(self) -> bool:
        """Whether a forward does nothing that no capture sees, as of now."""
        if self._guard.has_changed():
            self._graphs.clear()
            self._refused.clear()
        return self._guard.may_capture()

    def _can_capture(self, sharing: bool) -> bool:
        return self.is_plain() and sharing not in self._refused
