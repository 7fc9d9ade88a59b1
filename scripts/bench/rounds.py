"""How alloc and free without growth are timed: the same way whoever is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

BLOCKS = 4096
COUNTS = (1, 16, 256)
HELD = 512
"""Blocks in use beside the measured ones, as in a running engine."""
ROUNDS = 400


def nothing() -> None:
    """Ids on the host: nothing to wait for between batches."""


def alloc_and_free(
    alloc: Callable[[int], Any], free: Callable[[Any], Any], count: int, settle: Callable[[], Any] = nothing
) -> dict[str, Any]:
    """Time alloc and free apart: a batch of allocs, then a batch of frees, again and again.

    Args:
        alloc: takes a number of blocks, returns ids, or ``None`` for a miss.
        free: takes what ``alloc`` returned.
        count: blocks per call.
        settle: waits for work that the calls left behind on a device; not timed.

    Returns:
        Nanoseconds per call of each kind, over rounds.

    Raises:
        RuntimeError: an alloc was a miss, so this would not be alloc without growth.
    """
    loops = max(1, min(64, (BLOCKS - HELD) // (2 * count)))
    alloc_ns: list[float] = []
    free_ns: list[float] = []
    for _ in range(ROUNDS):
        held: list[Any] = []
        settle()
        began = time.perf_counter_ns()
        for _ in range(loops):
            held.append(alloc(count))
        middle = time.perf_counter_ns()
        if any(ids is None for ids in held):
            raise RuntimeError(f"an alloc of {count} blocks was a miss")
        settle()
        freeing = time.perf_counter_ns()
        for ids in held:
            free(ids)
        ended = time.perf_counter_ns()
        alloc_ns.append((middle - began) / loops)
        free_ns.append((ended - freeing) / loops)
    return {"alloc": _summary(alloc_ns), "free": _summary(free_ns)}


def _summary(values: list[float]) -> dict[str, float]:
    values.sort()
    return {
        "best_ns": round(values[0], 1),
        "p50_ns": round(values[len(values) // 2], 1),
        "p99_ns": round(values[int(len(values) * 0.99)], 1),
    }
