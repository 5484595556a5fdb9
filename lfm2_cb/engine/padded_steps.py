"""PaddedSteps: decode steps replayed from device graphs, padded to the next batch size that has been captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from transformers.utils import logging

from ..adapters.pool import AdapterPool
from ..model.decode_batch import DecodeBatch
from ..model.hybrid_cache import HybridCache
from ..model.modeling import Lfm2CbForCausalLM
from ..model.padded_batch import PaddedDecodeBatch
from ..model.ragged_batch import Row
from ..ops.kernel_set import KernelSet
from .capture_guard import CaptureGuard
from .device_graphs import DeviceGraph, DeviceGraphs

logger = logging.get_logger("transformers.lfm2_cb")

#: rows that graphs are captured for
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: tokens of a row that the first graphs have room for; longer rows have them captured again, for four times as many
FIRST_TOKENS = 4096


class PaddedSteps:
    """One graph for each of `SIZES`, up to as many rows as there may be, the largest captured first, all at the first
    step that may use one; they hold while the model is what it was (`CaptureGuard`).

    Steps with adapters, of more rows, or of anything but decodes, and models with modules of others, are run as they
    are. So are all steps of a model that cannot be captured, until it is changed.

    Args:
        graphs: captures them. compute: the forward of a batch, to logits `[rows, vocab_size]`.
        most_rows: sequences of a step, at most.
        adapters: those that rows may have, where any may.
    """

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        cache: HybridCache,
        kernels: KernelSet,
        compute: Callable[[PaddedDecodeBatch], torch.Tensor],
        graphs: DeviceGraphs,
        most_rows: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._model, self._cache, self._kernels, self._compute = model, cache, kernels, compute
        self._device_graphs, self._adapters = graphs, adapters
        self.sizes = [size for size in SIZES if size // 2 < most_rows]
        self._max_blocks = -(-FIRST_TOKENS // cache.plan.block_size)
        self._graphs: dict[int, tuple[PaddedDecodeBatch, DeviceGraph]] = {}  # by rows
        self._guard = CaptureGuard(model)
        self._refused = self._is_void = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def invalidate(self) -> None:
        """The model may have been changed since the last step, as between two calls of `generate()`."""
        self._guard.invalidate()

    def run(
        self,
        rows: Sequence[Row],
        shared: Sequence[tuple[list[int], int]] = (),
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Logits `[rows, vocab_size]`, to be read before the next step; None: the rows must be run otherwise.

        Args:
            shared: as in `RaggedBatch`. Here each row reads all of its keys by itself.
            token_ids: in place of the rows', on the device, `[rows]` int64. The step before may still be computed, so
                None is returned where graphs would have to be captured, or dropped.
        """
        if len(rows) > self.sizes[-1] or not all(map(DecodeBatch.is_decode, rows)):
            return None
        if self._adapters is not None and not self._adapters.is_empty and any(row.adapter >= 0 for row in rows):
            return None
        self._is_void = self._guard.has_changed() or self._is_void
        if token_ids is not None and (self._is_void or not self._graphs or self._blocks(rows) > self._max_blocks):
            return None
        if self._is_void:
            self._graphs.clear()
            self._refused = self._is_void = False
        if self._refused or not self._guard.all_plain or not self._guard.may_capture():
            return None
        self._make_room(rows)
        if not self._graphs and not self._capture():
            return None
        batch, graph = self._graphs[next(size for size in self.sizes if size >= len(rows))]
        batch.fill(rows)
        if token_ids is not None:
            batch.input_ids[: len(rows)].copy_(token_ids)
        self._embed(batch)
        return graph.replay()[: len(rows)]

    def _blocks(self, rows: Sequence[Row]) -> int:
        """Of the longest."""
        return max(row.start for row in rows) // self._cache.plan.block_size + 1

    def _make_room(self, rows: Sequence[Row]) -> None:
        longest = self._blocks(rows)
        if longest > self._max_blocks:
            self._graphs.clear()
            while longest > self._max_blocks:
                self._max_blocks *= 4

    def _capture(self) -> bool:
        """Capture all graphs. Returns: whether that worked; else the reason is logged, once per state of the model."""
        try:
            for size in reversed(self.sizes):
                batch = PaddedDecodeBatch(
                    self._cache,
                    self._model.config.conv_L_cache,
                    self._kernels,
                    num_rows=size,
                    max_blocks=self._max_blocks,
                    inputs_embeds=torch.zeros(
                        size, self._model.config.hidden_size, dtype=self._model.dtype, device=self._cache.device
                    ),
                )
                self._embed(batch)
                graph = self._device_graphs.capture(functools.partial(self._compute, batch))
                self._graphs[size] = batch, graph
        except Exception as error:
            self._graphs.clear()
            self._refused = True
            reason = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("lfm2_cb: decode steps run without device graphs: %s", reason[0])
            return False
        return True

    def _embed(self, batch: PaddedDecodeBatch) -> None:
        self._kernels.embed(self._model.model.embed_tokens, batch.input_ids, batch.inputs_embeds)
