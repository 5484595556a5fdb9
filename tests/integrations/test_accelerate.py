"""generate_across_processes under torchrun, two processes on gloo, beside one process and stock."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import random_prompts, stock_greedy
from lfm2_cb.integrations.accelerate import generate_across_processes

import lfm2_cb

WORKER = str(Path(__file__).parent / "accelerate_worker.py")


def cases():
    prompts = random_prompts(random.Random(5), 7, 30, vocab_size=3000)
    greedy = {"do_sample": False, "eos_token_id": None}
    return {
        "uneven": {"prompts": prompts, **greedy, "max_new_tokens": [4, 9, 3, 8, 5, 7, 6]},
        "fewer prompts than processes": {"prompts": prompts[:1], **greedy, "max_new_tokens": 4},
        "none": {"prompts": [], "max_new_tokens": 4},
        "sampled": {"prompts": prompts, "do_sample": True, "max_new_tokens": 5, "seed": 7, "num_return_sequences": 2},
        "sampled by torch's generator": {"prompts": prompts, "do_sample": True, "max_new_tokens": 5},
        "one share fails": {"prompts": [*prompts, [10**6]], **greedy, "max_new_tokens": 4},
        "all shares fail": {"prompts": prompts, "no_such_option": 1},
        "after a failure": {"prompts": prompts, **greedy, "max_new_tokens": 3},
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Each process's results of a run of two."""
    folder = tmp_path_factory.mktemp("two")
    cases_path = folder / "cases.json"
    cases_path.write_text(json.dumps(cases()), "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, WORKER, str(cases_path), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*-of-2.json"))]
    assert len({report["pid"] for report in reports}) == 2
    return [report["results"] for report in reports]


@pytest.fixture
def one(demo_stock):
    """Runs a case in this process alone."""

    def run(name):
        torch.manual_seed(100)  # as the worker's main process
        case = cases()[name]
        with lfm2_cb.ContinuousBatchingGenerator(demo_stock, cache_memory="32MiB") as generator:
            outputs = generate_across_processes(generator, case.pop("prompts"), **case)
        return [[output.prompt_token_ids, output.token_ids] for output in outputs]

    return run


@pytest.mark.parametrize("name", ["uneven", "fewer prompts than processes", "after a failure"])
def test_answers_are_stocks_in_the_order_of_the_prompts(two, demo_stock, name):
    case = cases()[name]
    limits = case["max_new_tokens"]
    limits = limits if isinstance(limits, list) else [limits] * len(case["prompts"])
    expected = [[p, stock_greedy(demo_stock, p, n)] for p, n in zip(case["prompts"], limits, strict=True)]
    assert [results[name] for results in two] == [expected] * 2


def test_nothing_to_do(two):
    assert [results["none"] for results in two] == [[], []]


def test_sampled_answers_do_not_depend_on_the_number_of_processes(two, one):
    answers = one("sampled")
    assert two[0]["sampled"] == two[1]["sampled"] == answers
    assert len(answers) == 14 and answers[0] != answers[1]


def test_all_processes_sample_by_the_main_ones_seed(two, one):
    name = "sampled by torch's generator"
    assert two[0][name] == two[1][name] == one(name)


def test_a_failed_share_is_reported_in_every_process(two):
    for results in two:
        assert results["one share fails"]["ranks"] == [1]
        assert "process 1 of 2 failed" in results["one share fails"]["message"]
        assert "token id 1000000, outside the vocabulary" in results["one share fails"]["message"]
        assert results["all shares fail"]["ranks"] == [0, 1]
        assert "no_such_option" in results["all shares fail"]["message"]


def test_processes_that_accelerate_does_not_know_of_are_not_passed_over(one, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="2 processes were started"):
        one("uneven")
