"""One rank's way into an epoch: from what it holds to what the leader's snapshot names (rules M1, M2).

A survivor keeps what the snapshot names and gives back the rest. A restarted rank is empty: it creates and
maps what is published and holds nothing for retained runs. What becomes of the leader's open transaction is
in :mod:`.epoch`.
"""

from __future__ import annotations

from collections import deque

from .effects import Work, WorkDone, WorkKind
from .invariants import require
from .messages import Snapshot
from .records import Records
from .runs import RETAINED, RunState, RunTable
from .types import Rank, Run, Txn, TxnPhase

TXN_BASE = 1 << 62
"""Transaction numbers of the work of a join, one per epoch; ordinary ones never get there."""

_TOUCHED = (TxnPhase.UNMAPPED, TxnPhase.UNMAP_FAILED, TxnPhase.RESTORE_FAILED)
"""Phases after which a retired run may be partly unmapped."""


class Join:
    """Driver work that brings a rank to a snapshot, in order.

    Making it changes the states of runs that need no driver call. New handles are created under a transaction
    number that no ordinary transaction has.

    Args:
        rank: the rank.
        held: what it holds.
        records: its transactions of the epoch that has ended.
        message: what it is to hold.

    Raises:
        InvariantViolation: this rank holds something that the leader cannot know of (S1, S3).
    """

    def __init__(self, rank: Rank, held: RunTable, records: Records, message: Snapshot) -> None:
        self._rank = rank
        self._held = held
        self._records = records
        self._steps = self._plan(message)

    @property
    def work(self) -> Work | None:
        """What is to be done next; ``None``: the rank holds what the snapshot names."""
        return self._steps[0] if self._steps else None

    def done(self, done: WorkDone) -> None:
        """The next work has ended well, or has ended the join."""
        work = self._steps.popleft()
        require(
            (work.kind, work.txn) == (done.kind, done.txn),
            "S6",
            f"rank {self._rank}: {done.kind.name} finished while the join waits for {work.kind.name}",
        )
        if done.cause is not None:
            self._steps.clear()
            return
        held = self._held
        match work.kind:
            case WorkKind.UNMAP:
                held.become(work.runs, RunState.UNMAPPED)
            case WorkKind.ABORT | WorkKind.RELEASE:
                held.become(work.runs, None)
            case WorkKind.RESERVE:
                held.become(work.runs, RunState.RESERVED)
            case WorkKind.MAP | WorkKind.RESTORE:
                held.become(work.runs, RunState.MAPPED)
                held.become(work.runs, RunState.PUBLISHED)

    # ------------------------------------------------------------------ the plan

    def _plan(self, message: Snapshot) -> deque[Work]:
        txn = Txn(TXN_BASE + message.epoch)
        wanted = {item.run: item.published for item in message.runs}
        steps: deque[Work] = deque()
        gone: list[Run] = []
        again: list[Run] = []
        for run in self._held.runs():
            if run in wanted:
                if wanted[run] and not self._settle_published(run):
                    again.append(run)
                elif not wanted[run]:
                    self._settle_retained(run)
            elif run not in message.quarantined:
                reservation = self._reservation_of(run)
                if reservation is None:
                    gone.append(run)
                elif all(work.txn != reservation for work in steps):
                    steps.append(Work(WorkKind.ABORT, reservation, self._records[reservation].runs))
        if gone:
            # A run whose release was refused is unmapped already, and parts of it may be gone.
            bare = self._held.runs(RunState.UNMAPPED, RunState.STUCK)
            if mapped := tuple(run for run in gone if run not in bare):
                steps.append(Work(WorkKind.UNMAP, txn, mapped))
            steps.append(Work(WorkKind.RELEASE, txn, tuple(gone)))
        if again:
            steps.append(Work(WorkKind.RESTORE, txn, tuple(again)))
        held = set(self._held.runs())
        missing = tuple(run for run, published in wanted.items() if published and run not in held)
        if missing:
            steps.append(Work(WorkKind.RESERVE, txn, missing))
            steps.append(Work(WorkKind.MAP, txn, missing))
        return steps

    def _settle_published(self, run: Run) -> bool:
        """A run that the snapshot publishes: whether it is mapped here without further driver work."""
        state = self._held.state(run)
        require(
            state not in (RunState.RESERVED, RunState.PARTIAL, RunState.STUCK),
            "S3",
            f"rank {self._rank}: the snapshot publishes {run}, which is {state and state.value} here",
        )
        if state is RunState.UNMAPPED or (state is RunState.RETIRED and self._was_touched(run)):
            return False
        if state is not RunState.PUBLISHED:
            self._held.become((run,), RunState.PUBLISHED)
        return True

    def _was_touched(self, run: Run) -> bool:
        """Whether an unmap of a retired run may have begun."""
        return any(run in record.runs and record.phase in _TOUCHED for record in self._records.values())

    def _settle_retained(self, run: Run) -> None:
        """A run that the snapshot retains stays as it is; what is not known to be mapped counts as partial."""
        if self._held.state(run) not in RETAINED:
            self._held.become((run,), RunState.PARTIAL)

    def _reservation_of(self, run: Run) -> Txn | None:
        """Transaction that holds handles for a run which was never mapped."""
        if self._held.state(run) is not RunState.RESERVED:
            return None
        return next(txn for txn, record in reversed(self._records.items()) if run in record.runs)


__all__ = ["TXN_BASE", "Join"]
