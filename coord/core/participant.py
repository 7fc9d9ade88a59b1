"""The physical side of one rank: it receives the leader's messages, asks for driver work and answers.

Every rank has one, the leader too. It never decides a transaction: after ``RESERVED`` or ``MAPPED`` it waits for
the leader. What the rank holds is in :mod:`.runs`, what it knows of each transaction in :mod:`.records`, its way
into an epoch in :mod:`.join`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .effects import Effect, Note, Send, TakeFence, Work, WorkDone, WorkKind
from .invariants import require
from .join import Join
from .messages import (
    Abort,
    Drained,
    Fail,
    Joined,
    Map,
    Message,
    Query,
    Release,
    Reserve,
    Restore,
    Snapshot,
    State,
    TxnMessage,
    Unmap,
)
from .records import PHASE_AFTER, Record, Records, answer_of
from .runs import RETAINED, RunState, RunTable
from .types import Cause, Epoch, Rank, Run, Txn, TxnPhase

LEADER = Rank(0)


class Participant:
    """Physical state machine of one rank.

    Args:
        rank: this rank.
        epoch: epoch of the links; messages of another epoch change nothing (S8).
        pools: number of pools in the world's list, for handle counts.

    Threads: not thread-safe; the agent calls it under its lock.
    """

    def __init__(self, rank: Rank, epoch: Epoch, pools: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.handles: tuple[int, ...] = (0,) * pools
        self.stale_messages = 0
        self.newest_txn = Txn(0)
        self.held = RunTable(rank)
        self._records = Records()
        self._join: Join | None = None
        self._out: list[Effect] = []

    # ------------------------------------------------------------------ reading

    def take(self) -> list[Effect]:
        """Effects since the last call, in order."""
        out, self._out = self._out, []
        return out

    def phase(self, txn: Txn) -> TxnPhase:
        """What this rank answers to a query about ``txn``."""
        return self._records.seen(txn)

    def quiet_txn(self) -> Txn:
        """Newest transaction seen, or 0 while driver work is queued or a reservation waits for its verdict.

        A beat that leaves before the ABORT arrives counts handles that the leader no longer does.
        """
        busy = any(record.queued or record.phase is TxnPhase.RESERVED for record in self._records.values())
        return Txn(0) if busy else self.newest_txn

    # ------------------------------------------------------------------ messages

    def on_message(self, message: TxnMessage) -> None:
        """One message of the leader.

        Raises:
            InvariantViolation: the message contradicts what this rank knows (S4, S6).
        """
        if message.epoch != self.epoch:
            self.stale_messages += 1
            return
        handler = _HANDLERS.get(type(message))
        require(handler is not None, "S9", f"rank {self.rank} received {type(message).__name__}, not meant for it")
        assert handler is not None
        if not isinstance(message, Query):
            self.newest_txn = Txn(max(self.newest_txn, message.txn))
        handler(self, message)

    def _on_reserve(self, message: Reserve) -> None:
        if message.txn in self._records:
            self._answer_again(message.txn)
            return
        self._adopt_cancelled(message.runs)
        states = [self.held.state(run) for run in message.runs]
        adopted = all(state in RETAINED for state in states)
        if not adopted and any(self.held.overlaps(run) for run in message.runs):
            held = [f"{run}={state}" for run, state in zip(message.runs, states, strict=True)]
            require(False, "S6", f"rank {self.rank}: RESERVE txn={message.txn} over runs that hold memory here: {held}")
        record = self._records.remember(Record(message.txn, message.runs, TxnPhase.RUNNING, adopted=adopted))
        if not adopted:
            self.held.become(message.runs, RunState.RESERVED)
        self._issue(record, WorkKind.RESERVE)

    def _adopt_cancelled(self, runs: tuple[Run, ...]) -> None:
        """A RESERVE over retained runs in retirement says that it was cancelled; the UNRETIRE follows in the stream."""
        if any(self.held.state(run) is not RunState.RETIRED for run in runs):
            return
        for record in reversed(self._records.values()):
            if record.retained and record.runs == runs and record.phase in (TxnPhase.RETIRED, TxnPhase.DRAINED):
                if not record.queued:
                    self._take_back(record)
                return

    def _on_abort(self, message: Abort) -> None:
        record = self._records.get(message.txn)
        if record is None:
            self._records.remember(Record(message.txn, (), TxnPhase.ABORTED))
            return
        if record.phase in (TxnPhase.ABORTED, TxnPhase.REFUSED) or record.aborting:
            return
        require(
            record.phase in (TxnPhase.RUNNING, TxnPhase.RESERVED) and record.queued in ([], [WorkKind.RESERVE]),
            "S1",
            f"rank {self.rank}: ABORT txn={message.txn} in phase {record.phase.name}, after MAP (rule M3)",
        )
        record.aborting = True
        # The runs are free for the leader from here on: its next RESERVE may name them before the work behind this
        # one is done. Work is done in order, so that the next RESERVE finds what this ABORT has left.
        if not record.adopted:
            self.held.become(record.runs, None)
        self._issue(record, WorkKind.ABORT)

    def _on_map(self, message: Map) -> None:
        record = self._known(message)
        if WorkKind.MAP in record.issued:
            self._answer_again(message.txn)
            return
        require(
            record.phase is TxnPhase.RESERVED and not record.aborting,
            "S1",
            f"rank {self.rank}: MAP txn={message.txn} in phase {record.phase.name}",
        )
        self._issue(record, WorkKind.MAP)

    def _on_unmap(self, message: Unmap) -> None:
        record = self._known(message)
        if WorkKind.UNMAP in record.issued:
            self._answer_again(message.txn)
            return
        require(
            record.phase is TxnPhase.DRAINED,
            "S4",
            f"rank {self.rank}: UNMAP txn={message.txn} in phase {record.phase.name}, not drained here (rule M4)",
        )
        self._issue(record, WorkKind.UNMAP)

    def _on_restore(self, message: Restore) -> None:
        record = self._known(message)
        if record.restoring:
            self._answer_again(message.txn)
            return
        require(
            record.phase in (TxnPhase.DRAINED, TxnPhase.UNMAPPED, TxnPhase.UNMAP_FAILED),
            "S1",
            f"rank {self.rank}: RESTORE txn={message.txn} in phase {record.phase.name}",
        )
        record.restoring = True
        self._issue(record, WorkKind.RESTORE)

    def _on_release(self, message: Release) -> None:
        record = self._known(message)
        if record.queued or record.phase is TxnPhase.RELEASED:
            self._answer_again(message.txn)
            return
        require(
            record.phase in (TxnPhase.UNMAPPED, TxnPhase.RELEASE_FAILED) and not record.restoring,
            "S4",
            f"rank {self.rank}: RELEASE txn={message.txn} in phase {record.phase.name} (rule M9)",
        )
        self._issue(record, WorkKind.RELEASE)

    def _on_query(self, message: Query) -> None:
        record = self._records.get(message.txn)
        cause = record.cause if record is not None else None
        phase = self.phase(message.txn)
        self._send(State(self.epoch, message.txn, message.number, phase, cause, self.handles))

    # ------------------------------------------------------------------ log entries

    def publish(self, txn: Txn, runs: tuple[Run, ...]) -> None:
        """A ``Publish`` entry took effect on this rank."""
        record = self._records.get(txn)
        phase = self.phase(txn)
        require(
            record is not None and phase in (TxnPhase.MAPPED, TxnPhase.RESTORED) and record.runs == runs,
            "S2",
            f"rank {self.rank}: PUBLISH txn={txn} {_names(runs)} but this rank is in phase {phase.name}",
        )
        for run in runs:
            if self.held.state(run) is not RunState.MAPPED:
                require(False, "S3", f"rank {self.rank}: PUBLISH of {run}, not mapped")
        self.held.become(runs, RunState.PUBLISHED)

    def retire(self, txn: Txn, runs: tuple[Run, ...], retained: bool) -> None:
        """A ``Retire`` entry took effect on this rank; asks for a fence."""
        allowed = RETAINED if retained else (RunState.PUBLISHED,)
        if retained:
            # A rank that was restarted meanwhile holds nothing for runs that were never published (rule M1).
            runs = tuple(run for run in runs if self.held.state(run) is not None)
        before: dict[Run, RunState] = {}
        for run in runs:
            state = self.held.state(run)
            require(state in allowed, "S6", f"rank {self.rank}: RETIRE txn={txn} of {run} in state {state}")
            assert state is not None
            before[run] = state
        record = Record(txn, runs, TxnPhase.RETIRED, retained=retained, before=before)
        self._records.remember(record)
        self.newest_txn = Txn(max(self.newest_txn, txn))
        self.held.become(runs, RunState.RETIRED)
        self._out.append(TakeFence(txn))

    def unretire(self, txn: Txn) -> None:
        """An ``Unretire`` entry took effect on this rank."""
        record = self._records.get(txn)
        if record is not None and record.phase is TxnPhase.CANCELLED:
            return
        require(
            record is not None and record.phase in (TxnPhase.RETIRED, TxnPhase.DRAINED) and not record.queued,
            "S4",
            f"rank {self.rank}: UNRETIRE txn={txn} in phase {self.phase(txn).name}, after UNMAP (rule M4)",
        )
        assert record is not None
        self._take_back(record)

    def _take_back(self, record: Record) -> None:
        for run in record.runs:
            self.held.become((run,), record.before[run])
        self._enter(record, TxnPhase.CANCELLED, None)

    # ------------------------------------------------------------------ change of epoch

    def on_snapshot(self, message: Snapshot) -> None:
        """A new epoch begins: hold what the snapshot names and nothing else, then answer ``JOINED``.

        No driver work may be under way; the agent finishes it first (rule M2).
        """
        require(
            all(not record.queued for record in self._records.values()),
            "S8",
            f"rank {self.rank}: snapshot of epoch {message.epoch} while driver work is under way",
        )
        self.epoch = message.epoch
        self._join = Join(self.rank, self.held, self._records, message)
        self._records.clear()
        self._continue(self._join)

    @property
    def joining(self) -> bool:
        """Whether the work of a snapshot is not finished (or has failed)."""
        return self._join is not None

    def _continue(self, join: Join) -> None:
        work = join.work
        if work is not None:
            self._out.append(work)
            return
        self._join = None
        self._send(Joined(self.epoch, self.handles))

    # ------------------------------------------------------------------ completions

    def on_fence(self, txn: Txn, lag_steps: int) -> None:
        """The fence of a retirement has passed. Ignored if the retirement was cancelled meanwhile."""
        record = self._records.get(txn)
        if record is None or record.phase is not TxnPhase.RETIRED:
            return
        self._enter(record, TxnPhase.DRAINED, None)
        self._send(Drained(self.epoch, txn, lag_steps))

    def on_work_done(self, done: WorkDone) -> None:
        """Driver work has finished; the oldest issued first."""
        if self._join is not None:
            self.handles = done.handles
            self._join.done(done)
            if done.cause is None:
                self._continue(self._join)
            else:
                self._send(Fail(self.epoch, done.cause))
            return
        record = self._records[done.txn]
        require(
            bool(record.queued) and record.queued[0] is done.kind,
            "S6",
            f"rank {self.rank}: {done.kind.name} of txn={done.txn} finished out of order, issued {record.queued}",
        )
        record.queued.pop(0)
        self.handles = done.handles
        good, bad = PHASE_AFTER[done.kind]
        self._enter(record, good if done.cause is None else bad, done.cause)
        self._settle_runs(record, done)
        if record.aborting and done.kind is WorkKind.RESERVE:
            return
        if record.restoring and done.kind is WorkKind.UNMAP:
            return
        if done.kind is not WorkKind.ABORT:
            self._answer_again(done.txn)
        elif done.cause is not None:
            # A handle that cannot be given back stays in the count; the leader's would differ for ever (S7, S10).
            self._send(Fail(self.epoch, done.cause))

    def _settle_runs(self, record: Record, done: WorkDone) -> None:
        """Move the runs of a transaction to where its driver work has left them."""
        ok = done.cause is None
        match done.kind:
            case WorkKind.RESERVE if not ok and not record.adopted and not record.aborting:
                self.held.become(record.runs, None)
            case WorkKind.MAP:
                self.held.become(record.runs, RunState.MAPPED if ok else RunState.PARTIAL)
            case WorkKind.UNMAP if ok:
                self.held.become(record.runs, RunState.UNMAPPED)
            case WorkKind.RESTORE if ok:
                self.held.become(record.runs, RunState.MAPPED)
            case WorkKind.RELEASE:
                self.held.become(record.runs, None if ok else RunState.STUCK)
            case _:
                pass

    # ------------------------------------------------------------------ inner

    def _answer_again(self, txn: Txn) -> None:
        """Send the answer that fits the phase. Silent while work runs."""
        answer = answer_of(self._records[txn], self.epoch, self.handles)
        if answer is not None:
            self._send(answer)

    def _known(self, message: TxnMessage) -> Record:
        record = self._records.get(message.txn)
        require(
            record is not None,
            "S6",
            f"rank {self.rank}: {type(message).__name__.upper()} of unknown txn={message.txn}",
        )
        assert record is not None
        return record

    def _issue(self, record: Record, kind: WorkKind) -> None:
        record.queued.append(kind)
        record.issued.add(kind)
        self._out.append(Work(kind, record.txn, record.runs))

    def _enter(self, record: Record, phase: TxnPhase, cause: Cause | None) -> None:
        record.enter(phase, cause)
        text = f"event=participant rank={self.rank} epoch={self.epoch} txn={record.txn} phase={phase.name.lower()}"
        self._out.append(Note(text if cause is None else f"{text} cause={cause}"))

    def _send(self, message: Message) -> None:
        self._out.append(Send(LEADER, message))


def _names(runs: tuple[Run, ...]) -> str:
    return " ".join(str(run) for run in runs)


_HANDLERS: dict[type[TxnMessage], Callable[[Participant, Any], None]] = {
    Reserve: Participant._on_reserve,
    Abort: Participant._on_abort,
    Map: Participant._on_map,
    Unmap: Participant._on_unmap,
    Restore: Participant._on_restore,
    Release: Participant._on_release,
    Query: Participant._on_query,
}
