"""The radix tree over whole blocks beside a brute-force reading of the same list."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2_cb.scheduling.prefix_tree import PrefixNode, build_prefix_tree, sharing_order

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=20)


def leaves(node):
    for child in node.children:
        if isinstance(child, PrefixNode):
            yield from leaves(child)
        else:
            yield child


def nodes(node):
    yield node
    for child in node.children:
        if isinstance(child, PrefixNode):
            yield from nodes(child)


def common_blocks(a, b, block_size):
    usable = (min(len(a), len(b)) - 1) // block_size
    return max((n for n in range(usable + 1) if a[: n * block_size] == b[: n * block_size]), default=0)


@settings(max_examples=300, deadline=None)
@given(prompts, st.integers(1, 4))
def test_the_tree_says_what_every_two_prompts_share(prompts, block_size):
    root = build_prefix_tree(prompts, block_size)
    assert sorted(leaves(root)) == list(range(len(prompts)))
    deepest = {}
    for node in nodes(root):
        members = list(leaves(node))
        assert node is root or len(members) > 1, "a group of one"
        assert all(c.num_blocks > node.num_blocks for c in node.children if isinstance(c, PrefixNode))
        for a in members:
            for b in members:
                deepest[a, b] = max(deepest.get((a, b), 0), node.num_blocks)
    for (a, b), depth in deepest.items():
        if a != b:
            assert depth == common_blocks(prompts[a], prompts[b], block_size)


@settings(max_examples=200, deadline=None)
@given(prompts, st.integers(1, 4))
def test_the_order_is_a_permutation_with_sharers_side_by_side(prompts, block_size):
    order = sharing_order(prompts, [5] * len(prompts), block_size)
    assert sorted(order) == list(range(len(prompts)))
    place = {index: i for i, index in enumerate(order)}
    for node in nodes(build_prefix_tree(prompts, block_size)):
        members = sorted(place[index] for index in leaves(node))
        assert members == list(range(members[0], members[0] + len(members))) if members else not prompts


def test_groups_that_decode_most_for_their_prefill_come_first():
    heavy = [[1] * 8 + [i] for i in range(10, 13)]
    light = [[2] * 8 + [i] for i in range(10, 13)]
    alone = [[3] * 9]
    prompts = [light[0], heavy[0], alone[0], light[1], heavy[1], heavy[2], light[2]]
    new = [2, 50, 30, 2, 60, 50, 2]
    assert sharing_order(prompts, new, 4) == [4, 1, 5, 2, 0, 3, 6]


def test_a_prefix_of_another_prompt_leaves_its_last_token_to_compute():
    root = build_prefix_tree([[7] * 8, [7] * 12], 4)
    (group,) = root.children
    assert group.num_blocks == 1
