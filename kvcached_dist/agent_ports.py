"""What an agent works with, as it sees it: the physical side, fences of the device, injected faults, time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from .coord.core.effects import Work
from .coord.core.types import Cause, Tick


class Fence(Protocol):
    """A point behind work that was launched on the device."""

    def done(self) -> bool:
        """Whether all of that work has finished. Must not block and must not synchronise the device."""


class Worker(Protocol):
    """The physical side: performs driver work and knows what is held (``kvcached_dist.physical``)."""

    def perform(self, work: Work) -> Cause | None:
        """Do the work in the calling thread; ``None`` on success."""

    def handles(self) -> tuple[int, ...]:
        """Physical handles held now, per pool of the world's list."""

    def held_bytes(self) -> int:
        """Physical bytes held now."""

    def budget_bytes(self) -> int:
        """Bytes this rank could still create above its reserve and below its limit."""

    def set_limit(self, limit_bytes: int) -> None:
        """A logged limit takes effect; 0: none."""


class Faults(Protocol):
    """Step-addressed faults (``kvcached_dist.faults.Injector``)."""

    def at(self, point: str) -> None:
        """This rank passes a point of the protocol."""

    def drops(self, message: str) -> bool:
        """Whether this message is to be lost."""


class NoFaults:
    """Nothing is injected."""

    def at(self, point: str) -> None:
        """Go on."""

    def drops(self, message: str) -> bool:
        """Nothing is lost."""
        return False


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: between beats, and the longest wait for the leader's next mark.

    A silent leader is noticed by its link after one lease. One that beats may rightly be late by as long as it waits
    for a hung rank itself, so a mark is waited for longer than the lease.
    """

    beat_s: float
    mark_wait_s: float


def ticks() -> Tick:
    """Now, in the core's unit (microseconds)."""
    return time.monotonic_ns() // 1000  # type: ignore[return-value]  # Tick(...) is a call, in every step


__all__ = ["Faults", "Fence", "NoFaults", "Timing", "Worker", "ticks"]
