"""What a prefix cache reports to other processes: hashes of its blocks, from which no prompt can be read.

The cache itself compares tokens, never hashes: a collision can send a request to a less suitable engine, but cannot
make its answer wrong.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

from .block_pool import ROOT, BlockPool, ContentId

#: bytes of a chained hash, and of its reported part: with a million blocks in a fleet, one lookup in 4,000 is wrong
CHAIN_BYTES, REPORTED_BYTES = 8, 4


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """A hash of each whole block that a prompt may share, with all before it: those that `match_prefix` looks up.

    Args: salt: what else decides what a block holds, such as the adapter that computed it.
    """
    hashes, chain = [], _start(salt)
    for end in range(block_size, len(token_ids), block_size):  # its last token is always left to compute
        chain = _extend(chain, token_ids[end - block_size : end])
        hashes.append(_hash_of(chain))
    return hashes


class PrefixSketch:
    """The hashes of the blocks that a pool holds: a few bytes a block, and no more than `max_blocks`.

    It may be read while another thread's engine changes the pool: what changed meanwhile is right or missing.

    Args:
        max_blocks: reported at most; where the pool has more, those used last.
    """

    def __init__(self, pool: BlockPool, max_blocks: int = 8192) -> None:
        self.pool, self.max_blocks = pool, max_blocks
        self._chains: dict[ContentId, bytes] = {}  # by content id; those of the last reading are kept

    def read(self, salts: Mapping[ContentId, str] = MappingProxyType({ROOT: ""})) -> bytes:
        """Hashes as `unpack` takes them.

        Args: salts: of `prefix_hashes`, by the content id of the empty prefix; others are not reported.
        """
        blocks = self.pool.known_blocks()[: self.max_blocks]
        by_content = {block.content_id: key for block in blocks if (key := block.key) is not None}
        chains = {content_id: chain for content_id, chain in self._chains.items() if content_id in by_content}
        self._chains = {**chains, **{root: _start(salt) for root, salt in salts.items()}}
        hashes = array(
            "I", (_hash_of(chain) for content_id in by_content if (chain := self._chain(content_id, by_content)))
        )
        return hashes.tobytes()

    def _chain(self, content_id: ContentId, keys: dict[ContentId, tuple[ContentId, tuple[int, ...]]]) -> bytes | None:
        """None: a block before it is not there."""
        missing = []
        while content_id not in self._chains:
            if content_id not in keys:
                return None
            missing.append(content_id)
            content_id = keys[content_id][0]
        chain = self._chains[content_id]
        for content_id in reversed(missing):
            chain = self._chains[content_id] = _extend(chain, keys[content_id][1])
        return chain


def unpack(sketch: bytes) -> array:
    """The hashes in a sketch."""
    hashes = array("I")
    hashes.frombytes(sketch)
    return hashes


def _start(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=CHAIN_BYTES).digest()


def _extend(chain: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(chain + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=CHAIN_BYTES).digest()


def _hash_of(chain: bytes) -> int:
    return int.from_bytes(chain[:REPORTED_BYTES], "little")
