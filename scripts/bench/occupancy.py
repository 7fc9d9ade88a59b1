"""How much memory comes back when half of the blocks are free, by run length and by what was freed together."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import torch

from kvcached_dist import Config, Coordinator, World, _native

from .plan import DOMAIN, model_of

PAGES = 2048
TOGETHER = (1, 32, 256)
"""Blocks that one request holds: one (the worst case), 8 Ki tokens, 64 Ki tokens."""
SEED = 7
STEPS_MAX = 5000


def measure(device: _native.Device, layers: int, runs: tuple[int, ...]) -> list[dict[str, Any]]:
    """Grow ``PAGES`` in runs of each length, free half of the requests at random, reclaim, compare."""
    return [_one(device, layers, run, together) for run in runs for together in TOGETHER]


def _one(device: _native.Device, layers: int, run: int, together: int) -> dict[str, Any]:
    settings = Config.preset(
        "engine",
        min_reserved_pages=0,
        max_reserved_pages=0,
        run_pages_min=run,
        run_pages_max=run,
        run_share=0,
        growth_deadline_s=20.0,
    )
    stage = model_of(layers, PAGES + 1).stage(0, 1)
    # One layer per pool: the layers of a pool come and go alike, so the share is that of the whole stage.
    stage = replace(stage, pools=tuple(replace(pool, layers=pool.layers[:1]) for pool in stage.pools))
    with Coordinator.start(world=World(0, 1, 1), stage=stage, device=device, config=settings) as coordinator:
        domain = coordinator.domains[DOMAIN]
        null_bytes = sum(coordinator.backing.held_bytes())
        requests: list[Any] = []
        for _ in range(PAGES // run):
            ids = domain.alloc(run)
            if ids is None:
                raise RuntimeError(f"growing {run} pages was a miss: {coordinator.stats}")
            requests.append(ids)
        full_bytes = sum(coordinator.backing.held_bytes()) - null_bytes
        pieces = list(torch.cat(requests).split(together))
        random.Random(SEED).shuffle(pieces)
        for ids in pieces[: len(pieces) // 2]:
            domain.free(ids)
        coordinator.idle(True)
        for _ in range(STEPS_MAX):
            if coordinator.step().settled:
                break
            time.sleep(0.0005)
        left_bytes = sum(coordinator.backing.held_bytes()) - null_bytes
    return {
        "layers": layers, "run_pages": run, "blocks_together": together, "full_bytes": full_bytes,
        "recovered_bytes": full_bytes - left_bytes, "recovered_share": round(1 - left_bytes / full_bytes, 4),
    }  # fmt: skip
