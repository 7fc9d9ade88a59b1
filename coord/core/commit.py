"""The leader's two-phase commit: the one open transaction, from its first message to its verdict.

What a transaction is, and its steps, are in :mod:`.transaction`. Here is what each answer leads to: the next step
for every rank, an abort, a repair, or a verdict and the entry that says so in the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from .entries import Publish, Quarantine, Reclaimed, Retire
from .invariants import require
from .ledger import CLOSED_MAX, Closed
from .messages import (
    Abort,
    Drained,
    Map,
    MapFailed,
    Mapped,
    Refused,
    Release,
    Released,
    ReleaseFailed,
    Reserve,
    Reserved,
    Restore,
    Restored,
    RestoreFailed,
    TxnMessage,
    Unmap,
    UnmapFailed,
    Unmapped,
)
from .pages import PageState
from .transaction import Retained, Transaction, TxnStep, Verdict
from .types import Cause, CauseKind, Epoch, Rank, Run, Tick, Txn

if TYPE_CHECKING:
    from .leader import Leader

RELEASE_RETRIES = 2
"""RELEASE messages repeated after a driver refused to release, before the domain fails (rule M8)."""

_DROPPED = {
    PageState.ABSENT: Verdict.ABORTED,
    PageState.RETAINED: Verdict.RETAINED,
    PageState.PUBLISHED: Verdict.CANCELLED,
}

_STEP_OF: dict[type[TxnMessage], TxnStep] = {
    Reserved: TxnStep.RESERVING,
    Refused: TxnStep.RESERVING,
    Mapped: TxnStep.MAPPING,
    MapFailed: TxnStep.MAPPING,
    Drained: TxnStep.DRAINING,
    Unmapped: TxnStep.UNMAPPING,
    UnmapFailed: TxnStep.UNMAPPING,
    Restored: TxnStep.RESTORING,
    RestoreFailed: TxnStep.RESTORING,
    Released: TxnStep.RELEASING,
    ReleaseFailed: TxnStep.RELEASING,
}
"""The step in which an answer means something; any other is late or a duplicate and changes nothing (S9)."""


class Commit:
    """Transactions of one leader, one after the other. They outlive an epoch: numbers go on, retained runs stay.

    Attributes:
        txn: the open transaction.
        last: number of the newest one.
        retained: runs of failed MAPs, by batch.
        closed: finished transactions, for statistics.
    """

    def __init__(self, leader: Leader) -> None:
        self.txn: Transaction | None = None
        self.last = Txn(0)
        self.retained: list[Retained] = []
        self.closed: deque[Closed] = deque(maxlen=CLOSED_MAX)
        self.short: Cause | None = None
        """The last refusal, if it was for memory and its rank has not said since that there is enough."""
        self._leader = leader

    # ------------------------------------------------------------------ opening and giving up

    def open_grow(self, runs: tuple[Run, ...], *, foreground: bool, retry: Retained | None = None) -> None:
        """Send RESERVE for ``runs`` to every rank."""
        self._leader.become(runs, PageState.OPEN)
        txn = self._open(TxnStep.RESERVING, runs, self._leader.policy.growth_deadline)
        txn.foreground = foreground
        if retry is not None:
            self.retained.remove(retry)
            txn.adopted = True
            txn.tries = retry.tries
        self._broadcast(lambda epoch, number: Reserve(epoch, number, runs))

    def open_reclaim(self, runs: tuple[Run, ...], retained: Retained | None = None) -> Retire:
        """Begin to give back ``runs``; the entry belongs into the mark that is being built.

        Args:
            runs: what goes.
            retained: the batch whose runs they are, if they were never published.
        """
        self._leader.become(runs, PageState.RETIRING)
        if retained is not None:
            self.retained.remove(retained)
        txn = self._open(TxnStep.DRAINING, runs, self._leader.policy.drain_deadline)
        txn.retained = retained
        return Retire(txn.txn, runs, retained is not None)

    def abort(self, cause: Cause) -> None:
        """The grow is a miss: every rank that was asked gives back what this transaction created (rule M3)."""
        leader, txn = self._leader, cast(Transaction, self.txn)
        require(txn.step is TxnStep.RESERVING, "S1", f"ABORT of txn={txn.txn} in {txn.step.name} (rule M3)")
        self._broadcast(Abort)
        # What was adopted had been held before, and stays held.
        for rank in () if txn.adopted else txn.handles:
            self._spend(rank, txn.runs, sign=-1)
        leader.counters.refusals += 1
        leader.backoff.refused(leader.now)
        self.short = cause if cause.kind is CauseKind.EXHAUSTED else None
        if txn.adopted:
            leader.become(txn.runs, PageState.RETAINED)
            self.retained.append(Retained(txn.runs, txn.tries, cause))
        else:
            leader.become(txn.runs, PageState.ABSENT)
        leader.demand.refused(txn, cause)
        self._close(Verdict.ABORTED, cause)

    def cancel_retirement(self, why: str) -> None:
        """Take back a retirement of which no UNMAP was sent (rule M4). Its UNRETIRE is due at the next mark."""
        leader, txn = self._leader, cast(Transaction, self.txn)
        require(txn.step is TxnStep.DRAINING, "S4", f"UNRETIRE of txn={txn.txn} in {txn.step.name} (rule M4)")
        if txn.retained is not None:
            leader.become(txn.runs, PageState.RETAINED)
            self.retained.append(txn.retained)
        else:
            leader.become(txn.runs, PageState.PUBLISHED)
        leader.log.unretire(txn.txn, () if txn.retained is not None else txn.runs)
        leader.note(f"event=unretire txn={txn.txn} why={why!r}")
        self._close(Verdict.CANCELLED, None)

    def drop_open(self, state: PageState, cause: Cause) -> None:
        """The epoch ended with a transaction open: its pages enter ``state``."""
        txn = cast(Transaction, self.txn)
        self._leader.become(txn.runs, state)
        self._close(_DROPPED[state], cause)

    # ------------------------------------------------------------------ answers

    def answer(self, rank: Rank, message: TxnMessage) -> None:
        """One answer, from a message or from the reply to a query; late and duplicate ones change nothing."""
        txn = self.txn
        expected = _STEP_OF.get(type(message))
        if txn is None or message.txn != txn.txn or txn.step is not expected or rank not in txn.waiting:
            self._leader.counters.stale_answers += 1
            return
        del txn.waiting[rank]
        match message:
            case Reserved(handles=handles):
                txn.handles[rank] = handles
                if not txn.adopted:
                    self._spend(rank, txn.runs)
            case Refused(cause=cause):
                txn.cause = cause
                self.abort(cause)
                return
            case Drained(lag_steps=lag):
                txn.lag_steps = max(txn.lag_steps, lag)
            case MapFailed(cause=cause):
                txn.cause = txn.cause or cause
            case UnmapFailed(cause=cause):
                txn.cause = txn.cause or cause
                self._enter(TxnStep.RESTORING)
                self._broadcast(Restore)
                return
            case RestoreFailed(cause=cause):
                self._leader.fail_domains(txn.runs, cause, "restoring the mapping after a failed unmap")
                return
            case ReleaseFailed(cause=cause):
                self._retry_release(rank, txn, cause)
                return
            case Released(handles=handles):
                self._leader.peers[rank].handles = handles
                # Its next beat says so too; an operation that waits for this memory does not wait for that.
                self._spend(rank, txn.runs, sign=-1)
            case _:
                pass
        if not txn.waiting:
            self._all_answered(txn)

    def resend_release(self, rank: Rank) -> None:
        """RELEASE is idempotent: repeat it with the same transaction number."""
        self._leader.send(rank, Release(self._leader.epoch, cast(Transaction, self.txn).txn))

    def _all_answered(self, txn: Transaction) -> None:
        match txn.step:
            case TxnStep.RESERVING:
                for rank, handles in txn.handles.items():
                    self._leader.peers[rank].handles = handles
                self._enter(TxnStep.MAPPING)
                self._broadcast(Map)
            case TxnStep.MAPPING:
                self._mapped(txn)
            case TxnStep.DRAINING:
                self._enter(TxnStep.UNMAPPING)
                self._broadcast(Unmap)
            case TxnStep.UNMAPPING:
                self._enter(TxnStep.RELEASING)
                self._broadcast(Release)
            case TxnStep.RESTORING:
                self._restored(txn)
            case TxnStep.RELEASING:
                self._released(txn)
            case TxnStep.CLOSED:
                require(False, "S1", f"txn={txn.txn} is closed and received an answer")

    def _mapped(self, txn: Transaction) -> None:
        leader = self._leader
        if txn.cause is None:
            leader.log.append(Publish(txn.txn, txn.runs))
            leader.backoff.succeeded()
            leader.counters.foreground_grows += txn.foreground
            leader.demand.grew(txn)
            self._close(Verdict.PUBLISHED, None)
            return
        cause = txn.cause
        leader.become(txn.runs, PageState.RETAINED)
        if txn.tries >= leader.policy.map_retries:
            leader.become(txn.runs, PageState.QUARANTINED)
            leader.log.append(Quarantine(txn.runs, cause))
            leader.degrade(txn.runs, cause)
        else:
            self.retained.append(Retained(txn.runs, txn.tries + 1, cause))
        self._close(Verdict.RETAINED, cause)

    def _restored(self, txn: Transaction) -> None:
        leader = self._leader
        leader.reclaim.failed()
        cause = cast(Cause, txn.cause)
        if txn.retained is not None:
            leader.become(txn.runs, PageState.RETAINED)
            self.retained.append(txn.retained)
        else:
            leader.log.append(Publish(txn.txn, txn.runs))
        self._close(Verdict.RESTORED, cause)

    def _released(self, txn: Transaction) -> None:
        leader = self._leader
        leader.become(txn.runs, PageState.ABSENT)
        leader.log.append(Reclaimed(txn.txn))
        leader.counters.reclaimed_runs += len(txn.runs)
        if self.short is not None:
            self.short = None
            leader.backoff.lifted(leader.now)
        self._close(Verdict.RECLAIMED, None)

    def _retry_release(self, rank: Rank, txn: Transaction, cause: Cause) -> None:
        if txn.releases >= RELEASE_RETRIES:
            self._leader.fail_domains(txn.runs, cause, "releasing memory that every rank has unmapped")
            return
        txn.releases += 1
        self._leader.silence.expect(txn, rank)
        self.resend_release(rank)

    # ------------------------------------------------------------------ inner

    def _spend(self, rank: Rank, runs: tuple[Run, ...], sign: int = 1) -> None:
        peer = self._leader.peers[rank]
        peer.budget_bytes -= sign * sum(run.count * peer.page_bytes[run.domain] for run in runs)
        self._leader.memory.budgets_changed()

    def _open(self, step: TxnStep, runs: tuple[Run, ...], deadline: int) -> Transaction:
        leader = self._leader
        require(self.txn is None, "S6", f"a transaction is open ({leader.phase()})")
        self.last = Txn(self.last + 1)
        self.txn = Transaction(self.last, step, runs, leader.now)
        for rank in leader.ranks:
            leader.silence.expect(self.txn, Rank(rank), deadline)
        names = " ".join(str(run) for run in runs)
        leader.note(f"event=open txn={self.last} step={step.value} runs=[{names}]")
        return self.txn

    def _enter(self, step: TxnStep) -> None:
        leader, txn = self._leader, cast(Transaction, self.txn)
        txn.enter(step, leader.ranks, Tick(leader.now + leader.policy.growth_deadline))
        leader.note(f"event=step txn={txn.txn} step={step.value}")

    def _close(self, verdict: Verdict, cause: Cause | None) -> None:
        leader, txn = self._leader, cast(Transaction, self.txn)
        grow = txn.grows
        txn.enter(TxnStep.CLOSED, leader.ranks, leader.now)
        self.txn = None
        leader.counters.closed[verdict] += 1
        self.closed.append(
            Closed(txn.txn, verdict, grow, txn.foreground, txn.started, leader.now, txn.lag_steps, cause)
        )
        text = f"event=decided txn={txn.txn} verdict={verdict.value} us={leader.now - txn.started}"
        leader.note(text if cause is None else f"{text} cause={cause}")

    def _broadcast(self, make: Callable[[Epoch, Txn], TxnMessage]) -> None:
        """Send a message of the open transaction to every rank."""
        leader, txn = self._leader, cast(Transaction, self.txn)
        # The own rank last: its part is handled in this thread, and the others work meanwhile.
        for rank in reversed(leader.ranks):
            leader.send(Rank(rank), make(leader.epoch, txn.txn))


__all__ = ["Commit"]
