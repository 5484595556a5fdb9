"""What each policy promises beyond ending every request (test_scheduler.py): order, admission, bounds."""

import random
import statistics

import pytest

from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import (
    POLICIES,
    Batch,
    ByAdapter,
    LengthAware,
    Outlook,
    PastFuture,
    Policy,
    make_policy,
    num_own_blocks,
    survival,
)
from lfm2_cb.scheduling.request import FinishReason, Request
from lfm2_cb.scheduling.scheduler import Scheduler


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(policy, *, blocks=1000, block_size=4, max_batch_tokens=64, max_sequences=32, clock=None):
    cache = CacheManager(blocks, block_size, max_sequences)
    return Scheduler(cache, policy, max_batch_tokens, max_sequences, clock or Clock())


def step(scheduler, ends=None):
    """One step. ends: request id → output length, for those that stop before their limit."""
    rows = scheduler.schedule()
    for row in rows:
        scheduler.on_computed(row, [7] if row.samples else [])
        request = row.request
        if row.samples and request.num_output_tokens >= min(
            request.max_new_tokens, (ends or {}).get(request.request_id, 1 << 30)
        ):
            scheduler.finish(request, FinishReason.LENGTH)
    scheduler.check_integrity()
    return rows


def drain(scheduler, ends=None):
    steps = []
    while scheduler.has_unfinished:
        steps.append(step(scheduler, ends))
        assert len(steps) < 20_000
    return steps


def unlike(i, length=8, new=4, **kwargs):
    return Request(i, [1000 * (i + 1) + j for j in range(length)], new, **kwargs)


def test_a_policy_object_is_taken_as_it_is_and_other_things_are_named():
    policy = PastFuture(window=5)
    assert make_policy(policy) is policy
    assert {type(make_policy(name)) for name in POLICIES} == {Policy, Batch, PastFuture, LengthAware, ByAdapter}
    with pytest.raises(TypeError, match="policy must be a name or a Policy, got int"):
        make_policy(3)


# waiting_served_ratio, and the starvation bound


def test_waiting_served_ratio_gathers_newcomers_but_not_for_ever():
    scheduler = make(Policy(waiting_served_ratio=1.0, max_waiting_steps=5))
    scheduler.add_all([unlike(i, new=50) for i in range(4)])
    step(scheduler)
    assert len(scheduler.running) == 4
    scheduler.add(unlike(10, new=50))
    for _ in range(4):
        step(scheduler)
        assert len(scheduler.running) == 4
    step(scheduler)
    assert len(scheduler.running) == 5  # its wait has an end
    scheduler.add_all([unlike(20 + i, new=50) for i in range(5)])
    step(scheduler)
    assert len(scheduler.running) == 10  # five wait for five that run: in at once


def test_who_was_thrown_out_too_often_goes_before_all_others():
    scheduler = make(Policy(max_preemptions=2), max_sequences=2)
    victim, *others = [unlike(i, new=30, priority=-5 * (i == 0)) for i in range(4)]
    scheduler.add(victim)
    step(scheduler)
    scheduler.preempt(victim)
    scheduler.add_all(others)
    assert scheduler.policy.peek() is not victim  # once: priority still counts
    while victim not in scheduler.running:
        step(scheduler)
    scheduler.preempt(victim)
    assert scheduler.policy.peek() is victim
    step(scheduler)
    assert scheduler.running[0] is victim  # and the last to give way
    drain(scheduler)


# batch


@pytest.mark.parametrize("policy", ["fcfs", "past_future", "length_aware"])
@pytest.mark.parametrize(("blocks", "order"), [(1000, [1, 3, 0, 2]), (12, [0, 1, 2, 3])])
def test_of_a_list_that_fits_the_longest_answers_begin_first(policy, blocks, order):
    scheduler = make(make_policy(policy), blocks=blocks, max_sequences=1)
    scheduler.add_all([unlike(i, new=new) for i, new in enumerate((3, 9, 2, 9))])
    ended = []
    while scheduler.has_unfinished:
        first = step(scheduler)[0].request
        ended += [first.request_id] if first.is_finished else []
    assert ended == order


def test_by_adapter_keeps_the_order_of_a_list_that_fits():
    scheduler = make(make_policy("by_adapter"), blocks=1000, max_sequences=1)
    scheduler.add_all([unlike(i, new=new) for i, new in enumerate((3, 9, 2, 9))])
    ended = []
    while scheduler.has_unfinished:
        first = step(scheduler)[0].request
        ended += [first.request_id] if first.is_finished else []
    assert ended == [0, 1, 2, 3]


