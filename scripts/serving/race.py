"""The same load on two servers of one machine at the same time.

What disturbs a virtual machine disturbs both alike, so the ratio of what they did in the same seconds says more than
that of two loads one after the other. Each server has half of the processors, and its client runs there too; halves are
swapped from round to round. Where the two share a card, both take longer than alone, driver calls wait for its time
slices, and whoever is ahead keeps it; servers on cards of their own only share what disturbs the machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import load
from .load import Answer, Request
from .server import Server

START_AFTER_S = 0.3
"""Until both clients have their requests."""


@contextlib.contextmanager
def two_clients() -> Iterator[ProcessPoolExecutor]:
    """Two processes for clients, ready to begin at once."""
    # Not forked: this process may have threads.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as clients:
        list(clients.map(_ready, range(2)))
        yield clients


def _ready(_: int) -> None:
    """Everything is imported by now; long enough for the other one to be made."""
    time.sleep(START_AFTER_S)


class Race:
    """A client process for each of two servers.

    Args:
        clients: the processes.
    """

    def __init__(self, clients: ProcessPoolExecutor) -> None:
        self._clients = clients

    @classmethod
    @contextlib.contextmanager
    def between(cls) -> Iterator[Race]:
        """Clients for two servers, that live as long as the body."""
        with two_clients() as clients:
            yield cls(clients)

    def run(
        self,
        servers: Mapping[str, Server],
        requests: Sequence[Request],
        parallel: int,
        *,
        swapped: bool,
        from_s: float = 0.0,
    ) -> dict[str, dict[str, Any]]:
        """One load on each server at once, then a flush of each.

        Args:
            servers: two of them, by kind.
            requests: what each of them is asked.
            parallel: requests in flight at each of them.
            swapped: which half of the processors belongs to which.
            from_s: seconds at the beginning that do not belong to the steady state.

        Returns:
            By kind, what the client saw until the first of the two had answered everything (``client``), the same
            without the beginning (``steady``, where there is one to leave out), and what the leader counted.
        """
        before = {kind: server.counters() for kind, server in servers.items()}
        begin = time.time() + START_AFTER_S
        asked = {}
        for (kind, server), cpus in zip(servers.items(), halves(swapped), strict=True):
            server.pin(cpus)
            asked[kind] = self._clients.submit(_client, server.port, list(requests), parallel, cpus, begin)
        answers = {kind: future.result() for kind, future in asked.items()}
        ended = min(max((answer.chunks[-1] for answer in of if answer.chunks), default=0.0) for of in answers.values())
        found = {}
        for kind, of_kind in answers.items():
            servers[kind].flush()
            after = servers[kind].counters()
            found[kind] = {
                "client": load.summary_between(of_kind, 0.0, ended),
                **({"steady": load.summary_between(of_kind, from_s, ended)} if from_s else {}),
                "errors": [answer.error for answer in of_kind if answer.error][:5],
                "counters": {name: after[name] - before[kind].get(name, 0) for name in after},
            }
        return found


def halves(swapped: bool) -> list[list[int]]:
    """The processors that this process may use, in two halves."""
    cpus = sorted(os.sched_getaffinity(0))
    parts = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    return parts[::-1] if swapped else parts


def _client(port: int, requests: list[Request], parallel: int, cpus: list[int], begin: float) -> list[Answer]:
    os.sched_setaffinity(0, cpus)
    time.sleep(max(0.0, begin - time.time()))
    return load.play(port, requests, parallel)
