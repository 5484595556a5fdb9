"""The simulator beside the engine it stands for, and its cost model."""

import random
import sys
from pathlib import Path

import pytest
from helpers import random_prompts

from lfm2_cb.engine.engine import Engine, EngineConfig
from lfm2_cb.engine.sampler import SamplingParams
from lfm2_cb.loading import as_lfm2_cb
from lfm2_cb.scheduling.cache_manager import CacheManager
from lfm2_cb.scheduling.policies import POLICIES
from lfm2_cb.scheduling.request import Request

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tools"))

import simulate


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_its_steps_are_the_engines_steps(demo_stock, monkeypatch, policy):
    rng = random.Random(4)
    prefix = random_prompts(rng, 1, 40)[0]
    work = [(prefix[: rng.choice([0, 40])] + p, rng.randint(1, 30)) for p in random_prompts(rng, 40, 60)]
    blocks, block_size, sequences, tokens = 40, 4, 8, 64

    engine = Engine(as_lfm2_cb(demo_stock), EngineConfig(tokens, sequences, 2**26, block_size, policy=policy))
    engine.scheduler.cache = CacheManager(blocks, block_size, engine.plan.num_slots)
    requests = [Request(i, p, n, params=SamplingParams()) for i, (p, n) in enumerate(work, 1)]
    engine.add_all(requests)
    steps, run = [], engine.runner.run

    def noted(rows):
        steps.append([(row.request.request_id, row.start, row.num_tokens) for row in rows])
        return run(rows)

    engine.runner.run = noted
    while engine.has_unfinished:
        engine.step()

    monkeypatch.setattr(
        simulate, "arrivals", lambda args, replica: iter([simulate.Arrival(0.0, p, n) for p, n in work])
    )
    args = simulate.parse(
        f"--blocks {blocks} --block-size {block_size} --sequences {sequences} --max-batch-tokens {tokens} "
        "--known-lengths --policies fcfs".split()
    )
    simulated, cost = [], simulate.CostModel()
    monkeypatch.setattr(
        simulate.CostModel,
        "seconds",
        lambda self, rows: simulated.append([(r.request.request_id, r.start, r.num_tokens) for r in rows]) or 1.0,
    )
    result = simulate.Simulation(policy, args, cost).run()
    assert simulated == steps and result.steps == len(steps) > 20
    assert result.evictions == sum(r.metrics.num_preemptions for r in requests)
    assert result.output_tokens == sum(n for _, n in work)


def test_arrivals_in_time_wait_their_turn_and_all_end(capsys):
    results = simulate.main(
        ["--requests", "300", "--rate", "2", "--sequences", "16", "--blocks", "120", "--prefixes", "3"]
    )
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(POLICIES) == 2 + len(results)
    for result in results:
        assert len(result.ttft) == 300 and min(result.ttft) > 0
        assert result.seconds > 100 and result.most_running <= 16 and result.most_blocks <= 120
    assert len({result.output_tokens for result in results}) == 1  # the same trace for every policy


def test_replicas_share_the_trace(capsys):
    one, four = (
        simulate.main(f"--requests 400 --policies fcfs --sequences 16 --replicas {n}".split())[0] for n in (1, 4)
    )
    assert four.output_tokens == one.output_tokens and len(four.ttft) == 400
    assert one.seconds / 5 < four.seconds < one.seconds / 2


def test_a_cost_model_is_found_again_from_its_own_steps():
    rng, model = random.Random(0), simulate.CostModel(0.05, 0.004, 0.0, 1e-6)
    shapes = [(rng.randint(1, 2000), rng.randint(1, 256), rng.randint(1, 100_000)) for _ in range(300)]
    found = simulate.CostModel.fit([(*shape, model.seconds_of(*shape)) for shape in shapes])
    for shape in shapes:
        assert found.seconds_of(*shape) == pytest.approx(model.seconds_of(*shape), rel=1e-3)


def test_of_a_mixture_of_experts_too():
    rng, model = random.Random(0), simulate.CostModel(0.05, 0.004, 0.0, 1e-6, expert=0.003, num_experts=32, top_k=4)
    assert model.seconds_of(1, 1, 0) == pytest.approx(0.054 + 4 * 0.003)
    assert model.seconds_of(1000, 1, 0) == pytest.approx(4.05 + 32 * 0.003)
    shapes = [(rng.choice([1, 2, 5, 9, 30, 900]), rng.randint(1, 256), rng.randint(1, 100_000)) for _ in range(300)]
    found = simulate.CostModel.fit([(*shape, model.seconds_of(*shape)) for shape in shapes], 32, 4)
    assert found.expert == pytest.approx(0.003, rel=0.01)
    for shape in shapes:
        assert found.seconds_of(*shape) == pytest.approx(model.seconds_of(*shape), rel=1e-3)


def test_a_trace_of_lengths_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 30, "output_tokens": 5}\n{"prompt_tokens": 9, "output_tokens": 40}\n')
    plot = tmp_path / "plot.png"
    (result,) = simulate.main(f"--trace {trace} --requests 50 --policies batch --plot {plot}".split())
    assert plot.read_bytes()[:4] == b"\x89PNG" and 50 * 5 <= result.output_tokens <= 50 * 40
