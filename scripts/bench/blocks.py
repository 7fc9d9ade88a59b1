"""Alloc and free without growth, beside a list that is sliced from a tensor."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvcached_dist import Config, Coordinator, World, _native

from .plan import DOMAIN, model_of

BLOCKS = 4096
COUNTS = (1, 16, 256)
HELD = 512
"""Blocks in use beside the measured ones, as in a running engine."""


class SlicedList:
    """The cheapest free list that torch offers: ids are cut off the front of a tensor and appended at its end.

    Engines with paged allocators work this way: two views per alloc, one concatenation per free, no check of the ids.
    """

    def __init__(self, blocks: int) -> None:
        self._free = torch.arange(1, blocks, dtype=torch.int64)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > self._free.numel():
            return None
        taken = self._free[:count]
        self._free = self._free[count:]
        return taken

    def free(self, ids: torch.Tensor) -> None:
        self._free = torch.cat((self._free, ids))


def _alloc_and_free(alloc: Callable[[int], Any], free: Callable[[Any], None], count: int) -> dict[str, Any]:
    """Time alloc and free apart: a batch of allocs, then a batch of frees, again and again."""
    loops = max(1, min(64, (BLOCKS - HELD) // (2 * count)))
    rounds = 400
    alloc_ns: list[float] = []
    free_ns: list[float] = []
    for _ in range(rounds):
        held: list[Any] = []
        began = time.perf_counter_ns()
        for _ in range(loops):
            held.append(alloc(count))
        middle = time.perf_counter_ns()
        for ids in held:
            free(ids)
        ended = time.perf_counter_ns()
        alloc_ns.append((middle - began) / loops)
        free_ns.append((ended - middle) / loops)
    alloc_ns.sort()
    free_ns.sort()

    def of(values: list[float]) -> dict[str, float]:
        return {"best_ns": round(values[0], 1), "p50_ns": round(values[rounds // 2], 1),
                "p99_ns": round(values[int(rounds * 0.99)], 1)}  # fmt: skip

    return {"alloc": of(alloc_ns), "free": of(free_ns)}


def measure() -> list[dict[str, Any]]:
    """Every count, ours and the sliced list, in nanoseconds per operation; a world of one on host memory."""
    device = _native.HostDevice(64 << 30, 4096)
    settings = Config.preset("engine", min_reserved_pages=0, max_reserved_pages=0, run_pages_max=BLOCKS)
    rows: list[dict[str, Any]] = []
    stage = model_of(43, BLOCKS).stage(0, 1)
    # Ids do not depend on the number of layers; the pools are backed for real, so one layer each is enough.
    stage = replace(stage, pools=tuple(replace(pool, layers=pool.layers[:1]) for pool in stage.pools))
    with Coordinator.start(world=World(0, 1, 1), stage=stage, device=device, config=settings) as coordinator:
        domain = coordinator.domains[DOMAIN]
        everything = domain.alloc(BLOCKS - 1)
        assert everything is not None
        domain.free(everything)
        kept = domain.alloc(HELD)
        assert kept is not None
        gc.disable()
        for count in COUNTS:
            sliced = SlicedList(BLOCKS)
            sliced.alloc(HELD)
            rows.append(
                {
                    "blocks": count,
                    "ours": _alloc_and_free(domain.alloc, domain.free, count),
                    "sliced": _alloc_and_free(sliced.alloc, sliced.free, count),
                    "pool": _alloc_and_free(domain.pool.alloc, domain.pool.free, count),
                }
            )
        gc.enable()
    return rows
