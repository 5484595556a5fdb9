"""Who is in memory, under a budget; and the policy that groups requests by adapter."""

import random
from dataclasses import dataclass

import pytest

from lfm2_cb.scheduling.adapters import AdapterPlaces, AdapterTooLarge
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import ByAdapter, Policy
from lfm2_cb.scheduling.request import FinishReason, Request
from lfm2_cb.scheduling.scheduler import Scheduler


@dataclass(eq=False)
class Adapter:
    adapter_id: int
    num_bytes: int = 10


def test_the_least_recently_used_gives_way_and_none_in_use_does():
    places, (a, b, c) = AdapterPlaces(20, 8), (Adapter(i) for i in (1, 2, 3))
    place = {adapter: places.acquire(adapter) for adapter in (a, b)}
    assert places.take_changes() == {place[a]: a, place[b]: b} and not places.has_room(c)
    places.release(b)
    places.release(a)
    places.acquire(a)
    assert places.has_room(c) and places.acquire(c) == place[b]  # a was used later
    assert places.take_changes() == {place[b]: c} and b not in places
    assert (places.num_loads, places.num_hits, places.num_bytes) == (3, 1, 20)
    places.check_integrity([a, c])
    with pytest.raises(AdapterTooLarge, match="21 bytes"):
        places.check_fits(Adapter(4, 21))


def test_several_small_ones_give_way_to_a_large_one():
    places, small, large = AdapterPlaces(30, 8), [Adapter(i) for i in (1, 2, 3)], Adapter(4, 25)
    for adapter in small:
        places.acquire(adapter)
        places.release(adapter)
    places.take_changes()
    place = places.acquire(large)
    changes = places.take_changes()
    assert changes.pop(place) is large and [*changes.values()] == [None, None]
    places.check_integrity([large])


def run(policy, adapters, num_places, seed=0):
    """Requests to their end, in turn. Returns: in which order they started; the loads."""
    rng = random.Random(seed)
    places = AdapterPlaces(10 * num_places, 8)
    scheduler = Scheduler(CacheManager(64, 4, 4), policy, 16, 4, adapters=places)
    requests = [Request(i, [1, 2], rng.randint(1, 6), adapter=adapter) for i, adapter in enumerate(adapters)]
    scheduler.add_all(requests)
    started = []
    for _ in range(10_000):
        rows = scheduler.schedule()
        places.take_changes()
        if not rows:
            break
        for row in rows:
            assert (row.request.adapter_place >= 0) == (row.request.adapter is not None)
            if row.start == 0:
                started.append(row.request.request_id)
            scheduler.on_computed(row, [5] if row.samples else [])
            if row.request.num_tokens >= row.request.max_num_tokens:
                scheduler.finish(row.request, FinishReason.LENGTH)
            elif rng.random() < 0.05:
                scheduler.preempt(row.request)
        scheduler.check_integrity()
    assert all(request.is_finished for request in requests)
    return list(dict.fromkeys(started)), places.num_loads


@pytest.mark.parametrize("seed", range(5))
def test_by_adapter_saves_loads_and_lets_nobody_wait_for_long(seed):
    rng, known = random.Random(seed), [Adapter(i) for i in range(1, 9)]
    asked = [rng.choice([None, *known]) for _ in range(120)]
    _, loads = run(Policy(), asked, 2, seed)
    order, fewer = run(ByAdapter(window=20), asked, 2, seed)
    assert fewer < 0.7 * loads
    for place, request in enumerate(order):
        assert sum(other > request for other in order[:place]) <= 20
