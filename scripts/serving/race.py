"""The same load on two servers of one machine at the same time.

What disturbs a virtual machine disturbs both alike, so the ratio of what they did in the same seconds says more than
that of two loads one after the other. Each server has half of the processors, and its client runs there too; halves are
swapped from round to round. The card is shared: both take longer than alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import load
from .load import Answer, Request
from .server import Server

START_AFTER_S = 0.3
"""Until both clients are ready."""


def halves(swapped: bool) -> list[list[int]]:
    """The processors that this process may use, in two halves."""
    cpus = sorted(os.sched_getaffinity(0))
    parts = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    return parts[::-1] if swapped else parts


def run(
    servers: Mapping[str, Server], requests: Sequence[Request], parallel: int, swapped: bool
) -> dict[str, dict[str, Any]]:
    """One load on each server at once, then a flush of each.

    Args:
        servers: two of them, by kind.
        requests: what each of them is asked.
        parallel: requests in flight at each of them.
        swapped: which half of the processors belongs to which.

    Returns:
        By kind, what the client saw until the first of the two had answered everything, and the leader's counters.
    """
    begin = time.time() + START_AFTER_S
    before = {kind: server.counters() for kind, server in servers.items()}
    # Not forked: this process may have threads.
    with ProcessPoolExecutor(len(servers), multiprocessing.get_context("spawn")) as clients:
        asked = {}
        for (kind, server), cpus in zip(servers.items(), halves(swapped), strict=True):
            server.pin(cpus)
            asked[kind] = clients.submit(_client, server.port, list(requests), parallel, cpus, begin)
        answers = {kind: future.result() for kind, future in asked.items()}
    ended = min(max((answer.chunks[-1] for answer in of if answer.chunks), default=0.0) for of in answers.values())
    found = {}
    for kind, of_kind in answers.items():
        servers[kind].flush()
        after = servers[kind].counters()
        found[kind] = {
            "client": load.summary_until(of_kind, ended),
            "errors": [answer.error for answer in of_kind if answer.error][:5],
            "counters": {name: after[name] - before[kind].get(name, 0) for name in after},
        }
    return found


def _client(port: int, requests: list[Request], parallel: int, cpus: list[int], begin: float) -> list[Answer]:
    os.sched_setaffinity(0, cpus)
    time.sleep(max(0.0, begin - time.time()))
    return load.play(port, requests, parallel)
