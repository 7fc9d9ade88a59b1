"""What the core asks its surroundings to do. Effects are data; the core itself performs none of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .messages import Message
from .types import Cause, Rank, Run, Txn


class WorkKind(Enum):
    """A batch of driver calls; each value names the method of the pool backing that performs it."""

    RESERVE = "reserve"
    ABORT = "abort"
    MAP = "map"
    UNMAP = "unmap"
    RESTORE = "restore"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``to`` on its FIFO link (to this rank itself: deliver it locally, in order)."""

    to: Rank
    message: Message


@dataclass(frozen=True, slots=True)
class Work:
    """Perform driver calls on the worker thread, in order; report with ``Participant.on_work_done``."""

    kind: WorkKind
    txn: Txn
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class TakeFence:
    """Record a fence behind all work launched so far; report with ``Participant.on_fence`` when it passed."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the event ring and the log; a state change, in ``key=value`` form."""

    text: str


@dataclass(frozen=True, slots=True)
class GroupDown:
    """The coordinator fails with this first cause; tell every other rank and raise it at every call."""

    cause: Cause
    phase: str


@dataclass(frozen=True, slots=True)
class EpochDown:
    """A follower was lost and may rejoin: this epoch ends, the coordinator does not."""

    cause: Cause


Effect = Send | Work | TakeFence | Note | GroupDown | EpochDown


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Outcome of a :class:`Work`.

    Attributes:
        kind: the kind of the work.
        txn: its transaction.
        cause: ``None`` on success.
        handles: physical handles held afterwards, per pool of the world's list.
    """

    kind: WorkKind
    txn: Txn
    cause: Cause | None
    handles: tuple[int, ...]
