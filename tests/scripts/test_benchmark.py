"""scripts/benchmarks/compare.py on the shipped model with its work cut small: what it writes must hold together."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

import lfm2_cb

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

import compare
from harness import fresh, load, machine, peers, plots, readings, report, roofline
from harness.workloads import cut, equal_requests, make_workloads

from lfm2_cb.ops.native import library as native

SCRIPTS = Path(compare.__file__).parent
TINY = ["--model", "tiny", "--dtype", "float32", "--cache-memory", "16MiB"]

FAKE_PEER = """
import common, os

def start(options):
    assert options["max_sequences"] == 256 and options["threads"] > 0
    print("noise on standard output")

    def run(work, gained):
        for index, (prompt, length) in enumerate(work):
            assert prompt
            gained(index, length - 1 if prompt[0] == 99 else length)
        if os.environ.get("FAKE_FAILS_AFTER") == str(len(work)):
            raise SystemExit(3)

    return run, {"version": "7"}

common.main(start)
"""


MACHINE = {"read_gb_per_s": 2.0, "bf16_tflop_per_s": 0.5, "fp32_tflop_per_s": 1.0}


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch):
    """Measuring takes longer than all the work here."""
    monkeypatch.setattr(machine, "measure", lambda: dict(MACHINE))


@pytest.fixture
def fake_peer(monkeypatch, tmp_path):
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "run_fake.py").write_text(FAKE_PEER)
    (folder / "common.py").write_text((SCRIPTS / "peers" / "common.py").read_text("utf-8"))
    monkeypatch.setattr(peers, "RUNNERS", folder)
    return f"fake={sys.executable}"


@pytest.fixture(scope="module")
def tiny():
    return compare.load_model("tiny", torch.float32)


def test_the_workloads_are_the_fixed_ones():
    works = make_workloads(65536, 128000)
    shapes = {name: (len(w), sum(len(p) for p, _ in w), sum(n for _, n in w)) for name, w in works.items()}
    assert shapes["single"] == (1, 128, 128) and shapes["five"] == (5, 135, 500) and shapes["long8"] == (8, 16384, 512)
    assert [shapes[name][0] for name in ("ragged64", "ragged256", "prefix64")] == [64, 256, 64]
    assert all(p[:512] == works["prefix64"][0][0][:512] for p, _ in works["prefix64"])
    assert works == make_workloads(65536, 128000)


def test_every_engine_in_turn_and_the_summary_is_of_the_rounds(tmp_path, capsys, fake_peer):
    out, table = tmp_path / "out.json", tmp_path / "table.md"
    arguments = "--workloads single five ragged64 ragged256 long8 --limit 3 6 --repeats 2 --stock-repeats 1 --uncached"
    arguments += f" --stock-batch 1 3 --checkpoint {lfm2_cb.demo_model_path()} --peer {fake_peer} --sweep 1 2"
    arguments += f" --sweep-stock-to 1 --json {out} --markdown {table} --plots {tmp_path}"
    pytest.importorskip("matplotlib")
    compare.main([*TINY, *arguments.split()])
    data, works = json.loads(out.read_text()), data_workloads()
    assert list(data["workloads"]) == list(works) and data["peers"]["fake"]["version"] == "7"
    for name, found in data["workloads"].items():
        rounds, summary = found["rounds"], found["summary"]
        assert len(rounds) == 2 and found["output_lengths"] == [n for _, n in works[name]]
        engines = [[key for key in entry if key in ("ours", "stock", "uncached", "fake")] for entry in rounds]
        first = ["ours"] + ["stock"] * (name != "ragged256") + ["uncached"] * (name == "five") + ["fake"]
        assert engines == [first, ["ours", "fake"]]
        for engine in first:
            for entry in (e[engine] for e in rounds if engine in e):
                tokens = sum(n for _, n in works[name])
                assert entry["num_output_tokens"] == tokens
                assert entry["output_tokens_per_s"] == pytest.approx(tokens / entry["seconds"])
                assert entry["ttft_p50"] <= entry["ttft_p99"] <= entry["ttft_last"] <= entry["seconds"]
                assert entry["itl_p50"] <= entry["itl_p99"]
            ratios = [
                e[engine]["seconds"] / e["ours"]["seconds"] for e in rounds if engine in e
            ]  # the same tokens: rates are to each other as times
            if engine != "ours":
                assert summary["ratios"][engine] == pytest.approx(statistics.median(ratios))
    stock64 = data["workloads"]["ragged64"]["rounds"][0]["stock"]
    assert stock64["output_tokens_per_s"] == max(data["workloads"]["ragged64"]["rounds"][0]["tried"].values())
    rates = data["workloads"]["ragged256"]["summary"]
    assert rates["output_tokens_per_s"]["stock"] == stock64["output_tokens_per_s"]
    assert rates["ratios"]["stock"] == pytest.approx(
        rates["output_tokens_per_s"]["ours"] / rates["output_tokens_per_s"]["stock"]
    )
    assert [["stock" in entry for entry in rounds] for rounds in data["sweep"].values()] == [
        [True, False],
        [False] * 2,
    ]
    assert table.read_text().strip() in capsys.readouterr().out
    for name in ("workloads", "throughput_by_batch"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "latency_by_load.png").exists()


def data_workloads():
    works = make_workloads(4096, 4096)
    return {name: cut(works[name], 3, 6) for name in ("single", "five", "ragged64", "ragged256", "long8")}


def test_the_fractions_are_of_this_rounds_machine(tiny):
    work = machine.ModelWork.of(tiny)
    assert work.weight_bytes == sum(p.nbytes for p in tiny.parameters())  # the head is the embedding
    linears = sum(p.numel() for n, p in tiny.named_parameters() if n.endswith("proj.weight") or ".feed_forward" in n)
    assert work.token_flops == 2 * linears and work.head_flops == 2 * tiny.lm_head.weight.numel()
    workload = [([1] * 10, 3), ([1], 3)]
    assert work.prompt_flops(workload) == 11 * work.token_flops + 56 * work.attention_flops + 2 * work.head_flops
    ours = readings.reading(workload, 4.0, [[1.0, 1.5, 2.0], [2.0, 2.5, 3.0]])
    assert machine.reached("single", work, workload, ours, MACHINE) == {
        "read_bandwidth": pytest.approx(work.weight_bytes / 2e9 / 0.5)
    }
    rate = work.prompt_flops(workload) / 2.0 / 1e12
    assert machine.reached("long8", work, workload, ours, MACHINE) == {
        "bf16_matrix_rate": pytest.approx(rate / 0.5),
        "fp32_matrix_rate": pytest.approx(rate),
    }
    assert machine.reached("ragged64", work, workload, ours, MACHINE) == {}


def test_the_roofline_is_the_larger_of_bytes_and_arithmetic_step_by_step(tiny):
    work = dataclasses.replace(machine.ModelWork.of(tiny), block_bytes=1000)
    rates = {"probe_read_gb_per_s": 2.0, "probe_tflop_per_s": 0.5, "probe_int8_top_per_s": 1.0}
    decode, prefill = roofline.Step(1, 1, 50, 2), roofline.Step(10**6, 0, 7, 2)
    ours = readings.reading([([1], 1)], 4.0, [[1.0]])
    best = (work.weight_bytes + 2000) / 2e9 + (10**6 * work.token_flops + 7 * work.attention_flops) / 5e11
    found = machine.reached("ragged64", work, [], ours, MACHINE | rates, [decode, prefill])
    assert found == {"roofline": pytest.approx(best / 4.0)}
    int8 = dataclasses.replace(work, weights="int8")
    faster = machine.reached("ragged64", int8, [], ours, MACHINE | rates, [decode, prefill])["roofline"]
    assert 0.5 < faster / found["roofline"] < 0.6


def test_the_steps_of_a_run_are_noted(demo_stock):
    with lfm2_cb.ContinuousBatchingGenerator(demo_stock, cache_memory="16MiB", max_batch_tokens=64) as generator:
        with roofline.steps_of(generator.engine) as steps:
            generator.generate([[5] * 100, [6] * 20], max_new_tokens=3, do_sample=False, eos_token_id=None)
        generator.generate([[7]], max_new_tokens=1)
    assert sum(step.tokens for step in steps) == 120 + 2 * 2 and sum(step.heads for step in steps) == 6
    assert sum(step.pairs for step in steps) == 102 * 103 // 2 + 22 * 23 // 2
    assert steps[0].blocks in (1, 2) and steps[-1].blocks == 1 + 2


def test_the_processor_is_probed():
    found = roofline.rates(1e-2)
    assert found["probe_read_gb_per_s"] > 0.1 and found["probe_tflop_per_s"] > 1e-3


def test_the_machine_is_measured():
    assert 0.5 < machine.read_rate(1e-3) < 5000
    rates = {dtype: machine.matrix_rate(dtype, 1e-3) for dtype in (torch.float32, torch.bfloat16)}
    assert all(1e-4 < rate < 1e4 for rate in rates.values())
    assert set(machine.facts()) == {"cpu", "threads", "bf16_hardware", "torch"}


def test_a_reading_counts_every_gap_and_refuses_other_lengths():
    workload = [([1, 2], 3), ([3], 1)]
    found = readings.reading(workload, 2.0, [[0.5, 0.75, 1.75], [1.5]])
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == (2.0, 3.5)
    assert (found.ttft_p50, found.ttft_last, found.itl_p50, found.itl_p99) == (1.5, 1.5, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="answers of"):
        readings.reading(workload, 2.0, [[0.5, 0.75], [1.5]])


def test_stock_stops_its_clock_at_each_rows_length(tiny):
    workload = [([11, 12, 13], 2), ([14, 15], 5), ([16], 3)]
    for use_cache in (True, False):
        found = readings.run_stock(tiny, workload, 2, use_cache)
        assert found.num_output_tokens == 10 and found.batch_size == 2
        assert 0 < found.ttft_p50 <= found.ttft_last < found.seconds


def test_a_peer_that_answers_too_short_or_ends(fake_peer):
    name, python = fake_peer.split("=")
    options = {"max_sequences": 256, "threads": 1}
    with pytest.raises(ValueError, match="--peer other: the peers are fake"):
        peers.Peer("other", python, options)
    with pytest.raises(peers.PeerFailed, match="fake ended with status 1"):
        peers.Peer(name, python, options | {"threads": 0})
    peer = peers.Peer(name, python, options)
    try:
        for _ in range(2):
            assert _state(peer.pid) == "T"  # stopped
            assert peer.run([([1], 4)]).num_output_tokens == 4 and peer.peak_rss_mb() > 1
        assert peers.Peer(name, python, options).close() == 0  # not killed
        with pytest.raises(RuntimeError, match="answers of"):
            peer.run([([99], 4)])
        with pytest.raises(peers.PeerFailed):
            peer.run([([], 4)])
    finally:
        peer.close()
    assert peers.known_peers() == ["fake"]


def _state(pid):
    """Of a process, once it has taken up what it was sent."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "T":
            break
        time.sleep(0.05)
    return state


