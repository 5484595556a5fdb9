"""ModelRunner: scheduled rows → one packed forward → the logits that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ..adapters.pool import AdapterPool
from ..model.changes import ModelWatch
from ..model.configuration import layers_of_type, rope_type
from ..model.conversion import stock_of
from ..model.decode_batch import DecodeBatch
from ..model.device_batch import make_batch
from ..model.hybrid_cache import CachePlan, HybridCache
from ..model.modeling import Lfm2CbForCausalLM
from ..model.padded_batch import PaddedDecodeBatch
from ..model.placement import place_side_by_side
from ..model.quantization import check_device, weights_of
from ..model.ragged_batch import RaggedBatch, Row
from ..ops.attention.sparse import SparsePrefill
from ..ops.kernel_set import KernelSet
from ..ops.native import Arena, CommandBuffer, NativeKernels, lend
from ..ops.triton import launching_on
from ..scheduling.cache_manager import Fork
from ..scheduling.scheduler import ScheduledRow
from .captured_steps import CapturedSteps
from .device_graphs import graphs_for
from .padded_steps import PaddedSteps
from .sharing import shared_prefixes

#: RoPE variants whose frequencies depend on the longest sequence of the batch, and so on batch mates
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ModelRunner:
    """Owns the model and the cache tensors; runs on the device and in the dtype that the model has.

    Raises: ValueError: the config has no layer to cache, or a RoPE variant that would make a request's answer depend
    on its batch mates; or low-bit weights on another device than a CPU. NativeUnavailable: kernels="native" cannot be
    had.

    `cascade = False`, on an instance or the class, makes every row read its own keys even where rows share them;
    `capturing = False` runs every step through the model's Python.

    Args: adapters: those that rows may have, where any may.
    """

    cascade = True
    capturing = True

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        plan: CachePlan,
        kernels: str = "auto",
        adapters: AdapterPool | None = None,
    ) -> None:
        config = model.config
        kind = rope_type(config)
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ValueError(f"rope_type={kind!r} depends on the longest sequence of a batch: use stock generate()")
        if not layers_of_type(config, "full_attention") and not layers_of_type(config, "conv"):
            raise ValueError("the config has neither attention nor conv layers")
        if model.device.type != "cpu":
            check_device(weights_of(model), model.device)
        self.model, self.kernel_size, self.adapters = model, config.conv_L_cache, adapters
        self.kernels = KernelSet.resolve(kernels, model.device, model.dtype)
        if self.kernels.native is not None:
            stock = stock_of(model)
            place_side_by_side(model, stock() if stock is not None else None)
        self._watch = ModelWatch(model)
        self._watch.check()
        graphs = graphs_for(kernels, model.device) if self.kernels.native is None else None
        self.cache = HybridCache(config, plan, model.dtype, model.device, has_scratch=graphs is not None)
        self._batch: RaggedBatch | None = None
        self.arena = Arena()  # for the intermediates of native steps
        self.captured: CapturedSteps | PaddedSteps | None = None
        whole = model, self.cache, self.kernels, self._compute
        if self.kernels.native is not None:
            self.captured = CapturedSteps(*whole, self.arena, adapters)
        elif graphs is not None:
            self.captured = PaddedSteps(*whole, graphs, plan.num_slots, adapters)

    @property
    def native(self) -> NativeKernels | None:
        """The native kernels that this engine runs by; None: the torch reference."""
        return self.kernels.native

    def run(self, scheduled: Sequence[ScheduledRow]) -> torch.Tensor:
        """Compute the rows; the cache then holds them.

        Returns:
            Logits `[n, vocab_size]` in the model's dtype: for each row that samples, one for its last known token and
            one for each draft behind it, in the rows' order.
        """
        shared = shared_prefixes(scheduled, self.cache.plan.block_size) if self.cascade else []
        rows = [self._row(row) for row in scheduled]
        for i, row in enumerate(scheduled):
            if (reuse := row.request.reuse) is None:
                continue  # it has no gaps, and so one row
            rows[i].keeps_state = i + 1 == len(scheduled) or scheduled[i + 1].request is not row.request
            if row.start == reuse.first:
                reuse.fill(self.cache, row.request.block_table)
        return self.forward(rows, shared)

    @torch.inference_mode()
    def run_ahead(self, scheduled: Sequence[ScheduledRow], token_ids: torch.Tensor) -> torch.Tensor | None:
        """As `run`, of decodes whose tokens are known to the device only.

        Args: token_ids: on the device, `[rows]` int64.
        Returns: None, with nothing done, where they must be run otherwise, once the tokens are known.
        """
        if not self.capturing or not isinstance(self.captured, PaddedSteps):
            return None
        rows = [replace(self._row(row), token_ids=[0]) for row in scheduled]
        with launching_on(self.cache.device):
            return self.captured.run(rows, token_ids=token_ids)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], shared: Sequence[tuple[list[int], int]] = ()) -> torch.Tensor:
        """One packed forward: logits `[sum of num_logits, vocab_size]`. shared: as in `RaggedBatch`."""
        with launching_on(self.cache.device):
            return self._forward(rows, shared)

    def _forward(self, rows: Sequence[Row], shared: Sequence[tuple[list[int], int]]) -> torch.Tensor:
        if self.captured is not None:
            if self.capturing and (logits := self.captured.run(rows, shared)) is not None:
                self._batch = None
                return logits
            self.captured.invalidate()
        kernels = self.kernels if self.adapters is None else self.adapters.kernels_for(self.kernels, rows)
        self._batch = make_batch(rows, self.cache, self.kernel_size, shared, kernels)
        with lend(self.arena), self._command_buffer():
            return self._compute(self._batch)

    def _command_buffer(self) -> AbstractContextManager[object]:
        """Native calls are deferred if the forward runs no user's Python."""
        defers = self.capturing and isinstance(self.captured, CapturedSteps) and self.captured.is_plain()
        return CommandBuffer(self.native, self.arena) if defers and self.native is not None else nullcontext()

    def _compute(self, batch: RaggedBatch | PaddedDecodeBatch) -> torch.Tensor:
        tokens = {"input_ids": batch.input_ids}
        if isinstance(batch, (DecodeBatch, PaddedDecodeBatch)):
            tokens = {"inputs_embeds": batch.inputs_embeds}
        hidden_states = self.model.model(
            **tokens, position_ids=batch.position_ids, state=batch, use_cache=False
        ).last_hidden_state
        if len(batch.logits_index) < len(hidden_states):
            hidden_states = hidden_states[batch.logits_index]
        return batch.kernels.linear(self.model.lm_head, hidden_states)

    def check_model(self) -> None:
        """Look whether the model can still be run. From any thread. Raises: ModelChanged."""
        self._watch.check()

    def follow_model(self) -> bool:
        """Take over what was changed in the model, between two steps. Returns: whether its cached states are void."""
        return self._watch.follow()

    def commit_conv_state(self, num_accepted: dict[int, int]) -> None:
        """Keep the conv state of the accepted drafts: row index in the last `run` → how many were accepted."""
        assert self._batch is not None
        self._batch.commit_conv_state(num_accepted)

    def copy(self, fork: Fork) -> None:
        """Carry out a fork's copies."""
        if fork.block_copy is not None:
            self.cache.copy_block(*fork.block_copy)
        self.cache.copy_slot(*fork.slot_copy)

    def release(self) -> None:
        """Drop the last step's tensors, as when the engine falls idle."""
        self._batch = None

    @staticmethod
    def _row(row: ScheduledRow) -> Row:
        request = row.request
        token_ids = request.token_ids[row.start : row.start + row.num_tokens - row.num_drafts]
        if row.num_drafts:
            token_ids += request.draft_token_ids[: row.num_drafts]
        return Row(
            token_ids,
            row.start,
            request.block_table,
            request.state_slot,  # type: ignore[arg-type]  # a scheduled request has one
            row.restore_block,
            1 + row.num_drafts if row.samples else 0,
            row.num_drafts,
            sparse=_sparse(row),
            adapter=request.adapter_place,
        )


def _sparse(row: ScheduledRow) -> SparsePrefill | None:
    """How a chunk of a prompt attends, where that is sparsely. From the prompt's last token on all is exact."""
    share = row.request.sparse_prefill
    if share is None or row.num_tokens == 1:
        return None
    last = row.request.num_prompt_tokens - 1
    return SparsePrefill(share, last) if row.start < last else None
