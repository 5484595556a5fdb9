"""BlockPool: who owns which cache block, which blocks hold known content, and which is evicted next."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

#: what identifies a block's content with everything before it: numbers that are never used twice; of an empty prefix
#: `ROOT`, or a tuple that tells apart requests that compute differently (`Request.root_content_id`)
ContentId = int | tuple[object, ...]
ROOT: ContentId = 0


@dataclass(slots=True)
class Block:
    """One block of the cache. A block with a key is in the prefix index; `ready` says its content is computed."""

    block_id: int
    ref_count: int = 0
    key: tuple[ContentId, tuple[int, ...]] | None = None  # (content id of the block before, this block's token ids)
    content_id: ContentId = ROOT
    ready: bool = False


@dataclass
class BlockPool:
    """Reference-counted blocks, with an index of their content.

    The index is exact: a key holds the block's token ids and the identity of everything before it, and content ids
    are never used twice, so no collision can return wrong content. A block without owners stays indexed until
    its room is needed; the least recently used is evicted first.
    """

    num_blocks: int
    blocks: list[Block] = field(init=False)
    num_evictions: int = 0

    def __post_init__(self) -> None:
        self.blocks = [Block(i) for i in range(self.num_blocks)]
        self._free = list(range(self.num_blocks))[::-1]  # the last is the next: memory that was used already, if any
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[tuple[ContentId, tuple[int, ...]], Block] = {}
        self._next_content_id = 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached content included."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Those of the free blocks whose content is kept until their room is needed."""
        return len(self._cached_free)

    def allocate(self) -> int:
        """Take a free block, evicting the least recently used cached one where none is empty.

        Raises: IndexError: nothing is free (callers look at `num_free` first).
        """
        if self._free:
            block = self.blocks[self._free.pop()]
        elif self._cached_free:
            block = self.blocks[self._cached_free.popitem(last=False)[0]]
            self._forget(block)
            self.num_evictions += 1
        else:
            raise IndexError("no free cache block")
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: int) -> None:
        """Add an owner, bringing the block back from the free ones where it had none."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self._cached_free[block_id]
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """Remove an owner. The last one leaves the block free: cached if its content is known, else empty."""
        block = self.blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} released without an owner"
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.ready:
            self._cached_free[block_id] = None
        else:
            self._forget(block)
            self._free.append(block_id)

    def lookup(self, parent_content_id: ContentId, token_ids: tuple[int, ...]) -> Block | None:
        """The block that holds these tokens after that prefix, computed or about to be (`ready`)."""
        return self._index.get((parent_content_id, token_ids))

    def register(self, block_id: int, parent_content_id: ContentId, token_ids: tuple[int, ...], ready: bool) -> Block:
        """Index an owned block's content. Where another block already holds it, that one is returned and stays."""
        key = (parent_content_id, token_ids)
        known, block = self._index.get(key), self.blocks[block_id]
        if known is block:
            block.ready = block.ready or ready
            return block
        if known is not None and (known.ready or not ready):
            return known
        if known is None:
            content_id: ContentId = self._next_content_id
            self._next_content_id += 1
        else:  # the known block is not computed yet, and this one is: take its place and its identity
            content_id = known.content_id
            self._forget(known)
        self._forget(block)  # indexed after a prefix that was dropped since, not computed
        block.key, block.content_id, block.ready = key, content_id, ready
        self._index[key] = block
        return block

    def known_blocks(self) -> list[Block]:
        """Blocks whose content is computed and indexed: those in use, then the others, the last used first."""
        in_use = [block for block in self.blocks if block.ref_count and block.ready]
        return in_use + [self.blocks[block_id] for block_id in reversed(list(self._cached_free))]

    def clear_cached(self) -> None:
        """Forget all content (the weights changed). Owned blocks stay owned."""
        for block_id in self._cached_free:
            self._free.append(block_id)
        self._cached_free.clear()
        for block in self.blocks:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self._index[block.key]
        block.key, block.content_id, block.ready = None, ROOT, False

    def check_integrity(self) -> None:
        """Assert the invariants: every block is free or owned, once; the index and the blocks agree."""
        free, cached = set(self._free), set(self._cached_free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both empty and cached"
        for block in self.blocks:
            is_free = block.block_id in free or block.block_id in cached
            assert is_free == (block.ref_count == 0), f"block {block.block_id}: free and owned disagree"
            if block.block_id in cached:
                assert block.ready and block.key is not None, f"block {block.block_id}: cached without content"
            if block.block_id in free:
                assert block.key is None, f"block {block.block_id}: empty with content"
            if block.key is not None:
                assert self._index[block.key] is block, f"block {block.block_id}: not in the index under its key"
        assert len(self._index) == sum(block.key is not None for block in self.blocks), "stale index entries"
