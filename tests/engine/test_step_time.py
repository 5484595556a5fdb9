"""max_step_seconds: prefill chunks beside decodes are cut to what the time allows, and no token changes."""

import math
import random

import pytest
from helpers import random_prompts, stock_greedy

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.drafting import StepTimes
from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.scheduling.request import Request


def test_tokens_within_a_time():
    times = StepTimes()
    assert times.tokens_within(1.0) is None
    times.add(10, 0.1)
    assert times.tokens_within(0.05) == 5
    assert times.tokens_within(1.0) == 100  # in proportion, though it may be less
    times.add(100, 0.2)
    assert times.tokens_within(0.15) in (54, 55)
    assert times.tokens_within(0.4) == 200
    times.add(1000, 60.0)  # interrupted, surely: taken for twice the 2 s that it is in proportion
    assert times.tokens_within(0.2) == 100
    assert 500 < times.tokens_within(2.0) < 550
    for _ in range(20):
        times.add(1000, 2.0)
    assert times.tokens_within(2.0) > 950


class SimulatedTimes(StepTimes):
    """Every step took what it takes on this machine: 10 ms, and 1 ms a token."""

    def add(self, num_tokens, seconds):
        super().add(num_tokens, 0.01 + 0.001 * num_tokens)


def test_decodes_wait_no_longer_and_tokens_stay(demo_stock):
    prompts = [*random_prompts(random.Random(0), 4, 10), *random_prompts(random.Random(1), 2, 300)]
    prompts[4:] = [(prompt * 300)[:300] for prompt in prompts[4:]]
    longest = {}
    for limit in (None, math.inf, 0.05):
        engine = Engine(as_lfm2_cb(demo_stock), EngineConfig(cache_memory=2**26, max_step_seconds=limit))
        engine.speculation.times = SimulatedTimes()
        requests = [Request(i, prompt, 20, params=SamplingParams()) for i, prompt in enumerate(prompts)]
        for request in requests[:4]:
            engine.add(request)
        engine.step()
        for request in requests[4:]:
            engine.add(request)
        sizes, schedule = [], engine.scheduler.schedule

        def noted(sizes=sizes, schedule=schedule):
            rows = schedule()
            sizes.append(sum(row.num_tokens for row in rows))
            return rows

        engine.scheduler.schedule = noted
        while engine.has_unfinished:
            engine.step()
        longest[limit] = max(sizes)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == stock_greedy(demo_stock, prompt, 20)
    assert longest[None] > 500 and longest[math.inf] == longest[None]
    assert 30 <= longest[0.05] <= 40  # 40 tokens take 50 ms


@pytest.mark.parametrize("limit", [0, -1.0, "fast", True])
def test_no_time_at_all_is_refused(demo_stock, limit):
    with pytest.raises(ValueError, match="max_step_seconds"):
        ContinuousBatchingGenerator(demo_stock, max_step_seconds=limit)
