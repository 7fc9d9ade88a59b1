"""The leader: decides every grow and reclaim, and when its outcome enters the log.

Sans-IO. Inputs are messages of participants (its own rank's too), ticks of a clock, link news and the
calls of its scheduler thread. Outputs are effects (:mod:`.effects`) and marks. Its parts:

================  ========================================================================
:mod:`.demand`    what it wants: growth for a waiting operation, growth ahead of demand
:mod:`.memory`    what the ranks could still back
:mod:`.reclaim`   what it gives back
:mod:`.commit`    the one open transaction, from RESERVE or RETIRE to its verdict
:mod:`.silence`   missing answers and missing beats
:mod:`.calm`      steps in which there is nothing to decide
:mod:`.log`       entries that the next mark carries
:mod:`.pages`     which pages exist for whom
:mod:`.limits`    limits of a controller
:mod:`.epoch`     what becomes of all that when an epoch ends
================  ========================================================================

Quantities are in :mod:`.policy`; what is remembered of ranks and in counters in :mod:`.ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import epoch as epoch_change
from .calm import Calm
from .commit import Commit
from .demand import Demand
from .effects import Effect, EpochDown, GroupDown, Note, Send
from .entries import Entry, Evict, Grant, Mark, PositionKind, Publish
from .invariants import require
from .ledger import LEADER, Counters, Peer
from .limits import Limits
from .log import Log
from .memory import Memory
from .messages import ANSWERS, Beat, Bye, Fail, Message, Reform, State, TxnMessage
from .pages import PageState, PageTable
from .policy import Backoff, Policy
from .reclaim import Reclaim
from .replica import Replica
from .silence import Silence
from .transaction import TxnStep
from .types import Cause, CauseKind, DomainId, Epoch, Health, Rank, Run, Tick


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
        self.backoff = Backoff(policy)
        self.counters = Counters()
        self.now = now
        self.log = Log()
        self.commit = Commit(self)
        self.memory = Memory(self)
        self.demand = Demand(self)
        self.reclaim = Reclaim(self)
        self.limits = Limits(self)
        self.silence = Silence(self)
        self.calm = Calm(self)
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

    def due_blocks(self, domain: DomainId) -> int:
        """Blocks that the next mark will publish in a domain."""
        return self.log.due_pages(domain) * self.replica.blocks_per_page[domain]

    def phase(self) -> str:
        """What is going on, for messages to people."""
        txn = self.commit.txn
        return "no open transaction" if txn is None else f"txn {txn.txn} {txn.step.value}"

    def quiescent(self) -> bool:
        """A rank has said goodbye: nothing new is opened, the world is being closed."""
        return any(peer.left for peer in self.peers)

    # ------------------------------------------------------------------ inputs

    def on_message(self, rank: Rank, message: Message, now: Tick) -> None:
        """A message of a rank's link (or of the leader rank's own participant).

        Raises:
            InvariantViolation: the rank's state contradicts the leader's (S10).
        """
        self.calm.ends()
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
                self.commit.answer(rank, message)
            case _:
                self.counters.stale_answers += 1
        self.demand.advance()

    def tick(self, now: Tick) -> None:
        """Time has passed: deadlines, leases, queries. That alone ends no calm: nothing of them is open in one."""
        self.now = now
        if self.active:
            self.silence.tick()
            self.demand.advance()

    def on_link_down(self, rank: Rank, reason: str, *, eof: bool, now: Tick) -> None:
        """A follower's link has ended. After its goodbye that is no news."""
        self.calm.ends()
        self.now = now
        if self.peers[rank].left:
            return
        kind = CauseKind.RANK_LOST if eof else CauseKind.RANK_HUNG
        self.lose(Cause(kind, rank, reason))

    def evict(self, tokens: int) -> None:
        """Log an eviction of ``tokens`` tokens at the next mark; none is logged in an epoch that has ended."""
        self.calm.ends()
        if tokens > 0 and self.active:
            self.log.append(Evict(tokens))

    def compact(self) -> None:
        """Log, as an eviction of nothing, the point at which every rank may move together what its cache keeps."""
        self.calm.ends()
        if self.active:
            self.log.append(Evict(0))

    def mark(self, kind: PositionKind, position: int, now: Tick, grant: bool | None = None) -> Mark:
        """Close the log up to here: :meth:`close_log` and :meth:`seal`.

        The caller broadcasts the mark and applies it on this rank in the same call, with no list operation
        in between (rule M5).

        Args:
            kind: step or operation.
            position: number of the step or operation.
            now: current tick.
            grant: verdict of the waiting operation, for ``PositionKind.OP``.
        """
        entries = self.close_log(kind, now)
        if grant is not None:
            entries.append(Grant(position, grant))
        return self.seal(kind, position, entries)

    def close_log(self, kind: PositionKind, now: Tick) -> list[Entry]:
        """The entries of a mark: what is due, what is retired at this very point, changed capacity.

        Where there are none and nobody waits for a mark, none has to be sealed and sent.
        """
        self.calm.ends()
        self.now = now
        if kind is PositionKind.STEP:
            self.demand.step_ends()
        entries = self.log.take(kind)
        for entry in entries:
            if isinstance(entry, Publish):
                self.become(entry.runs, PageState.PUBLISHED)
                if kind is PositionKind.OP:
                    self.demand.published_inside(entry.runs)
        if kind is PositionKind.STEP and self.active:
            entries.extend(self.reclaim.pick())
        entries.extend(self.memory.changed())
        return entries

    def seal(self, kind: PositionKind, position: int, entries: Sequence[Entry]) -> Mark:
        """The mark with these entries of :meth:`close_log`."""
        settled = kind is PositionKind.STEP and self.demand.settled(entries)
        replica = self.replica
        return Mark(
            self.epoch, kind, position, replica.next_index, tuple(entries), replica.op_index, replica.digest, settled
        )

    # ------------------------------------------------------------------ failure and change of epoch

    def fail(self, cause: Cause, phase: str) -> None:
        """The coordinator fails; the first cause is kept and told to every rank."""
        self.calm.ends()
        if self.failure is not None:
            return
        self.failure = GroupDown(cause, phase)
        self.health = [Health.FAILED] * len(self.health)
        self.first_cause = [known or cause for known in self.first_cause]
        self.note(f"event=failed phase={phase!r} cause={cause}")
        for rank in self.ranks:
            if rank != LEADER:
                self.send(Rank(rank), Fail(self.epoch, cause))
        self._out.append(self.failure)

    def lose(self, cause: Cause) -> None:
        """A follower is lost: the coordinator fails, or only its epoch ends where the engine asked for that."""
        if not self.policy.rejoin:
            self.fail(cause, self.phase())
            return
        if self.failure is not None or self.lost is not None:
            return
        self.calm.ends()
        self.lost = cause
        self.note(f"event=epoch_down epoch={self.epoch} phase={self.phase()!r} cause={cause}")
        for rank in self.ranks:
            if rank not in (LEADER, cause.rank):
                self.send(Rank(rank), Reform(self.epoch, cause))
        epoch_change.resolve(self)
        self._out.append(EpochDown(cause))

    def begin_epoch(self, epoch: Epoch, replica: Replica, peers: Sequence[Peer], now: Tick) -> None:
        """Every rank has joined ``epoch``: logical state starts again from the published runs.

        Args:
            epoch: the new epoch.
            replica: the leader rank's new replica.
            peers: one per rank; ``handles`` are those of their ``JOINED`` (rule M2).
            now: current tick.
        """
        require(
            epoch > self.epoch and self.commit.txn is None and not self.log.due(),
            "S8",
            f"epoch {epoch} after {self.epoch}",
        )
        self.epoch = epoch
        self.replica = replica
        self.peers = list(peers)
        self.now = now
        self.lost = None
        self.backoff = Backoff(self.policy)
        self.memory = Memory(self)
        self.demand = Demand(self)
        self.reclaim = Reclaim(self)
        self.limits = Limits(self)
        self.silence = Silence(self)
        self.calm = Calm(self)

    @staticmethod
    def _enough_again(peer: Peer, short: Cause) -> int:
        """Bytes that a rank has to exceed before its last refusal stops being the known answer.

        What was asked for, where there was less. Else clearly more than there was: a refusal that free memory does not
        explain would be repeated at every beat that says a little more.
        """
        had = short.free_bytes - short.reserve_bytes
        if had < short.required_bytes:
            return short.required_bytes - 1
        return had + max(had // 8, min(filter(None, peer.page_bytes), default=0))

    def fail_closed(self, rank: Rank) -> None:
        """A rank has closed its coordinator while something here still needs it."""
        self.fail(Cause(CauseKind.CLOSED, rank, "its coordinator was closed while others still need it"), self.phase())

    # ------------------------------------------------------------------ for its parts

    def note(self, text: str) -> None:
        """One line for the event ring."""
        self._out.append(Note(text))

    def send_query(self, rank: Rank, message: Message) -> None:
        """Send a read-only query."""
        self.counters.queries += 1
        self.send(rank, message)

    def send(self, rank: Rank, message: Message) -> None:
        """Send a message to a rank, this one too."""
        self.counters.messages += 1
        self._out.append(Send(rank, message))

    def become(self, runs: tuple[Run, ...], state: PageState) -> None:
        """Move the pages of runs."""
        for run in runs:
            self.tables[run.domain].become(run, state)

    def fail_domains(self, runs: tuple[Run, ...], cause: Cause, phase: str) -> None:
        """The coordinator fails because of what happened to these runs."""
        for run in runs:
            self.first_cause[run.domain] = self.first_cause[run.domain] or cause
        self.fail(cause, phase)

    def degrade(self, runs: tuple[Run, ...], cause: Cause) -> None:
        """Runs are out of use: their domains work with what is left."""
        for run in runs:
            if self.health[run.domain] is Health.HEALTHY:
                self.health[run.domain] = Health.DEGRADED
                self.first_cause[run.domain] = cause
                self.note(f"event=degraded domain={run.domain} run={run} cause={cause}")

    def _on_beat(self, rank: Rank, peer: Peer, beat: Beat) -> None:
        txn = self.commit.txn
        creating = txn is not None and txn.step is TxnStep.RESERVING and not txn.adopted and rank in txn.waiting
        if not creating:
            # Else it may be from before the creates or from behind them; the answer says which, and is paid for then.
            peer.budget_bytes = beat.free_bytes
            self.memory.budgets_changed()
        short = self.commit.short
        if short is not None and short.rank == rank and beat.free_bytes > self._enough_again(peer, short):
            self.commit.short = None
            self.backoff.lifted(self.now)
        peer.held_bytes = beat.held_bytes
        if self.commit.txn is None and self.commit.last and beat.quiet_txn == self.commit.last:
            require(
                beat.handles == peer.handles,
                "S10",
                f"rank {rank} holds {beat.handles} handles per pool at rest, the leader counts {peer.handles}",
            )