def shared_list(rng, groups=8, sharers=6, prefix=24, tail=(1, 9), new=(2, 20)):
    requests = []
    for g in range(groups):
        head = [g + 1] * prefix
        for _ in range(sharers):
            tokens = head + [rng.randrange(100, 999) for _ in range(rng.randint(*tail))]
            requests.append(Request(len(requests), tokens, rng.randint(*new)))
    rng.shuffle(requests)
    return requests


def computed_tokens(steps):
    return sum(row.num_tokens for rows in steps for row in rows)


def test_batch_computes_every_shared_prefix_once_where_fcfs_throws_it_out():
    counts = {}
    for name in ("fcfs", "batch"):
        requests = shared_list(random.Random(1))
        scheduler = make(make_policy(name), blocks=34, max_sequences=4)  # room for about three prefixes of eight
        scheduler.add_all(requests)
        counts[name] = computed_tokens(drain(scheduler))
        assert all(r.num_output_tokens == r.max_new_tokens for r in requests)
    unique = 8 * 24 + sum(len(r.prompt_token_ids) - 24 + r.max_new_tokens - 1 for r in requests)
    assert counts["batch"] == unique
    assert counts["fcfs"] > 1.3 * unique


def test_batch_serves_lists_in_the_order_they_came():
    scheduler = make(Batch(), max_sequences=1)
    first, second = [unlike(i, new=1) for i in range(3)], [unlike(10 + i, new=90) for i in range(3)]
    scheduler.add_all(first)
    scheduler.add_all(second)
    order = [rows[0].request for rows in drain(scheduler) if rows[0].start == 0]
    assert {r.request_id for r in order[:3]} == {0, 1, 2}


def test_many_sharers_of_a_prefix_under_way_do_not_make_a_step_look_at_them_all():
    scheduler = make(Batch(), max_sequences=8)
    scheduler.add_all([Request(i, [5] * 20 + [i], 2) for i in range(500)])
    step(scheduler)
    assert len(scheduler._deferred) <= 8 and scheduler.num_waiting == 499
    drain(scheduler)


# past_future


def test_survival_counts_those_still_running_as_longer_than_so_far():
    # Each time, one more who never ends is at risk too.
    assert survival([2, 4], []) == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3])
    # One of five ends at 2; of the three beyond 3, one ends at 4: (1 - 1/5) × (1 - 1/3) survive.
    assert survival([2, 4], [3, 9]) == pytest.approx([1, 1, 4 / 5, 4 / 5, 8 / 15])
    assert survival([], [5]) == [1.0]  # nothing known: only limits end anybody


def produced(request, length):
    request.token_ids += [7] * length
    return request


def test_outlook_has_the_sums_expectation_and_deviation():
    """Against each request's memory over all past lengths that it may still reach."""
    rng = random.Random(3)
    past = sorted(min(300, round(rng.lognormvariate(4, 0.8))) for _ in range(400))
    alive = survival(past, [])
    alive = [share - alive[-1] for share in alive]  # without the one who never ends
    requests = [produced(unlike(i, new=rng.choice([60, 400])), rng.randint(0, 50)) for i in range(20)]
    own = [i % 7 for i in range(20)]
    outlook = Outlook(alive, requests, 4)
    outlook.add(requests[:12], own[:12])
    outlook.add(requests[12:], own[12:])
    peaks = []
    for i, time in enumerate(outlook.times):
        expected = variance = 0.0
        for request, blocks in zip(requests, own, strict=True):
            now = request.num_output_tokens
            ends = [min(request.max_new_tokens, length) for length in past if length > now]
            held = [blocks + time / 4 if end > now + time else 0.0 for end in ends]
            expected += statistics.mean(held)
            variance += statistics.pvariance(held)
        assert outlook.expected[i] == pytest.approx(expected)
        assert outlook.variance[i] == pytest.approx(variance)
        peaks.append(expected + 2 * variance**0.5)
    assert outlook.peak(2) == pytest.approx(max(peaks)) and max(peaks) > peaks[0]


