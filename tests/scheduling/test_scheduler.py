"""Scheduler: budgets, order, preemption, sharing; with no model anywhere."""

import random

import pytest

from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES, make_policy
from lfm2_cb.scheduling.request import FinishReason, Request, RequestStatus
from lfm2_cb.scheduling.scheduler import RequestTooLarge, Scheduler


def make(blocks=100, block_size=4, max_batch_tokens=32, max_sequences=8, policy="fcfs", prefix_caching=True):
    cache = CacheManager(blocks, block_size, max_sequences, prefix_caching)
    return Scheduler(cache, make_policy(policy), max_batch_tokens, max_sequences)


def request(i, length=6, new=4, **kwargs):
    return Request(i, [100 * i + j for j in range(length)], new, **kwargs)


def advance(scheduler, rows, token=7):
    """Pretend to have computed the rows; every sampling row gains one token."""
    for row in rows:
        scheduler.on_computed(row, [token] if row.samples else [])
        scheduler.fork(row.request)
        if row.samples and row.request.num_output_tokens >= row.request.max_new_tokens:
            scheduler.finish(row.request, FinishReason.LENGTH)


def drain(scheduler, limit=10_000):
    steps = 0
    while scheduler.has_unfinished:
        rows = scheduler.schedule()
        assert rows and sum(row.num_tokens for row in rows) <= scheduler.max_batch_tokens
        advance(scheduler, rows)
        scheduler.check_integrity()
        steps += 1
        assert steps < limit
    return steps


def test_prefill_chunks_fill_the_budget_beside_decodes():
    scheduler = make(max_batch_tokens=10)
    scheduler.add(request(1, length=3))
    scheduler.add(request(2, length=20))
    rows = scheduler.schedule()
    assert [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in rows] == [
        (1, 0, 3, True),
        (2, 0, 7, False),
    ]
    advance(scheduler, rows)
    rows = scheduler.schedule()
    assert [(r.request.request_id, r.start, r.num_tokens, r.samples) for r in rows] == [
        (1, 3, 1, True),
        (2, 7, 9, False),
    ]


def run_beside_a_long_prompt(limit):
    """Two requests decode when a prompt of 100 tokens comes; tokens of every step until it is prefilled."""
    cache = CacheManager(100, 4, 8)
    scheduler = Scheduler(cache, make_policy("fcfs"), 64, 8, decode_budget=lambda: limit)
    scheduler.add_all([request(1, new=90), request(2, new=90)])
    steps = [scheduler.schedule()]
    advance(scheduler, steps[0])
    long = request(3, length=100)
    scheduler.add(long)
    while not long.num_output_tokens:
        steps.append(scheduler.schedule())
        advance(scheduler, steps[-1])
        scheduler.check_integrity()
    return [sum(row.num_tokens for row in rows) for rows in steps]


def test_a_step_that_decodes_keeps_to_its_own_budget():
    assert run_beside_a_long_prompt(None) == [12, 64, 40]
    assert run_beside_a_long_prompt(30) == [12, 30, 30, 30, 18]
    assert run_beside_a_long_prompt(1000) == [12, 64, 40]
    # However tight it is, prompts get on.
    assert run_beside_a_long_prompt(1) == [12, *[18] * 6, 6]


def test_the_budget_of_decodes_does_not_bind_where_nobody_decodes():
    scheduler = Scheduler(CacheManager(100, 4, 8), make_policy("fcfs"), 64, 8, decode_budget=lambda: 5)
    scheduler.add(request(1, length=100))
    assert [row.num_tokens for row in scheduler.schedule()] == [64]


def test_a_finished_request_frees_its_place_for_the_next_step():
    scheduler = make(max_sequences=1)
    scheduler.add(request(1, new=1))
    scheduler.add(request(2, new=1))
    advance(scheduler, scheduler.schedule())
    assert scheduler.running == []
    assert [row.request.request_id for row in scheduler.schedule()] == [2]


def test_priorities_go_first_and_give_way_last():
    scheduler = make(max_sequences=2)
    for i, priority in enumerate([0, 5, 1]):
        scheduler.add(request(i, priority=priority))
    assert [row.request.request_id for row in scheduler.schedule()] == [1, 2]
    assert scheduler.running[-1].request_id == 2


def test_when_blocks_run_out_the_youngest_gives_way_and_keeps_its_tokens():
    scheduler = make(blocks=7, prefix_caching=False)
    old, young = request(1, length=8, new=12), request(2, length=8, new=12)
    scheduler.add(old)
    scheduler.add(young)
    while young.metrics.num_preemptions == 0:
        advance(scheduler, scheduler.schedule())
        scheduler.check_integrity()
    assert young.status is RequestStatus.WAITING and not young.block_table and young.num_output_tokens > 0
    had = list(young.token_ids)
    assert old.metrics.num_preemptions == 0
    drain(scheduler)
    assert young.token_ids[: len(had)] == had and old.metrics.num_preemptions == 0


