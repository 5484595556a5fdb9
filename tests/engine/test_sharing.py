"""Which rows share cache blocks, beside a brute-force search for the groups that save most."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2_cb.engine import sharing
from lfm2_cb.scheduling.request import Request
from lfm2_cb.scheduling.scheduler import ScheduledRow


def row(block_table, start):
    request = Request(0, [0], 1)
    request.block_table = block_table
    return ScheduledRow(request, start, 1, 0, None, True)


@pytest.fixture(autouse=True)
def any_saving(monkeypatch):
    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 1)


def test_one_level_is_chosen_by_what_it_saves():
    tables = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 3, 4, 12], [1, 20], [1, 21], [7, 8]]
    rows = [row(t, 8 * len(t) - 3) for t in tables]
    assert sharing.shared_prefixes(rows, 8) == [([0, 1, 2], 4)]  # 2 × 4 blocks, where all five would save 4 × 1
    rows = [row(t, 8 * len(t) - 3) for t in [*tables, *([1, 30 + i] for i in range(6))]]
    ((group, num_blocks),) = sharing.shared_prefixes(rows, 8)
    assert sorted(group) == [0, 1, 2, 3, 4, *range(6, 12)] and num_blocks == 1


def test_blocks_that_hold_a_rows_own_queries_are_not_shared():
    rows = [row([1, 2, 3], 8), row([1, 2, 4], 20), row([1, 2], 0)]
    ((group, num_blocks),) = sharing.shared_prefixes(rows, 8)
    assert sorted(group) == [0, 1] and num_blocks == 1


tables = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=5), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(tables)
def test_groups_really_share_and_are_disjoint(shapes):
    # A block id stands for all that comes before it, as in the cache.
    rows = [row([hash(tuple(t[: i + 1])) % 2**31 for i in range(len(t))], 4 * len(t) - 2) for t in shapes]
    groups = sharing.shared_prefixes(rows, 4)
    members = [i for group, _ in groups for i in group]
    assert len(members) == len(set(members))
    for group, num_blocks in groups:
        assert len(group) > 1 and num_blocks > 0
        assert len({tuple(rows[i].request.block_table[:num_blocks]) for i in group}) == 1
        assert all(rows[i].start >= 4 * num_blocks for i in group)
