"""What a run has found: kept as JSON that is whole after every reading, and shown as Markdown."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .workloads import STOCK_BATCHES, STOCK_RUNS

Row = list[str]
#: what is measured of a machine, and how it is called
UNITS = {
    "read_gb_per_s": "GB/s read (torch)",
    "bf16_tflop_per_s": "bf16 TFLOP/s (torch)",
    "fp32_tflop_per_s": "fp32 TFLOP/s (torch)",
    "probe_read_gb_per_s": "GB/s read (probe)",
    "probe_tflop_per_s": "TFLOP/s (probe)",
    "probe_int8_top_per_s": "int8 TOP/s (probe)",
}


class Report:
    """Everything a run has found, by section, and the file that holds it.

    Sections: "machine": what it is. "options". "workloads": name → {"rounds": [{"machine", "ours", "stock",
    "uncached", one a peer, "reached"}], "summary"}. "peers": name → facts. "memory": engine → workload → MB.
    "startup". "sweep": batch size → rounds. "load": readings.
    """

    def __init__(self, path: str | None = None, data: dict[str, Any] | None = None) -> None:
        self.path, self.data = path, data if data is not None else {}

    @classmethod
    def read(cls, paths: Iterable[str], into: str | None = None) -> Report:
        """Several runs' files as one, which is written to `into`; where two have the same part, the later one counts.

        Of a workload that two have, the later one counts for the engines that it ran, and the others' rounds stay.
        """
        data: dict[str, Any] = {}
        for path in paths:
            found = json.loads(Path(path).read_text("utf-8"))
            for section, value in found.items():
                known = data.get(section)
                if section == "workloads":
                    value = {name: _merged((known or {}).get(name), workload) for name, workload in value.items()}
                data[section] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        if "workloads" in data:
            workloads: dict[str, Any] = data["workloads"]
            data["workloads"] = {name: workloads[name] for name in STOCK_BATCHES if name in workloads}
        report = cls(into, data)
        report.save()  # also where there is no file: a workload may be compared with one of another run
        return report

    def section(self, name: str) -> dict[str, Any]:
        return self.data.setdefault(name, {})

    def save(self) -> None:
        """Replace the file in one move: whoever is interrupted keeps what was there."""
        for workload in self.data.get("workloads", {}).values():
            workload["summary"] = summary(workload["rounds"], self._stock_rounds(workload["name"]))
        if self.path:
            scratch = Path(f"{self.path}.part")
            scratch.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
            os.replace(scratch, self.path)

    def _stock_rounds(self, name: str) -> list[dict[str, Any]] | None:
        """The rounds of the workload that stock runs instead of this one, where they are there."""
        other = self.data["workloads"].get(STOCK_RUNS.get(name, name))
        return other["rounds"] if other and other["name"] != name else None


def _merged(known: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """A workload by two runs: of the earlier one, the rounds of the engines that the later one did not run."""
    if known is None:
        return found
    if any(known.get(name) != found.get(name) for name in ("prompt_lengths", "output_lengths")):
        raise ValueError(f"two runs of {found['name']} are of different requests, which cannot be shown together")
    again = {"machine", *(name for entry in found["rounds"] for name in entry)}
    kept = [{name: value for name, value in entry.items() if name not in again} for entry in known["rounds"]]
    earlier = [{"machine": e["machine"], **k} for e, k in zip(known["rounds"], kept, strict=True) if k]
    return {**found, "rounds": [*found["rounds"], *earlier]}


def median_of(rounds: list[dict[str, Any]], engine: str, name: str = "output_tokens_per_s") -> float | None:
    found = [entry[engine][name] for entry in rounds if engine in entry]
    return statistics.median(found) if found else None


def summary(rounds: list[dict[str, Any]], stock_rounds: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Medians of output tokens/s by engine; of the ratios ours / engine within a round; of the fractions reached.

    The ratio to an engine that never ran in a round with ours is that of the medians.

    Args: stock_rounds: of another workload, whose rate by stock (a median then) stands for this one's.
    """
    engines = [key for entry in rounds for key in entry if key not in ("machine", "reached", "tried")]
    engines = list(dict.fromkeys(engines))
    rates = {engine: median_of(rounds, engine) for engine in engines}
    ratios = {}
    for engine in engines:
        if engine == "ours" or "ours" not in rates:
            continue
        both = [e for e in rounds if engine in e and "ours" in e]
        found = [e["ours"]["output_tokens_per_s"] / e[engine]["output_tokens_per_s"] for e in both]
        ratios[engine] = statistics.median(found) if both else rates["ours"] / rates[engine]
    if stock_rounds is not None and "stock" not in rates:
        elsewhere = median_of(stock_rounds, "stock")
        if elsewhere is not None and rates.get("ours") is not None:
            rates["stock"], ratios["stock"] = elsewhere, rates["ours"] / elsewhere
    names = dict.fromkeys(name for entry in rounds for name in entry.get("reached", {}))
    reached = {n: statistics.median(e["reached"][n] for e in rounds if n in e.get("reached", {})) for n in names}
    return {"output_tokens_per_s": rates, "ratios": ratios, "reached": reached}


# Markdown


def markdown(data: dict[str, Any]) -> str:
    """All sections that are there, as tables."""
    shown: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("machine", _machine),
        ("workloads", _throughput),
        ("workloads", _latency),
        ("memory", _memory),
        ("startup", _startup),
        ("sweep", _sweep),
        ("load", _load),
    ]
    return "\n\n".join(show(data) for name, show in shown if data.get(name))


