"""Sketches of prefix caches, and the router that reads them."""

import random
from collections import Counter

import pytest

from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.prefix_hashes import PrefixSketch, prefix_hashes, unpack
from lfm2_cb.scheduling.request import Request
from lfm2_cb.scheduling.routing import SAMPLE, SHARE, SLACK, PrefixRouter

BLOCK = 4


def run(cache: CacheManager, tokens: list[int], keep: bool = False) -> Request:
    """Compute a prompt, with the blocks it leaves."""
    request = Request(len(tokens), tokens, 1)
    assert cache.admit(request, cache.match_prefix(request))
    request.num_computed_tokens = request.num_tokens
    cache.commit(request)
    if not keep:
        cache.free(request)
    return request


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(60_000), k=count)


# Sketches


def test_a_sketch_says_what_the_cache_would_match():
    cache = CacheManager(40, BLOCK, 4)
    sketch = PrefixSketch(cache.pool)
    first, second = tokens_of(1, 17), tokens_of(2, 9)
    run(cache, first)
    run(cache, first[:8] + second, keep=True)
    for tokens in (first, first[:8] + second, first[:8], first[:6] + second, second, first + second):
        told = set(unpack(sketch.read()))
        hashes = prefix_hashes(tokens, BLOCK)
        depth = next((i for i, block in enumerate(hashes) if block not in told), len(hashes))
        assert depth == len(cache.match_prefix(Request(99, tokens, 1)).block_ids)


def test_a_sketch_follows_the_cache_as_it_forgets():
    cache = CacheManager(6, BLOCK, 4)
    sketch = PrefixSketch(cache.pool)
    for seed in range(20):
        tokens = tokens_of(seed, 17)
        run(cache, tokens)
        told = unpack(sketch.read())
        assert set(prefix_hashes(tokens, BLOCK)) <= set(told) and len(told) <= 6
        assert len(sketch._chains) <= 8
    cache.clear()
    assert not sketch.read()


def test_what_is_promised_only_is_not_told():
    cache = CacheManager(20, BLOCK, 4)
    request = Request(1, tokens_of(3, 17), 1)
    cache.admit(request, cache.match_prefix(request))
    assert cache.match_prefix(Request(2, request.token_ids, 1)).pending and not PrefixSketch(cache.pool).read()


def test_a_large_cache_tells_what_was_used_last():
    cache = CacheManager(100, BLOCK, 4)
    old, new = tokens_of(4, 81), tokens_of(5, 21)
    run(cache, old)
    run(cache, new)
    assert set(unpack(PrefixSketch(cache.pool, max_blocks=5).read())) == set(prefix_hashes(new, BLOCK))
    run(cache, old)
    assert set(unpack(PrefixSketch(cache.pool, max_blocks=5).read())) == set(prefix_hashes(old, BLOCK)[:5])


def test_hashes_tell_prefixes_and_salts_apart_and_are_the_same_everywhere():
    tokens = tokens_of(6, 13)
    assert (
        prefix_hashes(tokens, BLOCK)[:2] == prefix_hashes(tokens[:9], BLOCK) and len(prefix_hashes(tokens, BLOCK)) == 3
    )
    assert not {*prefix_hashes(tokens, BLOCK)} & {*prefix_hashes([1, *tokens[1:]], BLOCK)}
    assert not {*prefix_hashes(tokens, BLOCK)} & {*prefix_hashes(tokens, BLOCK, "adapter")}
    assert prefix_hashes(range(9), BLOCK) == [2002155330, 1326819337]  # of any process, on any machine


# The router


def router_of(count: int, seed: int = 0) -> PrefixRouter:
    router = PrefixRouter(seed)
    router.keep(f"r{i}" for i in range(count))
    return router


def test_the_longest_prefix_wins_and_load_takes_from_it():
    router, hashes = router_of(3), prefix_hashes(tokens_of(7, 41), BLOCK)
    router.report("r0", hashes[:4])
    router.report("r1", hashes[:9])
    loads = {"r0": 1, "r1": 1, "r2": 0}
    assert router.choose(hashes, loads.__getitem__) == "r1"
    loads["r1"] = 4  # 9 blocks / 5 < 4 blocks / 2
    assert router.choose(hashes, loads.__getitem__) == "r0"


