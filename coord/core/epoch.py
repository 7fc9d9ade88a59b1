"""Change of epoch: what becomes of the open transaction, and how ranks agree on memory again (rules M1, M2).

The engine has stopped when this runs: every rank begins the new epoch with the published runs all free, at
operation 0. So nothing needs to drain, and what is resolved here is physical:

=====================  ==========================================================================
open in the old epoch  in the snapshot
=====================  ==========================================================================
RESERVING              aborted (a retry: its runs stay retained)
MAPPING                retained
mapped, not logged     retained
DRAINING               cancelled: published
UNMAPPING, RELEASING   rolled forward: absent
RESTORING              continued: published
=====================  ==========================================================================

A survivor keeps what the snapshot names and gives back the rest. A restarted rank is empty: it creates and
maps what is published and holds nothing for retained runs.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .effects import Work, WorkKind
from .entries import Publish
from .invariants import require
from .messages import Snapshot, SnapshotRun
from .pages import PageState
from .transaction import Retained, Transaction, TxnStep
from .types import Cause, CauseKind, Epoch, Rank, Run, Txn

if TYPE_CHECKING:
    from .leader import Leader
    from .participant import Participant

LEADER = Rank(0)

JOIN_TXN_BASE = 1 << 62
"""Transaction numbers of the work of a join, one per epoch; ordinary ones never get there."""


def resolve(leader: Leader) -> None:
    """Close the open transaction of the leader and empty its due entries, as the table above says."""
    txn = leader.txn
    if txn is not None:
        _resolve_open(leader, txn)
    for entry in leader.take_due():
        if isinstance(entry, Publish):
            _resolve_unlogged(leader, entry.runs)


def _resolve_open(leader: Leader, txn: Transaction) -> None:
    cause = txn.cause or Cause(CauseKind.RANK_LOST, LEADER, "the epoch ended")
    match txn.step:
        case TxnStep.RESERVING if not txn.adopted:
            leader.drop_open(PageState.ABSENT, cause)
        case TxnStep.RESERVING | TxnStep.MAPPING:
            leader.drop_open(PageState.RETAINED, cause)
            leader.retained.append(Retained(txn.runs, txn.tries, cause))
        case TxnStep.DRAINING | TxnStep.RESTORING if txn.retained:
            leader.drop_open(PageState.RETAINED, cause)
            leader.retained.append(Retained(txn.runs, leader.policy.map_retries, cause))
        case TxnStep.DRAINING | TxnStep.RESTORING:
            leader.drop_open(PageState.PUBLISHED, cause)
        case TxnStep.UNMAPPING | TxnStep.RELEASING:
            leader.drop_open(PageState.ABSENT, cause)
        case TxnStep.CLOSED:
            require(False, "S1", f"txn={txn.txn} is closed and still the open one")


def _resolve_unlogged(leader: Leader, runs: tuple[Run, ...]) -> None:
    state = leader.tables[runs[0].domain].state(runs[0].first)
    for run in runs:
        table = leader.tables[run.domain]
        table.become(run, PageState.RETAINED if state is PageState.OPEN else PageState.PUBLISHED)
    if state is PageState.OPEN:
        cause = Cause(CauseKind.RANK_LOST, LEADER, "the epoch ended before these runs were published")
        leader.retained.append(Retained(runs, 0, cause))


def snapshot(leader: Leader, epoch: Epoch, domain_blocks: tuple[int, ...], next_index: int) -> Snapshot:
    """What every rank of the new epoch is to hold. Call :func:`resolve` first."""
    require(leader.txn is None and not leader.due(), "S8", "a snapshot is taken while something is open")
    runs: list[SnapshotRun] = []
    quarantined: list[Run] = []
    for table in leader.tables:
        runs += [SnapshotRun(run, True) for run in table.runs(PageState.PUBLISHED)]
        runs += [SnapshotRun(run, False) for run in table.runs(PageState.RETAINED)]
        quarantined += table.runs(PageState.QUARANTINED)
    limit = leader.limits.newest
    return Snapshot(
        epoch, domain_blocks, tuple(runs), tuple(quarantined), next_index, limit.revision, limit.limit_bytes
    )


def plan_join(participant: Participant, message: Snapshot) -> deque[Work]:
    """Driver work that brings this rank from what it holds to what the snapshot names, in order.

    Changes the states of runs that need no driver call. New handles are created under a transaction number
    that no ordinary transaction has.

    Raises:
        InvariantViolation: this rank holds something that the leader cannot know of (S1, S3).
    """
    txn = Txn(JOIN_TXN_BASE + message.epoch)
    wanted = {item.run: item.published for item in message.runs}
    steps: deque[Work] = deque()
    gone: list[Run] = []
    again: list[Run] = []
    for run in participant.runs():
        if run in wanted:
            if wanted[run] and not participant.settle_published(run):
                again.append(run)
            elif not wanted[run]:
                participant.settle_retained(run)
        elif run not in message.quarantined:
            reservation = participant.reservation_of(run)
            if reservation is None:
                gone.append(run)
            elif all(work.txn != reservation for work in steps):
                steps.append(Work(WorkKind.ABORT, reservation, participant.runs_of(reservation)))
    if gone:
        # A run whose release was refused is unmapped already, and parts of it may be gone.
        bare = participant.unmapped_runs()
        if mapped := tuple(run for run in gone if run not in bare):
            steps.append(Work(WorkKind.UNMAP, txn, mapped))
        steps.append(Work(WorkKind.RELEASE, txn, tuple(gone)))
    if again:
        steps.append(Work(WorkKind.RESTORE, txn, tuple(again)))
    held = set(participant.runs())
    missing = tuple(run for run, published in wanted.items() if published and run not in held)
    if missing:
        steps.append(Work(WorkKind.RESERVE, txn, missing))
        steps.append(Work(WorkKind.MAP, txn, missing))
    return steps
