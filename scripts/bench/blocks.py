"""Alloc and free without growth, beside a list that is sliced from a tensor and beside other block managers."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from kvcached_dist import Config, Coordinator, World, _native

from . import bounded, peer
from .plan import DOMAIN, model_of
from .rounds import BLOCKS, COUNTS, HELD, alloc_and_free

ENGINE_SECONDS = 60.0
"""For one device; most of it is the import of the engine."""


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
                    "ours": alloc_and_free(domain.alloc, domain.free, count),
                    "sliced": alloc_and_free(sliced.alloc, sliced.free, count),
                    "pool": alloc_and_free(domain.pool.alloc, domain.pool.free, count),
                }
            )
        gc.enable()
    return rows


def beside(backend: str) -> dict[str, dict[str, Any]]:
    """The same calls of other block managers, each in a process of its own.

    Args:
        backend: ``host``: only what needs no card is measured.

    Returns:
        Name -> ``rows`` (blocks, alloc, free), or ``skipped`` with the reason.
    """
    found: dict[str, dict[str, Any]] = {}
    on_card = backend == "cuda"
    found["kvcached KVCacheManager"] = peer.blocks() if on_card else {"skipped": "it needs a card: --backend cuda"}
    for device in ("cpu", "cuda:0") if on_card else ("cpu",):
        engine = bounded.figures("engine_child", ["--device", device], ENGINE_SECONDS, bounded.environment())
        if "skipped" in engine:
            found[f"SGLang allocators, {device}"] = engine
        for name, rows in engine.get("allocators", {}).items():
            found[f"SGLang {name}, {device}"] = {"rows": rows}
    return found