def test_what_never_fits_is_refused_with_the_numbers():
    scheduler = make(blocks=4)
    scheduler.add(request(1, length=10, new=7))  # 16 tokens are computed: the last one never is
    with pytest.raises(RequestTooLarge, match="needs 5 cache blocks of 4 tokens, and cache_memory holds 4"):
        scheduler.add(request(2, length=10, new=8))


def test_sharers_wait_for_the_one_that_computes_their_prefix():
    scheduler = make(max_batch_tokens=64)
    prefix = list(range(500, 512))
    for i in range(3):
        scheduler.add(Request(i, [*prefix, i, i], 2))
    rows = scheduler.schedule()
    assert [row.request.request_id for row in rows] == [0] and scheduler.num_waiting == 2
    advance(scheduler, rows)
    rows = scheduler.schedule()
    assert sorted((row.request.request_id, row.start) for row in rows) == [(0, 14), (1, 12), (2, 12)]
    assert [row.restore_block is not None for row in rows] == [False, True, True]
    assert rows[1].request.metrics.num_cached_tokens == 12
    assert rows[1].request.block_table[:3] == rows[0].request.block_table[:3]


def test_sharers_go_on_when_the_one_they_waited_for_is_cancelled():
    scheduler = make(max_batch_tokens=8)
    prefix = list(range(500, 520))
    leader, sharer = Request(0, [*prefix, 0], 2), Request(1, [*prefix, 1], 2)
    scheduler.add(leader)
    scheduler.add(sharer)
    advance(scheduler, scheduler.schedule())
    scheduler.finish(leader, FinishReason.CANCELLED)
    drain(scheduler)
    assert sharer.num_output_tokens == 2 and sharer.metrics.num_cached_tokens == 8


def test_a_request_may_opt_out_of_the_prefix_cache():
    scheduler = make()
    for i in range(2):
        scheduler.add(Request(i, list(range(12)), 2, use_prefix_cache=False))
    rows = scheduler.schedule()
    assert [row.num_tokens for row in rows] == [12, 12]
    drain(scheduler)
    assert not scheduler.cache.pool._index


def test_the_next_turn_of_a_chat_reuses_the_reply():
    scheduler = make()
    first = request(1, length=6, new=11)
    scheduler.add(first)
    drain(scheduler)
    second = Request(2, [*first.token_ids, 1, 2, 3], 2)
    scheduler.add(second)
    drain(scheduler)
    assert second.metrics.num_cached_tokens == 16  # of 17 known tokens all but the last are computed: 4 blocks


def test_cancelling_in_every_state():
    scheduler = make(max_sequences=1)
    running, waiting = request(1), request(2)
    parent = request(3)
    children = [request(3), request(3)]
    for child, i in zip(children, (31, 32), strict=True):
        child.request_id = i
    parent.adopt_forks(children)
    for r in (running, waiting, parent):
        scheduler.add(r)
    advance(scheduler, scheduler.schedule())
    scheduler.finish(running, FinishReason.CANCELLED)
    scheduler.finish(waiting, FinishReason.CANCELLED)
    scheduler.finish(waiting, FinishReason.CANCELLED)  # again: nothing
    scheduler.finish(children[0], FinishReason.CANCELLED)
    scheduler.finish(parent, FinishReason.CANCELLED)  # its other child fends for itself
    assert scheduler.num_waiting == 1
    drain(scheduler)
    assert children[1].num_output_tokens == 4
    scheduler.cache.check_integrity([])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_every_policy_ends_every_request_within_the_budgets(policy, seed):
    rng = random.Random(seed)
    scheduler = make(blocks=30, max_batch_tokens=rng.choice([8, 20, 64]), policy=policy)
    requests = [
        Request(i, [rng.randrange(3) for _ in range(rng.randint(1, 40))], rng.randint(1, 30), rng.randrange(2))
        for i in range(60)
    ]
    for r in requests:
        scheduler.add(r)
    drain(scheduler)
    assert all(r.num_output_tokens == r.max_new_tokens for r in requests)
    scheduler.cache.check_integrity([])
    assert len(scheduler.policy) == 0


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match=r"unknown scheduling policy 'best'; known: .*fcfs"):
        make_policy("best")


def test_cancelled_requests_do_not_pile_up_in_the_queue():
    scheduler = make(max_sequences=1)
    for i in range(1000):
        r = request(i)
        scheduler.add(r)
        if i:
            scheduler.finish(r, FinishReason.CANCELLED)
    assert len(scheduler.policy) == 1 and len(scheduler.policy._heap) < 200


@pytest.mark.parametrize("forgotten", ["at once", "when told to"])
def test_blocks_that_were_used_are_used_again_before_any_that_never_was(forgotten):
    """Their memory is there; the system would have to clear other pages first."""
    scheduler = make(prefix_caching=forgotten == "when told to")
    used = []
    for i in range(4):
        scheduler.add(request(i, length=17 + i, new=1))
        rows = scheduler.schedule()
        used.append({block for row in rows for block in row.request.block_table})
        advance(scheduler, rows)
        scheduler.cache.clear()
        scheduler.check_integrity()
    assert used == [used[0]] * 4 and len(used[0]) == 5
