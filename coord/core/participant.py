"""The physical side of one rank: which runs hold memory here, and what became of each transaction.

Every rank has one, the leader too. It receives the leader's messages, asks for driver work and answers.
It never decides a transaction: after ``RESERVED`` or ``MAPPED`` it waits for the leader.

State of a run on this rank::

    ABSENT --reserve--> RESERVED --map--> MAPPED --publish--> PUBLISHED --retire--> RETIRED
      ^ ^                  |  |             ^  |retire(retained) ^    |unretire        |unmap
      | +------abort-------+  +-map failed->PARTIAL              +----+                v
      +------------------------------release--------------------------------------- UNMAPPED
                                                          RETIRED/UNMAPPED --restore--> MAPPED

MAPPED and PARTIAL runs that were not published are *retained*: only a retry of the identical runs may
adopt them, or a logged retirement may give them back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import epoch as epoch_change
from .effects import Effect, Note, Send, TakeFence, Work, WorkDone, WorkKind
from .invariants import require
from .messages import (
    Abort,
    Drained,
    Fail,
    Joined,
    Map,
    MapFailed,
    Mapped,
    Message,
    Query,
    Refused,
    Release,
    Released,
    ReleaseFailed,
    Reserve,
    Reserved,
    Restore,
    Restored,
    RestoreFailed,
    Snapshot,
    State,
    TxnMessage,
    Unmap,
    UnmapFailed,
    Unmapped,
)
from .types import Cause, DomainId, Epoch, PageId, Rank, Run, Txn, TxnPhase

LEADER = Rank(0)

FINISHED_MAX = 4096
"""Finished transactions whose outcome is remembered for late or repeated messages."""


class RunState(Enum):
    """What this rank holds for a run. ABSENT runs have no record."""

    RESERVED = "reserved"
    MAPPED = "mapped"
    PARTIAL = "partial"
    PUBLISHED = "published"
    RETIRED = "retired"
    UNMAPPED = "unmapped"
    STUCK = "stuck"
    """The driver refused to release it; the handle stays in the count."""


_RUN_EDGES: dict[RunState | None, frozenset[RunState | None]] = {
    None: frozenset({RunState.RESERVED}),
    RunState.RESERVED: frozenset({None, RunState.MAPPED, RunState.PARTIAL}),
    RunState.MAPPED: frozenset({RunState.MAPPED, RunState.PARTIAL, RunState.PUBLISHED, RunState.RETIRED}),
    RunState.PARTIAL: frozenset({RunState.MAPPED, RunState.PARTIAL, RunState.RETIRED}),
    RunState.PUBLISHED: frozenset({RunState.RETIRED}),
    RunState.RETIRED: frozenset({RunState.PUBLISHED, RunState.MAPPED, RunState.PARTIAL, RunState.UNMAPPED}),
    RunState.UNMAPPED: frozenset({None, RunState.MAPPED, RunState.PARTIAL, RunState.UNMAPPED, RunState.STUCK}),
    RunState.STUCK: frozenset({None, RunState.STUCK}),
}
"""The transition table; ``None`` is ABSENT. ``Participant._become`` refuses every edge that is not here."""

_RETAINED = (RunState.MAPPED, RunState.PARTIAL)

_TOUCHED = (TxnPhase.UNMAPPED, TxnPhase.UNMAP_FAILED, TxnPhase.RESTORE_FAILED)
"""Phases after which a retired run may be partly unmapped."""

_DONE_PHASE: dict[WorkKind, tuple[TxnPhase, TxnPhase]] = {
    WorkKind.RESERVE: (TxnPhase.RESERVED, TxnPhase.REFUSED),
    WorkKind.ABORT: (TxnPhase.ABORTED, TxnPhase.ABORTED),
    WorkKind.MAP: (TxnPhase.MAPPED, TxnPhase.MAP_FAILED),
    WorkKind.UNMAP: (TxnPhase.UNMAPPED, TxnPhase.UNMAP_FAILED),
    WorkKind.RESTORE: (TxnPhase.RESTORED, TxnPhase.RESTORE_FAILED),
    WorkKind.RELEASE: (TxnPhase.RELEASED, TxnPhase.RELEASE_FAILED),
}


@dataclass(slots=True)
class _Record:
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
        self._runs: dict[Run, RunState] = {}
        self._held: dict[DomainId, list[Run]] = {}
        """The keys of ``_runs`` per domain, by first page."""
        self._records: OrderedDict[Txn, _Record] = OrderedDict()
        self._join: deque[Work] = deque()
        self._joining = False
        self._out: list[Effect] = []

    # ------------------------------------------------------------------ reading

    def take(self) -> list[Effect]:
        """Effects since the last call, in order."""
        out, self._out = self._out, []
        return out

    def phase(self, txn: Txn) -> TxnPhase:
        """What this rank answers to a query about ``txn``."""
        record = self._records.get(txn)
        if record is None:
            return TxnPhase.UNKNOWN
        return TxnPhase.RUNNING if record.queued else record.phase

    def runs(self, *states: RunState) -> list[Run]:
        """Runs in one of ``states`` (all runs that hold memory, without arguments), in id order."""
        return sorted(run for run, state in self._runs.items() if not states or state in states)

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
        states = [self._runs.get(run) for run in message.runs]
        adopted = all(state in _RETAINED for state in states)
        if not adopted and any(self._overlaps_held(run) for run in message.runs):
            held = [f"{run}={state}" for run, state in zip(message.runs, states, strict=True)]
            require(False, "S6", f"rank {self.rank}: RESERVE txn={message.txn} over runs that hold memory here: {held}")
        record = self._remember(_Record(message.txn, message.runs, TxnPhase.RUNNING, adopted=adopted))
        if not adopted:
            self._become(message.runs, RunState.RESERVED)
        self._issue(record, WorkKind.RESERVE)

    def _adopt_cancelled(self, runs: tuple[Run, ...]) -> None:
        """A RESERVE over retained runs in retirement says that it was cancelled; the UNRETIRE follows in the stream."""
        if any(self._runs.get(run) is not RunState.RETIRED for run in runs):
            return
        for record in reversed(self._records.values()):
            if record.retained and record.runs == runs and record.phase in (TxnPhase.RETIRED, TxnPhase.DRAINED):
                if not record.queued:
                    self._take_back(record)
                return

    def _on_abort(self, message: Abort) -> None:
        record = self._records.get(message.txn)
        if record is None:
            self._remember(_Record(message.txn, (), TxnPhase.ABORTED))
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
            self._become(record.runs, None)
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
            if self._runs.get(run) is not RunState.MAPPED:
                require(False, "S3", f"rank {self.rank}: PUBLISH of {run}, not mapped")
        self._become(runs, RunState.PUBLISHED)

    def retire(self, txn: Txn, runs: tuple[Run, ...], retained: bool) -> None:
        """A ``Retire`` entry took effect on this rank; asks for a fence."""
        allowed = _RETAINED if retained else (RunState.PUBLISHED,)
        if retained:
            # A rank that was restarted meanwhile holds nothing for runs that were never published (rule M1).
            runs = tuple(run for run in runs if run in self._runs)
        before: dict[Run, RunState] = {}
        for run in runs:
            state = self._runs.get(run)
            require(state in allowed, "S6", f"rank {self.rank}: RETIRE txn={txn} of {run} in state {state}")
            assert state is not None
            before[run] = state
        record = _Record(txn, runs, TxnPhase.RETIRED, retained=retained, before=before)
        self._remember(record)
        self.newest_txn = Txn(max(self.newest_txn, txn))
        self._become(runs, RunState.RETIRED)
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

    def _take_back(self, record: _Record) -> None:
        for run in record.runs:
            self._become((run,), record.before[run])
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
        self._join = epoch_change.plan_join(self, message)
        self._joining = True
        self._records.clear()
        self._continue_join()

    @property
    def joining(self) -> bool:
        """Whether the work of a snapshot is not finished (or has failed)."""
        return self._joining

    def settle_published(self, run: Run) -> bool:
        """A run that the snapshot publishes: whether it is mapped here without further driver work."""
        state = self._runs[run]
        touched = any(run in record.runs and record.phase in _TOUCHED for record in self._records.values())
        require(
            state not in (RunState.RESERVED, RunState.PARTIAL, RunState.STUCK),
            "S3",
            f"rank {self.rank}: the snapshot publishes {run}, which is {state.value} here",
        )
        if state is RunState.UNMAPPED or (state is RunState.RETIRED and touched):
            return False
        if state is not RunState.PUBLISHED:
            self._become((run,), RunState.PUBLISHED)
        return True

    def unmapped_runs(self) -> list[Run]:
        """Runs that hold memory here and are mapped no more."""
        return self.runs(RunState.UNMAPPED, RunState.STUCK)

    def settle_retained(self, run: Run) -> None:
        """A run that the snapshot retains stays as it is; what is not known to be mapped counts as partial."""
        if self._runs[run] not in _RETAINED:
            self._become((run,), RunState.PARTIAL)

    def reservation_of(self, run: Run) -> Txn | None:
        """Transaction that holds handles for a run which was never mapped."""
        if self._runs[run] is not RunState.RESERVED:
            return None
        return next(txn for txn, record in reversed(self._records.items()) if run in record.runs)

    def runs_of(self, txn: Txn) -> tuple[Run, ...]:
        """Runs of a transaction of this epoch."""
        return self._records[txn].runs

    def _continue_join(self) -> None:
        if self._join:
            self._out.append(self._join[0])
            return
        self._joining = False
        self._send(Joined(self.epoch, self.handles))

    def _join_done(self, done: WorkDone) -> None:
        work = self._join.popleft()
        require(
            (work.kind, work.txn) == (done.kind, done.txn),
            "S6",
            f"rank {self.rank}: {done.kind.name} finished while the join waits for {work.kind.name}",
        )
        if done.cause is not None:
            self._join.clear()
            self._send(Fail(self.epoch, done.cause))
            return
        match work.kind:
            case WorkKind.UNMAP:
                self._become(work.runs, RunState.UNMAPPED)
            case WorkKind.ABORT | WorkKind.RELEASE:
                self._become(work.runs, None)
            case WorkKind.RESERVE:
                self._become(work.runs, RunState.RESERVED)
            case WorkKind.MAP | WorkKind.RESTORE:
                self._become(work.runs, RunState.MAPPED)
                self._become(work.runs, RunState.PUBLISHED)
        self._continue_join()

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
        if self._joining:
            self.handles = done.handles
            self._join_done(done)
            return
        record = self._records[done.txn]
        require(
            bool(record.queued) and record.queued[0] is done.kind,
            "S6",
            f"rank {self.rank}: {done.kind.name} of txn={done.txn} finished out of order, issued {record.queued}",
        )
        record.queued.pop(0)
        self.handles = done.handles
        good, bad = _DONE_PHASE[done.kind]
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

    def _settle_runs(self, record: _Record, done: WorkDone) -> None:
        """Move the runs of a transaction to where its driver work has left them."""
        ok = done.cause is None
        match done.kind:
            case WorkKind.RESERVE if not ok and not record.adopted and not record.aborting:
                self._become(record.runs, None)
            case WorkKind.MAP:
                self._become(record.runs, RunState.MAPPED if ok else RunState.PARTIAL)
            case WorkKind.UNMAP if ok:
                self._become(record.runs, RunState.UNMAPPED)
            case WorkKind.RESTORE if ok:
                self._become(record.runs, RunState.MAPPED)
            case WorkKind.RELEASE:
                self._become(record.runs, None if ok else RunState.STUCK)
            case _:
                pass

    # ------------------------------------------------------------------ inner

    def _answer_again(self, txn: Txn) -> None:
        """Send the answer that fits the phase (S9: duplicates get the same answer). Silent while work runs."""
        record = self._records[txn]
        if record.queued:
            return
        cause = record.cause
        match record.phase:
            case TxnPhase.RESERVED:
                self._send(Reserved(self.epoch, txn, self.handles))
            case TxnPhase.REFUSED if cause is not None:
                self._send(Refused(self.epoch, txn, cause))
            case TxnPhase.MAPPED:
                self._send(Mapped(self.epoch, txn))
            case TxnPhase.MAP_FAILED if cause is not None:
                self._send(MapFailed(self.epoch, txn, cause))
            case TxnPhase.UNMAPPED:
                self._send(Unmapped(self.epoch, txn))
            case TxnPhase.UNMAP_FAILED if cause is not None:
                self._send(UnmapFailed(self.epoch, txn, cause))
            case TxnPhase.RESTORED:
                self._send(Restored(self.epoch, txn))
            case TxnPhase.RESTORE_FAILED if cause is not None:
                self._send(RestoreFailed(self.epoch, txn, cause))
            case TxnPhase.RELEASED:
                self._send(Released(self.epoch, txn, self.handles))
            case TxnPhase.RELEASE_FAILED if cause is not None:
                self._send(ReleaseFailed(self.epoch, txn, cause))
            case _:
                pass

    def _known(self, message: TxnMessage) -> _Record:
        record = self._records.get(message.txn)
        require(
            record is not None,
            "S6",
            f"rank {self.rank}: {type(message).__name__.upper()} of unknown txn={message.txn}",
        )
        assert record is not None
        return record

    def _remember(self, record: _Record) -> _Record:
        self._records[record.txn] = record
        while len(self._records) > FINISHED_MAX:
            self._records.popitem(last=False)
        return record

    def _issue(self, record: _Record, kind: WorkKind) -> None:
        record.queued.append(kind)
        record.issued.add(kind)
        self._out.append(Work(kind, record.txn, record.runs))

    def _overlaps_held(self, run: Run) -> bool:
        """Whether a page of the run holds memory here."""
        # Held runs are disjoint: only the last one that begins before this run's end can reach into it.
        held = self._held.get(run.domain, [])
        at = bisect_left(held, PageId(run.end), key=_first) - 1
        return at >= 0 and held[at].end > run.first

    def _become(self, runs: tuple[Run, ...], state: RunState | None) -> None:
        """The only writer of run states; refuses an edge that is not in the table."""
        for run in runs:
            old = self._runs.get(run)
            if state not in _RUN_EDGES[old]:
                require(False, "S6", f"rank {self.rank}: {run} from {old} to {state}")
            if state is None:
                if self._runs.pop(run, None) is not None:
                    held = self._held[run.domain]
                    held.pop(bisect_left(held, run.first, key=_first))
                continue
            if old is None:
                insort(self._held.setdefault(run.domain, []), run, key=_first)
            self._runs[run] = state

    def _enter(self, record: _Record, phase: TxnPhase, cause: Cause | None) -> None:
        record.phase = phase
        record.cause = cause
        text = f"event=participant rank={self.rank} epoch={self.epoch} txn={record.txn} phase={phase.name.lower()}"
        self._out.append(Note(text if cause is None else f"{text} cause={cause}"))

    def _send(self, message: Message) -> None:
        self._out.append(Send(LEADER, message))


def _first(run: Run) -> PageId:
    return run.first


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
