"""Five minutes under a light load that never pauses, after a peak: memory comes back all the same.

The engine's list is first-in-first-out: what is free after the peak is scattered over all runs, and the light load
walks through it. Without the sorting of the list no run would ever be free as a whole.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang import cases
from tests.sglang.matrix import ELASTIC, ROWS
from tests.sglang.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

BUSY_S = 300.0
CLIENTS = 2
ROW = replace(next(row for row in ROWS if (row.tp, row.pp, row.page) == (2, 1, 1)), radix=False)


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    started = ROW.served().start(folder, {**ELASTIC, "KVCACHED_DIST_RUN_PAGES_MAX": "4"})
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def published(server: Server) -> int:
    return int(server.states()[0]["domains"]["full"]["published"])


def client(server: Server, seed: int, until: float) -> int:
    """Short requests, one after the other without a pause; how many."""
    choose, answered = random.Random(seed), 0
    while time.monotonic() < until:
        start, tokens = choose.randrange(800), choose.randrange(2, 20)
        assert len(server.generate(cases.PROMPT[start : start + choose.randrange(5, 60)], tokens)) == tokens
        answered += 1
    return answered


def test_a_peak_comes_back_in_five_minutes_without_a_pause(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    until = time.monotonic() + BUSY_S
    with ThreadPoolExecutor(CLIENTS + 5) as pool:
        # The light load runs before, during and after the peak, so that there is no idle moment in which to give back.
        running = [pool.submit(client, server, seed, until) for seed in range(CLIENTS)]
        peaks = [pool.submit(server.generate, cases.PROMPT[k * 40 : k * 40 + 500], 60) for k in range(5)]
        top = published(server)
        while not all(peak.done() for peak in peaks):
            top = max(top, published(server))
            time.sleep(0.1)
        mapped, reclaimed = server.mapped_bytes(), server.counter("reclaimed_runs")
        came_back: float | None = None
        begin = time.monotonic()
        while not all(answer.done() for answer in running):
            if came_back is None and published(server) <= top // 3:
                came_back = time.monotonic() - begin
            time.sleep(0.25)
        answered = sum(answer.result() for answer in running)
        busy = server.counter("reclaimed_runs") - reclaimed
    assert came_back is not None, (top, published(server), server.states()[0]["counters"])
    assert busy >= 3
    assert answered > 5 * CLIENTS
    assert [state["failure"] for state in server.states()] == [None, None]
    record_property("published_tokens_top", top)
    record_property("a_third_of_it_after_s", round(came_back, 1))
    record_property("mapped_bytes_peak_and_after", [mapped, server.mapped_bytes()])
    record_property("requests_while_busy", answered)
    record_property("grows", server.grows())
    record_property("refused", server.counter("refused"))
    record_property("reclaimed_runs", server.counter("reclaimed_runs"))
