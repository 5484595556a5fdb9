"""scripts/gpu.sh without a card: every part by itself, and what is found is kept."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

import compare
import gpu

ENTRY = {"seconds": 2.0, "output_tokens_per_s": 30.0, "total_tokens_per_s": 60.0, "batch_size": 16}
ENTRY |= {"ttft_p50": 1.0, "ttft_p99": 1.5, "itl_p50": 0.02, "itl_p99": 0.04}


def report(**rates: float) -> dict:
    """One round of ragged64."""
    engines = {name: ENTRY | {"output_tokens_per_s": rate} for name, rate in rates.items()}
    rounds = [{"machine": {"read_gb_per_s": 4000.0}, **engines}]
    ratios = {n: rates["ours"] / r for n, r in rates.items() if n != "ours"}
    summary = {"output_tokens_per_s": rates, "ratios": ratios, "reached": {}}
    facts = {"cpu": "a processor", "threads": 2, "bf16_hardware": False, "torch": "2.13"}
    facts |= {"card": "a card", "card_gib": 80}
    workload = {"name": "ragged64", "rounds": rounds, "summary": summary}
    return {"machine": facts, "options": {"model": "m", "dtype": "bfloat16"}, "workloads": {"ragged64": workload}}


def test_without_a_card_one_line_says_so(capsys, tmp_path):
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "no CUDA card here: nothing was run" in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="ends process groups")
def test_a_part_that_hangs_or_fails_costs_no_other_its_results(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    written, plotted = tmp_path / "written.json", []
    written.write_text(json.dumps(report(ours=210.0, stock=30.0)))
    scripts = {
        "parity": "echo 1 passed",
        "stock": f"cp {written} {out}/stock.json",
        "generate_batch": "sleep 600 & echo $!; wait",
        "vllm": "exit 3",
    }
    monkeypatch.setattr(gpu, "commands", lambda name, args, out: [["bash", "-c", scripts[name]]])
    monkeypatch.setattr(gpu.plots, "write", lambda data, folder: plotted.append(Path(folder).name))
    monkeypatch.setattr(gpu, "why_not", lambda name, args: None)
    monkeypatch.setattr(gpu, "LIMITS", gpu.LIMITS | {"generate_batch": 1})
    assert gpu.main(["--device", "cpu", "--out", str(out)]) == 1
    found = json.loads((out / "results.json").read_text())
    statuses = {part["name"]: part["status"] for part in found["parts"]}
    assert statuses["parity"] == statuses["stock"] == "done" and "stopped after 1 s" in statuses["generate_batch"]
    assert statuses["vllm"] == "failed (3): see vllm.log" and "1 passed" in (out / "parity.log").read_text()
    assert plotted == ["stock"]
    text = (out / "results.md").read_text()
    assert text.strip() in capsys.readouterr().out and "m, bfloat16, on a card (80 GiB), torch 2.13" in text
    assert "| ragged64, at least 6 × stock | 7.00 × | yes |" in text
    assert "| ragged64, at least 1 × vllm | not measured |" in text
    child = int((out / "generate_batch.log").read_text().split()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # ended with what had started it


def test_the_parts_say_what_compare_takes(tmp_path):
    args = gpu.parse(["--vllm", "/a/python", "--limit", "3", "8"])
    for name in ("stock", "generate_batch", "vllm"):
        command = gpu.commands(name, args, tmp_path)[-1]
        parsed = compare.parse(command[2:])
        assert parsed.device == "cuda" and parsed.limit == [3, 8] and Path(parsed.json).name == f"{name}.json"
        assert list(parsed.peer) == ([] if name == "stock" else [name]) and parsed.no_stock == (name != "stock")
    assert sum(gpu.LIMITS.values()) < 600 and gpu.why_not("vllm", args) is None


def test_what_was_reached_is_the_least_of_all_workloads():
    data = report(ours=90.0, stock=30.0)
    data["workloads"]["five"] = report(ours=15.0, stock=30.0)["workloads"]["ragged64"]
    rows = list(gpu.targets([gpu.Part("stock", "done", 1.0, data)]))
    unknown = ["not measured", "–"]
    assert [row[1:] for row in rows] == [["3.00 ×", "no"], unknown, ["0.50 × (five)", "no"], unknown]
