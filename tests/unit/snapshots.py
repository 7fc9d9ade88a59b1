"""Snapshots for tests: states with known sums, and rank processes that hold a file until they are signalled."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcached_dist.processes import start_ticks

PAGE = 149_760


def state(mapped_pages: int = 3, **changes: Any) -> dict[str, Any]:
    """One rank with ``mapped_pages`` pages mapped in SWA and one in C4."""
    return {
        "tp": 2,
        "pp": 2,
        "epoch": 1,
        "step": 17,
        "failure": None,
        "pools": {
            "swa_kv": pool("swa", mapped_pages * PAGE, limit_bytes=100 * PAGE),
            "c4_kv": pool("full", PAGE, reserved_bytes=4096, retained_bytes=512),
        },
        "domains": {
            "full": {
                "blocks": 1000, "blocks_per_page": 4, "published": 40, "free": 12, "growable": 800,
                "health": "degraded", "first_cause": "rank 1: driver (map of c4_kv)",
            }
        },
        "counters": {
            "grow_foreground": 2, "grow_background": 5, "grow_aborted": 1, "refused": 1, "reclaimed_runs": 3,
            "misses": 3, "queries": 0,
        },
        "device": {"card_id": "0000:3b:00.0", "total": 8 << 30, "free": 5 << 30},
        "runtime_pools": {},
        "log": ["event=started"],
        **changes,
    }  # fmt: skip


def pool(domain: str, mapped_bytes: int, **changes: int) -> dict[str, Any]:
    """One pool with much virtual and little physical memory."""
    zero = dict.fromkeys(("reserved_bytes", "retained_bytes", "limit_bytes"), 0)
    return {
        "domain": domain, "virtual_bytes": 1000 * PAGE, "mapped_bytes": mapped_bytes, "static_bytes": 500 * PAGE,
        **zero, **changes,
    }  # fmt: skip


FLEET = """
import json, os, signal, sys
from kvcached_dist.admission import AdmissionTurn
from kvcached_dist.snapshot import SnapshotWriter
state_dir, lock_dir, state, *ranks = sys.argv[1:]
for each in ranks:
    name, rank = each.rsplit(":", 1)
    ready, written = os.pipe()
    if os.fork() == 0:
        turn = AdmissionTurn(lock_dir, "G0")
        writer = SnapshotWriter.open(state_dir, name, int(rank))
        writer.publish(json.loads(state))
        with turn.take(10):
            pass
        os.write(written, b"r")
        while True:
            signal.pause()
    os.read(ready, 1)
print("ready", flush=True)
sys.stdin.read()
statuses = []
try:
    while True:
        statuses.append(os.waitstatus_to_exitcode(os.wait()[1]))
except ChildProcessError:
    print(json.dumps(statuses), flush=True)
"""


@contextmanager
def fleet(state_dir: str, lock_dir: str, ranks: Sequence[str], content: str = "{}") -> Iterator[list[int]]:
    """Rank processes ``name:rank`` that have published and wait to be signalled.

    Yields their pids. Behind the ``with`` all of them are gone, and those that still ran were killed.
    """
    command = [sys.executable, "-c", FLEET, state_dir, lock_dir, content, *ranks]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids: list[int] = []
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        with open(f"/proc/{parent.pid}/task/{parent.pid}/children", encoding="ascii") as children:
            pids = [int(pid) for pid in children.read().split()]
        assert len(pids) == len(ranks)
        yield pids
    finally:
        for pid in pids:
            _kill(pid)
        parent.communicate()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for_end(pids: Sequence[int]) -> None:
    """Waits until every process has given back its memory and locks; a zombie has."""
    for pid in pids:
        fd = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(30_000), f"process {pid} still runs"
        finally:
            os.close(fd)
        assert start_ticks(pid) is None
