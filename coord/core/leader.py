"""The leader: decides every grow and reclaim, and when its outcome enters the log.

Sans-IO. Inputs are messages of participants (its own rank's too), ticks of a clock, link news and the
calls of its scheduler thread. Outputs are effects (:mod:`.effects`) and marks. The transaction itself is
in :mod:`.transaction`, the pages in :mod:`.pages`, the quantities in :mod:`.policy`; asking about missing
answers is in :mod:`.silence`, growth in :mod:`.demand`, giving back in :mod:`.reclaim`, limits in
:mod:`.limits`, the change of epoch in :mod:`.epoch`, what is remembered in :mod:`.ledger`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from . import epoch as epoch_change
from .demand import Demand
from .effects import Effect, EpochDown, GroupDown, Note, Send
from .entries import Entry, Evict, Grant, Limit, Mark, PositionKind, Publish, Quarantine, Reclaimed, Retire, Unretire
from .invariants import require
from .ledger import CLOSED_MAX, LEADER, Closed, Counters, Peer
from .limits import Limits
from .messages import (
    ANSWERS,
    Abort,
    Beat,
    Bye,
    Drained,
    Fail,
    Map,
    MapFailed,
    Mapped,
    Message,
    Reform,
    Refused,
    Release,
    Released,
    ReleaseFailed,
    Reserve,
    Reserved,
    Restore,
    Restored,
    RestoreFailed,
    State,
    TxnMessage,
    Unmap,
    UnmapFailed,
    Unmapped,
)
from .pages import PageState, PageTable
from .policy import Backoff, Policy
from .reclaim import Reclaim
from .replica import Replica
from .silence import Silence
from .transaction import Retained, Transaction, TxnStep, Verdict
from .types import Cause, CauseKind, DomainId, Epoch, Health, Rank, Run, Tick, Txn

_DROPPED = {
    PageState.ABSENT: Verdict.ABORTED,
    PageState.RETAINED: Verdict.RETAINED,
    PageState.PUBLISHED: Verdict.CANCELLED,
}

RELEASE_RETRIES = 2
"""RELEASE messages repeated after a driver refused to release, before the domain fails (rule M8)."""

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


class Leader:
    """State machine of rank 0.

    Args:
        epoch: epoch of the links.
        policy: settings of the decisions.
        replica: the leader rank's own replica; its free lists are read when runs are picked.
        domain_pages: logical capacity per domain in pages, null page included.
        peers: one per rank, in rank order; their number is the world size.
        now: current tick.

    Threads: not thread-safe; the agent calls it under its lock.
    """

    def __init__(
        self,
        epoch: Epoch,
        policy: Policy,
        replica: Replica,
        domain_pages: Sequence[int],
        peers: Sequence[Peer],
        now: Tick,
    ) -> None:
        self.epoch = epoch
        self.policy = policy
        self.replica = replica
        self.peers = list(peers)
        self.ranks = range(len(peers))
        self.tables = [PageTable(DomainId(domain), pages) for domain, pages in enumerate(domain_pages)]
        self.health = [Health.HEALTHY] * len(self.tables)
        self.first_cause: list[Cause | None] = [None] * len(self.tables)
        self.failure: GroupDown | None = None
        self.lost: Cause | None = None
        """The follower whose loss has ended this epoch; nothing is decided until the next one."""
        self.retained: list[Retained] = []
        self.backoff = Backoff(policy)
        self.counters = Counters()
        self.closed: deque[Closed] = deque(maxlen=CLOSED_MAX)
        self.txn: Transaction | None = None
        self.last_txn = Txn(0)
        self.now = now
        self.demand = Demand(self)
        self.reclaim = Reclaim(self)
        self.limits = Limits(self)
        self.silence = Silence(self)
        self._due: list[Entry] = []
        self._unretired: dict[Txn, tuple[Run, ...]] = {}
        self._out: list[Effect] = []

    # ------------------------------------------------------------------ reading

    @property
    def active(self) -> bool:
        """Whether this epoch goes on: the coordinator has not failed and nobody was lost."""
        return self.failure is None and self.lost is None

    def take(self) -> list[Effect]:
        """Effects since the last call, in order."""
        out, self._out = self._out, []
        return out

    def due(self) -> Sequence[Entry]:
        """Entries that the next mark will carry."""
        return self._due

    def due_blocks(self, domain: DomainId) -> int:
        """Blocks that the next mark will publish in a domain."""
        pages = 0
        for entry in self._due:
            if isinstance(entry, Publish):
                pages += sum(run.count for run in entry.runs if run.domain == domain)
            elif isinstance(entry, Unretire):
                pages += sum(run.count for run in self._unretired[entry.txn] if run.domain == domain)
        return pages * self.replica.blocks_per_page[domain]

    # ------------------------------------------------------------------ inputs

    def on_message(self, rank: Rank, message: Message, now: Tick) -> None:
        """A message of a rank's link (or of the leader rank's own participant).

        Raises:
            InvariantViolation: the rank's state contradicts the leader's (S10).
        """
        self.now = now
        if message.epoch != self.epoch or not self.active:
            self.counters.stale_answers += 1
            return
        peer = self.peers[rank]
        peer.heard = now
        match message:
            case Beat():
                self._on_beat(rank, peer, message)
            case Bye():
                peer.left = True
                if self.demand.foreground is not None and self.demand.foreground.verdict is None:
                    self.fail_closed(rank)
            case Fail(cause=cause):
                self.fail(cause, "a rank reported a failure")
            case State():
                self.silence.on_state(rank, message)
            case TxnMessage() if isinstance(message, ANSWERS):
                self.answer(rank, message)
            case _:
                self.counters.stale_answers += 1
        self.demand.advance()

    def tick(self, now: Tick) -> None:
        """Time has passed: deadlines, leases, queries."""
        self.now = now
        if self.active:
            self.silence.tick()
            self.demand.advance()

    def on_link_down(self, rank: Rank, reason: str, *, eof: bool, now: Tick) -> None:
        """A follower's link has ended. After its goodbye that is no news."""
        self.now = now
        if self.peers[rank].left:
            return
        kind = CauseKind.RANK_LOST if eof else CauseKind.RANK_HUNG
        self.lose(Cause(kind, rank, reason))

    def evict(self, tokens: int) -> None:
        """Log an eviction of ``tokens`` tokens at the next mark; none is logged in an epoch that has ended."""
        if tokens > 0 and self.active:
            self._due.append(Evict(tokens))

    def log_entry(self, entry: Limit) -> None:
        """Log an entry that needs no transaction at the next mark."""
        self._due.append(entry)

    def mark(self, kind: PositionKind, position: int, now: Tick, grant: bool | None = None) -> Mark:
        """Close the log up to here: due entries, changed capacity, what is retired at this very point.

        The caller broadcasts the mark and applies it on this rank in the same call, with no list operation
        in between (rule M5).

        Args:
            kind: step or operation.
            position: number of the step or operation.
            now: current tick.
            grant: verdict of the waiting operation, for ``PositionKind.OP``.
        """
        self.now = now
        # Evictions change the engine's own state, so they wait for the end of a step.
        later: list[Entry] = [e for e in self._due if isinstance(e, Evict) and kind is PositionKind.OP]
        entries = [entry for entry in self._due if entry not in later]
        for entry in entries:
            if isinstance(entry, Publish):
                self._become(entry.runs, PageState.PUBLISHED)
        self._due = later
        self._unretired.clear()
        if kind is PositionKind.STEP and self.active:
            entries.extend(self.reclaim.pick())
        entries.extend(self.demand.changed_capacity())
        if grant is not None:
            entries.append(Grant(position, grant))
        settled = kind is PositionKind.STEP and self.demand.settled(entries)
        replica = self.replica
        return Mark(
            self.epoch, kind, position, replica.next_index, tuple(entries), replica.op_index, replica.digest, settled
        )

    # ------------------------------------------------------------------ transactions

    def open_grow(self, runs: tuple[Run, ...], *, foreground: bool, retry: Retained | None = None) -> None:
        """Send RESERVE for ``runs`` to every rank."""
        self._become(runs, PageState.OPEN)
        txn = self._new_txn(TxnStep.RESERVING, runs, self.policy.growth_deadline)
        txn.foreground = foreground
        if retry is not None:
            self.retained.remove(retry)
            txn.adopted = True
            txn.tries = retry.tries
        self._broadcast(lambda: Reserve(self.epoch, txn.txn, runs))

    def open_reclaim(self, runs: tuple[Run, ...], *, retained: bool) -> Retire:
        """Begin to give back ``runs``; the entry belongs into the mark that is being built."""
        self._become(runs, PageState.RETIRING)
        if retained:
            self.retained = [batch for batch in self.retained if batch.runs != runs]
        txn = self._new_txn(TxnStep.DRAINING, runs, self.policy.drain_deadline)
        txn.retained = retained
        return Retire(txn.txn, runs, retained)

    def answer(self, rank: Rank, message: TxnMessage) -> None:
        """One answer, from a message or from the reply to a query; late and duplicate ones change nothing."""
        txn = self.txn
        expected = _STEP_OF.get(type(message))
        if txn is None or message.txn != txn.txn or txn.step is not expected or rank not in txn.waiting:
            self.counters.stale_answers += 1
            return
        del txn.waiting[rank]
        match message:
            case Reserved(handles=handles):
                txn.handles[rank] = handles
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
                self._broadcast(lambda: Restore(self.epoch, txn.txn))
                return
            case RestoreFailed(cause=cause):
                self._fail_domains(txn.runs, cause, "restoring the mapping after a failed unmap")
                return
            case ReleaseFailed(cause=cause):
                self._retry_release(rank, txn, cause)
                return
            case Released(handles=handles):
                self.peers[rank].handles = handles
            case _:
                pass
        if not txn.waiting:
            self._all_answered(txn)

    def abort(self, cause: Cause) -> None:
        """The grow is a miss: every rank that was asked gives back what this transaction created (rule M3)."""
        txn = cast(Transaction, self.txn)
        require(txn.step is TxnStep.RESERVING, "S1", f"ABORT of txn={txn.txn} in {txn.step.name} (rule M3)")
        self._broadcast(lambda: Abort(self.epoch, txn.txn))
        for rank in txn.handles:
            self._spend(rank, txn.runs, sign=-1)
        self.counters.refusals += 1
        self.backoff.refused(self.now)
        if txn.adopted:
            self._become(txn.runs, PageState.RETAINED)
            self.retained.append(Retained(txn.runs, txn.tries, cause))
        else:
            self._become(txn.runs, PageState.ABSENT)
        self.demand.refused(txn, cause)
        self._close(Verdict.ABORTED, cause)

    def cancel_retirement(self, why: str) -> None:
        """Take back a retirement of which no UNMAP was sent (rule M4). Its UNRETIRE is due at the next mark."""
        txn = cast(Transaction, self.txn)
        require(txn.step is TxnStep.DRAINING, "S4", f"UNRETIRE of txn={txn.txn} in {txn.step.name} (rule M4)")
        if txn.retained:
            self._become(txn.runs, PageState.RETAINED)
            self.retained.append(Retained(txn.runs, self.policy.map_retries, Cause(CauseKind.DEADLINE, LEADER, why)))
        else:
            self._become(txn.runs, PageState.PUBLISHED)
        self._due.append(Unretire(txn.txn))
        self._unretired[txn.txn] = () if txn.retained else txn.runs
        self.note(f"event=unretire txn={txn.txn} why={why!r}")
        self._close(Verdict.CANCELLED, None)

    def fail(self, cause: Cause, phase: str) -> None:
        """The coordinator fails; the first cause is kept and told to every rank."""
        if self.failure is not None:
            return
        self.failure = GroupDown(cause, phase)
        self.health = [Health.FAILED] * len(self.health)
        self.first_cause = [known or cause for known in self.first_cause]
        self.note(f"event=failed phase={phase!r} cause={cause}")
        for rank in self.ranks:
            if rank != LEADER:
                self._send(Rank(rank), Fail(self.epoch, cause))
        self._out.append(self.failure)

    def lose(self, cause: Cause) -> None:
        """A follower is lost: the coordinator fails, or only its epoch ends where the engine asked for that."""
        if not self.policy.rejoin:
            self.fail(cause, self.phase())
            return
        if self.failure is not None or self.lost is not None:
            return
        self.lost = cause
        self.note(f"event=epoch_down epoch={self.epoch} phase={self.phase()!r} cause={cause}")
        for rank in self.ranks:
            if rank not in (LEADER, cause.rank):
                self._send(Rank(rank), Reform(self.epoch, cause))
        epoch_change.resolve(self)
        self._out.append(EpochDown(cause))

    def take_due(self) -> list[Entry]:
        """Entries that no mark has carried; empties them."""
        due, self._due = self._due, []
        self._unretired.clear()
        return due

    def drop_open(self, state: PageState, cause: Cause) -> None:
        """The epoch ended with a transaction open: its pages enter ``state``."""
        txn = cast(Transaction, self.txn)
        self._become(txn.runs, state)
        self._close(_DROPPED[state], cause)

    def begin_epoch(self, epoch: Epoch, replica: Replica, peers: Sequence[Peer], now: Tick) -> None:
        """Every rank has joined ``epoch``: logical state starts again from the published runs.

        Args:
            epoch: the new epoch.
            replica: the leader rank's new replica.
            peers: one per rank; ``handles`` are those of their ``JOINED`` (rule M2).
            now: current tick.
        """
        require(epoch > self.epoch and self.txn is None and not self._due, "S8", f"epoch {epoch} after {self.epoch}")
        self.epoch = epoch
        self.replica = replica
        self.peers = list(peers)
        self.now = now
        self.lost = None
        self.backoff = Backoff(self.policy)
        self.demand = Demand(self)
        self.reclaim = Reclaim(self)
        self.limits = Limits(self)
        self.silence = Silence(self)

    def fail_closed(self, rank: Rank) -> None:
        """A rank has closed its coordinator while something here still needs it."""
        self.fail(Cause(CauseKind.CLOSED, rank, "its coordinator was closed while others still need it"), self.phase())

    def quiescent(self) -> bool:
        """A rank has said goodbye: nothing new is opened, the world is being closed."""
        return any(peer.left for peer in self.peers)

    def phase(self) -> str:
        """What is going on, for messages to people."""
        return "no open transaction" if self.txn is None else f"txn {self.txn.txn} {self.txn.step.value}"

    def note(self, text: str) -> None:
        """One line for the event ring."""
        self._out.append(Note(text))

    def send_query(self, rank: Rank, message: Message) -> None:
        """Send a read-only query."""
        self.counters.queries += 1
        self._send(rank, message)

    def resend_release(self, rank: Rank) -> None:
        """RELEASE is idempotent: repeat it with the same transaction number."""
        self._send(rank, Release(self.epoch, cast(Transaction, self.txn).txn))

    # ------------------------------------------------------------------ inner

    def _all_answered(self, txn: Transaction) -> None:
        match txn.step:
            case TxnStep.RESERVING:
                for rank, handles in txn.handles.items():
                    self.peers[rank].handles = handles
                self._enter(TxnStep.MAPPING)
                self._broadcast(lambda: Map(self.epoch, txn.txn))
            case TxnStep.MAPPING:
                self._mapped(txn)
            case TxnStep.DRAINING:
                self._enter(TxnStep.UNMAPPING)
                self._broadcast(lambda: Unmap(self.epoch, txn.txn))
            case TxnStep.UNMAPPING:
                self._enter(TxnStep.RELEASING)
                self._broadcast(lambda: Release(self.epoch, txn.txn))
            case TxnStep.RESTORING:
                self._restored(txn)
            case TxnStep.RELEASING:
                self._become(txn.runs, PageState.ABSENT)
                self._due.append(Reclaimed(txn.txn))
                self.counters.reclaimed_runs += len(txn.runs)
                self._close(Verdict.RECLAIMED, None)
            case TxnStep.CLOSED:
                require(False, "S1", f"txn={txn.txn} is closed and received an answer")

    def _mapped(self, txn: Transaction) -> None:
        if txn.cause is None:
            self._due.append(Publish(txn.txn, txn.runs))
            self.backoff.succeeded()
            self.counters.foreground_grows += txn.foreground
            self.demand.grew(txn)
            self._close(Verdict.PUBLISHED, None)
            return
        cause = txn.cause
        self._become(txn.runs, PageState.RETAINED)
        if txn.tries >= self.policy.map_retries:
            self._become(txn.runs, PageState.QUARANTINED)
            self._due.append(Quarantine(txn.runs, cause))
            self._degrade(txn.runs, cause)
        else:
            self.retained.append(Retained(txn.runs, txn.tries + 1, cause))
        self._close(Verdict.RETAINED, cause)

    def _restored(self, txn: Transaction) -> None:
        self.reclaim.failed()
        cause = cast(Cause, txn.cause)
        if txn.retained:
            self._become(txn.runs, PageState.RETAINED)
            self.retained.append(Retained(txn.runs, self.policy.map_retries, cause))
        else:
            self._due.append(Publish(txn.txn, txn.runs))
        self._close(Verdict.RESTORED, cause)

    def _retry_release(self, rank: Rank, txn: Transaction, cause: Cause) -> None:
        if txn.releases >= RELEASE_RETRIES:
            self._fail_domains(txn.runs, cause, "releasing memory that every rank has unmapped")
            return
        txn.releases += 1
        self.silence.expect(txn, rank)
        self.resend_release(rank)

    def _fail_domains(self, runs: tuple[Run, ...], cause: Cause, phase: str) -> None:
        for run in runs:
            self.first_cause[run.domain] = self.first_cause[run.domain] or cause
        self.fail(cause, phase)

    def _degrade(self, runs: tuple[Run, ...], cause: Cause) -> None:
        for run in runs:
            if self.health[run.domain] is Health.HEALTHY:
                self.health[run.domain] = Health.DEGRADED
                self.first_cause[run.domain] = cause
                self.note(f"event=degraded domain={run.domain} run={run} cause={cause}")

    def _on_beat(self, rank: Rank, peer: Peer, beat: Beat) -> None:
        peer.budget_bytes = beat.free_bytes
        peer.held_bytes = beat.held_bytes
        if self.txn is None and self.last_txn and beat.quiet_txn == self.last_txn:
            require(
                beat.handles == peer.handles,
                "S10",
                f"rank {rank} holds {beat.handles} handles per pool at rest, the leader counts {peer.handles}",
            )

    def _spend(self, rank: Rank, runs: tuple[Run, ...], sign: int = 1) -> None:
        peer = self.peers[rank]
        peer.budget_bytes -= sign * sum(run.count * peer.page_bytes[run.domain] for run in runs)

    def _new_txn(self, step: TxnStep, runs: tuple[Run, ...], deadline: int) -> Transaction:
        require(self.txn is None, "S6", f"a transaction is open ({self.phase()})")
        self.last_txn = Txn(self.last_txn + 1)
        self.txn = Transaction(self.last_txn, step, runs, self.now)
        for rank in self.ranks:
            self.silence.expect(self.txn, Rank(rank), deadline)
        names = " ".join(str(run) for run in runs)
        self.note(f"event=open txn={self.last_txn} step={step.value} runs=[{names}]")
        return self.txn

    def _enter(self, step: TxnStep) -> None:
        txn = cast(Transaction, self.txn)
        txn.enter(step, self.ranks, Tick(self.now + self.policy.growth_deadline))
        self.note(f"event=step txn={txn.txn} step={step.value}")

    def _close(self, verdict: Verdict, cause: Cause | None) -> None:
        txn = cast(Transaction, self.txn)
        grow = txn.grows
        txn.enter(TxnStep.CLOSED, self.ranks, self.now)
        self.txn = None
        self.counters.closed[verdict] += 1
        pages = sum(run.count for run in txn.runs)
        self.closed.append(
            Closed(txn.txn, verdict, grow, txn.foreground, pages, txn.started, self.now, txn.lag_steps, cause)
        )
        text = f"event=decided txn={txn.txn} verdict={verdict.value} us={self.now - txn.started}"
        self.note(text if cause is None else f"{text} cause={cause}")

    def _become(self, runs: tuple[Run, ...], state: PageState) -> None:
        for run in runs:
            self.tables[run.domain].become(run, state)

    def _broadcast(self, make: Callable[[], Message]) -> None:
        # The own rank last: its part is handled in this thread, and the others work meanwhile.
        for rank in reversed(self.ranks):
            self._send(Rank(rank), make())

    def _send(self, rank: Rank, message: Message) -> None:
        self.counters.messages += 1
        self._out.append(Send(rank, message))
