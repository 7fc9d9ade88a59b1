"""Small geometries and a forked child, for the tests of this folder."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvcached_dist._native import Backing, HostDevice, PoolGeometry

GRANULE = 4096


def pool(
    *,
    pages: int = 8,
    page_bytes: int = GRANULE,
    lanes: int = 1,
    domain: int = 0,
    fill: list[tuple[int, int, int]] | None = None,
    fill_row_bytes: int = 0,
) -> PoolGeometry:
    """A pool of equal lanes, one directly behind the other."""
    return PoolGeometry(
        name=f"{lanes}x{page_bytes}",
        domain=domain,
        pages=pages,
        reservation_bytes=lanes * pages * page_bytes,
        lanes=[(lane * pages * page_bytes, page_bytes) for lane in range(lanes)],
        fill=fill or [],
        fill_row_bytes=fill_row_bytes,
    )


def host(*pools: PoolGeometry, granules: int = 4096) -> tuple[HostDevice, Backing]:
    """A card of some granules, and a backing of these pools on it."""
    device = HostDevice(granules * GRANULE, GRANULE)
    return device, Backing(device, pools)


def grow(backing: Backing, txn: int, *runs: tuple[int, int, int]) -> None:
    """Reserves and maps runs, which has to work."""
    for outcome in (backing.reserve(txn, runs), backing.map(runs)):
        assert outcome.ok, outcome


def shrink(backing: Backing, *runs: tuple[int, int, int]) -> None:
    """Unmaps and releases runs, which has to work."""
    for outcome in (backing.unmap(runs), backing.release(runs)):
        assert outcome.ok, outcome


class Child:
    """A forked child that runs ``body`` and then ends with status 0; without core files, reaped in any case."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            status = 1
            try:
                body()
                status = 0
            finally:
                os._exit(status)

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is a zombie, which nobody has reaped yet."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait(self) -> int:
        """The exit status, or minus the number of the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
