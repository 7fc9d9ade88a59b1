"""Five minutes under a light load that never pauses, with peaks in it: memory comes back after each of them.

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
from tests.sglang.matrix import ROWS
from tests.sglang.server import Server
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

BUSY_S = 300.0
CLIENTS = 2
BACK_S = 40.0
"""Longest until a third of a peak is held; a step of the tiny model on a busy machine takes tens of milliseconds."""

PAUSE_S = 5.0
"""Of light load only, between two peaks."""

ROW = replace(next(row for row in ROWS if (row.tp, row.pp, row.page) == (2, 1, 1)), radix=False)


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    started = ROW.served().start(folder, {**elastic(), "KVCACHED_DIST_RUN_PAGES_MAX": "4"})
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


def peak(server: Server, pool: ThreadPoolExecutor) -> int:
    """Five long prompts at once; most tokens that were published meanwhile."""
    answers = [pool.submit(server.generate, cases.PROMPT[k * 40 : k * 40 + 500], 60) for k in range(5)]
    top = published(server)
    while not all(answer.done() for answer in answers):
        top = max(top, published(server))
        time.sleep(0.1)
    assert [len(answer.result()) for answer in answers] == [60] * 5
    return top


def test_every_peak_comes_back_although_nobody_pauses(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    until = time.monotonic() + BUSY_S
    tops: list[int] = []
    took_s: list[float] = []
    with ThreadPoolExecutor(CLIENTS + 5) as pool:
        # The light load runs before, during and after the peaks, so that there is no idle moment in which to give back.
        running = [pool.submit(client, server, seed, until) for seed in range(CLIENTS)]
        while time.monotonic() < until - BACK_S:
            tops.append(peak(server, pool))
            begin = time.monotonic()
            while published(server) > tops[-1] // 3:
                assert time.monotonic() - begin < BACK_S, (tops, took_s, server.states()[0]["counters"])
                time.sleep(0.1)
            took_s.append(time.monotonic() - begin)
            time.sleep(PAUSE_S)
        answered = sum(answer.result() for answer in running)
    assert len(tops) >= 5
    assert server.counter("reclaimed_runs") >= len(tops)
    assert answered > 5 * CLIENTS
    assert [state["failure"] for state in server.states()] == [None, None]
    record_property("peaks", len(tops))
    record_property("published_tokens_at_the_smallest_peak", min(tops))
    record_property("longest_until_a_third_of_it_s", round(max(took_s), 1))
    record_property("requests_while_busy", answered)
    record_property("grows", server.grows())
    record_property("refused", server.counter("refused"))
    record_property("reclaimed_runs", server.counter("reclaimed_runs"))