def table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _machine(data: dict[str, Any]) -> str:
    machine, options = data["machine"], data.get("options", {})
    rounds = [entry["machine"] for w in data.get("workloads", {}).values() for entry in w["rounds"]]
    measured = [machine["measured"], *rounds] if "measured" in machine else rounds
    text = f"{options.get('model')}, {options.get('dtype')}, on {where(machine)}"
    for name, unit in UNITS.items():
        found = [entry[name] for entry in measured if name in entry]
        if found:
            digits = 1 if "GB/s" in unit else 3
            text += f"; {min(found):.{digits}f} to {max(found):.{digits}f} {unit}"
    if not machine["bf16_hardware"] and "card" not in machine:
        text += "; no bf16 arithmetic in hardware, torch.matmul emulates it"
    return text + "."


def where(machine: dict[str, Any]) -> str:
    """What it ran on."""
    if "card" in machine:
        return f"{machine['card']} ({machine['card_gib']} GiB), torch {machine['torch']}"
    return f"{machine['cpu']}, {machine['threads']} threads"


def _peers(data: dict[str, Any]) -> list[str]:
    found = [peer for workload in data["workloads"].values() for peer in workload["summary"]["ratios"]]
    return [peer for peer in dict.fromkeys(found) if peer != "stock"]


def _throughput(data: dict[str, Any]) -> str:
    others, rows = _peers(data), []
    for name, workload in data["workloads"].items():
        rates, ratios, reached = (workload["summary"][k] for k in ("output_tokens_per_s", "ratios", "reached"))
        batch = next((f" ({e['stock']['batch_size']})" for e in workload["rounds"] if "stock" in e), "")
        if "stock" in rates and name in STOCK_RUNS:
            batch = f" (on {STOCK_RUNS[name]})"
        row = [name, _number(rates.get("ours")), _number(rates.get("stock")) + batch, _number(ratios.get("stock"), 2)]
        for peer in others:
            row += [_number(rates.get(peer)), _number(ratios.get(peer), 2)]
        total = median_of(workload["rounds"], "ours", "total_tokens_per_s")
        row.append(_number(total, 0))
        row.append(", ".join(f"{share:.0%} of {n.replace('_', ' ')}" for n, share in reached.items()) or "–")
        rows.append([*row, str(len([e for e in workload["rounds"] if "ours" in e]))])
    header = ["workload, output tok/s", "ours", "stock (batch)", "ratio"]
    for peer in others:
        header += [peer, f"ratio to {peer}"]
    return table([*header, "ours, total tok/s", "reached", "rounds"], rows)


def _latency(data: dict[str, Any]) -> str:
    rows = []
    for name, workload in data["workloads"].items():
        for engine in workload["summary"]["output_tokens_per_s"]:
            found = {
                n: median_of(workload["rounds"], engine, n) for n in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
            }
            if any(value is not None for value in found.values()):
                rows.append([name, engine, *_latencies(found)])
    return table(["workload", "engine", "TTFT p50 / p99 s", "ITL p50 / p99 ms"], rows)


def _latencies(found: dict[str, Any]) -> Row:
    return [
        f"{found['ttft_p50']:.2f} / {found['ttft_p99']:.2f}",
        f"{1e3 * found['itl_p50']:.1f} / {1e3 * found['itl_p99']:.1f}",
    ]


def _memory(data: dict[str, Any]) -> str:
    rows = []
    for engine, workloads in data["memory"].items():
        for name, found in workloads.items():
            keys = ("imports_mb", "loaded_mb", "peak_rss_mb", "weights_mb", "limit_mb")
            row = [engine, name] + [_number(found.get(key), 0) for key in keys]
            kept = "limit_mb" in found and found["peak_rss_mb"] <= found["limit_mb"]
            rows.append([*row, ("yes" if kept else "no") if "limit_mb" in found else "–"])
    header = ["engine", "workload", "RSS MB, imported", "loaded", "peak", "weights MB"]
    return table([*header, "weights × 1.25 + cache budget + 500 MB", "within"], rows)


def _startup(data: dict[str, Any]) -> str:
    names = {
        "imported_s": "process start to imported",
        "loaded_s": "from_pretrained",
        "first_token_s": "from_pretrained to first token, kernels cached",
        "native_build_s": "native build, once",
    }
    return table(["start-up", "s"], [[text, _number(data["startup"].get(name))] for name, text in names.items()])


def _sweep(data: dict[str, Any]) -> str:
    rows = []
    for size, rounds in data["sweep"].items():
        found = summary(rounds)
        rates, ratios = found["output_tokens_per_s"], found["ratios"]
        rows.append([size, _number(rates.get("ours")), _number(rates.get("stock")), _number(ratios.get("stock"), 2)])
    return table(["batch size, output tok/s", "ours", "stock", "ratio"], rows)


def _load(data: dict[str, Any]) -> str:
    rows = []
    for found in data["load"]:
        row = [f"{found['rate']:g}", str(found["max_batch_tokens"]), f"{found['num_requests']} ({found['num_long']})"]
        long = _number(found["long_ttft_p50"], 2)
        rows.append([*row, _number(found["output_tokens_per_s"]), *_latencies(found), long])
    header = ["arrivals/s", "max_batch_tokens", "requests (long)", "output tok/s", "TTFT p50 / p99 s"]
    return table([*header, "ITL p50 / p99 ms", "long prompts' TTFT p50 s"], rows)