def test_the_runners_that_ship():
    assert peers.known_peers() == ["generate_batch", "openvino", "vllm"]


def test_under_load_all_arrive_and_the_long_ones_are_told_apart(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "load.json"
    arguments = (
        f"--workloads --no-stock --load 100 400 --load-long --load-requests 13 --load-chunks 16 64 --json {out}"
    )
    compare.main([*TINY, *arguments.split(), *f"--limit 13 6 --plots {tmp_path}".split()])
    found = json.loads(out.read_text())["load"]
    assert [(f["max_batch_tokens"], f["rate"]) for f in found] == [(16, 100), (16, 400), (64, 100), (64, 400)]
    lengths = [n for _, n in cut(make_workloads(4096, 4096)["ragged256"], 13, 6)]
    for f in found:
        assert (f["num_requests"], f["num_long"], f["num_output_tokens"]) == (13, 2, sum(lengths))
        assert 0 < f["ttft_p50"] <= f["ttft_p99"] < f["seconds"] and 0 < f["itl_p50"] <= f["itl_p99"]
        assert f["long_ttft_p50"] > 0
    assert (tmp_path / "latency_by_load.png").read_bytes()[:4] == b"\x89PNG"


def test_first_tokens_are_counted_from_the_arrival(tiny):
    """Requests that arrive all at once at a slow engine wait for each other."""
    with lfm2_cb.ContinuousBatchingGenerator(tiny, cache_memory="8MiB", max_sequences=1) as generator:
        step = generator.engine.step
        found = load.run_load(generator, equal_requests(4, 4000, 4, 5), rate=1e6)
        assert generator.engine.step == step
    assert found.ttft_p99 > 3 * 4 * found.itl_p50 * 0.5  # three others' answers went first
    assert found.num_output_tokens == 20 and found.seconds > found.ttft_p99 and found.long_ttft_p50 is None


def test_peak_memory_in_a_fresh_process(tmp_path):
    out = tmp_path / "memory.json"
    arguments = f"--workloads --no-stock --memory single --limit 1 4 --checkpoint {lfm2_cb.demo_model_path()}"
    arguments += " --weights int8"  # a quarter of the 18.7 MB
    compare.main([*TINY, *arguments.split(), "--json", str(out)])
    found = json.loads(out.read_text())["memory"]["ours"]["single"]
    assert found["limit_mb"] == pytest.approx(1.25 * found["weights_mb"] + 2**24 / 1e6 + 500)
    assert found["peak_rss_mb"] >= found["loaded_mb"] >= found["imports_mb"] > 6 > found["weights_mb"] > 4.7


def test_a_fresh_process_that_fails_says_so():
    with pytest.raises(RuntimeError, match="startup in a fresh process ended with status 1"):
        fresh.measure({"kind": "startup"}, PYTHONHOME="/nowhere")


def test_start_up(monkeypatch, tmp_path):
    """The jobs of the fresh processes, in this one: an import takes seconds."""
    jobs = {"startup": fresh._startup, "build": fresh._build}
    called = []

    def here(job, **environment):
        called.append((job["kind"], *environment))
        return jobs[job["kind"]]({**job, "started": 0.0})

    monkeypatch.setattr(fresh, "measure", here)
    monkeypatch.setattr(native, "load", lambda load=native.load: called.append("built") or load())
    job = {"model": lfm2_cb.demo_model_path(), "dtype": "float32", "weights": None, "cache_memory": 2**23}
    found = fresh.startup(job, repeats=2)
    assert [c for c in called if c != "built"] == [("startup",)] * 3 + [("build", "XDG_CACHE_HOME")]
    assert "built" in called and set(found) == {"imported_s", "loaded_s", "first_token_s", "native_build_s"}
    assert 0 < found["loaded_s"] < found["first_token_s"]


def test_earlier_runs_are_shown_together(tmp_path, capsys):
    entry = {"seconds": 2.0, "output_tokens_per_s": 30.0, "total_tokens_per_s": 60.0, "batch_size": 16}
    entry |= {"ttft_p50": 1.0, "ttft_p99": 1.5, "itl_p50": 0.02, "itl_p99": 0.04}
    both = {"ours": entry | {"output_tokens_per_s": 90.0}, "stock": entry, "reached": {"read_bandwidth": 0.875}}
    both["machine"] = {"read_gb_per_s": 30.0, "bf16_tflop_per_s": 0.02, "fp32_tflop_per_s": 0.1}
    facts = {"cpu": "a processor", "threads": 2, "bf16_hardware": False, "torch": "2"}
    for i, name in enumerate(("ragged64", "ragged256")):
        rounds = [both if name == "ragged64" else {"ours": both["ours"], "machine": both["machine"]}]
        work = {"name": name, "rounds": rounds}
        first = report.Report(str(tmp_path / f"{i}.json"), {"machine": facts, "workloads": {name: work}})
        first.save()
    merged = compare.main(["--read", str(tmp_path / "0.json"), str(tmp_path / "1.json")])
    shown = capsys.readouterr().out
    assert "| ragged64 | 90.0 | 30.0 (16) | 3.00 | 60 | 88% of read bandwidth | 1 |" in shown
    assert "| ragged256 | 90.0 | 30.0 (on ragged64) | 3.00 |" in shown
    assert "| ragged64 | stock | 1.00 / 1.50 | 20.0 / 40.0 |" in shown and "no bf16 arithmetic" in shown
    assert list(merged.data["workloads"]) == ["ragged64", "ragged256"]


def test_rounds_of_another_engine_stay_when_a_workload_is_measured_again(tmp_path, capsys):
    def entry(**rates):
        times = {"ttft_p50": 1.0, "ttft_p99": 1.5, "itl_p50": 0.02, "itl_p99": 0.04, "batch_size": 5}
        readings = {e: times | {"output_tokens_per_s": r, "total_tokens_per_s": 2 * r} for e, r in rates.items()}
        return {"machine": MACHINE, "reached": {"roofline": rates["ours"] / 100}, **readings}

    facts = {"cpu": "a processor", "threads": 2, "bf16_hardware": True, "torch": "2"}
    runs = {"old": [entry(ours=50.0, stock=10.0)], "new": [entry(ours=80.0, vllm=40.0), entry(ours=60.0, vllm=50.0)]}
    for name, rounds in runs.items():
        work = {"name": "five", "prompt_lengths": [12], "output_lengths": [100], "rounds": rounds}
        report.Report(str(tmp_path / f"{name}.json"), {"machine": facts, "workloads": {"five": work}}).save()
    both = tmp_path / "both.json"
    paths = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    compare.main(["--read", *paths, "--json", str(both)])
    assert "| five | 70.0 | 10.0 (5) | 7.00 | 45.0 | 1.60 | 140 | 70% of roofline | 2 |" in capsys.readouterr().out
    found = json.loads(both.read_text("utf-8"))["workloads"]["five"]
    assert [sorted(e.keys() - {"machine", "reached"}) for e in found["rounds"]] == [["ours", "vllm"]] * 2 + [["stock"]]
    again = report.Report.read([str(both), paths[1]])  # a run that is merged twice counts once
    assert again.data["workloads"]["five"] == found
    work["prompt_lengths"] = [13]
    report.Report(paths[1], {"machine": facts, "workloads": {"five": work}}).save()
    with pytest.raises(ValueError, match="two runs of five are of different requests"):
        report.Report.read(paths)


def test_without_matplotlib_the_extra_is_named_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(compare, "measure", lambda args: pytest.fail("measured first"))
    with pytest.raises(plots.PlotsUnavailable, match=r"lfm2-cb\[bench\]"):
        compare.main([*TINY, "--plots", str(tmp_path)])


def test_a_peer_that_fails_costs_nobody_else_a_reading(monkeypatch, tmp_path, capsys, fake_peer):
    monkeypatch.setenv("FAKE_FAILS_AFTER", "3")
    out = tmp_path / "out.json"
    arguments = f"--workloads single ragged256 --limit 3 4 --repeats 2 --peer {fake_peer} --json {out}"
    compare.main([*TINY, *arguments.split(), "--checkpoint", lfm2_cb.demo_model_path()])
    data = json.loads(out.read_text())
    engines = {name: [list(e) for e in found["rounds"]] for name, found in data["workloads"].items()}
    assert engines["single"] == [["machine", "ours", "reached", "tried", "stock", "fake"],
                                 ["machine", "ours", "reached", "stock", "fake"]]  # fmt: skip
    assert ["fake" in names for names in engines["ragged256"]] == [False, False]
    assert "on ragged256: fake ended with status 3" in data["peers"]["fake"]["failed"]
    assert "fake is left out from here on" in capsys.readouterr().err
    # Without ragged64 in the run, stock does that workload in ragged256's rounds.
    stock, works = data["workloads"]["ragged256"]["rounds"][1]["stock"], make_workloads(4096, 4096)
    assert stock["num_output_tokens"] == sum(n for _, n in cut(works["ragged64"], 3, 4))


def test_the_simulators_cost_model_and_the_cost_of_sampling(tmp_path, capsys):
    out, cost = tmp_path / "out.json", tmp_path / "cost.json"
    arguments = f"--workloads single five --limit 5 8 --no-stock --repeats 1 --sampling-overhead --cost-model {cost}"
    compare.main([*TINY, *arguments.split(), "--json", str(out)])
    assert set(json.loads(cost.read_text())) == {field.name for field in dataclasses.fields(compare.CostModel)}
    assert -1 < json.loads(out.read_text())["sampling_overhead"] < 20
    assert "to a step of 64 rows" in capsys.readouterr().out


def test_the_cost_model_knows_the_models_experts(tmp_path):
    true = compare.CostModel(step=0.01, token=1e-4, row=1e-4, kv_token=1e-6, expert=2e-3, num_experts=32, top_k=4)
    shapes = [(tokens, rows, 10 * rows) for tokens in (1, 2, 4, 8, 32, 128) for rows in (1, tokens)]
    steps = [(*shape, true.seconds_of(*shape)) for shape in shapes]
    config = compare.PreTrainedConfig(num_experts=32, num_experts_per_tok=4)
    compare.fit_cost_model(steps, config, str(tmp_path / "cost.json"))
    found = compare.CostModel(**json.loads((tmp_path / "cost.json").read_text()))
    assert (found.num_experts, found.top_k) == (32, 4)
    assert found.expert == pytest.approx(true.expert, rel=0.01)


def test_an_interrupted_run_keeps_its_readings(monkeypatch, tmp_path):
    out, calls = tmp_path / "out.json", []

    def stock(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return readings.run_stock(*args, **kwargs)

    monkeypatch.setattr("harness.rounds.run_stock", stock)
    with pytest.raises(KeyboardInterrupt):
        compare.main([*TINY, *f"--workloads single --limit 1 4 --json {out}".split()])
    first, second = json.loads(out.read_text())["workloads"]["single"]["rounds"]
    assert "stock" in first and "ours" in second and "stock" not in second


def test_the_cost_of_a_trace(capsys):
    import tracing

    tracing.main(["--model", "tiny", "--rows", "3", "--tokens", "8", "--rounds", "1"])
    out = capsys.readouterr().out
    assert 0 < float(re.search(r"within +(\S+)", out)[1]) < 1 and "on / off" in out and "3 rows" in out