@pytest.mark.parametrize("count", [2, 10, 200])
def test_with_nothing_known_it_is_the_less_loaded_of_two(count):
    router = router_of(count)
    loads = {f"r{i}": 0 for i in range(count)}
    for _ in range(20 * count):
        loads[router.choose([], loads.__getitem__)] += 1
    assert max(loads.values()) <= 20 + 5 and min(loads.values()) >= 20 - 8


@pytest.mark.parametrize("count", [4, 100])
def test_a_hot_prefix_spreads_and_nobody_is_loaded_beyond_its_share(count):
    router, hashes = router_of(count), prefix_hashes(tokens_of(8, 33), BLOCK)
    router.report("r0", hashes)
    loads = Counter({f"r{i}": 0 for i in range(count)})
    for number in range(10 * count):
        chosen = router.choose(hashes, loads.__getitem__)
        loads[chosen] += 1
        router.sent(chosen, hashes)
        if number == 0:
            assert chosen == "r0"
    assert len(+loads) >= count / SHARE - 1 and max(loads.values()) <= 1.3 * (SHARE * 10 + SLACK)  # of a sample's mean


def test_a_chat_stays_where_it_is():
    router, rng = router_of(50), random.Random(1)
    chats = {seed: tokens_of(seed, 30) for seed in range(300)}
    homes: dict[int, str] = {}
    for _ in range(5):
        for seed, tokens in rng.sample(sorted(chats.items()), len(chats)):
            hashes = prefix_hashes(tokens, BLOCK)
            chosen = router.choose(hashes, lambda name: rng.randrange(2))
            assert chosen == homes.setdefault(seed, chosen)
            router.sent(chosen, hashes)
            tokens += tokens_of(seed + 1000, 20)
    assert len(set(homes.values())) == 50


def test_the_adapter_counts_where_it_is():
    router, hashes = router_of(60), prefix_hashes(tokens_of(9, 33), BLOCK)
    assert {router.choose([], lambda _: 0.0, "poet") for _ in range(40)} > {"r7"}
    router.report("r7", [], ["poet", "judge"])
    assert {router.choose([], lambda _: 0.0, "poet") for _ in range(40)} == {"r7"}
    router.report("r8", hashes)
    router.report("r7", hashes[:4], ["poet"])
    assert router.choose(hashes, lambda _: 0.0, "poet") == "r7" and router.choose(hashes, lambda _: 0.0) == "r8"
    router.report("r7", [], [])
    assert router.choose(hashes, lambda _: 0.0, "poet") == "r8"


def test_what_was_sent_counts_until_a_report_can_have_it():
    router, hashes = router_of(40), prefix_hashes(tokens_of(10, 33), BLOCK)
    router.sent("r3", hashes)
    for _ in range(1):  # this one may be older than the request
        router.report("r3", [])
        assert router.choose(hashes, lambda _: 0.0) == "r3"
    router.report("r3", [])
    assert len({router.choose(hashes, lambda _: 0.0) for _ in range(20)}) > 1
    assert not router._holders


def test_engines_come_and_go():
    router, hashes = router_of(2), prefix_hashes(tokens_of(11, 33), BLOCK)
    router.report("r0", hashes, ["poet"])
    router.keep(["r1", "r2"])
    router.sent("r0", hashes)  # it went just now
    assert not router._holders and {router.choose(hashes, lambda _: 0.0, "poet") for _ in range(40)} == {"r1", "r2"}
    router.keep([])
    with pytest.raises(IndexError):
        router.choose(hashes, lambda _: 0.0)


def test_a_decision_does_not_cost_more_in_a_larger_fleet():
    router, hashes = router_of(1000), prefix_hashes(tokens_of(12, 41), BLOCK)
    for i in range(1000):
        router.report(f"r{i}", hashes)
    looked_at: list[str] = []
    router.choose(hashes, lambda name: looked_at.append(name) or 0.0)
    assert len(looked_at) <= 2 * SAMPLE
