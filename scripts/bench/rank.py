"""One rank process: measures the floor and the protocol of every cell, in step with the others."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from typing import Any

from torch.distributed import TCPStore

from kvcached_dist import _native
from kvcached_dist.coord.links.store import connect_store

from .floor import BareDriver, Floor
from .meeting import Meeting
from .plan import Cell, Options, cell_of, model_of
from .protocol import Protocol
from .seams import Profile


def make_device(options: Options, ranks: int, rank: int = 0) -> _native.Device:
    """This rank's device: its card, or its share of host memory."""
    if options.backend == "cuda":
        return _native.CudaDevice(rank % options.cards)
    return _native.HostDevice(options.memory_bytes // ranks)


def run(options: Options, ranks: int, rank: int, port: int, barrier: Any, results: Any) -> None:
    """Entry of a rank process; every result, or the error, goes into ``results``."""
    logging.basicConfig(level=logging.ERROR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet = Meeting(barrier)
    try:
        store = connect_store("127.0.0.1", port, False, ranks, 60) if ranks > 1 else None
        device = make_device(options, ranks, rank)
        bare = BareDriver(options.bare, rank % options.cards) if options.bare else None
        for layers in options.layers:
            for length in options.lengths(layers):
                cell = cell_of(options, ranks, layers, length)
                if cell.repeats:
                    results.put((rank, _measure(options, cell, rank, device, store, bare, meet)))
                elif rank == 0:
                    results.put((rank, {"cell": vars_of(cell), "skipped": "does not fit into the memory"}))
        results.put((rank, None))
    except BaseException:
        results.put((rank, {"error": traceback.format_exc()}))
        with contextlib.suppress(Exception):
            barrier.abort()


def vars_of(cell: Cell) -> dict[str, Any]:
    return {
        "ranks": cell.ranks, "layers": cell.layers, "run_pages": cell.run, "page_bytes": cell.page_bytes,
        "useful_bytes": cell.useful_bytes, "repeats": cell.repeats, "sustained_runs": cell.sustained,
    }  # fmt: skip


def _measure(
    options: Options,
    cell: Cell,
    rank: int,
    device: _native.Device,
    store: TCPStore | None,
    bare: BareDriver | None,
    meet: Meeting,
) -> dict[str, Any]:
    stage = model_of(cell.layers, cell.pages + 1).stage(0, 1)
    measured: dict[str, Any] = {"cell": vars_of(cell)}
    floor = Floor(device, stage, meet)
    try:
        measured["floor"] = floor.measure(cell)
        if options.profile:
            measured["lock_step"] = floor.lock_step(cell)
        sizes = [size for _, _, size in floor.ranges(cell.run)]
        measured["extent_bytes"] = sizes
        if bare is not None:
            measured["bare"] = bare.measure(sizes, cell.repeats, meet)
    finally:
        floor.close()
    if not options.protocol:
        return measured
    meet()
    protocol = Protocol(cell, rank, device, stage, store, meet)
    try:
        profile = Profile(protocol.coordinator if options.profile else None)
        measured["ours"] = protocol.measure(profile.mark)
        measured["notes"] = profile.notes()
    finally:
        protocol.close()
    return measured
