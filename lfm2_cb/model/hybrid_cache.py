"""HybridCache: K/V blocks, conv states and conv checkpoints as tensors, planned under one memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ..ops.attention.kv_blocks import KVBlocks, bytes_per_row, copy_block, make_blocks
from ..ops.kernel_set import REFERENCE, KernelSet
from ..ops.memory import zeros
from .configuration import head_dim, layers_of_type

#: what `cache_dtype=` may be → the dtype of K/V; None: the model's
CACHE_DTYPES: dict[str | None, torch.dtype | None] = {None: None, "int8": torch.int8}


class CacheTooSmall(ValueError):
    """The budget does not hold even one block."""


@dataclass(frozen=True)
class CachePlan:
    """How many blocks and slots a budget buys.

    bytes = num_blocks × (K/V of block_size tokens in every attention layer + one conv checkpoint)
    + (num_slots + 1) × one conv state.
    """

    num_blocks: int
    block_size: int  # tokens
    num_slots: int
    bytes_per_block: int
    bytes_per_state: int
    checkpoints: bool  # whether each block has room for a conv checkpoint
    cache_dtype: str | None = None  # of K/V: one of `CACHE_DTYPES`

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block + (self.num_slots + 1) * self.bytes_per_state

    @classmethod
    def from_budget(
        cls,
        config: PreTrainedConfig,
        budget: int,
        *,
        block_size: int,
        num_slots: int,
        dtype: torch.dtype,
        checkpoints: bool,
        cache_dtype: str | None = None,
    ) -> CachePlan:
        """Spend `budget` bytes, but no more than `num_slots` sequences of the model's full length can use.

        Args: dtype: the model's; cache_dtype: "int8" stores K/V in 8 bits, with a scale for each token and kv head.
        Raises: CacheTooSmall: with the numbers.
        """
        kv_rows = 2 * config.num_key_value_heads * len(layers_of_type(config, "full_attention"))
        per_token = kv_rows * bytes_per_row(head_dim(config), CACHE_DTYPES[cache_dtype] or dtype)
        state_values = (config.conv_L_cache - 1) * config.hidden_size * len(layers_of_type(config, "conv"))
        per_state = state_values * dtype.itemsize
        per_block = block_size * per_token + (per_state if checkpoints else 0)
        left = budget - (num_slots + 1) * per_state
        if left < per_block:
            raise CacheTooSmall(
                f"cache_memory of {budget:,} bytes is too small: {num_slots} conv state slots take "
                f"{(num_slots + 1) * per_state:,} and one block of {block_size} tokens {per_block:,}"
            )
        most = num_slots * -(-config.max_position_embeddings // block_size)
        num_blocks = min(left // max(per_block, 1), most)
        return cls(num_blocks, block_size, num_slots, per_block, per_state, checkpoints, cache_dtype)

    def __str__(self) -> str:
        in_bits = f" in {self.cache_dtype}" if self.cache_dtype else ""
        return (
            f"{self.total_bytes / 2**20:,.0f} MiB = {self.num_blocks:,} blocks of {self.block_size} tokens "
            f"({self.num_blocks * self.block_size:,} tokens{in_bits}) + {self.num_slots} conv state slots"
        )


class HybridCache:
    """The tensors behind block ids and state slots.

    keys[layer], values[layer]: `[num_blocks, kv_heads, block_size, head_dim]`, by attention layer index. (A head's
    keys lie together: in place they are read 1.2 × as fast in fp32, 1.6 × in bf16, as with the heads further in.)
    Tensors in the model's dtype, or `Int8Blocks`, as the plan's `cache_dtype` says.
    conv_states[layer]: `[1 + num_slots + num_blocks, kernel - 1, hidden]`, by conv layer index. Its rows are one zero
    state, then the slots, then the blocks' checkpoints: `slot_row` and `checkpoint_row` convert, so that reading the
    state a sequence starts from is one gather wherever it comes from.

    Memory is committed by the system as it is first touched, up to the plan's bytes.

    Args:
        has_scratch: there is one more block (`scratch_block`), and one more conv state (`scratch_row`), beyond the
            plan, that belong to no request: padded rows of a step write there.
    """

    ZERO_ROW = 0

    def __init__(
        self,
        config: PreTrainedConfig,
        plan: CachePlan,
        dtype: torch.dtype,
        device: torch.device,
        has_scratch: bool = False,
    ) -> None:
        self.plan, self.device = plan, device
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        kv_shape = (plan.num_blocks + has_scratch, config.num_key_value_heads, plan.block_size, head_dim(config))
        num_rows = 1 + plan.num_slots + (plan.num_blocks if plan.checkpoints else 0)
        conv_shape = (num_rows + has_scratch, config.conv_L_cache - 1, config.hidden_size)
        self.scratch_block, self.scratch_row = (plan.num_blocks, num_rows) if has_scratch else (-1, -1)
        attention, conv = layers_of_type(config, "full_attention"), layers_of_type(config, "conv")
        kv_dtype = CACHE_DTYPES[plan.cache_dtype] or dtype
        self.keys: dict[int, KVBlocks] = {i: make_blocks(kv_shape, kv_dtype, device) for i in attention}
        self.values: dict[int, KVBlocks] = {i: make_blocks(kv_shape, kv_dtype, device) for i in attention}
        self.conv_states = {i: zeros(conv_shape, dtype, device) for i in conv}

    def slot_row(self, state_slot: int) -> int:
        return 1 + state_slot

    def checkpoint_row(self, block_id: int) -> int:
        assert self.plan.checkpoints
        return 1 + self.plan.num_slots + block_id

    def write_kv(
        self,
        layer_idx: int,
        slot_mapping: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kernels: KernelSet = REFERENCE,
    ) -> None:
        """Store k, v `[tokens, kv_heads, head_dim]`; slot_mapping as in `ops.attention.kv_blocks.write_rows`."""
        kernels.write_rows(self.keys[layer_idx], slot_mapping, k)
        kernels.write_rows(self.values[layer_idx], slot_mapping, v)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's K/V. (Its checkpoint is not: a block that is copied is not full, so it has none.)"""
        for blocks in (*self.keys.values(), *self.values.values()):
            copy_block(blocks, source, target)

    def copy_slot(self, source: int, target: int) -> None:
        for states in self.conv_states.values():
            states[self.slot_row(target)] = states[self.slot_row(source)]
