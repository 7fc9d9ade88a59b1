"""Raw figures of one series and their summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

WARM_UP = 2
"""Repetitions before each series that are not counted."""


def now_us() -> float:
    return time.perf_counter_ns() / 1000


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summary(micros: Sequence[float]) -> dict[str, Any]:
    """Figures in microseconds, raw ones included."""
    return {
        "n": len(micros),
        "p50_us": round(percentile(micros, 0.50), 1),
        "p99_us": round(percentile(micros, 0.99), 1),
        "min_us": round(min(micros, default=0.0), 1),
        "raw_us": [round(value, 1) for value in micros],
    }


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per repetition the slowest rank: what a group that waits for everybody cannot undercut."""
    return [max(values) for values in zip(*per_rank, strict=True)]
