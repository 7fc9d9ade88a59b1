"""How much memory comes back when half of the requests have ended, by run length and by what a request holds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch

from kvcached_dist import Config, Coordinator, World, _native
from kvcached_dist.pools.specs import StageSpec

from .plan import DOMAIN, GRANULE_BYTES, NULL_PAGES, model_of

RUNS = (1, 4, 16, 64, 256, 1024, 2048)
"""Run lengths in pages."""
PAGES = 2048
RUNS_MIN = 16
"""With long runs more pages are grown: half of two or four runs is no random half."""
TOGETHER = (1, 32, 256)
"""Blocks that one request holds: one (the worst case), 8 Ki tokens, 64 Ki tokens. And, beside these, a run's size."""
SEED = 7
SETTLE_S = 60.0
PAUSE_S = 0.0005


def measure(device: _native.Device, layers: int, runs: tuple[int, ...]) -> list[dict[str, Any]]:
    """Grow pages in runs of each length, end half of the requests at random, reclaim, compare.

    Args:
        device: where memory comes from.
        layers: which model's pools, one layer of each.
        runs: run lengths in pages.

    Returns:
        A row per run length and size of the requests, or one with ``skipped``, the reason, for a run length.

    Raises:
        RuntimeError: a growth was a miss, or reclaim did not come to an end.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        pages = max(PAGES, RUNS_MIN * run) // run * run
        stage = _stage(layers, pages)
        needed, free = _bytes_needed(stage, pages), device.free_bytes()
        if needed > free:
            text = f"{pages} pages take up to {needed >> 20} MiB, {free >> 20} MiB are free"
            rows.append({"layers": layers, "run_pages": run, "pages": pages, "skipped": text})
            continue
        rows += [_one(device, stage, layers, run, pages, together) for together in (*TOGETHER, None)]
    return rows


def _stage(layers: int, pages: int) -> StageSpec:
    """One layer per pool: the layers of a pool come and go alike, so the share is that of the whole stage."""
    stage = model_of(layers, pages + NULL_PAGES).stage(0, 1)
    return replace(stage, pools=tuple(replace(pool, layers=pool.layers[:1]) for pool in stage.pools))


def _bytes_needed(stage: StageSpec, pages: int) -> int:
    """At most: every lane may begin and end inside a granule, and each domain has its null page."""
    return pages * stage.page_bytes(DOMAIN) + 3 * sum(pool.lanes for pool in stage.pools) * GRANULE_BYTES


def _one(
    device: _native.Device, stage: StageSpec, layers: int, run: int, pages: int, together: int | None
) -> dict[str, Any]:
    settings = Config.preset(
        "engine",
        min_reserved_pages=0,
        max_reserved_pages=0,
        run_pages_min=run,
        run_pages_max=run,
        run_share=0,
        growth_deadline_s=20.0,
    )
    began = time.monotonic()
    with Coordinator.start(world=World(0, 1, 1), stage=stage, device=device, config=settings) as coordinator:
        null_bytes, free_null = sum(coordinator.backing.held_bytes()), device.free_bytes()
        requests = _fill(coordinator, run, pages, together or run)
        full_bytes, free_full = sum(coordinator.backing.held_bytes()) - null_bytes, device.free_bytes()
        random.Random(SEED).shuffle(requests)
        for ids in requests[: len(requests) // 2]:
            coordinator.domains[DOMAIN].free(ids)
        _give_back(coordinator)
        left_bytes, free_left = sum(coordinator.backing.held_bytes()) - null_bytes, device.free_bytes()
    device_full, device_recovered = free_null - free_full, free_left - free_full
    return {
        "layers": layers, "run_pages": run, "pages": pages, "blocks_together": together or run,
        "of_run": together is None, "full_bytes": full_bytes, "recovered_bytes": full_bytes - left_bytes,
        "recovered_share": round(1 - left_bytes / full_bytes, 4), "device_full_bytes": device_full,
        "device_recovered_bytes": device_recovered, "device_share": round(device_recovered / full_bytes, 4),
        "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def _fill(coordinator: Coordinator, run: int, pages: int, together: int) -> list[torch.Tensor]:
    """Grow all pages run by run; their blocks as requests hold them."""
    domain = coordinator.domains[DOMAIN]
    taken: list[torch.Tensor] = []
    for _ in range(pages // run):
        ids = domain.alloc(run)
        if ids is None:
            raise RuntimeError(f"growing {run} pages was a miss: {coordinator.stats}")
        taken.append(ids)
    return list(torch.cat(taken).split(together))


def _give_back(coordinator: Coordinator) -> None:
    """Idle until nothing is left to reclaim, one engine step at a time."""
    deadline = time.monotonic() + SETTLE_S
    coordinator.idle(True)
    while not coordinator.step().settled:
        if time.monotonic() > deadline:
            raise RuntimeError(f"reclaim has not come to an end within {SETTLE_S:.0f} s: {coordinator.stats}")
        time.sleep(PAUSE_S)
