"""Virtual time: one queue of events, in microseconds. Hosts that are stopped get theirs when they run again."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Protocol

from kvcached_dist.coord.core.types import Tick

MS = 1_000
"""Microseconds of a millisecond."""

SECOND = 1_000 * MS

TRACE_MAX = 4_000
"""Lines kept for the report of a failing schedule."""

_STAMP = Struct("<qiqq")


class Subject(Protocol):
    """Something that events happen to."""

    rank: int
    dead: bool
    stopped_until: int


Event = tuple[int, int, "Subject | None", Callable[..., None], tuple[object, ...]]


class Loop:
    """The queue of events and the trace of what happened.

    Attributes:
        now: virtual time.
        events: events dispatched so far.
        digest: changes with every event and every line of the trace; equal for equal schedules.
    """

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.digest = 0
        self.trace: deque[tuple[int, int, str, object]] = deque(maxlen=TRACE_MAX)
        self._heap: list[Event] = []
        self._pushed = 0

    def at(self, when: int, subject: Subject | None, call: Callable[..., None], *arguments: object) -> None:
        """Call later. Events of one instant happen in the order in which they were asked for."""
        self._pushed += 1
        heapq.heappush(self._heap, (max(when, self.now), self._pushed, subject, call, arguments))

    def after(self, delay: int, subject: Subject | None, call: Callable[..., None], *arguments: object) -> None:
        """Call after ``delay``."""
        self.at(self.now + delay, subject, call, *arguments)

    def note(self, rank: int, what: str, detail: object, number: int = 0) -> None:
        """Add a line to the trace; ``number`` distinguishes lines of one kind in the digest."""
        self.trace.append((self.now, rank, what, detail))
        self.digest = zlib.crc32(_STAMP.pack(self.now, rank, zlib.crc32(what.encode()), number), self.digest)

    @property
    def pending(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._heap)

    def step(self) -> bool:
        """Dispatch the next event; ``False`` when there is none."""
        while self._heap:
            when, order, subject, call, arguments = heapq.heappop(self._heap)
            if subject is not None:
                if subject.dead:
                    continue
                if subject.stopped_until > when:
                    heapq.heappush(self._heap, (subject.stopped_until, order, subject, call, arguments))
                    continue
            self.now = when
            self.events += 1
            call(*arguments)
            return True
        return False

    def lines(self, last: int) -> list[str]:
        """The end of the trace, for people."""
        return [
            f"{when / MS:9.3f} ms  {'world' if rank < 0 else f'rank {rank}':7} {what:10} {detail}"
            for when, rank, what, detail in list(self.trace)[-last:]
        ]


class WorldClock:
    """What the agents under test take for the clock: virtual time, shifted per rank (R48)."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.offset = 0

    def __call__(self) -> Tick:
        return Tick(self.loop.now + self.offset)
