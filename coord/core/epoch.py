"""Change of epoch on the leader: what becomes of the open transaction, and what every rank is to hold (rules M1, M2).

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

How a rank gets from what it holds to the snapshot is in :mod:`.join`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .entries import Publish
from .invariants import require
from .messages import Snapshot, SnapshotRun
from .pages import PageState
from .transaction import Retained, Transaction, TxnStep
from .types import Cause, CauseKind, Epoch, Rank, Run

if TYPE_CHECKING:
    from .leader import Leader

LEADER = Rank(0)


def resolve(leader: Leader) -> None:
    """Close the open transaction of the leader and empty its due entries, as the table above says."""
    txn = leader.commit.txn
    if txn is not None:
        _resolve_open(leader, txn)
    for entry in leader.log.drop():
        if isinstance(entry, Publish):
            _resolve_unlogged(leader, entry.runs)


def _resolve_open(leader: Leader, txn: Transaction) -> None:
    cause = txn.cause or Cause(CauseKind.RANK_LOST, LEADER, "the epoch ended")
    match txn.step:
        case TxnStep.RESERVING if not txn.adopted:
            leader.commit.drop_open(PageState.ABSENT, cause)
        case TxnStep.RESERVING | TxnStep.MAPPING:
            leader.commit.drop_open(PageState.RETAINED, cause)
            leader.commit.retained.append(Retained(txn.runs, txn.tries, cause))
        case TxnStep.DRAINING | TxnStep.RESTORING if txn.retained is not None:
            leader.commit.drop_open(PageState.RETAINED, cause)
            leader.commit.retained.append(txn.retained)
        case TxnStep.DRAINING | TxnStep.RESTORING:
            leader.commit.drop_open(PageState.PUBLISHED, cause)
        case TxnStep.UNMAPPING | TxnStep.RELEASING:
            leader.commit.drop_open(PageState.ABSENT, cause)
        case TxnStep.CLOSED:
            require(False, "S1", f"txn={txn.txn} is closed and still the open one")


def _resolve_unlogged(leader: Leader, runs: tuple[Run, ...]) -> None:
    state = leader.tables[runs[0].domain].state(runs[0].first)
    for run in runs:
        table = leader.tables[run.domain]
        table.become(run, PageState.RETAINED if state is PageState.OPEN else PageState.PUBLISHED)
    if state is PageState.OPEN:
        cause = Cause(CauseKind.RANK_LOST, LEADER, "the epoch ended before these runs were published")
        leader.commit.retained.append(Retained(runs, 0, cause))


def snapshot(leader: Leader, epoch: Epoch, domain_blocks: tuple[int, ...], next_index: int) -> Snapshot:
    """What every rank of the new epoch is to hold. Call :func:`resolve` first."""
    require(leader.commit.txn is None and not leader.log.due(), "S8", "a snapshot is taken while something is open")
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
