"""One rank's agent: it joins the protocol core, the links and the pools, and owns their threads.

Threads of an agent::

    link readers   one per link; messages enter the core; never make a driver call
    worker         driver work, in order; now and then how much memory is left, which is a driver call too
    clock          ticks, beats, fences that have not passed yet; no driver call but the query of an event
    scheduler      the caller's; only touches logical state and marks

All of them enter the core under one lock, which is never held across a driver call, a send or a wait.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from .coord.core.effects import Effect, EpochDown, GroupDown, Note, Send, TakeFence, Work, WorkDone, WorkKind
from .coord.core.entries import Entry, Limit, Mark, PositionKind, Publish, Retire, Unretire
from .coord.core.errors import Divergence, GroupFailed, InvariantViolation, LinkDown, RankLost, WaitTimeout
from .coord.core.leader import Leader
from .coord.core.messages import ANSWERS, Beat, Bye, Fail, MarkMessage, Message, Reform, State, TxnMessage
from .coord.core.participant import Participant
from .coord.core.replica import Replica
from .coord.core.types import Cause, CauseKind, Epoch, Rank, Tick, Txn
from .coord.links.link import Link

_log = logging.getLogger(__name__)

LEADER = Rank(0)

EVENT_RING_MAX = 4096
"""Protocol events kept per rank for the report of a failure."""

MARKS_MAX = 65536
"""Marks a follower may hold that its engine has not reached; more means the engine has stopped stepping."""

FENCE_POLL_S = 0.001
"""Longest pause of the clock while a fence has not passed."""

FENCE_FIRST_POLL_S = 0.00005
"""Its first pause; the pauses double. A fence behind work that is nearly done passes within microseconds."""

CLOCK_PAUSE_MAX_S = 0.05
"""Longest pause of the clock, so that deadlines are seen in time whatever the beat is."""


class Fence(Protocol):
    """A point behind work that was launched on the device."""

    def done(self) -> bool:
        """Whether all of that work has finished. Must not block and must not synchronise the device."""


class Worker(Protocol):
    """The physical side: performs driver work and knows what is held (``kvcached_dist.physical``)."""

    def perform(self, work: Work) -> Cause | None:
        """Do the work in the calling thread; ``None`` on success."""

    def handles(self) -> tuple[int, ...]:
        """Physical handles held now, per pool of the world's list."""

    def held_bytes(self) -> int:
        """Physical bytes held now."""

    def budget_bytes(self) -> int:
        """Bytes this rank could still create above its reserve and below its limit."""

    def set_limit(self, limit_bytes: int) -> None:
        """A logged limit takes effect; 0: none."""


class Faults(Protocol):
    """Step-addressed faults (``kvcached_dist.faults.Injector``)."""

    def at(self, point: str) -> None:
        """This rank passes a point of the protocol."""

    def drops(self, message: str) -> bool:
        """Whether this message is to be lost."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: between beats, and the longest wait for the leader's next mark.

    A silent leader is noticed by its link after one lease. One that beats may rightly be late by as long as it waits
    for a hung rank itself, so a mark is waited for longer than the lease.
    """

    beat_s: float
    mark_wait_s: float


