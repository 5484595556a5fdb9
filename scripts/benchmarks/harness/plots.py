"""Pictures of a report: throughput by workload and by batch size, latency by load. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import median_of

#: engines by their key in a report, as the pictures call them; the others by their own names
ENGINES = {
    "ours": "lfm2_cb",
    "stock": "stock generate()",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "generate_batch": "stock generate_batch(), a Llama",
}
#: models of harness/workloads.py, as the pictures call them
MODELS = {"tiny": "the model that ships", "random-350m": "LFM2-350M (random weights)"}
COLOURS = ("#3b78c3", "#b9c0c9", "#e08a3c", "#7c5cc4", "#2a9d5c")


class PlotsUnavailable(RuntimeError):
    """There is no matplotlib."""


def check() -> None:
    """Raises: PlotsUnavailable: before anything is measured."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailable('--plots needs matplotlib: pip install "lfm2-cb[bench]"') from error
    matplotlib.use("Agg")


def write(data: dict[str, Any], folder: str) -> list[Path]:
    """A PNG for each section that has one. Returns: their paths, none where no section has."""
    check()
    Path(folder).mkdir(parents=True, exist_ok=True)
    drawn = {
        "workloads": (_workloads, "workloads"),
        "throughput_by_batch": (_throughput, "sweep"),
        "latency_by_load": (_latency, "load"),
    }
    return [draw(data, Path(folder, f"{name}.png")) for name, (draw, section) in drawn.items() if data.get(section)]


def _workloads(data: dict[str, Any], path: Path) -> Path:
    """A panel a workload: tokens per second of each engine, in bars from zero."""
    from matplotlib import pyplot

    found = {name: workload["summary"]["output_tokens_per_s"] for name, workload in data["workloads"].items()}
    engines = [name for name in ENGINES if any(name in rates for rates in found.values())]
    engines += [name for rates in found.values() for name in rates if name not in ENGINES]
    engines = list(dict.fromkeys(engine for engine in engines if engine != "uncached"))
    figure, panels = pyplot.subplots(1, len(found), figsize=(1.2 + 1.75 * len(found), 3.4), squeeze=False)
    for axes, (workload, rates) in zip(panels[0], found.items(), strict=True):
        there = [engine for engine in engines if rates.get(engine) is not None]
        colours = [COLOURS[engines.index(engine) % len(COLOURS)] for engine in there]
        bars = axes.bar(range(len(there)), [rates[engine] for engine in there], width=0.75, color=colours)
        axes.bar_label(bars, [f"{rates[engine]:,.0f}" for engine in there], fontsize=9, padding=2)
        axes.set_title(workload, fontsize=11)
        axes.set(xticks=[], yticks=[], xlim=(-0.7, len(engines) - 0.3))
        axes.margins(y=0.15)
        axes.spines[["left", "top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[i % len(COLOURS)]) for i in range(len(engines))]
    labels = [ENGINES.get(engine, engine) for engine in engines]
    figure.legend(handles, labels, loc="lower center", ncols=len(engines), frameon=False)
    figure.suptitle(f"Output tokens per second, {_setting(data)}", fontsize=12)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return _save(figure, path)


def _setting(data: dict[str, Any]) -> str:
    machine, options = data["machine"], data.get("options", {})
    model = f"{MODELS.get(options.get('model'), options.get('model'))} in {options.get('dtype')}"
    if "card" in machine:
        return f"{model}, {machine['card']}"
    cpu = machine["cpu"].replace("(R)", "").replace("(TM)", "")
    return f"{model}, {machine['threads']} threads of {cpu}"


def _throughput(data: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot, ticker

    sweep: dict[str, list[dict[str, Any]]] = data["sweep"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for engine, label in ENGINES.items():
        points = [(int(size), median_of(rounds, engine)) for size, rounds in sweep.items()]
        points = sorted((size, rate) for size, rate in points if rate is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel="requests in the batch", ylabel="output tokens per second", yscale="log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(size) for size in sweep], list(sweep))
    axes.grid(alpha=0.3)
    axes.set_title(f"Throughput by batch size\n{_setting(data)}", fontsize=11)
    axes.legend()
    figure.tight_layout()
    return _save(figure, path)


def _latency(data: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    load: list[dict[str, Any]] = data["load"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for size in dict.fromkeys(found["max_batch_tokens"] for found in load):
        points = sorted((f for f in load if f["max_batch_tokens"] == size), key=lambda found: found["rate"])
        rates = [found["rate"] for found in points]
        for share, style in (("p50", "-"), ("p99", "--")):
            label = f"{share}, max_batch_tokens={size}"
            left.plot(rates, [found[f"ttft_{share}"] for found in points], style, marker="o", label=label)
            right.plot(rates, [1e3 * found[f"itl_{share}"] for found in points], style, marker="o", label=label)
    left.set(xlabel="arrivals per second", ylabel="time to first token, s", ylim=(0, None))
    right.set(xlabel="arrivals per second", ylabel="time between tokens, ms", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"Latency under load, {_setting(data)}", fontsize=11)
    figure.tight_layout()
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
