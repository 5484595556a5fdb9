"""The simulated fleet: its books, and what the router is good for."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tools"))

import simulate_fleet

SMALL = "--requests 600 --rate 0.4 --blocks 400 --system-prompts 6"


def run(flags: str) -> dict[str, simulate_fleet.Outcome]:
    return {outcome.policy: outcome for outcome in simulate_fleet.main(f"{SMALL} {flags}".split())}


def test_every_request_is_answered_and_the_prefix_policy_hits_as_one_replica_does(tmp_path, capsys):
    table = tmp_path / "table.json"
    of_four = run(f"--replicas 4 --json {table}")
    alone = run("--replicas 1 --policies round_robin --rate 0.4")["round_robin"]
    for outcome in (*of_four.values(), alone):
        assert len(outcome.ttft) == 600 and min(outcome.ttft) > 0
        assert 0 < outcome.cached_tokens < outcome.prompt_tokens and outcome.imbalance >= 1
    rates = {policy: outcome.row()["hit rate %"] for policy, outcome in of_four.items()}
    assert rates["prefix"] > rates["round_robin"] + 20 and rates["prefix"] > rates["least_loaded"] + 20
    assert rates["prefix"] > alone.row()["hit rate %"] - 8  # each has a cache to fill
    assert [row["policy"] for row in json.loads(table.read_text())] == list(simulate_fleet.POLICIES)
    assert "| 4 | prefix |" in capsys.readouterr().out


def test_it_says_the_same_again():
    first, second = (run("--replicas 3 --policies prefix")["prefix"] for _ in range(2))
    assert first.ttft == second.ttft and first.cached_tokens == second.cached_tokens


@pytest.mark.parametrize("staleness", [0.5, 1e6])
def test_stale_sketches_break_nothing(staleness):
    outcome = run(f"--replicas 4 --policies prefix --staleness {staleness} --delay 0.5")["prefix"]
    assert len(outcome.ttft) == 600 and outcome.row()["hit rate %"] > 70


def test_an_engine_computes_what_its_cost_model_says():
    args = simulate_fleet.parse(["--requests", "1", "--turns", "0.001", "--delay", "0.25"])
    cost = simulate_fleet.CostModel(step=1.0, token=0.0, row=0.0, kv_token=0.0)
    fleet = simulate_fleet.Fleet("round_robin", 1, args, cost)
    outcome = fleet.run()
    assert outcome.ttft[0] == pytest.approx(1.0 + 2 * 0.25)  # one step, and the way there and back
