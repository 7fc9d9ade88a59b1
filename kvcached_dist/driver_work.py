"""The driver work of one rank: a queue, and the worker thread that does it in order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from .agent_ports import Faults, Worker
from .coord.core.effects import Work, WorkDone, WorkKind

LOOK_WHILE_SCARCE_S = 0.05
"""Seconds between two looks at how much memory is left while it is scarce: a neighbour may give some back."""

_POINT_BEFORE = {
    WorkKind.RESERVE: "reserve",
    WorkKind.MAP: "map",
    WorkKind.UNMAP: "unmap",
    WorkKind.RELEASE: "release",
}
_POINT_AFTER = {WorkKind.RESERVE: "reserved", WorkKind.MAP: "mapped", WorkKind.UNMAP: "unmapped"}


class DriverWork:
    """Work that the core has asked for, done in the order in which it was asked.

    Args:
        worker: performs it.
        faults: points that work passes.
        report: told what came of each; called without the agent's lock.
        look_s: seconds between two looks at how much memory is left, which is a driver call too.
        scarce_bytes: with less than this left, looks are as frequent as :data:`LOOK_WHILE_SCARCE_S`.
        page_bytes: bytes of the smallest page of a domain: less than that is no news.
        richer: told when more is left than the others have last been told, by an eighth and by a page; called without
            the lock.

    Threads: :meth:`put` under the agent's lock; the rest without it.
    """

    def __init__(
        self,
        worker: Worker,
        faults: Faults,
        report: Callable[[WorkDone], None],
        look_s: float,
        scarce_bytes: int,
        page_bytes: int,
        richer: Callable[[], None],
    ) -> None:
        self.queue: deque[Work] = deque()
        self._worker = worker
        self._faults = faults
        self._report = report
        self._look_s = look_s
        self._scarce_bytes = scarce_bytes
        self._page_bytes = page_bytes
        self._richer = richer
        self._told = 0
        """Bytes left, as the others have last been told."""
        self._budget = (0, 0)
        """Budget in bytes as the driver last told it, and what was held then."""
        self._ready = threading.Event()
        self._turn = threading.Lock()
        self._is_ours = False

    def put(self, work: Work) -> None:
        """Queue work. Threads: under the agent's lock."""
        self.queue.append(work)
        if not self._is_ours:
            self._ready.set()

    def do(self) -> None:
        """Do queued work, in order, in the calling thread.

        A foreground grow of a world of one calls this instead of waiting for a hand-over to the worker.

        Threads: any, without the lock. Blocks: for the driver calls queued, and for those another thread is doing.
        """
        with self._turn:
            while self.queue:
                self.perform(self.queue.popleft())

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """The caller does the work itself inside (:meth:`do`); the worker is not woken for it.

        Threads: the scheduler's, without the lock.
        """
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False
            if self.queue:
                self._ready.set()

    def perform(self, work: Work) -> None:
        """One driver work, and the word about it."""
        if point := _POINT_BEFORE.get(work.kind):
            self._faults.at(point)
        cause = self._worker.perform(work)
        handles = self._worker.handles()
        if point := _POINT_AFTER.get(work.kind):
            self._faults.at(point)
        self._report(WorkDone(work.kind, work.txn, cause, handles))

    def measure(self) -> None:
        """Ask the driver how much more this rank could create, for the next beats.

        Threads: never the clock's: while the driver is busy for long, a rank still has to beat.
        """
        with self._turn:  # in a world of one the scheduler creates and releases meanwhile
            self._budget = self._worker.budget_bytes(), self._worker.held_bytes()

    def memory(self) -> tuple[int, int]:
        """Bytes that this rank could still create, and bytes that it holds now, for the others. No driver call."""
        self._told, held = self._memory()
        return self._told, held

    def _memory(self) -> tuple[int, int]:
        budget, held_then = self._budget
        held = self._worker.held_bytes()
        return max(0, budget - (held - held_then)), held

    # ------------------------------------------------------------------ the worker thread

    def loop(self, closing: threading.Event) -> None:
        """Work until ``closing``; what was issued is finished first (rule M2)."""
        next_look = time.monotonic() + self._look_s
        while not closing.is_set():
            self._ready.wait(max(0.0, next_look - time.monotonic()))
            self._ready.clear()
            self.do()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._look()
        self.do()

    def _look(self) -> float:
        """Look how much memory is left; seconds until the next time.

        A rank that had little and has more says so at once: a growth that was refused would otherwise wait for the next
        beat after the next look.
        """
        self.measure()
        left, _ = self._memory()
        if self._told < self._scarce_bytes and left - self._told > max(self._told // 8, self._page_bytes - 1):
            self._richer()
        return min(self._look_s, LOOK_WHILE_SCARCE_S) if left < self._scarce_bytes else self._look_s

    def wake(self) -> None:
        """Let the worker look around, at the end of an agent."""
        self._ready.set()


__all__ = ["DriverWork"]
