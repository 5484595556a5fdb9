"""`lfm2-cb plot`: a trace as a picture: requests, steps and cache over time."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .flags import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Event = dict[str, Any]

#: what requests do, bottom to top where they overlap, and in which colour
COLOURS = {"waiting": "#d9d9d9", "preempted": "#d62728", "prefill": "#ff9d2e", "decode": "#3b78c3"}

NO_MATPLOTLIB = "lfm2-cb plot needs matplotlib: pip install 'lfm2-cb[bench]'"


def read_trace(path: str) -> list[Event]:
    """Events of a trace; of one that is still written, or that a killed process left, those that are whole.

    Raises: UsageError: it is none. OSError.
    """
    lines = Path(path).read_text("utf-8").splitlines()
    if not lines or lines[0] != "[":
        raise UsageError(f"{path} is not a trace written by lfm2-cb (--trace FILE)")
    events = []
    for line in lines[1:]:
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            break  # the last line, torn
        if isinstance(event, dict):
            events.append(event)
    if not any(event.get("name") == "step" for event in events):
        raise UsageError(f"{path} has no steps: nothing was run while it was written")
    return events


def plot(path: str, output: str) -> None:
    """Draw a trace into a PNG (or what else matplotlib takes by the name's suffix).

    Above: requests as lines over time, in the order in which they came; below: tokens a step, sequences, the cache.
    Raises: UsageError: no trace, or no matplotlib. OSError.
    """
    events = read_trace(path)
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(NO_MATPLOTLIB) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        4, sharex=True, figsize=(12, 9), height_ratios=(6, 1.4, 1.4, 1.4), layout="constrained"
    )
    spans, steps = _spans(events), [event for event in events if event["name"] == "step"]
    _draw_requests(axes[0], spans)
    _draw_steps(axes[1], steps)
    _draw_counter(axes[2], events, "sequences", ("running", "waiting"), ("#3b78c3", "#bdbdbd"))
    _draw_counter(axes[3], events, "cache blocks", ("in use", "cached"), ("#2a9d5c", "#b7e4c7"))
    axes[-1].set_xlabel("seconds")
    seconds = (steps[-1]["ts"] + steps[-1]["dur"] - steps[0]["ts"]) / 1e6
    tokens = sum(event["args"].get("tokens", 0) for _, event in spans if event["name"] == "decode")
    num_requests = len({tid for tid, _ in spans})
    figure.suptitle(f"{num_requests:,} requests, {len(steps):,} steps, {tokens:,} tokens decoded in {seconds:,.2f} s")
    try:
        figure.savefig(output, dpi=120)
    except ValueError as error:  # a suffix that it does not know
        raise UsageError(f"--output {output}: {str(error).splitlines()[0]}") from error
    finally:
        pyplot.close(figure)


def _spans(events: list[Event]) -> list[tuple[int, Event]]:
    return [(event["tid"], event) for event in events if event.get("ph") == "X" and event["name"] in COLOURS]


def _draw_requests(axis: Axes, spans: list[tuple[int, Event]]) -> None:
    rows = {tid: row for row, tid in enumerate(dict.fromkeys(tid for tid, _ in sorted(spans, key=_arrival)))}
    height = 0.9 if len(rows) <= 100 else 1.0  # lines of many requests touch: gaps of a pixel would come and go
    bars: dict[str, dict[int, list[tuple[float, float]]]] = {name: defaultdict(list) for name in COLOURS}
    for tid, event in spans:
        bars[event["name"]][rows[tid]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    for name, colour in COLOURS.items():
        for row, ranges in bars[name].items():
            axis.broken_barh(ranges, (row - height / 2, height), facecolors=colour, linewidth=0)
        if bars[name]:
            axis.plot([], [], color=colour, linewidth=6, label=name)
    axis.set(ylabel="request", ylim=(len(rows) - 0.5, -0.5))
    _add_legend(axis)


def _arrival(span: tuple[int, Event]) -> tuple[float, int]:
    tid, event = span
    return event["ts"], tid


def _draw_steps(axis: Axes, steps: list[Event]) -> None:
    starts = [event["ts"] / 1e6 for event in steps]
    widths = [event["dur"] / 1e6 for event in steps]
    bottom = [0.0] * len(steps)
    for name, colour in (("decode_tokens", COLOURS["decode"]), ("prefill_tokens", COLOURS["prefill"])):
        heights = [event["args"][name] for event in steps]
        axis.bar(starts, heights, widths, bottom, align="edge", color=colour, linewidth=0)
        bottom = [sum(pair) for pair in zip(bottom, heights, strict=True)]
    axis.set_ylabel("tokens\na step")


def _draw_counter(
    axis: Axes, events: list[Event], name: str, series: tuple[str, ...], colours: tuple[str, ...]
) -> None:
    counters = [event for event in events if event.get("ph") == "C" and event["name"] == name]
    times = [event["ts"] / 1e6 for event in counters]
    values = [[event["args"][key] for event in counters] for key in series]
    axis.stackplot(times, *values, labels=series, colors=colours, step="post")
    axis.set_ylabel(name.replace(" ", "\n"))
    _add_legend(axis)


def _add_legend(axis: Axes) -> None:
    """Above the panel, where it hides nothing."""
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), frameon=False, borderaxespad=0.1)
