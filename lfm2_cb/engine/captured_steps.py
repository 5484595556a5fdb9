"""RecordedDecodes: decode steps run from a recording instead of through the model's Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.utils import logging

from ..model.decode_batch import DecodeBatch
from ..model.foreign_code import foreign_code
from ..model.hybrid_cache import HybridCache
from ..model.modeling import Lfm2CbForCausalLM
from ..model.ragged_batch import RaggedBatch, Row
from ..ops.kernel_set import KernelSet
from ..ops.native.captured_graph import Arena, Tape

logger = logging.get_logger("transformers.lfm2_cb")

#: most sequences of a recorded step: beyond, Python is a small part of a step
MOST_ROWS = 64


class RecordedDecodes:
    """One tape for each number of rows that a step has had: at most `MOST_ROWS`, over one arena for what they compute
    on their way.

    A tape holds while the model is what it was. Before every step is looked at whether its tensors are in their places
    and it has no hooks; after every `expect_changes`, whether a module or a parameter has been exchanged. A model that
    does anything but native calls (an adapter, a hook) is not recorded at all.

    Args:
        compute: the forward of a batch, as the tapes are to do it, to logits `[rows, vocab_size]`.
    """

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        cache: HybridCache,
        kernels: KernelSet,
        compute: Callable[[RaggedBatch], torch.Tensor],
    ) -> None:
        self._model, self._cache, self._kernels, self._compute = model, cache, kernels, compute
        self._arena = Arena()
        self._tapes: dict[tuple[int, int], tuple[DecodeBatch, Tape]] = {}
        self._structure: list[object] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._hooks: list[Mapping[int, object]] = []
        self._recordable, self._doubtful = False, True

    @property
    def num_bytes(self) -> int:
        """What the arena takes."""
        return self._arena.num_bytes

    def expect_changes(self) -> None:
        """The model may have been changed since the last step, as between two calls of `generate()`."""
        self._doubtful = True

    def run(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Logits `[rows, vocab_size]`, to be read before the next step; None: the rows must be run otherwise.

        Rows that share a prefix must not be given where that is to be read once.
        """
        if not len(rows) <= MOST_ROWS or not all(map(DecodeBatch.is_decode, rows)) or not self._may_record():
            return None
        key = len(rows), torch.get_num_threads()
        batch, tape = self._tapes.get(key, (None, None))
        if batch is None or tape is None or not batch.holds(rows):
            return self._record(key, rows)
        batch.fill(rows)
        self._embed(batch)
        return tape.replay()

    def _embed(self, batch: DecodeBatch) -> None:
        self._kernels.embed(self._model.model.embed_tokens, batch.input_ids, batch.inputs_embeds)

    def _record(self, key: tuple[int, int], rows: Sequence[Row]) -> torch.Tensor:
        longest = max(row.start // self._cache.plan.block_size + 1 for row in rows)
        batch = DecodeBatch(
            rows,
            self._cache,
            self._model.config.conv_L_cache,
            self._kernels,
            max_blocks=2 * longest,
            inputs_embeds=torch.empty(len(rows), self._model.config.hidden_size, dtype=self._model.dtype),
        )
        self._embed(batch)
        assert self._kernels.native is not None
        tape = Tape(self._kernels.native, self._arena)
        logits = tape.record(lambda: self._compute(batch))
        if tape.unrecorded is None:
            self._tapes[key] = batch, tape
        else:
            logger.info("lfm2_cb: decode steps are not recorded, because of %s", tape.unrecorded)
            self._recordable = False
        return logits

    def _may_record(self) -> bool:
        if self._doubtful and (structure := _structure_of(self._model)) != self._structure:
            self._forget(structure)
        if self._addresses != list(map(torch.Tensor.data_ptr, self._tensors)):
            self._forget(_structure_of(self._model))
        self._doubtful = False
        return self._recordable and not (any(self._hooks) and self._has_foreign_hooks())

    def _has_foreign_hooks(self) -> bool:
        """Whether any hook may change what comes out. (transformers leaves some that do not.)"""
        return any(self._hooks[:2]) or any(map(foreign_code, self._model.modules()))

    def _forget(self, structure: list[object]) -> None:
        self._tapes.clear()
        self._structure = structure
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        modules = list(self._model.modules())
        self._recordable = not any("forward" in module.__dict__ for module in modules)
        self._hooks = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        for module in modules:
            self._hooks += module._forward_hooks, module._forward_pre_hooks


def _structure_of(model: nn.Module) -> list[object]:
    """What says that a model is still made of the same modules and tensors."""
    found: list[object] = []
    for module in model.modules():
        own = module.__dict__
        found += id(module), "forward" in own, own.get("eps"), own.get("scaling"), own.get("attention_scaling")
        found += map(id, (*module._parameters.values(), *module._buffers.values()))
    return found
