"""Groups prompts by their common prefixes: a radix tree over whole cache blocks, and the order that it suggests.

Zheng et al., "BatchLLM: Optimizing Large Batched LLM Inference with Global Prefix Sharing and Throughput-oriented
Token Batching", arXiv 2412.03594: with the whole list known, shared prefixes need not be met by chance.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixNode:
    """Prompts that share their first `num_blocks` blocks, under the prefix their parent node shares."""

    num_blocks: int
    children: list[PrefixNode | int] = field(default_factory=list)  # smaller groups, and prompts by index
    num_prefill_tokens: int = 0  # to compute for all of them, the parent's prefix already there
    num_decode_tokens: int = 0


def build_prefix_tree(prompts: Sequence[Sequence[int]], block_size: int) -> PrefixNode:
    """The tree of shared whole blocks; its root shares nothing. Token ids must be below 2**32.

    Sorted prompts that share a prefix stand side by side, so the tree can be read off the lengths that neighbours have
    in common, in one pass. A prompt's last token is never shared: something must be left to compute.
    """
    keys = [_sort_key(prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    root = PrefixNode(0)
    path = [root]  # open nodes, from the root to the deepest
    for i, index in enumerate(order):
        following = order[i + 1] if i + 1 < len(order) else None
        shared = 0 if following is None else _common_blocks(keys[index], keys[following], block_size)
        if shared > path[-1].num_blocks:
            path.append(PrefixNode(shared, [index]))
            continue
        path[-1].children.append(index)
        while shared < path[-1].num_blocks:  # the next prompt shares less: these groups are complete
            closed = path.pop()
            if shared > path[-1].num_blocks:
                path.append(PrefixNode(shared))
            path[-1].children.append(closed)
    return root


def sharing_order(prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], block_size: int) -> list[int]:
    """Indices of the prompts, sharers side by side, and groups with the larger share of decoding first.

    Decoding rows of the earlier groups then fill the steps in which the later ones prefill (BatchLLM, section 5).
    """
    root = build_prefix_tree(prompts, block_size)
    nodes = [root]
    for node in nodes:
        nodes.extend(child for child in node.children if isinstance(child, PrefixNode))
    ratio: dict[int, float] = {}  # of a group, by id
    for node in reversed(nodes):  # children before their parents
        inner = node.num_blocks * block_size
        for child in node.children:
            if isinstance(child, PrefixNode):
                node.num_prefill_tokens += child.num_prefill_tokens + (child.num_blocks - node.num_blocks) * block_size
                node.num_decode_tokens += child.num_decode_tokens
            else:
                node.num_prefill_tokens += len(prompts[child]) - inner
                node.num_decode_tokens += max_new_tokens[child]

        def share(child: PrefixNode | int, inner: int = inner) -> float:
            if isinstance(child, PrefixNode):
                return ratio[id(child)]
            return max_new_tokens[child] / (len(prompts[child]) - inner)

        node.children.sort(key=share, reverse=True)
        ratio[id(node)] = node.num_decode_tokens / max(node.num_prefill_tokens, 1)
    result, stack = [], [root]
    pending: list[PrefixNode | int] = list(reversed(stack))
    while pending:
        item = pending.pop()
        if isinstance(item, PrefixNode):
            pending.extend(reversed(item.children))
        else:
            result.append(item)
    return result


def _sort_key(prompt: Sequence[int]) -> bytes:
    """Bytes that sort as the token ids do: four a token, the highest first."""
    ids = array("I", prompt)
    assert ids.itemsize == 4
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def _common_blocks(a: bytes, b: bytes, block_size: int) -> int:
    """Whole blocks that two prompts share, by bisection over the (fast) comparison of their beginnings."""
    step = 4 * block_size
    low, high = 0, (min(len(a), len(b)) - 4) // step  # the last token is left to compute
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[: middle * step]):
            low = middle
        else:
            high = middle - 1
    return max(low, 0)
