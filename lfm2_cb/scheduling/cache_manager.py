"""CacheManager: which blocks and which conv state slot each request owns, and what can be shared.

A block holds the K/V of `block_size` tokens and, tied to it, a checkpoint of the conv state after its last token. One
identity, one reference count and one LRU cover both, so a prefix can be reused up to any block boundary, and prefix
reuse, preemption and forks are all "restore a checkpoint, compute the rest".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .block_pool import ROOT, Block, BlockPool, ContentId
from .request import Request


@dataclass
class PrefixMatch:
    """What the cache already holds of a request's tokens."""

    block_ids: list[int] = field(default_factory=list)  # computed, in order
    content_id: ContentId = ROOT  # of the last of them
    pending: Block | None = None  # the last block beyond those that a running request is about to compute


@dataclass(frozen=True)
class Fork:
    """What must be copied, as tensors, for a child to go on from its parent's state."""

    block_copy: tuple[int, int] | None  # (from block_id, to block_id): the one block both would write
    slot_copy: tuple[int, int]  # (from state_slot, to state_slot)


class CacheManager:
    """Allocates blocks and state slots.

    Args:
        num_blocks: blocks in the pool; block ids are 0 … num_blocks - 1.
        block_size: tokens a block.
        num_slots: conv state slots, one a running request; slot ids are 0 … num_slots - 1.
        prefix_caching: whether computed blocks are kept and shared.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, prefix_caching: bool = True) -> None:
        self.block_size, self.prefix_caching, self.num_slots = block_size, prefix_caching, num_slots
        self.pool = BlockPool(num_blocks)
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest run of whole blocks known of the request's tokens; its last token is always left to compute."""
        match = PrefixMatch(content_id=request.root_content_id)
        if not self.prefix_caching or not request.use_prefix_cache:
            return match
        parent = match.content_id
        for end in range(self.block_size, request.num_tokens, self.block_size):
            block = self.pool.lookup(parent, tuple(request.token_ids[end - self.block_size : end]))
            if block is None:
                break
            if block.ready and match.pending is None:
                match.block_ids.append(block.block_id)
                match.content_id = block.content_id
            else:
                match.pending = block
            parent = block.content_id
        return match

    def admit(self, request: Request, match: PrefixMatch, num_reserved: int = 0) -> bool:
        """Give the request a slot, the matched blocks, and blocks for all its other known tokens.

        Args: num_reserved: blocks that must stay free for those already running.
        Returns: False, with nothing changed, where there is not enough.
        """
        assert not request.block_table and request.state_slot is None
        revived = sum(self.pool.blocks[b].ref_count == 0 for b in match.block_ids)
        num_new = self.blocks_for(request.num_tokens) - len(match.block_ids)
        if not self._free_slots or num_new + revived + num_reserved > self.pool.num_free:
            return False
        for block_id in match.block_ids:
            self.pool.share(block_id)
        request.block_table = match.block_ids + [self.pool.allocate() for _ in range(num_new)]
        request.state_slot = self._free_slots.pop()
        request.num_computed_tokens = len(match.block_ids) * self.block_size
        request.num_hashed_blocks, request.last_content_id = len(match.block_ids), match.content_id
        request.restore_block = match.block_ids[-1] if match.block_ids else None
        self._promise(request)
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` beyond those computed. Returns: False, with nothing changed, if there is none."""
        missing = -(
            (len(request.block_table) * self.block_size - request.num_computed_tokens - num_tokens) // self.block_size
        )
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        request.block_table.extend(self.pool.allocate() for _ in range(missing))
        return True

    def commit(self, request: Request) -> None:
        """Make the whole blocks that the request has computed known to others. Call after each step."""
        num_whole = request.num_computed_tokens // self.block_size
        if num_whole <= request.num_hashed_blocks or not self._caches(request):
            return
        for i in range(request.num_hashed_blocks, num_whole):
            tokens = tuple(request.token_ids[i * self.block_size : (i + 1) * self.block_size])
            block = self.pool.register(request.block_table[i], request.last_content_id, tokens, ready=True)
            request.last_content_id = block.content_id
            request.num_hashed_blocks = i + 1

    def roll_back(self, request: Request, num_computed_tokens: int) -> None:
        """Take back computed tokens (rejected drafts): counters only, and blocks wholly beyond what is known."""
        assert num_computed_tokens >= request.num_hashed_blocks * self.block_size
        request.num_computed_tokens = num_computed_tokens
        for block_id in reversed(request.block_table[self.blocks_for(request.num_tokens) :]):
            self.pool.release(block_id)
            request.block_table.pop()

    def fork(self, parent: Request, child: Request) -> Fork | None:
        """Let `child`, which has the parent's tokens, go on from the parent's computed state.

        Whole blocks are shared (they are never written again); a partly filled last one is copied, as is the slot.
        Returns: the copies to make before either runs, or None, with nothing changed, where there is no room.
        """
        assert not child.block_table and child.state_slot is None and parent.state_slot is not None
        num_whole = parent.num_computed_tokens // self.block_size
        has_partial = parent.num_computed_tokens % self.block_size > 0
        if not self._free_slots or has_partial > self.pool.num_free:
            return None
        for block_id in parent.block_table[:num_whole]:
            self.pool.share(block_id)
        child.block_table = parent.block_table[:num_whole]
        child.state_slot = self._free_slots.pop()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_hashed_blocks, child.last_content_id = parent.num_hashed_blocks, parent.last_content_id
        child.restore_block = None
        block_copy = None
        if has_partial:
            child.block_table.append(self.pool.allocate())
            block_copy = (parent.block_table[num_whole], child.block_table[num_whole])
        return Fork(block_copy, (parent.state_slot, child.state_slot))

    def free(self, request: Request) -> None:
        """Take back everything the request owns. What it computed stays known until its room is needed."""
        for block_id in reversed(request.block_table):  # the deepest first, so that it is evicted first
            self.pool.release(block_id)
        request.block_table = []
        if request.state_slot is not None:
            self._free_slots.append(request.state_slot)
            request.state_slot = None
        request.num_computed_tokens = request.num_hashed_blocks = 0
        request.last_content_id, request.restore_block = request.root_content_id, None

    def clear(self) -> None:
        """Forget all cached content, as when the weights have changed."""
        self.pool.clear_cached()

    def check_integrity(self, owners: Iterable[Request]) -> None:
        """Assert that blocks and slots belong to exactly these requests (`[]` when idle: nothing is leaked)."""
        self.pool.check_integrity()
        owners = list(owners)
        counts = [0] * self.pool.num_blocks
        for request in owners:
            assert len(set(request.block_table)) == len(request.block_table), "a block twice in one request"
            for block_id in request.block_table:
                counts[block_id] += 1
        for block in self.pool.blocks:
            assert block.ref_count == counts[block.block_id], f"block {block.block_id}: {block.ref_count} references"
        slots = [r.state_slot for r in owners if r.state_slot is not None] + self._free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a state slot is lost or owned twice"

    def _caches(self, request: Request) -> bool:
        return self.prefix_caching and request.use_prefix_cache

    def _promise(self, request: Request) -> None:
        """Announce the whole blocks the request is about to compute, so that sharers can wait for them."""
        if not self._caches(request):
            return
        parent = request.last_content_id
        for i in range(request.num_hashed_blocks, request.num_tokens // self.block_size):
            tokens = tuple(request.token_ids[i * self.block_size : (i + 1) * self.block_size])
            parent = self.pool.register(request.block_table[i], parent, tokens, ready=False).content_id
