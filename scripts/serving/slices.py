"""The same load on two servers of one card, which take turns of a second or so.

Whoever's turn it is has the card and the processors for itself; the other one is stopped. What disturbs a virtual
machine lasts for seconds, so both see the same of it, and neither waits for the other. Times are those of a clock that
stands still while the server does. What a server does by the time of day (windows of recent demand, for example) sees
longer steps at the ends of its turns, which the elastic one pays for.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from . import load, measure
from .load import Answer, Request
from .race import START_AFTER_S
from .server import Server


class Turns:
    """When a server ran, and its own clock, which stood still in between. Seconds of the system's clock."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._before: list[float] = []
        """Seconds that it had run when each turn began."""
        self._ran = 0.0

    def took(self, begin: float, end: float) -> None:
        """It ran from then to then, after all turns so far."""
        self._begins.append(begin)
        self._before.append(self._ran)
        self._ran += end - begin

    def at(self, now: float) -> float:
        """What its clock showed then."""
        turn = bisect.bisect_right(self._begins, now) - 1
        if turn < 0:
            return 0.0
        end = self._before[turn + 1] if turn + 1 < len(self._before) else self._ran
        return min(self._before[turn] + now - self._begins[turn], end)

    def seen(self, answer: Answer, begin: float) -> Answer:
        """An answer whose times count from ``begin``, by its clock."""
        chunks = [self.at(begin + at) for at in answer.chunks]
        return Answer(self.at(begin + answer.sent), answer.tokens, chunks, answer.error)


def in_slices(
    clients: ProcessPoolExecutor,
    servers: Mapping[str, Server],
    requests: Sequence[Request],
    parallel: int,
    slice_s: float,
    *,
    swapped: bool,
) -> dict[str, dict[str, Any]]:
    """One load on each of two servers in alternating turns, then a flush of each.

    Args:
        clients: two processes (:func:`serving.race.two_clients`).
        servers: two of them, by kind, running; they run again afterwards.
        requests: what each of them is asked.
        parallel: requests in flight at each of them.
        slice_s: seconds of a turn.
        swapped: the second one begins.

    Returns:
        By kind, what the client saw by the server's clock (``client``), steps, and of elastic servers what the leader
        counted and what became of memory.
    """
    before = {kind: (server.counters(), server.steps(), server.mapped_bytes()) for kind, server in servers.items()}
    turns = {kind: Turns() for kind in servers}
    begin = time.perf_counter() + START_AFTER_S
    asked = {
        kind: clients.submit(load.play, server.port, list(requests), parallel, begin)
        for kind, server in servers.items()
    }
    _take_turns(servers, asked, turns, slice_s, begin, swapped)
    answers = {kind: [turns[kind].seen(answer, begin) for answer in asked[kind].result()] for kind in servers}
    found: dict[str, dict[str, Any]] = {}
    for kind, of_kind in answers.items():
        server, (counters, steps, idle) = servers[kind], before[kind]
        found[kind] = {
            "client": load.summary(of_kind),
            "errors": [answer.error for answer in of_kind if answer.error][:5],
            "steps": server.steps() - steps,
        }
        if server.elastic:
            peak = server.mapped_bytes()
            # The next load begins with empty pools again.
            found[kind]["memory"] = {"idle": idle, "peak": peak, **measure.memory_returns(server, idle, peak)}
            after = server.counters()
            found[kind]["counters"] = {name: after[name] - counters.get(name, 0) for name in after}
        else:
            server.flush()
    return found


def _take_turns(
    servers: Mapping[str, Server],
    asked: Mapping[str, Future[list[Answer]]],
    turns: Mapping[str, Turns],
    slice_s: float,
    begin: float,
    swapped: bool,
) -> None:
    order = list(servers)[::-1] if swapped else list(servers)
    switches = {kind: server.switch() for kind, server in servers.items()}
    try:
        for switch in switches.values():
            switch.stop()
        time.sleep(max(0.0, begin - time.perf_counter()))
        while not all(future.done() for future in asked.values()):
            for kind in order:
                if asked[kind].done():
                    continue
                began = time.perf_counter()
                switches[kind].go_on()
                wait([asked[kind]], slice_s, FIRST_COMPLETED)
                switches[kind].stop()
                turns[kind].took(began, time.perf_counter())
    finally:
        for switch in switches.values():
            switch.go_on()


__all__ = ["Turns", "in_slices"]
