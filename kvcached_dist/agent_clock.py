"""The clock thread of one rank: beats, the leader's look at its deadlines, and fences that have not passed yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .agent_ports import Fence
from .coord.core.types import Txn

FENCE_POLL_S = 0.001
"""Longest pause of the clock while a fence has not passed."""

FENCE_FIRST_POLL_S = 0.00005
"""Its first pause; the pauses double. A fence behind work that is nearly done passes within microseconds."""


class Clock:
    """Calls what is due, and sleeps as long as it can: each time it wakes it takes the interpreter from the engine.

    Args:
        beat_s: seconds between beats.
        beat: called once per ``beat_s``.
        tick: called in every round; seconds until the next one is due.
        poll: looks at the fences; whether some have not passed.
    """

    def __init__(
        self, beat_s: float, beat: Callable[[], None], tick: Callable[[], float], poll: Callable[[], bool]
    ) -> None:
        self._beat_s = beat_s
        self._beat = beat
        self._tick = tick
        self._poll = poll
        self._wake = threading.Event()
        self._beat_is_due = False

    def wake(self) -> None:
        """Look around now. Threads: any."""
        self._wake.set()

    def beat_now(self) -> None:
        """There is news that the others should not wait for. Threads: any."""
        self._beat_is_due = True
        self._wake.set()

    def loop(self, closing: threading.Event) -> None:
        """Run until ``closing``."""
        next_beat = 0.0
        pause = FENCE_FIRST_POLL_S / 2
        while not closing.is_set():
            now = time.monotonic()
            if now >= next_beat or self._beat_is_due:
                self._beat_is_due = False
                next_beat = now + self._beat_s
                self._beat()
            idle = min(self._tick(), next_beat - now)
            pause = min(2 * pause, FENCE_POLL_S) if self._poll() else idle
            self._wake.wait(pause)
            self._wake.clear()
            pause = pause if pause < idle else FENCE_FIRST_POLL_S / 2


@dataclass(frozen=True, slots=True)
class Pending:
    """A fence behind the work that was launched before a retirement.

    Attributes:
        txn: the retirement.
        fence: the fence.
        lag_steps: steps that this rank was behind the leader when it took the fence.
    """

    txn: Txn
    fence: Fence
    lag_steps: int


class Fences:
    """Fences that have not passed.

    Args:
        make: records a fence behind launched work; ``None``: work is synchronous.
        lock: the agent's.
        passed: told which fences have passed; called without the lock, and takes them out of :attr:`waiting`.
    """

    def __init__(
        self,
        make: Callable[[], Fence] | None,
        lock: threading.Condition,
        passed: Callable[[Sequence[Pending]], None],
    ) -> None:
        self.waiting: list[Pending] = []
        self.lag_steps_max = 0
        self._make = make
        self._lock = lock
        self._passed = passed

    def take(self, txn: Txn, lag_steps: int) -> None:
        """Record a fence. Threads: under the agent's lock."""
        self.lag_steps_max = max(self.lag_steps_max, lag_steps)
        self.waiting.append(Pending(txn, _PASSED if self._make is None else self._make(), lag_steps))

    def poll(self) -> bool:
        """Report fences that have passed; whether some have not. Threads: the clock's, without the lock."""
        with self._lock:
            pending = list(self.waiting)
        passed = [item for item in pending if item.fence.done()]
        if not passed:
            return bool(pending)
        self._passed(passed)
        with self._lock:
            return bool(self.waiting)


class _Passed:
    """The fence of a device whose work is synchronous."""

    def done(self) -> bool:
        return True


_PASSED = _Passed()

__all__ = ["Clock", "Fences", "Pending"]
