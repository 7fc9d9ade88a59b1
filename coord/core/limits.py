"""Physical limits with revisions: what a controller is told, and when a limit takes effect.

A limit travels as a log entry, so it is in force on all ranks from the same point on, or on none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .entries import Limit
from .types import Health

if TYPE_CHECKING:
    from .leader import Leader


class LimitStatus(Enum):
    """Answer to a request."""

    APPLIED = "applied"
    """In force at the next mark; every rank holds less."""
    DEFERRED = "deferred"
    """In force at the next mark; some rank holds more and gives it back as blocks are freed."""
    STALE = "stale"
    """A newer revision is known; nothing changed."""
    CONFLICT = "conflict"
    """This revision is known with another value; nothing changed."""
    REFUSED = "refused"
    """A domain owns quarantined pages; nothing changed."""
    UNAVAILABLE = "unavailable"
    """The coordinator has failed, or waits for a lost rank; nothing changed."""


@dataclass(frozen=True, slots=True)
class LimitAnswer:
    """Answer as data.

    Attributes:
        status: what became of the request.
        revision: revision in force (or about to be).
        limit_bytes: limit in force per rank; 0: none.
        overage_bytes: bytes that the fullest rank holds above it.
        detail: in words.
    """

    status: LimitStatus
    revision: int
    limit_bytes: int
    overage_bytes: int
    detail: str


class Limits:
    """Requests to one leader."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._newest = leader.replica.limit

    @property
    def newest(self) -> Limit:
        """The limit in force, or about to be at the next mark."""
        return self._newest

    def request(self, limit_bytes: int, revision: int) -> LimitAnswer:
        """Ask for a limit.

        Args:
            limit_bytes: most physical bytes per rank; 0: none.
            revision: number of the order; orders are taken in this order whatever order they arrive in.

        Raises:
            ValueError: a negative number.
        """
        self._leader.calm.ends()
        if limit_bytes < 0 or revision < 0:
            raise ValueError(f"limit_bytes={limit_bytes} and revision={revision} must not be negative")
        leader, newest = self._leader, self._newest
        if not leader.active:
            return self._answer(LimitStatus.UNAVAILABLE, "the coordinator has failed or waits for a lost rank")
        if revision < newest.revision:
            return self._answer(LimitStatus.STALE, f"revision {newest.revision} is known")
        if revision == newest.revision and limit_bytes != newest.limit_bytes:
            return self._answer(LimitStatus.CONFLICT, f"revision {revision} is known with {newest.limit_bytes} bytes")
        if Health.DEGRADED in leader.health:
            return self._answer(LimitStatus.REFUSED, "a domain owns quarantined pages")
        if revision > newest.revision:
            self._newest = Limit(revision, limit_bytes)
            leader.log.append(self._newest)
        over = self.overage_bytes()
        status = LimitStatus.DEFERRED if over else LimitStatus.APPLIED
        return self._answer(status, f"the fullest rank holds {over} bytes above it" if over else "")

    def overage_bytes(self) -> int:
        """Bytes that the fullest rank holds above the newest limit."""
        if not self._newest.limit_bytes:
            return 0
        return max(0, max(peer.held_bytes for peer in self._leader.peers) - self._newest.limit_bytes)

    def _answer(self, status: LimitStatus, detail: str) -> LimitAnswer:
        newest = self._newest
        return LimitAnswer(status, newest.revision, newest.limit_bytes, self.overage_bytes(), detail)