def test_outlook_takes_in_who_may_produce_more_than_the_others():
    outlook = Outlook(survival([10, 20], []), [unlike(0, new=50)], 4)
    outlook.add([produced(unlike(1, new=5000), 1000)], [3])
    # Longer than all that ended: nothing but its limit can end it.
    assert outlook.expected == pytest.approx([3 + time / 4 for time in outlook.times])
    assert outlook.variance == pytest.approx([0] * len(outlook.times))


def test_the_past_is_a_window_of_those_who_ended_by_themselves():
    policy = PastFuture(window=4)
    reasons = [FinishReason.STOP, FinishReason.LENGTH]
    for length in (90, 10, 20, 30, 40):  # the first has left the window by the end
        done = produced(unlike(1, new=200), length)
        done.finish_reason = reasons[length % 20 == 0]
        policy.on_finish(done)
    done.finish_reason = FinishReason.CANCELLED
    policy.on_finish(done)
    policy._fit([])
    assert policy._alive == survival([10, 20, 30, 40], [])


def test_blocks_that_others_share_do_not_become_free_when_one_ends():
    scheduler = make(Policy())
    first, second = Request(0, list(range(20)), 50), Request(1, [*range(8), *range(50, 70)], 50)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    step(scheduler)
    assert [num_own_blocks(r, scheduler.cache) for r in (first, second)] == [6 - 2, 7 - 2]
    scheduler.finish(first, FinishReason.CANCELLED)
    assert num_own_blocks(second, scheduler.cache) == len(second.block_table)


def run_tight(policy):
    """Requests that stop long before their limit, in a cache that holds a few dozen of them.

    Returns: evictions, and seconds as a machine would take that is busy with tokens beyond 40 a step.
    """
    rng = random.Random(0)
    lengths = {i: min(800, max(2, round(rng.lognormvariate(4.3, 0.7)))) for i in range(500)}
    scheduler = make(policy, blocks=1300, max_batch_tokens=512, max_sequences=256)
    requests = [unlike(i, length=rng.randint(20, 200), new=800) for i in range(500)]
    scheduler.add_all(requests)
    seconds = sum(max(40, sum(row.num_tokens for row in rows)) for rows in drain(scheduler, lengths))
    assert [r.num_output_tokens for r in requests] == [lengths[i] for i in range(500)]
    return sum(r.metrics.num_preemptions for r in requests), seconds


def test_past_future_throws_out_far_fewer_and_is_no_slower():
    fcfs, ours = run_tight(Policy()), run_tight(PastFuture())
    assert fcfs[0] >= 5 * ours[0] and fcfs[0] > 50
    assert ours[1] <= 1.01 * fcfs[1]


def test_past_future_lets_one_run_whatever_it_expects():
    scheduler = make(PastFuture(margin=100.0), blocks=30)
    scheduler.add_all([unlike(i, new=90) for i in range(3)])
    assert len(step(scheduler)) == 1
    drain(scheduler)


# length_aware


def test_short_prefills_pass_long_ones_within_the_window():
    clock = Clock()
    scheduler = make(LengthAware(short=10, window=2.0), max_sequences=1, clock=clock)
    clock.now = 100.0
    scheduler.add(unlike(0, length=40, new=1))
    clock.now = 101.0
    scheduler.add(unlike(1, length=5, new=1))
    clock.now = 102.5
    scheduler.add(unlike(2, length=5, new=1))  # came after the long one's window: stays behind it
    order = [rows[0].request.request_id for rows in drain(scheduler) if rows[0].start == 0]
    assert order == [1, 0, 2]


def test_a_long_prompt_with_a_cached_history_is_a_short_prefill():
    scheduler = make(LengthAware(short=10))
    history = list(range(40))
    scheduler.add(Request(0, history, 1))
    drain(scheduler)
    again, new = Request(1, [*history, 5, 6], 1), Request(2, [99, *history], 1)
    scheduler.add_all([new, again])
    assert scheduler.policy.peek() is again


def test_a_long_prefill_under_way_leaves_half_the_step_while_short_ones_wait():
    scheduler = make(LengthAware(short=10), max_batch_tokens=16)
    scheduler.add(unlike(0, length=100, new=1))
    assert [row.num_tokens for row in step(scheduler)] == [16]
    scheduler.add_all([unlike(i, length=6, new=1) for i in (1, 2)])
    rows = step(scheduler)
    assert [(row.request.request_id, row.num_tokens) for row in rows] == [(0, 8), (1, 6), (2, 2)]
    drain(scheduler)
