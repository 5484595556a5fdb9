"""The simulated fleet: its books, and what the router is good for."""

import json
import sys
from collections import deque
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tools"))

import simulate_fleet
from fleet_model import RecordedChat

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


def test_users_ask_less_where_answers_take_longer():
    """By rate the queues of engines that compute more than they must grow; users wait for their answers."""
    of_rate, of_users = (
        simulate_fleet.main(f"--replicas 2 --requests 600 --policies round_robin {flags}".split())[0]
        for flags in ("--rate 5", "--users 20")
    )
    assert len(of_users.ttft) == 600 and max(of_users.ttft) < max(of_rate.ttft) / 2


def test_chats_that_were_held_are_held_again():
    """What comes back otherwise than it was said is no hit, and a prompt that is being computed is waited for."""
    args = simulate_fleet.parse(["--requests", "5", "--block-size", "10", "--delay", "0"])  # more than there are
    cost = simulate_fleet.CostModel(step=1.0, token=0.0, row=0.0, kv_token=0.0)
    first = ([1, 2], [1, 2, 3, 4], 25, 20)
    second = ([1, 2, 3, 9], [1, 2, 3, 9, 10], 45, 8)
    chats = [RecordedChat(deque([first, second])) for _ in range(2)]
    fleet = simulate_fleet.Fleet("round_robin", 1, args, cost, chats)
    outcome = fleet.run()
    assert fleet.engines["0"].num_kv_tokens == 0, "nothing runs any more"
    assert len(outcome.ttft) == 4 and outcome.prompt_tokens == 2 * (25 + 45)
    assert outcome.cached_tokens == 0 + 20 + 30 + (30 if outcome.ttft[2] == outcome.ttft[3] else 40)
    assert outcome.ttft[1] > outcome.ttft[0]  # the other's prompt, first


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
