"""The fleet's page of metrics: each replica's, with its name as a label, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

PREFIX, FLEET = "lfm2_cb_", "lfm2_cb_fleet_"


class FrontMetrics:
    """What one front has seen."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        name = "lfm2_cb_front"
        self.refused = Counter(f"{name}_refused", "Requests answered with an error", ["status"], registry=registry)
        self.rerun = Counter(f"{name}_rerun", "Requests run again, their replica being lost", registry=registry)
        self.broken = Counter(f"{name}_broken", "Answers broken off, their replica being lost", registry=registry)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _Pages:
    """Pages as a collector of `prometheus_client`."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        each: dict[str, Metric] = {}
        sums: dict[str, dict[tuple, float]] = {}
        for replica, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                if family.name.endswith("_created"):  # when a counter began: nothing to add up
                    continue
                metric = each.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                total = sums.setdefault(family.name, {})
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
                    key = (sample.name, *sorted(sample.labels.items()))
                    total[key] = total.get(key, 0.0) + sample.value
        for name, metric in each.items():
            yield metric
            fleet = Metric(name.replace(PREFIX, FLEET, 1), f"{metric.documentation} (of all replicas)", metric.type)
            shares = len(self._pages) if name.endswith("_usage") else 1  # a share has a mean, and no sum
            for (sample_name, *labels), value in sums[name].items():
                fleet.add_sample(sample_name.replace(PREFIX, FLEET, 1), dict(labels), value / shares)
            yield fleet


def merge_pages(pages: Mapping[str, str]) -> bytes:
    """One page out of those of replicas, by name: their metrics labelled `replica`, and sums as `lfm2_cb_fleet_…`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))  # type: ignore[arg-type]
    return generate_latest(registry)
