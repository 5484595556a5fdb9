"""Groups a step's rows that begin with the same cache blocks, where attending to these together is worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..scheduling.prefix_tree import PrefixNode, build_prefix_tree
from ..scheduling.scheduler import ScheduledRow

#: tokens of K/V that a group must save reading to be worth the merging
MIN_SAVED_TOKENS = 1024


def shared_prefixes(rows: Sequence[ScheduledRow], block_size: int) -> list[tuple[list[int], int]]:
    """Groups of rows and how many of their first blocks they share; none of their queries lies in those.

    Rows that attend sparsely share with no other. Of nested groups, those that save most are taken: sharing is
    used one level deep.
    """
    may_share = [i for i, row in enumerate(rows) if row.start >= block_size and row.request.sparse_prefill is None]
    first_blocks = [rows[i].request.block_table[0] for i in may_share]
    if len(set(first_blocks)) == len(first_blocks):
        return []
    first = Counter(first_blocks)
    members = [i for i in may_share if first[rows[i].request.block_table[0]] > 1]
    tables = [[*rows[i].request.block_table[: rows[i].start // block_size], 0] for i in members]  # 0: never shared
    root = build_prefix_tree(tables, block_size=1)
    groups = [group for child in root.children if isinstance(child, PrefixNode) for group in _best(child)[1]]
    return [
        ([members[j] for j in rows], num_blocks)
        for rows, num_blocks in groups
        if (len(rows) - 1) * num_blocks * block_size >= MIN_SAVED_TOKENS
    ]


def _best(node: PrefixNode) -> tuple[int, list[tuple[list[int], int]]]:
    """Blocks saved at most within a node, and the groups that do it."""
    rows: list[int] = []
    saved_inside, groups_inside = 0, []
    for child in node.children:
        if isinstance(child, PrefixNode):
            saved, groups = _best(child)
            saved_inside += saved
            groups_inside += groups
            rows += _leaves(child)
        else:
            rows.append(child)
    saved_here = (len(rows) - 1) * node.num_blocks
    return (saved_here, [(rows, node.num_blocks)]) if saved_here >= saved_inside else (saved_inside, groups_inside)


def _leaves(node: PrefixNode) -> list[int]:
    return [leaf for child in node.children for leaf in (_leaves(child) if isinstance(child, PrefixNode) else [child])]
