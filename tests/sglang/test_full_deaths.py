"""A rank that dies, or hangs beyond its lease, ends all others soon, and the log says which one was first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.sglang.cases import PROMPT
from tests.sglang.models import LLAMA_OPTIONS, write_llama
from tests.sglang.server import Server
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]

LEASE_S = 3

MARGIN_S = 0.3
"""Two cores that all ranks and the test share are late by as much."""


@contextlib.contextmanager
def served(tp: int, pp: int) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    settings = {**elastic(), "KVCACHED_DIST_LEASE_S": str(LEASE_S)}
    started = Server.start(
        write_llama(folder, layers=2), folder, tp=tp, pp=pp, options=LLAMA_OPTIONS, settings=settings
    )
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


def seconds_until_the_others_end(server: Server, rank: int, number: signal.Signals) -> float:
    """From a signal to one rank, in the middle of an answer, until no other rank is left."""

    def ask() -> None:
        with contextlib.suppress(OSError):
            server.generate(PROMPT[:300], 400, timeout_s=30)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask)
        time.sleep(0.5)
        pids = {view.rank: view.owner.pid for view in server.ranks() if view.owner is not None}
        begun = time.monotonic()
        os.kill(pids[rank], number)
        while any(runs(pid) for other, pid in pids.items() if other != rank):
            assert time.monotonic() < begun + 30, server.tail()
            time.sleep(0.01)
        return time.monotonic() - begun


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 0), (2, 1, 1), (1, 2, 0), (1, 2, 1)])
def test_a_killed_rank_ends_the_others_within_a_second(tp: int, pp: int, rank: int) -> None:
    with served(tp, pp) as server:
        assert seconds_until_the_others_end(server, rank, signal.SIGKILL) < 1 + MARGIN_S
        log = server.log.read_text()
    assert f"event=group_failed rank={1 - rank}" in log
    assert f"cause=rank {rank}: rank lost" in log


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hung_rank_ends_the_others_a_second_after_its_lease(rank: int) -> None:
    with served(2, 1) as server:
        taken = seconds_until_the_others_end(server, rank, signal.SIGSTOP)
        log = server.log.read_text()
    assert LEASE_S - 1 < taken < LEASE_S + 1 + MARGIN_S
    assert f"event=group_failed rank={1 - rank}" in log
    assert f"cause=rank {rank}: rank hung (silent for a lease of {LEASE_S} s)" in log
