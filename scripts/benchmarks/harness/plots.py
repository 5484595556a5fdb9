"""Pictures of a report: throughput against batch size, latency against load. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import median_of


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
    """A PNG for each section that has one. Returns: their paths, none where there is neither a sweep nor a load."""
    check()
    Path(folder).mkdir(parents=True, exist_ok=True)
    drawn = {"throughput_by_batch": (_throughput, "sweep"), "latency_by_load": (_latency, "load")}
    return [
        draw(data[section], Path(folder, f"{name}.png"))
        for name, (draw, section) in drawn.items()
        if data.get(section)
    ]


def _throughput(sweep: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for engine, label in (("ours", "lfm2_cb"), ("stock", "stock generate()")):
        points = [(int(size), median_of(rounds, engine)) for size, rounds in sweep.items()]
        points = sorted((size, rate) for size, rate in points if rate is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel="requests in the batch", ylabel="output tokens/s", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(size) for size in sweep], list(sweep))
    return _save(figure, axes, path)


def _latency(load: list[dict[str, Any]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for size in dict.fromkeys(found["max_batch_tokens"] for found in load):
        points = sorted((f for f in load if f["max_batch_tokens"] == size), key=lambda found: found["rate"])
        rates = [found["rate"] for found in points]
        for share, style in (("p50", "-"), ("p99", "--")):
            label = f"{share}, max_batch_tokens={size}"
            left.plot(rates, [found[f"ttft_{share}"] for found in points], style, marker="o", label=label)
            right.plot(rates, [1e3 * found[f"itl_{share}"] for found in points], style, marker="o", label=label)
    left.set(xlabel="arrivals/s", ylabel="time to first token, s", ylim=(0, None))
    right.set(xlabel="arrivals/s", ylabel="inter-token latency, ms", ylim=(0, None))
    right.legend()
    return _save(figure, left, path)


def _save(figure: Any, axes: Any, path: Path) -> Path:
    from matplotlib import pyplot

    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
