"""What one rank knows of each transaction, and the answer that follows from it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .effects import WorkKind
from .messages import (
    MapFailed,
    Mapped,
    Message,
    Refused,
    Released,
    ReleaseFailed,
    Reserved,
    Restored,
    RestoreFailed,
    UnmapFailed,
    Unmapped,
)
from .runs import RunState
from .types import Cause, Epoch, Run, Txn, TxnPhase

FINISHED_MAX = 4096
"""Finished transactions whose outcome is remembered for late or repeated messages."""

PHASE_AFTER: dict[WorkKind, tuple[TxnPhase, TxnPhase]] = {
    WorkKind.RESERVE: (TxnPhase.RESERVED, TxnPhase.REFUSED),
    WorkKind.ABORT: (TxnPhase.ABORTED, TxnPhase.ABORTED),
    WorkKind.MAP: (TxnPhase.MAPPED, TxnPhase.MAP_FAILED),
    WorkKind.UNMAP: (TxnPhase.UNMAPPED, TxnPhase.UNMAP_FAILED),
    WorkKind.RESTORE: (TxnPhase.RESTORED, TxnPhase.RESTORE_FAILED),
    WorkKind.RELEASE: (TxnPhase.RELEASED, TxnPhase.RELEASE_FAILED),
}
"""Phase after driver work that went well, and after work that failed."""


@dataclass(slots=True)
class Record:
    """What this rank knows of one transaction."""

    txn: Txn
    runs: tuple[Run, ...]
    phase: TxnPhase
    cause: Cause | None = None
    adopted: bool = False
    """A grow over retained runs: an abort leaves them retained."""
    retained: bool = False
    """A retirement of runs that were never published."""
    before: dict[Run, RunState] = field(default_factory=dict)
    """States at RETIRE, for UNRETIRE."""
    queued: list[WorkKind] = field(default_factory=list)
    """Driver work issued and not yet reported, oldest first."""
    issued: set[WorkKind] = field(default_factory=set)
    """Driver work ever issued: a message that asks for it again is a duplicate, however late (S9)."""
    aborting: bool = False
    restoring: bool = False

    def enter(self, phase: TxnPhase, cause: Cause | None) -> None:
        """Move on; the only writer of the phase."""
        self.phase = phase
        self.cause = cause


class Records(OrderedDict[Txn, Record]):
    """Records by transaction, oldest first; the oldest are forgotten."""

    def remember(self, record: Record) -> Record:
        """Add a record."""
        self[record.txn] = record
        while len(self) > FINISHED_MAX:
            self.popitem(last=False)
        return record

    def seen(self, txn: Txn) -> TxnPhase:
        """What this rank answers to a query about ``txn``."""
        record = self.get(txn)
        if record is None:
            return TxnPhase.UNKNOWN
        return TxnPhase.RUNNING if record.queued else record.phase


def answer_of(record: Record, epoch: Epoch, handles: tuple[int, ...]) -> Message | None:
    """The answer that fits the phase of a transaction (S9: duplicates get the same one); ``None`` while work runs."""
    if record.queued:
        return None
    txn, cause = record.txn, record.cause
    match record.phase:
        case TxnPhase.RESERVED:
            return Reserved(epoch, txn, handles)
        case TxnPhase.REFUSED if cause is not None:
            return Refused(epoch, txn, cause)
        case TxnPhase.MAPPED:
            return Mapped(epoch, txn)
        case TxnPhase.MAP_FAILED if cause is not None:
            return MapFailed(epoch, txn, cause)
        case TxnPhase.UNMAPPED:
            return Unmapped(epoch, txn)
        case TxnPhase.UNMAP_FAILED if cause is not None:
            return UnmapFailed(epoch, txn, cause)
        case TxnPhase.RESTORED:
            return Restored(epoch, txn)
        case TxnPhase.RESTORE_FAILED if cause is not None:
            return RestoreFailed(epoch, txn, cause)
        case TxnPhase.RELEASED:
            return Released(epoch, txn, handles)
        case TxnPhase.RELEASE_FAILED if cause is not None:
            return ReleaseFailed(epoch, txn, cause)
        case _:
            return None


__all__ = ["FINISHED_MAX", "PHASE_AFTER", "Record", "Records", "answer_of"]
