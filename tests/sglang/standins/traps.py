"""Disturbances of a running engine, and a record of what its ranks did and when.

Loaded by the engine as a plugin, in force with TRAPS naming a folder. Everything that happens is one line of
``events`` there: time (of the machine's monotonic clock), process, what, numbers. A test switches disturbances on by
files in the folder: ``slow`` makes all ranks slow, ``late`` the last pipeline stage, ``slow_unmap`` the driver of the
followers, by the seconds that stand in the file or by four; ``hold`` makes one follower keep its interpreter for the
seconds that stand in the file, and ``limit`` makes the leader order the limit of memory that stands there.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TRAPS", ""))
LATE_S = 0.03
"""How long the last stage sleeps before each batch."""

SLOW_S = 0.1
"""How long all ranks sleep before each batch."""

SLOW_UNMAP_S = 4.0
"""How much longer a follower takes to unmap."""

_coordinator: Any = None
"""Of this process, once it has applied a mark."""

_revision = 0
"""Of the newest limit."""


def register() -> None:
    """Entry point of the engine's plugin group."""
    if not os.environ.get("TRAPS"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    HookRegistry.register(f"{scheduler}run_batch", _batch, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}process_input_requests", _iteration, HookType.BEFORE)
    # Where the unified cache evicts for whoever asks: its own allocations do not pass the public ``evict``.
    for place in ("radix_cache.RadixCache.evict", "unified_radix_cache.UnifiedRadixCache._evict"):
        HookRegistry.register(f"sglang.srt.mem_cache.{place}", _evicted, HookType.AFTER)
    HookRegistry.register("kvcached_dist.stream.StreamCoordinator.apply", _applying, HookType.AROUND)
    HookRegistry.register("kvcached_dist.physical.PhysicalWorker.perform", _driver_work, HookType.BEFORE)


def note(what: str, *numbers: int, at: float = 0.0) -> None:
    """Append one event, of now or of another time. One write of a short line: those of several processes do not mix."""
    line = f"{at or time.monotonic():.6f} {os.getpid()} {what} {' '.join(map(str, numbers))}\n"
    file = os.open(FOLDER / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _ordered(name: str) -> str | None:
    """What stands in this file of the folder; ``None``: there is none."""
    try:
        return (FOLDER / name).read_text()
    except FileNotFoundError:
        return None


def _batch(scheduler: Any, *_: Any, **__: Any) -> None:
    parallel = scheduler.ps
    if parallel.pp_rank == parallel.pp_size - 1 > 0 and (FOLDER / "late").exists():
        time.sleep(LATE_S)
    if (FOLDER / "slow").exists():
        time.sleep(SLOW_S)
    note("batch", parallel.pp_rank, parallel.tp_rank)


def _iteration(scheduler: Any, *_: Any) -> None:
    global _revision
    if scheduler.ps.pp_rank == scheduler.ps.tp_rank == 0 and _coordinator is not None:
        limit = _ordered("limit")
        if limit is not None:
            (FOLDER / "limit").unlink()
            _revision += 1
            _coordinator.set_limit(int(limit), _revision)
    hold = _ordered("hold") if scheduler.ps.tp_rank == scheduler.ps.tp_size - 1 else None
    if hold is None:
        return
    (FOLDER / "hold").unlink()
    seconds = int(hold)
    note("hold", seconds)
    # Called through PyDLL, a function keeps the interpreter: no other thread of this process runs meanwhile.
    ctypes.PyDLL(None).sleep(seconds)
    note("held", seconds)


def _evicted(result: Any, _cache: Any, *_: Any, **__: Any) -> None:
    if result.num_tokens_evicted:
        note("evict", result.num_tokens_evicted)


def _applying(original: Any, coordinator: Any, *arguments: Any, **options: Any) -> Any:
    global _coordinator
    # An entry is in force somewhere between the two; what others do about it they cannot do before the first.
    begun = time.monotonic()
    entries = original(coordinator, *arguments, **options)
    _coordinator = coordinator
    for entry in entries:
        note(type(entry).__name__, coordinator.world.rank, getattr(entry, "txn", 0), at=begun)
    return entries


def _driver_work(_worker: Any, work: Any) -> None:
    note(work.kind.name, work.txn)
    follows = _coordinator is not None and not _coordinator.leads
    slow = _ordered("slow_unmap") if work.kind.name == "UNMAP" and follows else None
    if slow is not None:
        time.sleep(float(slow or SLOW_UNMAP_S))
