"""PaddedDecodeBatch: a step of one token a sequence, padded to a number of rows that there is a device graph for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..ops.kernel_set import KernelSet
from .hybrid_cache import HybridCache
from .paged_state import PagedState
from .ragged_batch import Row
from .sequence_state import AttentionLayer, ConvLayer
from .static_inputs import StaticInputs


class PaddedDecodeBatch(PagedState):
    """One token of each of up to `num_rows` sequences, in tensors that stay where they are from step to step; after
    `fill`, of others. A device graph captured of a forward over it then holds for them too.

    Rows that are left over are the token 0 at the start of a sequence in the cache's scratch block; what they write
    goes there, and to the scratch state. Implements `SequenceState`.

    Args:
        cache: with scratch.
        max_blocks: cache blocks that a row may have.

    Attributes:
        inputs_embeds: `[num_rows, hidden]`, for the caller to fill from `input_ids`.
        input_ids, position_ids: int64 `[num_rows]`.
        kv_lens: int32 `[num_rows]`.
        block_table: int32 `[num_rows, max_blocks]`; beyond a row's blocks the scratch block.
    """

    def __init__(
        self,
        cache: HybridCache,
        kernel_size: int,
        kernels: KernelSet,
        *,
        num_rows: int,
        max_blocks: int,
        inputs_embeds: torch.Tensor,
    ) -> None:
        assert cache.scratch_block >= 0
        self.cache, self.kernels, self.num_rows, self.max_blocks = cache, kernels, num_rows, max_blocks
        self.inputs_embeds = inputs_embeds
        writes = 2 if cache.plan.checkpoints else 1
        self._inputs = StaticInputs(
            {
                "input_ids": ((num_rows,), torch.int64),
                "position_ids": ((num_rows,), torch.int64),
                "slot_mapping": ((num_rows * cache.num_kv_heads,), torch.int64),
                "slots": ((num_rows,), torch.int64),
                "read_rows": ((num_rows,), torch.int64),
                "write_rows": ((num_rows, writes), torch.int64),
                "kv_lens": ((num_rows,), torch.int32),
                "block_table": ((num_rows, max_blocks), torch.int32),
            },
            cache.device,
        )
        fields = self._inputs.on_device
        self.input_ids, self.position_ids = fields["input_ids"], fields["position_ids"]
        self.kv_lens, self.block_table = fields["kv_lens"], fields["block_table"]
        self._slot_mapping, self.slots = fields["slot_mapping"], fields["slots"]
        self._read_rows, self._write_rows = fields["read_rows"], fields["write_rows"]
        # Rows of "all states, then the inputs" that a token sees, oldest first; its new state are all but the first.
        window, row = kernel_size - 1, np.arange(num_rows)
        seen = np.vstack((row * window + np.arange(window)[:, None], num_rows * window + row))
        self._taps = torch.from_numpy(seen).to(cache.device)
        self._write_index = self._taps[1:].t().repeat_interleave(writes, dim=0)
        self.fill([])

    @property
    def logits_index(self) -> torch.Tensor:
        return self.input_ids  # of every row

    def fill(self, rows: Sequence[Row]) -> None:
        """Put other rows in the place of those before: decodes, at most `num_rows`, each of at most `max_blocks`."""
        cache, size, heads, count = self.cache, self.cache.plan.block_size, self.cache.num_kv_heads, len(rows)
        host = self._inputs.host()
        starts = np.array([row.start for row in rows], dtype=np.int64)
        blocks = np.array([row.block_table[row.start // size] for row in rows], dtype=np.int64)
        host["input_ids"][:count] = [row.token_ids[0] for row in rows]
        host["position_ids"][:count] = starts
        host["kv_lens"][:count] = starts + 1
        host["slots"][:count] = blocks * size + starts % size
        by_head = host["slot_mapping"].reshape(-1, heads)
        by_head[:count] = (blocks[:, None] * heads + np.arange(heads)) * size + (starts % size)[:, None]
        written = host["write_rows"]
        # What a row begins from is the last that it writes: the kernel has read it then.
        host["read_rows"][:count] = written[:count, -1] = [cache.slot_row(row.state_slot) for row in rows]
        if cache.plan.checkpoints:
            ends_block = (starts + 1) % size == 0
            written[:count, 0] = np.where(ends_block, cache.checkpoint_row(0) + blocks, cache.scratch_row)
        table = host["block_table"]
        table[:] = cache.scratch_block
        for i, row in enumerate(rows):
            num_blocks = row.start // size + 1
            table[i, :num_blocks] = row.block_table[:num_blocks]

        host["input_ids"][count:] = host["position_ids"][count:] = 0
        host["kv_lens"][count:] = 1
        host["slots"][count:] = cache.scratch_block * size
        by_head[count:] = (cache.scratch_block * heads + np.arange(heads)) * size
        host["read_rows"][count:] = HybridCache.ZERO_ROW
        written[count:] = cache.scratch_row
        self._inputs.upload()

    # SequenceState

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        self.cache.write_kv(layer.layer_idx, self._slot_mapping, k, v, self.kernels)
        return self.attend_queries(layer, q), None

    def attend_queries(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.caches(layer)
        mixed = self.kernels.decode_attention(q, keys, values, self.kv_lens, self.block_table, layer.scaling)
        return mixed.flatten(-2)

    def convolve(self, layer: ConvLayer, bcx: torch.Tensor) -> torch.Tensor:
        conv, states = layer.conv, self.cache.conv_states[layer.layer_idx]
        if self.kernels.triton is not None:
            rows = self._read_rows, self._write_rows
            return self.kernels.triton.decode_short_conv(bcx, states, conv.weight, conv.bias, *rows)
        read, written = (states, self._read_rows, self._taps), (self._write_rows.flatten(), self._write_index)
        mixed, _ = self.kernels.short_conv(bcx, *read, conv.weight, conv.bias, *written, whole=False)
        return mixed

    def mask_padding(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states  # the results of padded rows are not used
