#!/usr/bin/env python3
"""What a step of an engine with a stream of its own costs rank 0 when there is nothing to say: the decision.

    .venv/bin/python scripts/bench_decision.py [--calls 20000]

One rank, one domain, host memory, a free list as SGLang keeps it; demand is what is published and free, so nothing
grows. Microseconds per call of ``StreamCoordinator.decide``.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import torch

from kvcached_dist import World, _native
from kvcached_dist.config import Config
from kvcached_dist.pools.specs import DomainSpec, FillPiece, ModelSpec, PoolSpec
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.stream import EngineList, StreamCoordinator

PER_PAGE, PAGES, WANTED = 64, 1000, 130
SETTLE_S = 5.0


def start() -> StreamCoordinator:
    """A coordinator whose engine has built an empty free list."""
    pool = PoolSpec("kv", "full", 128, (0,), (128,), fill_row_bytes=128, fill=(FillPiece(0, 128),))
    model = ModelSpec("decision", 1, (DomainSpec("full", PAGES * PER_PAGE, 1, PER_PAGE),), (pool,))
    made: list[TokenList] = []

    def lists(blocks: object, per_page: object) -> list[EngineList]:
        made.append(TokenList("full", PAGES * PER_PAGE, PER_PAGE, PAGES * PER_PAGE - 1))
        return [*made]

    coordinator = StreamCoordinator.start(
        world=World(), stage=model.stage(0, 1), device=_native.HostDevice(1 << 30, 4096),
        config=Config.preset("engine"), make_lists=lists,
    )  # fmt: skip
    empty = torch.arange(0)
    made[0].bind(SimpleNamespace(free_pages=empty, release_pages=empty, need_sort=False))
    return coordinator


def main() -> None:
    """Settle, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20000)
    calls = parser.parse_args().calls
    with start() as coordinator:

        def step() -> float:
            begin = time.perf_counter()
            frames = coordinator.decide({"full": WANTED}, idle=False)
            taken = time.perf_counter() - begin
            if frames:
                coordinator.apply(frames)
            return taken

        settled = time.monotonic() + SETTLE_S
        while time.monotonic() < settled:
            step()
            time.sleep(0.001)
        taken = sorted(step() for _ in range(calls))
    shown = ", ".join(f"p{share} {1e6 * taken[min(calls - 1, calls * share // 100)]:.1f}" for share in (50, 90, 99))
    print(f"{calls} decisions, microseconds: {shown}")


if __name__ == "__main__":
    main()
