"""In a process of its own: kvcached's map and unmap, and its block manager.

kvcached ends its process where a driver call fails, and reads its settings when it is imported. So every measurement
is a process: ``python -m bench.peer_child growth ...`` and ``... blocks``, started by :mod:`bench.peer`.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch

from .bounded import report
from .peer import PAGE_BYTES, offsets_of
from .rounds import BLOCKS, COUNTS, HELD, alloc_and_free
from .samples import WARM_UP, now_us, summary

PAUSE_S = 0.002
GROUP = 0
BLOCK_TOKENS = 16
CELL_BYTES = 1024
"""A block of 16 tokens is 16 KiB in one layer: 128 blocks a page."""
MANAGER_LAYERS = 1
READY_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("growth", "blocks"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--contiguous", action="store_true")
    parser.add_argument("--pages", default="1,8")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(arguments.device))
        torch.zeros(1, device=arguments.device)  # the context is there before the first call is timed
    if arguments.what == "growth":
        pages = tuple(int(part) for part in arguments.pages.split(","))
        found = growth(arguments.device, arguments.layers, arguments.contiguous, pages, arguments.repeats)
    else:
        found = blocks(arguments.device, arguments.contiguous)
    report(found)


def growth(device: str, layers: int, contiguous: bool, pages: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Microseconds of one map and one unmap call for each number of pages.

    The calls return when the driver has done its work on all layers; nothing is left to wait for.
    """
    from kvcached import vmm_ops

    _create(vmm_ops, device, layers, contiguous, max(pages))
    rows = []
    for count in pages:
        offsets = offsets_of(count, layers, contiguous)
        grow, back = [], []
        for repeat in range(WARM_UP + repeats):
            time.sleep(PAUSE_S)
            began = now_us()
            mapped = vmm_ops.map_to_kv_tensors(offsets, GROUP)
            ended = now_us()
            time.sleep(PAUSE_S)
            unmap_began = now_us()
            unmapped = vmm_ops.unmap_from_kv_tensors(offsets, GROUP)
            unmap_ended = now_us()
            if not (mapped and unmapped):
                raise RuntimeError(f"map returned {mapped}, unmap {unmapped}")
            if repeat >= WARM_UP:
                grow.append(ended - began)
                back.append(unmap_ended - unmap_began)
        rows.append({"pages": count, "map": summary(grow), "unmap": summary(back)})
    return {"rows": rows}


def blocks(device: str, contiguous: bool) -> dict[str, Any]:
    """Nanoseconds of ``KVCacheManager.alloc`` and ``free`` while all pages stay mapped.

    The settings in the environment (see :func:`bench.peer.blocks`) turn its preallocation thread off and let it keep
    every page that becomes free, so neither call reaches the driver's map and unmap.
    """
    from kvcached import vmm_ops
    from kvcached.kv_cache_manager import KVCacheManager

    pages = BLOCKS * BLOCK_TOKENS * CELL_BYTES // PAGE_BYTES
    _create(vmm_ops, device, MANAGER_LAYERS, contiguous, pages)
    manager = KVCacheManager(
        num_blocks=BLOCKS, block_size=BLOCK_TOKENS, cell_size=CELL_BYTES, num_layers=MANAGER_LAYERS,
        world_size=1, async_sched=False, reserve_null_block=True, num_kv_buffers=2, group_id=GROUP,
    )  # fmt: skip
    everything = _when_ready(manager, BLOCKS - 1)
    manager.free(everything)
    kept = manager.alloc(HELD)
    gc.disable()
    rows = [{"blocks": count, **alloc_and_free(manager.alloc, manager.free, count)} for count in COUNTS]
    gc.enable()
    manager.free(kept)
    return {"rows": rows}


def _create(vmm_ops: Any, device: str, layers: int, contiguous: bool, pages: int) -> None:
    vmm_ops.init_kvcached(device, PAGE_BYTES, contiguous)
    # Bytes of K and V of one layer, in both layouts: V begins in the middle and must begin on a page.
    vmm_ops.create_kv_tensors(2 * PAGE_BYTES * pages, 2, device, layers, 2, GROUP)
    if not vmm_ops.kv_tensors_created(GROUP):
        raise RuntimeError("kvcached did not create its tensors")


def _when_ready(manager: Any, count: int) -> list[int]:
    """All blocks at once; the manager sets itself up in a thread."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        ids = manager.alloc(count)
        if ids is not None:
            return list(ids)
        time.sleep(0.05)
    raise RuntimeError(f"KVCacheManager had no {count} blocks within {READY_S:.0f} s: {manager.available_size()} free")


if __name__ == "__main__":
    main()
