"""Words of the protocol as types: ranks, epochs, transactions, runs, causes.

Everything here is immutable and standard library only, so that the leader, the participants, the
links and the simulator can share it without sharing state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NewType

Rank = NewType("Rank", int)
"""World rank, ``pp_rank * tp_size + tp_rank``. Rank 0 is the leader."""

Epoch = NewType("Epoch", int)
"""One generation of membership and links. Stamps every message."""

Txn = NewType("Txn", int)
"""Number of a grow or reclaim transaction. Never reused, not even across epochs."""

DomainId = NewType("DomainId", int)
"""Index of an id space in the world's list of domains."""

PageId = NewType("PageId", int)
"""Index of a granted page inside a domain. Page 0 holds the null block."""

Tick = NewType("Tick", int)
"""Time inside the core, in microseconds. Only differences mean anything."""


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Consecutive pages of one domain that are granted together; the unit of reclaim.

    Attributes:
        domain: index of the domain in the world's list.
        first: first page of the run.
        count: number of pages, at least 1.
    """

    domain: DomainId
    first: PageId
    count: int

    def __post_init__(self) -> None:
        if self.domain < 0 or self.first < 0 or self.count < 1:
            raise ValueError(f"a run needs domain >= 0, first >= 0 and count >= 1, got {self}")

    @property
    def end(self) -> int:
        """One past the last page."""
        return self.first + self.count

    def __str__(self) -> str:
        return f"{self.domain}:[{self.first},{self.end})"


class CauseKind(IntEnum):
    """Why a rank refused, failed or was lost. The values travel on the wire."""

    EXHAUSTED = 1
    """Not enough physical memory above the reserve that must stay free; an ordinary miss."""
    DRIVER = 3
    """An unexpected driver status."""
    LIMIT = 4
    """A configured limit would be exceeded."""
    DEADLINE = 5
    """An answer did not come before the growth deadline."""
    RANK_LOST = 6
    """The process of a rank died (its link ended)."""
    RANK_HUNG = 7
    """A rank sent no beat for a whole lease."""
    UNKNOWN_OUTCOME = 8
    """A rank lives but cannot say what became of a transaction."""
    DIVERGENCE = 9
    """A rank's operations differ from the leader's."""
    INVARIANT = 10
    """A safety invariant does not hold."""
    CLOSED = 11
    """The coordinator of a rank was closed."""
    ADMISSION = 12
    """The admission turn of a physical GPU could not be taken in time."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A typed reason with the rank it comes from.

    Attributes:
        kind: the class of the cause.
        rank: world rank where it happened.
        detail: what happened, in words, naming the pool, call or message; at most 600 bytes on the wire.
        required_bytes: for ``EXHAUSTED`` and ``LIMIT``, what the request needed.
        free_bytes: for ``EXHAUSTED``, what the device had.
        reserve_bytes: for ``EXHAUSTED``, what must stay free.
    """

    kind: CauseKind
    rank: Rank
    detail: str = ""
    required_bytes: int = 0
    free_bytes: int = 0
    reserve_bytes: int = 0

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.kind.name.lower().replace('_', ' ')}"
        if self.detail:
            text += f" ({self.detail})"
        if self.kind in (CauseKind.EXHAUSTED, CauseKind.LIMIT):
            text += f": needs {self.required_bytes} bytes, {self.free_bytes} free, {self.reserve_bytes} must stay free"
        return text


class Health(Enum):
    """State of a domain. Only moves downwards; the first cause is kept."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    FAILED = "failed"


class TxnPhase(IntEnum):
    """What a participant knows of a transaction; the answer to ``QUERY``. Values travel on the wire."""

    UNKNOWN = 0
    RUNNING = 1
    """A driver call of this transaction is queued or under way."""
    RESERVED = 2
    REFUSED = 3
    ABORTED = 4
    MAPPED = 5
    MAP_FAILED = 6
    RETIRED = 7
    """A RETIRE was applied; the rank waits for work already launched."""
    DRAINED = 8
    UNMAPPED = 9
    UNMAP_FAILED = 10
    RESTORED = 11
    RESTORE_FAILED = 12
    RELEASED = 13
    RELEASE_FAILED = 14
    CANCELLED = 15
    """The retirement was cancelled by UNRETIRE before it was unmapped."""


__all__ = [
    "Cause",
    "CauseKind",
    "DomainId",
    "Epoch",
    "Health",
    "PageId",
    "Rank",
    "Run",
    "Tick",
    "Txn",
    "TxnPhase",
]
