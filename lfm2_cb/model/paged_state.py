"""PagedState: attention over a paged cache whose rows are written by the kernel that norms and rotates them."""

from __future__ import annotations

import torch

from ..ops.attention.kv_blocks import KVBlocks
from .hybrid_cache import HybridCache
from .sequence_state import AttentionLayer, SequenceState


class PagedState(SequenceState):
    """Attributes:
    cache: where keys and values go.
    slots: int64 or int32 `[tokens]`, block id × block size + place in it, of each token.
    """

    cache: HybridCache
    slots: torch.Tensor

    def attend_packed(
        self, layer: AttentionLayer, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norms, caches = (layer.q_layernorm, layer.k_layernorm), self.caches(layer)
        q = self.kernels.norm_rotate_write(qkv, layer.num_heads, *norms, rope, self.slots, *caches)
        return super().attend_packed(layer, qkv, rope) if q is None else (self.attend_queries(layer, q), None)

    def caches(self, layer: AttentionLayer) -> tuple[KVBlocks, KVBlocks]:
        """The layer's keys and values."""
        return self.cache.keys[layer.layer_idx], self.cache.values[layer.layer_idx]

    def attend_queries(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """`attend`, where keys and values are in the cache already."""
        raise NotImplementedError
