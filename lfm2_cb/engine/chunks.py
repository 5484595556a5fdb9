"""Prompt segments computed once and reused at other positions, after Cache-Craft (arXiv 2502.15734).

A segment is first computed alone, from position 0. In a prompt that contains it, its keys are rotated to their new
positions and its values are reused unchanged. The parts that depend most on the text before it are recomputed, with
attention to the whole prompt: its first tokens, as far as the short convolutions reach, and the blocks whose attention
output would change most.

Which blocks these are is estimated before anything is computed. Apart from the rotation, the queries and keys of the
first attention layer depend only on the few tokens within reach of the convolutions below it. The queries of that
layer are kept with the segment: their attention to the text before it shows how far the layer's output changes, and
every deviation in the layers above follows from that change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..model.configuration import layers_of_type
from ..model.hybrid_cache import CachePlan, HybridCache
from ..model.modeling import Lfm2CbForCausalLM
from ..model.ragged_batch import RaggedBatch, Row
from ..model.sequence_state import AttentionLayer
from ..ops.attention.cascade import attention_with_lse
from ..ops.attention.kv_blocks import gather
from ..ops.kernel_set import KernelSet
from ..ops.pointwise import rotate_alike
from ..scheduling.request import Request

#: every which query of a segment is kept, to see how far its attention would move
QUERY_STRIDE = 16

#: cos and sin of the angles between a position and another, fp32 `[head_dim / 2]`
Turn = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Segment:
    """What was computed of a segment standing alone.

    Attributes:
        keys, values: by attention layer `[tokens, kv_heads, head_dim]`, keys rotated from position 0 on.
        states: by conv layer `[marks, kernel - 1, hidden]`, after each whole block of tokens and after the last token.
        queries: of the first attention layer `[sampled, heads, head_dim]`, of every `QUERY_STRIDE`th position.
        near: their attention within the segment, fp32, and `[sampled, heads]` the logarithms of its denominators.
    """

    num_tokens: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: torch.Tensor | None = None
    near: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        tensors = [*self.keys.values(), *self.values.values(), *self.states.values(), *(self.near or ())]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.queries is None else self.queries.nbytes)


@dataclass(frozen=True)
class Placed:
    """A segment of a prompt, from its token `start` on."""

    start: int
    segment: Segment

    @property
    def end(self) -> int:
        return self.start + self.segment.num_tokens


class SegmentBatch(RaggedBatch):
    """Segments side by side, some of whose first queries are kept."""

    queries: torch.Tensor | None = None

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        if self.queries is None:
            self.queries = q.clone()
        return super().attend(layer, q, k, v)


class ChunkStore:
    """Segments by their tokens, those used last up to `max_bytes`, in addition to the engine's cache.

    Args:
        block_size: tokens of a block: what is computed again is whole blocks of a segment.
        max_tokens: of a segment that is kept, at most.
    """

    def __init__(
        self,
        model: Lfm2CbForCausalLM,
        kernels: KernelSet,
        block_size: int,
        max_tokens: int,
        max_bytes: int,
    ) -> None:
        self.model, self.kernels, self.block_size, self.max_bytes = model, kernels, block_size, max_bytes
        self.max_tokens, self.config = max_tokens, model.config
        self.attention, self.conv = (layers_of_type(self.config, kind) for kind in ("full_attention", "conv"))
        #: tokens that a sequence's convolutions reach back from its conv states: what is before them does not matter
        self.warm_up = (self.config.conv_L_cache - 1) * len(self.conv)
        self._segments: OrderedDict[tuple[int, ...], Segment] = OrderedDict()
        self._cache: HybridCache | None = None

    def clear(self) -> None:
        """Forget all, as when the weights have changed."""
        self._segments.clear()

    def keeps(self, num_tokens: int) -> bool:
        """Whether segments of so many tokens are worth keeping: more than is computed again anyway."""
        return max(self.block_size, self.warm_up) < num_tokens <= self.max_tokens

    def plan(self, request: Request) -> None:
        """Decide which parts of a request's prompt are reused, and compute the segments that are missing."""
        starts = [0, *request.segments]
        parts = [tuple(request.prompt_token_ids[a:b]) for a, b in zip(starts, request.segments, strict=False)]
        kept = [i for i, part in enumerate(parts) if self.keeps(len(part))]
        if request.recompute >= 1 or not kept:
            return
        self._compute([parts[i] for i in kept])
        placed = [Placed(starts[i], self._segments[parts[i]]) for i in kept]
        for i in kept:
            self._segments.move_to_end(parts[i])
        self._evict()
        reuse = Reuse(self, placed, request.recompute)
        for r in (request, *request.forks):
            r.reuse, r.gaps = reuse, reuse.gaps

    def _evict(self) -> None:
        held = sum(segment.num_bytes for segment in self._segments.values())
        while held > self.max_bytes and self._segments:
            _, segment = self._segments.popitem(last=False)
            held -= segment.num_bytes

    def _compute(self, parts: Sequence[tuple[int, ...]]) -> None:
        missing = [part for part in dict.fromkeys(parts) if part not in self._segments]
        while missing:
            count, tokens = 0, 0
            while count < len(missing) and tokens + self._padded(missing[count]) <= self._padded_most:
                tokens += self._padded(missing[count])
                count += 1
            for part, segment in zip(missing[:count], self._compute_some(missing[:count]), strict=True):
                self._segments[part] = segment
            missing = missing[count:]

    def _padded(self, part: Sequence[int]) -> int:
        return -(-len(part) // self.block_size) * self.block_size

    @property
    def _padded_most(self) -> int:
        return self.max_tokens + self.block_size

    @torch.inference_mode()
    def _compute_some(self, parts: Sequence[tuple[int, ...]]) -> list[Segment]:
        """One forward over segments, each by itself, in a small cache of their own."""
        if self._cache is None:
            num_blocks = -(-self._padded_most // self.block_size)
            plan = CachePlan(num_blocks, self.block_size, num_blocks, 0, 0, True)
            self._cache = HybridCache(self.config, plan, self.model.dtype, self.model.device)
        rows, block = [], 0
        for slot, part in enumerate(parts):
            blocks = range(block, block + self._padded(part) // self.block_size)
            rows.append(Row(part, 0, blocks, slot))
            block = blocks.stop
        batch = SegmentBatch(rows, self._cache, self.config.conv_L_cache, (), self.kernels)
        self.model.model(input_ids=batch.input_ids, position_ids=batch.position_ids, state=batch, use_cache=False)
        return [self._take(row, batch.queries, start) for row, start in zip(rows, batch.cu_seqlens, strict=False)]

    def _take(self, row: Row, queries: torch.Tensor | None, start: int) -> Segment:
        """Copies of what a row left in the cache."""
        cache, size = self._cache, len(row.token_ids)
        assert cache is not None
        blocks = torch.tensor(list(row.block_table), device=cache.device)
        marks = [cache.checkpoint_row(b) for b in row.block_table[: size // self.block_size]]
        marks.append(cache.slot_row(row.state_slot))
        segment = Segment(
            size,
            {i: gather(cache.keys[i], blocks, size).contiguous() for i in self.attention},
            {i: gather(cache.values[i], blocks, size).contiguous() for i in self.attention},
            {i: cache.conv_states[i][marks] for i in self.conv},
        )
        if queries is not None:
            layer, last = self.attention[0], range(QUERY_STRIDE - 1, size, QUERY_STRIDE)
            segment.queries = queries[start + QUERY_STRIDE - 1 : start + size : QUERY_STRIDE].clone()
            parts = [
                self._attend(segment.queries[i : i + 1], segment.keys[layer][: p + 1], segment.values[layer][: p + 1])
                for i, p in enumerate(last)
            ]
            segment.near = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        return segment

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_with_lse(q, k, v, q.shape[-1] ** -0.5, causal=False)

    @torch.inference_mode()
    def deviations(self, placed: Sequence[Placed]) -> Iterator[torch.Tensor]:
        """For each segment and each of its blocks how far the first attention layer's output moves, as a share of its
        length, by attention to the segments before it."""
        if not self.attention:
            yield from (torch.zeros(-(-place.segment.num_tokens // self.block_size)) for place in placed)
            return
        layer, num_before = self.attention[0], 0
        turns = [self.turn(place.start) for place in placed]
        segments = [place.segment for place in placed]
        keys = torch.cat([self.rotated(s.keys[layer], turn) for s, turn in zip(segments, turns, strict=True)]).float()
        values = torch.cat([segment.values[layer] for segment in segments]).float()
        for segment, turn in zip(segments, turns, strict=True):
            assert segment.queries is not None and segment.near is not None
            moved = torch.zeros(len(segment.queries), device=segment.queries.device)
            if num_before:
                near, near_lse = segment.near
                queries = self.rotated(segment.queries, turn)
                far, far_lse = self._attend(queries, keys[:num_before], values[:num_before])
                change = torch.sigmoid(far_lse - near_lse).unsqueeze(-1) * (far - near)
                moved = (change.flatten(1).norm(dim=-1) / near.flatten(1).norm(dim=-1).clamp_min(1e-9)).float()
            num_before += segment.num_tokens
            block = torch.arange(QUERY_STRIDE - 1, segment.num_tokens, QUERY_STRIDE) // self.block_size
            sums = torch.zeros(-(-segment.num_tokens // self.block_size)).index_add_(0, block, moved.cpu())
            yield sums / block.bincount(minlength=len(sums)).clamp_min(1)

    def turn(self, distance: int) -> Turn | None:
        """The angles by which RoPE turns what stands further on by `distance`; None: it is at its place."""
        if not distance:
            return None
        angles = distance * self.model.model.rotary_emb.inv_freq.double()
        return angles.cos().float(), angles.sin().float()

    def rotated(self, x: torch.Tensor, turn: Turn | None) -> torch.Tensor:
        """Keys or queries `[tokens, heads, head_dim]`, by the angles of `turn`."""
        return x if turn is None else rotate_alike(x, *turn, self.kernels.native)


class Reuse:
    """Which parts of a prompt are reused, and which are computed.

    Attributes: gaps: `(start, end)` of the tokens that are reused, in order.
    """

    def __init__(self, store: ChunkStore, placed: Sequence[Placed], recompute: float) -> None:
        self.store, self.placed = store, placed
        self.gaps = self._gaps(recompute)

    @property
    def first(self) -> int:
        """The first token that is computed."""
        return self.gaps[0][1] if self.gaps and self.gaps[0][0] == 0 else 0

    def _gaps(self, recompute: float) -> list[tuple[int, int]]:
        """All of the segments, but for the first tokens of each that stands behind others, and the blocks whose
        attention would move most, until the share of all their tokens is computed."""
        size, placed = self.store.block_size, self.placed
        computed: list[tuple[int, int]] = []
        budget = round(recompute * sum(place.segment.num_tokens for place in placed))
        for place in placed:
            if place.start > 0:
                computed.append((place.start, place.start + self.store.warm_up))
                budget -= self.store.warm_up
        ranked: list[tuple[float, int, int]] = []
        if budget > 0:
            for place, moved in zip(placed, self.store.deviations(placed), strict=True):
                for block, distance in enumerate(moved.tolist()):
                    start = place.start + block * size
                    end = min(start + size, place.end)
                    if place.start > 0:
                        start = max(start, place.start + self.store.warm_up)
                    if start < end:
                        ranked.append((distance, start, end))
        for _, start, end in sorted(ranked, reverse=True):
            if budget < (end - start) // 2:
                break
            computed.append((start, end))
            budget -= end - start
        return _without([(place.start, place.end) for place in placed], computed)

    @torch.inference_mode()
    def fill(self, cache: HybridCache, block_table: Sequence[int]) -> None:
        """Write what is reused to the blocks of a prompt: K/V, and the conv states that computing continues from."""
        store, heads, size = self.store, cache.num_kv_heads, cache.plan.block_size
        table = torch.tensor(block_table, device=cache.device)
        head = torch.arange(heads, device=cache.device)
        for place, start, end in self._taken():
            turn, own = store.turn(place.start), slice(start - place.start, end - place.start)
            position = torch.arange(start, end, device=cache.device)
            rows = ((table[position // size, None] * heads + head) * size + position[:, None] % size).flatten()
            for i in store.attention:
                keys = store.rotated(place.segment.keys[i][own], turn)
                cache.write_kv(i, rows, keys, place.segment.values[i][own], store.kernels)
        for _, end in self.gaps:
            place = next(p for p in self.placed if p.start < end <= p.end)
            whole = end == place.end
            mark = -1 if whole else (end - place.start) // size - 1
            for i in store.conv:
                cache.conv_states[i][cache.checkpoint_row(block_table[end // size])] = place.segment.states[i][mark]

    def _taken(self) -> Iterator[tuple[Placed, int, int]]:
        """The reused part of each segment: from and to which token of the prompt."""
        for place in self.placed:
            for start, end in self.gaps:
                if start < place.end and end > place.start:
                    yield place, max(start, place.start), min(end, place.end)


def _without(spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of some spans lies in no other span; neighbours are one."""
    left: list[tuple[int, int]] = []
    for start, end in spans:
        for a, b in sorted(others):
            if b <= start or a >= end:
                continue
            if a > start:
                left.append((start, a))
            start = max(start, b)
        if start < end:
            left.append((start, end))
    joined: list[tuple[int, int]] = []
    for start, end in left:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
