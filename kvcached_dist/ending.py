"""How one rank's part of the world ends: the first cause, kept, or a follower whose loss ends only the epoch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .coord.core.errors import GroupFailed, RankLost
from .coord.core.types import Cause, Epoch, Rank

EVENT_RING_MAX = 4096
"""Protocol events kept per rank for the report of a failure."""

EVENTS_REPORTED = 20
"""The newest of them, written to the log with a failure."""

# The messages belong to the agent, whoever writes them.
_log = logging.getLogger("kvcached_dist.agent")


class Ending:
    """What every call on this rank raises from some moment on.

    Args:
        rank: this rank.
        epoch: epoch of the links.
        describe: names a rank in words, for errors.

    Threads: written under the agent's lock, read by any.
    """

    def __init__(self, rank: Rank, epoch: Epoch, describe: Callable[[int], str]) -> None:
        self.is_down = False
        """Whether :meth:`raise_if_failed` would raise: a plain attribute, because every operation looks at it."""
        self.failure: GroupFailed | None = None
        """The first cause, once the coordinator has failed."""
        self.failed = threading.Event()
        """Set with :attr:`failure`. Who waits for a failure waits here: the lock's condition is notified by every
        event, and a thread that wakes up each time takes the interpreter from the engine's scheduler."""
        self.lost: Cause | None = None
        """The follower whose loss has ended this epoch."""
        self.events: deque[str] = deque(maxlen=EVENT_RING_MAX)
        self._rank = rank
        self._epoch = epoch
        self._describe = describe

    def note(self, text: str) -> None:
        """Keep one line for the report of a failure."""
        self.events.append(text)
        _log.debug("%s", text)

    def fail(self, cause: Cause, phase: str) -> bool:
        """The coordinator has failed; whether this is the first cause."""
        if self.failure is not None:
            return False
        self.failure = GroupFailed(cause, phase, self._describe(cause.rank))
        self.is_down = True
        _log.error("event=group_failed rank=%d epoch=%d phase=%r cause=%s", self._rank, self._epoch, phase, cause)
        for line in list(self.events)[-EVENTS_REPORTED:]:
            _log.error("event ring rank=%d %s", self._rank, line)
        self.failed.set()
        return True

    def lose(self, cause: Cause) -> None:
        """A follower was lost: the epoch has ended."""
        self.lost = cause
        self.is_down = True
        _log.warning("event=rank_lost rank=%d epoch=%d cause=%s", self._rank, self._epoch, cause)

    def raise_if_failed(self) -> None:
        """Raise the first cause, if there is one.

        Raises:
            GroupFailed: the coordinator has failed.
            RankLost: a follower was lost and the next epoch has not begun.
        """
        failure = self.failure
        if failure is not None:
            # A new object each time: raising the same one again and again would grow its traceback.
            raise GroupFailed(failure.cause, failure.phase, failure.who)
        if self.lost is not None:
            raise RankLost(self.lost)


__all__ = ["Ending"]
