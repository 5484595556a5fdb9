"""How many replicas there should be, for Ray Serve's autoscaler, which applies bounds, delays and factors to it."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

#: how full replicas are to be: what is left takes in a burst while others start
TARGET_PRESSURE = 0.7


def wanted_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy: as many replicas as have all queues and caches `TARGET_PRESSURE` full.

    By what replicas report as `pressure` (see `Replica.record_autoscaling_stats`).
    """
    reported = (context.aggregated_metrics or {}).get("pressure", {})
    pressures = [value for name, value in reported.items() if name in set(context.running_replicas)]
    if not pressures:
        return context.target_num_replicas, {}
    mean = sum(pressures) / len(pressures)
    return max(1.0, mean * context.current_num_replicas / TARGET_PRESSURE), {}