def ticks() -> Tick:
    """Now, in the core's unit (microseconds)."""
    return Tick(time.monotonic_ns() // 1000)


_POINT_BEFORE = {
    WorkKind.RESERVE: "reserve",
    WorkKind.MAP: "map",
    WorkKind.UNMAP: "unmap",
    WorkKind.RELEASE: "release",
}
_POINT_AFTER = {WorkKind.RESERVE: "reserved", WorkKind.MAP: "mapped", WorkKind.UNMAP: "unmapped"}


class Agent:
    """Threads around one rank's part of the protocol.

    Args:
        rank: this rank.
        epoch: epoch of the links.
        replica: logical state.
        participant: physical state.
        links: to every follower on rank 0, to the leader elsewhere; empty for a world of one.
        worker: performs driver work.
        timing: beat and lease.
        describe: names a rank in words, for errors.
        faults: injected faults, tests only.
        make_fence: records a fence behind launched work; ``None``: work is synchronous.
        on_beat: called about once per beat in the clock thread, for snapshots.

    Threads: public methods may be called from any thread unless they say otherwise.
    """

    def __init__(
        self,
        *,
        rank: Rank,
        epoch: Epoch,
        replica: Replica,
        participant: Participant,
        links: Mapping[Rank, Link],
        worker: Worker,
        timing: Timing,
        describe: Callable[[int], str],
        faults: Faults | None = None,
        make_fence: Callable[[], Fence] | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.replica = replica
        self.participant = participant
        self.leader: Leader | None = None
        """The leader's machine; rank 0 gets it when every rank has joined the epoch."""
        self.timing = timing
        self.step_done = 0
        self.lag_steps_max = 0
        self.events: deque[str] = deque(maxlen=EVENT_RING_MAX)
        self.changed = threading.Condition(threading.Lock())
        self._links = dict(links)
        self._worker = worker
        self._describe = describe
        self._faults = faults
        self._make_fence = make_fence
        self._on_beat = on_beat
        self.is_down = False
        """Whether :meth:`raise_if_failed` would raise: a plain attribute, because every operation looks at it."""
        self._failure: GroupFailed | None = None
        self._lost: Cause | None = None
        self._marks: deque[Mark] = deque()
        self._newest_step = 0
        self._fences: list[tuple[Txn, Fence, int]] = []
        self._work: deque[Work] = deque()
        self._budget = (0, 0)
        """Budget in bytes as the driver last told it, and what was held then."""
        self._work_ready = threading.Event()
        self._work_turn = threading.Lock()
        self._work_is_ours = False
        self._awaited: Callable[[], bool] | None = None
        self._clock_wake = threading.Event()
        self._closing = threading.Event()
        self._left: set[Rank] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"kvcached-{name}-{rank}", daemon=True)
            for name, loop in (("worker", self._worker_loop), ("clock", self._clock_loop))
        ]

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the threads. Links must be started by the caller with :meth:`on_message` and :meth:`on_link_down`."""
        self.measure_budget()
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float) -> None:
        """Say goodbye, stop the threads, close the links. Idempotent.

        Args:
            wait_s: how long to wait for the others' goodbye and for running driver work.
        """
        if self._closing.is_set():
            return
        if self._failure is None and self._lost is None:
            self._say_goodbye(wait_s)
        self.stop(wait_s)

    def _say_goodbye(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        with self.changed:
            for link in self._links.values():
                self._send_on(link, Bye(self.epoch))
            while self._failure is None and self._left != set(self._links) and time.monotonic() < deadline:
                self.changed.wait(max(0.0, min(deadline - time.monotonic(), 0.1)))

    def stop(self, wait_s: float) -> None:
        """Stop the threads and close the links; driver work that was issued is finished first (rule M2).

        Args:
            wait_s: how long to wait for running driver work.

        Raises:
            WaitTimeout: driver work still runs.
        """
        self._closing.set()
        self._work_ready.set()
        self._clock_wake.set()
        for link in self._links.values():
            link.close()
        for thread in self._threads:
            if thread.ident is None or thread is threading.current_thread():
                continue
            thread.join(wait_s)
            if thread.is_alive():
                raise WaitTimeout(f"rank {self.rank}", f"end of {thread.name}", wait_s)

    @property
    def failure(self) -> GroupFailed | None:
        """The first cause, once the coordinator has failed."""
        return self._failure

    def raise_if_failed(self) -> None:
        """Raise the first cause, if there is one.

        Raises:
            GroupFailed: the coordinator has failed.
            RankLost: a follower was lost and the next epoch has not begun.
        """
        failure = self._failure
        if failure is not None:
            # A new object each time: raising the same one again and again would grow its traceback.
            raise GroupFailed(failure.cause, failure.phase, failure.who)
        if self._lost is not None:
            raise RankLost(self._lost)

    @property
    def lost(self) -> Cause | None:
        """The follower whose loss has ended this epoch."""
        return self._lost

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock; afterwards route what the core asked for and wake waiters.

        Raises:
            GroupFailed: a rule of the protocol was found violated inside.
        """
        with self.changed:
            try:
                yield
            except (InvariantViolation, Divergence) as error:
                self._fail_here(error)
                self.raise_if_failed()
            finally:
                self._guarded(self._route)
                self._wake()

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Sleep until ``reached()``, a failure, or the timeout; may return earlier, so the caller looks again.

        Events that do not lead there leave the caller asleep: each awakening would take the interpreter from the
        thread that is in the middle of an answer.

        Threads: the scheduler's, with the lock held and released meanwhile.
        """
        self._awaited = reached
        try:
            self.changed.wait(timeout_s)
        finally:
            self._awaited = None

    def _wake(self) -> None:
        """Lock held: wake whoever waits, unless it is the scheduler and what it waits for has not come."""
        reached = self._awaited
        if reached is None or self._failure is not None or self._lost is not None or reached():
            self.changed.notify_all()

    # ------------------------------------------------------------------ news from links

    def on_message(self, peer: Rank, message: Message) -> None:
        """A frame has arrived on a link. Threads: the link's reader."""
        with self.changed:
            if not self._closing.is_set():
                self._handle(lambda: self._deliver(peer, message))

    def on_link_down(self, peer: Rank, down: LinkDown) -> None:
        """A link has ended. Threads: the link's reader or writer."""
        with self.changed:
            if self._closing.is_set():
                return
            if self.leader is not None:
                self.leader.on_link_down(peer, down.reason, eof=down.eof, now=ticks())
            elif peer not in self._left and self._lost is None:
                kind = CauseKind.RANK_LOST if down.eof else CauseKind.RANK_HUNG
                self._set_failure(Cause(kind, peer, down.reason), self._own_phase())
            self._left.add(peer)
            self._handle(lambda: None)

    def _deliver(self, peer: Rank, message: Message) -> None:
        if isinstance(message, Bye):
            self._left.add(peer)
        if self.leader is not None:
            self.leader.on_message(peer, message, ticks())
        elif isinstance(message, MarkMessage):
            if len(self._marks) >= MARKS_MAX:
                raise InvariantViolation("L1", f"rank {self.rank} holds {MARKS_MAX} marks it has not reached")
            self._marks.append(message.mark)
            if message.mark.kind is PositionKind.STEP:
                self._newest_step = message.mark.position
        elif isinstance(message, Fail):
            self._set_failure(message.cause, "the leader reported a failure")
        elif isinstance(message, Reform):
            self._lose(message.cause)
        elif isinstance(message, TxnMessage):
            self.participant.on_message(message)

    # ------------------------------------------------------------------ marks

    def broadcast(self, mark: Mark) -> None:
        """Send a mark to every follower. Threads: under :meth:`entered`, on the leader."""
        for link in self._links.values():
            self._send_on(link, MarkMessage(self.epoch, mark))

    def next_mark(self, kind: PositionKind, position: int, wait_s: float | None = None) -> Mark:
        """The next mark of the leader, which must belong to this position.

        Args:
            kind: step or operation.
            position: its number.
            wait_s: longest wait; ``Timing.mark_wait_s`` by default.

        Threads: a follower's scheduler, under :meth:`entered`. Blocks: at most ``wait_s``.

        Raises:
            Divergence: the leader's next mark belongs elsewhere.
            GroupFailed: the coordinator failed meanwhile, or no mark came in time.
        """
        wait_s = self.timing.mark_wait_s if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        while not self._marks:
            self.raise_if_failed()
            left = deadline - time.monotonic()
            if left <= 0:
                what = f"no mark for {kind.name.lower()} {position} for {wait_s:.1f} s"
                self._set_failure(Cause(CauseKind.RANK_HUNG, LEADER, what), "waiting for the leader's mark")
                self.raise_if_failed()
            if LEADER in self._left:
                what = f"its coordinator was closed, and this rank is at {kind.name.lower()} {position}"
                self._set_failure(Cause(CauseKind.CLOSED, LEADER, what), "waiting for the leader's mark")
                self.raise_if_failed()
            self.wait(lambda: bool(self._marks) or LEADER in self._left, min(left, 0.5))
        self.raise_if_failed()
        mark = self._marks.popleft()
        if (mark.kind, mark.position) != (kind, position):
            raise Divergence(
                f"rank {self.rank} is at {kind.name.lower()} {position}, the leader's next mark belongs to"
                f" {mark.kind.name.lower()} {mark.position}: the ranks do not run the same operations"
            )
        return mark

    def apply(self, mark: Mark) -> None:
        """Put the entries of a mark in force on this rank. Threads: the scheduler, under :meth:`entered`."""
        self.replica.check(mark)
        for entry in mark.entries:
            self._apply_entry(entry)

    def _apply_entry(self, entry: Entry) -> None:
        match entry:
            case Publish(txn=txn, runs=runs):
                self.participant.publish(txn, runs)
                self.replica.apply(entry)
                self._pass("publish")
            case Retire(txn=txn, runs=runs, retained=retained):
                self.replica.apply(entry)
                self.participant.retire(txn, runs, retained)
                self._pass("retire")
            case Unretire(txn=txn):
                self.participant.unretire(txn)
                self.replica.apply(entry)
            case Limit(limit_bytes=limit_bytes):
                self.replica.apply(entry)
                self._worker.set_limit(limit_bytes)
            case _:
                self.replica.apply(entry)

    # ------------------------------------------------------------------ routing, under the lock

    def _handle(self, event: Callable[[], None]) -> None:
        """Let the core see an event, carry out what it asks for, wake who waits. Raises for no broken rule."""
        self._guarded(event)
        self._guarded(self._route)
        self._wake()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (InvariantViolation, Divergence) as error:
            self._fail_here(error)

    def _route(self) -> None:
        """Carry out effects until the core asks for nothing more."""
        while True:
            effects = self.participant.take()
            if self.leader is not None:
                effects += self.leader.take()
            if not effects:
                return
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self._send_to(to, message)
            case Work():
                self._work.append(effect)
                if not self._work_is_ours:
                    self._work_ready.set()
            case TakeFence(txn=txn):
                self._take_fence(txn)
            case Note(text=text):
                self.events.append(text)
                _log.debug("%s", text)
            case GroupDown(cause=cause, phase=phase):
                self._set_failure(cause, phase)
            case EpochDown(cause=cause):
                self._lose(cause)

    def _send_to(self, to: Rank, message: Message) -> None:
        if to == self.rank:
            if isinstance(message, TxnMessage) and _for_participant(message):
                self.participant.on_message(message)
            elif self.leader is not None and not self._loses(message):
                self.leader.on_message(self.rank, message, ticks())
            elif isinstance(message, Fail):
                self._set_failure(message.cause, "joining an epoch")
            return
        if isinstance(message, Fail) and self.leader is None:
            self._set_failure(message.cause, "joining an epoch")
        if self.leader is None and self._loses(message):
            return
        link = self._links.get(to)
        if link is not None:
            self._send_on(link, message)

    def _send_on(self, link: Link, message: Message) -> None:
        # A link that is down reports itself through on_link_down; sending on it meanwhile is no second cause.
        with contextlib.suppress(LinkDown):
            link.send(message)

    def _loses(self, message: Message) -> bool:
        return self._faults is not None and self._faults.drops(_wire_name(message))

    def _take_fence(self, txn: Txn) -> None:
        lag = max(0, self._newest_step - self.step_done - 1)
        self.lag_steps_max = max(self.lag_steps_max, lag)
        fence = _PASSED if self._make_fence is None else self._make_fence()
        self._fences.append((txn, fence, lag))
        self._clock_wake.set()

    def _pass(self, point: str) -> None:
        if self._faults is not None:
            self._faults.at(point)

    # ------------------------------------------------------------------ failure

    def _fail_here(self, error: InvariantViolation | Divergence) -> None:
        kind = CauseKind.DIVERGENCE if isinstance(error, Divergence) else CauseKind.INVARIANT
        cause = Cause(kind, self.rank, str(error))
        if self.leader is not None:
            self.leader.fail(cause, self.leader.phase())
            self._route()
            # Effects that were being carried out when this rule broke are lost, an earlier failure perhaps with them.
            down = self.leader.failure
            assert down is not None
            self._set_failure(down.cause, down.phase)
            return
        self._set_failure(cause, self._own_phase())
        for link in self._links.values():
            self._send_on(link, Fail(self.epoch, cause))

    def _set_failure(self, cause: Cause, phase: str) -> None:
        if self._failure is not None:
            return
        self._failure = GroupFailed(cause, phase, self._describe(cause.rank))
        self.is_down = True
        _log.error("event=group_failed rank=%d epoch=%d phase=%r cause=%s", self.rank, self.epoch, phase, cause)
        for line in list(self.events)[-20:]:
            _log.error("event ring rank=%d %s", self.rank, line)
        self.changed.notify_all()

    def _lose(self, cause: Cause) -> None:
        self._lost = cause
        self.is_down = True
        _log.warning("event=rank_lost rank=%d epoch=%d cause=%s", self.rank, self.epoch, cause)
        self.changed.notify_all()

    def _own_phase(self) -> str:
        newest = self.participant.newest_txn
        return f"txn {newest} {self.participant.phase(newest).name.lower()}" if newest else "no transaction"

    # ------------------------------------------------------------------ threads

    def _run(self, loop: Callable[[], None]) -> None:
        """Run a thread of this agent. Whatever ends it ends the coordinator: nothing may stop without a word."""
        try:
            loop()
        except Exception as error:
            _log.exception("event=thread_ended rank=%d thread=%s", self.rank, threading.current_thread().name)
            with self.changed:
                self._fail_here(InvariantViolation("L1", f"a thread of the agent ended: {error!r}"))
                self.changed.notify_all()

    def _worker_loop(self) -> None:
        next_look = time.monotonic() + self.timing.beat_s
        while not self._closing.is_set():
            self._work_ready.wait(max(0.0, next_look - time.monotonic()))
            self._work_ready.clear()
            self.do_work()
            if time.monotonic() >= next_look:
                self.measure_budget()
                next_look = time.monotonic() + self.timing.beat_s
        self.do_work()

    def measure_budget(self) -> None:
        """Ask the driver how much more this rank could create, for the next beats.

        Threads: never the clock's: while the driver is busy for long, a rank still has to beat.
        """
        self._budget = self._worker.budget_bytes(), self._worker.held_bytes()

    def do_work(self) -> None:
        """Do queued driver work, in order, in the calling thread.

        A foreground grow of a world of one calls this instead of waiting for a hand-over to the worker.

        Threads: any, without the lock. Blocks: for the driver calls queued, and for those another thread is doing.
        """
        with self._work_turn:
            while self._work:
                self._perform(self._work.popleft())

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The caller does the driver work itself inside (:meth:`do_work`); the worker is not woken for it.

        Threads: the scheduler's, without the lock.
        """
        self._work_is_ours = True
        try:
            yield
        finally:
            self._work_is_ours = False
            if self._work:
                self._work_ready.set()

    def _perform(self, work: Work) -> None:
        if point := _POINT_BEFORE.get(work.kind):
            self._pass(point)
        cause = self._worker.perform(work)
        handles = self._worker.handles()
        if point := _POINT_AFTER.get(work.kind):
            self._pass(point)
        with self.changed:
            self._handle(lambda: self.participant.on_work_done(WorkDone(work.kind, work.txn, cause, handles)))

    def _clock_loop(self) -> None:
        next_beat = 0.0
        idle = min(self.timing.beat_s, CLOCK_PAUSE_MAX_S)
        pause = FENCE_FIRST_POLL_S / 2
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.timing.beat_s
                self._beat()
            self.tick()
            pause = min(2 * pause, FENCE_POLL_S) if self._poll_fences() else idle
            self._clock_wake.wait(pause)
            self._clock_wake.clear()
            pause = pause if pause < idle else FENCE_FIRST_POLL_S / 2

    def tick(self) -> None:
        """Let the leader look at the clock; nothing on other ranks."""
        leader = self.leader
        if leader is not None:
            with self.changed:
                self._handle(lambda: leader.tick(ticks()))

    def _beat(self) -> None:
        budget, held_then = self._budget
        held = self._worker.held_bytes()
        with self.changed:
            self._handle(lambda: self._beat_locked(max(0, budget - (held - held_then)), held))
        self._publish()

    def _publish(self) -> None:
        """Let the snapshot be written. A status file that cannot be is no reason to end an engine."""
        if self._on_beat is None:
            return
        try:
            self._on_beat()
        except (OSError, ValueError, RuntimeError):
            _log.exception("event=snapshot_failed rank=%d; no further one is tried", self.rank)
            self._on_beat = None

    def _beat_locked(self, budget: int, held: int) -> None:
        participant = self.participant
        beat = Beat(self.epoch, budget, held, participant.handles, self.step_done, participant.quiet_txn())
        if self.leader is not None:
            self.leader.on_message(self.rank, beat, ticks())
        for link in self._links.values():
            self._send_on(link, beat)

    def _poll_fences(self) -> bool:
        """Report fences that have passed; whether some have not."""
        with self.changed:
            pending = list(self._fences)
        passed = [item for item in pending if item[1].done()]
        if not passed:
            return bool(pending)
        self._pass("drained")
        with self.changed:
            self._handle(lambda: self._fences_passed(passed))
            return bool(self._fences)

    def _fences_passed(self, passed: list[tuple[Txn, Fence, int]]) -> None:
        for txn, fence, lag in passed:
            self._fences.remove((txn, fence, lag))
            self.participant.on_fence(txn, lag)


class _Passed:
    """The fence of a device whose work is synchronous."""

    def done(self) -> bool:
        return True


_PASSED = _Passed()


def _for_participant(message: Message) -> bool:
    return isinstance(message, TxnMessage) and not isinstance(message, (*ANSWERS, State))


def _wire_name(message: Message) -> str:
    """``MapFailed`` -> ``MAP_FAILED``, as fault specs name messages."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).upper()
