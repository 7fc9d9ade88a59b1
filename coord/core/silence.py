"""Missing answers and missing beats: bounded read-only queries, and the lease.

At its deadline an unanswered request is queried, at most twice, ``query_interval`` apart. A rank that says it
is still working is left alone (a RESERVE is given up, a miss). A rank that beats but does not answer two
queries, or does not know the transaction, ends the coordinator: its state cannot be shown. For a rank that
does not even beat only the lease decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import (
    MapFailed,
    Mapped,
    Query,
    Refused,
    Released,
    ReleaseFailed,
    Reserved,
    Restored,
    RestoreFailed,
    State,
    TxnMessage,
    UnmapFailed,
    Unmapped,
)
from .transaction import QUERIES_MAX, Pending, Transaction, TxnStep
from .types import Cause, CauseKind, Rank, Tick, TxnPhase

if TYPE_CHECKING:
    from .leader import Leader

_LEADER = Rank(0)


class Silence:
    """Watches what has not come yet, for one leader."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._ticked = leader.now

    def expect(self, txn: Transaction, rank: Rank, deadline: int | None = None) -> None:
        """Wait for an answer of ``rank`` to the current step of ``txn``."""
        leader = self._leader
        wait = leader.policy.growth_deadline if deadline is None else deadline
        txn.waiting[rank] = Pending(Tick(leader.now + wait))

    def tick(self) -> None:
        """Compare what is missing with the clock."""
        if self._own_stop():
            return
        self._check_leases()
        leader = self._leader
        txn = leader.commit.txn
        if txn is None or not leader.active:
            return
        overdue = [rank for rank, pending in sorted(txn.waiting.items()) if leader.now >= pending.due]
        if not overdue:
            return
        if txn.step is TxnStep.DRAINING:
            leader.commit.cancel_retirement(f"ranks {overdue} have not drained in time")
            return
        for rank in overdue:
            if leader.commit.txn is not txn or not leader.active:
                return
            self._overdue(txn, rank, txn.waiting[rank])

    def on_state(self, rank: Rank, state: State) -> None:
        """The reply to a query: as if the answer had come, or still running, or unknown."""
        leader = self._leader
        txn = leader.commit.txn
        pending = None if txn is None else txn.waiting.get(rank)
        if txn is None or pending is None or state.txn != txn.txn or state.number != pending.number:
            leader.counters.stale_answers += 1
            return
        if state.phase is TxnPhase.RUNNING:
            self._still_running(txn, rank, pending)
            return
        answer = _as_answer(txn.step, state)
        if answer is not None:
            leader.commit.answer(rank, answer)
        elif txn.step is TxnStep.RELEASING and state.phase is TxnPhase.UNMAPPED:
            pending.due = Tick(leader.now + leader.policy.growth_deadline)
            leader.commit.resend_release(rank)
        else:
            detail = f"asked about txn {txn.txn} ({txn.step.value}) it answered {state.phase.name}"
            leader.fail(Cause(CauseKind.UNKNOWN_OUTCOME, rank, f"{detail}; restart the engine"), leader.phase())

    # ------------------------------------------------------------------ inner

    def _overdue(self, txn: Transaction, rank: Rank, pending: Pending) -> None:
        leader = self._leader
        if leader.peers[rank].left:
            leader.fail_closed(rank)
            return
        if pending.queries < QUERIES_MAX:
            pending.queries += 1
            txn.asked += 1
            pending.number = txn.asked
            pending.queried_at = leader.now
            pending.due = Tick(leader.now + leader.policy.query_interval)
            leader.note(f"event=query txn={txn.txn} step={txn.step.value} rank={rank} number={pending.number}")
            leader.send_query(rank, Query(leader.epoch, txn.txn, pending.number))
            return
        if leader.peers[rank].heard > pending.queried_at and not pending.lives:
            pending.lives = True
            pending.due = Tick(leader.now + leader.policy.query_interval)
        elif pending.lives:
            detail = f"it beats but answered none of {QUERIES_MAX} queries about txn {txn.txn} ({txn.step.value})"
            leader.fail(Cause(CauseKind.UNKNOWN_OUTCOME, rank, f"{detail}; restart the engine"), leader.phase())
        elif txn.step is TxnStep.RESERVING:
            leader.commit.abort(Cause(CauseKind.DEADLINE, rank, f"no answer to RESERVE of txn {txn.txn} and no beat"))
        else:
            txn.late = True
            pending.due = Tick(leader.now + leader.policy.query_interval)

    def _still_running(self, txn: Transaction, rank: Rank, pending: Pending) -> None:
        leader = self._leader
        if txn.step is TxnStep.RESERVING:
            leader.commit.abort(
                Cause(CauseKind.DEADLINE, rank, f"RESERVE of txn {txn.txn} is still running at its deadline")
            )
            return
        txn.late = True
        pending.queries = 0
        pending.lives = False
        pending.due = Tick(leader.now + leader.policy.growth_deadline)

    def _check_leases(self) -> None:
        leader = self._leader
        for rank, peer in enumerate(leader.peers):
            silent = leader.now - peer.heard
            if rank != _LEADER and not peer.left and silent > leader.policy.lease:
                detail = f"no beat for {silent / 1e6:.2f} s (lease {leader.policy.lease / 1e6:.2f} s)"
                leader.lose(Cause(CauseKind.RANK_HUNG, Rank(rank), detail))
                return

    def _own_stop(self) -> bool:
        """A leader that was stopped itself must not blame others for what it did not hear meanwhile."""
        leader = self._leader
        gap = leader.now - self._ticked
        self._ticked = leader.now
        if gap > leader.policy.lease:
            detail = f"this process did not run for {gap / 1e6:.2f} s, longer than the lease"
            leader.fail(Cause(CauseKind.RANK_HUNG, _LEADER, detail), leader.phase())
            return True
        if gap > leader.policy.lease // 4:
            for peer in leader.peers:
                peer.heard = Tick(peer.heard + gap)
            return True
        return False


def _as_answer(step: TxnStep, state: State) -> TxnMessage | None:
    """The answer that the reply of a query stands for, if it fits the step."""
    epoch, txn, cause = state.epoch, state.txn, state.cause
    match step, state.phase:
        case TxnStep.RESERVING, TxnPhase.RESERVED:
            return Reserved(epoch, txn, state.handles)
        case TxnStep.RESERVING, TxnPhase.REFUSED if cause is not None:
            return Refused(epoch, txn, cause)
        case TxnStep.MAPPING, TxnPhase.MAPPED:
            return Mapped(epoch, txn)
        case TxnStep.MAPPING, TxnPhase.MAP_FAILED if cause is not None:
            return MapFailed(epoch, txn, cause)
        case TxnStep.UNMAPPING, TxnPhase.UNMAPPED:
            return Unmapped(epoch, txn)
        case TxnStep.UNMAPPING, TxnPhase.UNMAP_FAILED if cause is not None:
            return UnmapFailed(epoch, txn, cause)
        case TxnStep.RESTORING, TxnPhase.RESTORED:
            return Restored(epoch, txn)
        case TxnStep.RESTORING, TxnPhase.RESTORE_FAILED if cause is not None:
            return RestoreFailed(epoch, txn, cause)
        case TxnStep.RELEASING, TxnPhase.RELEASED:
            return Released(epoch, txn, state.handles)
        case TxnStep.RELEASING, TxnPhase.RELEASE_FAILED if cause is not None:
            return ReleaseFailed(epoch, txn, cause)
        case _:
            return None
