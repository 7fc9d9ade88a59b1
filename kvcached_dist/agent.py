"""One rank's agent: the threads around its protocol core, and the lock under which they enter it.

Threads of an agent::

    link readers   one per link; messages enter the core; never make a driver call     (rank_links)
    worker         driver work, in order; now and then how much memory is left         (driver_work)
    clock          ticks, beats, fences that have not passed yet; no driver call but the query of an event
                                                                                       (agent_clock)
    scheduler      the caller's; only touches logical state and marks                  (marks)

All of them enter the core under one lock, which is never held across a driver call, a send or a wait. Where what comes
in goes, and what the core asks for in return, is in ``routing``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .agent_clock import Clock, Fences, Pending
from .agent_ports import Faults, Fence, NoFaults, Timing, Worker, ticks
from .coord.core.effects import WorkDone
from .coord.core.entries import Mark, PositionKind
from .coord.core.errors import Divergence, GroupFailed, InvariantViolation, LinkDown, WaitTimeout
from .coord.core.messages import Bye, MarkMessage, Message
from .coord.core.participant import Participant
from .coord.core.replica import Replica
from .coord.core.types import Cause, CauseKind, Epoch, Rank, Tick, Txn
from .coord.links.link import Link
from .driver_work import DriverWork
from .ending import Ending
from .marks import Marks
from .rank_links import RankLinks
from .routing import Routing

_log = logging.getLogger(__name__)

LEADER = Rank(0)


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
        scarce_bytes: with less memory left than this, the rank looks often and tells the others at once of more.
        page_bytes: bytes of the smallest page of a domain: less than that is no news.
        now: the time, in ticks.

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
        scarce_bytes: int = 0,
        page_bytes: int = 0,
        now: Callable[[], Tick] = ticks,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.replica = replica
        self.participant = participant
        self.timing = timing
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.ending = Ending(rank, epoch, describe)
        self.links = RankLinks(links)
        self._faults: Faults = faults or NoFaults()
        self.marks = Marks(rank, replica, participant, worker, self._faults)
        self.fences = Fences(make_fence, self.changed, self._fences_passed)
        self._clock = Clock(timing.beat_s, self.beat, self.tick, self.fences.poll)
        self.work = DriverWork(
            worker, self._faults, self._work_done, timing.beat_s, scarce_bytes, page_bytes, self._clock.beat_now
        )  # fmt: skip
        self.routing = Routing(
            rank, epoch, participant, self.marks, self.links, self.ending,
            put_work=self.work.put, take_fence=self.take_fence, faults=faults, now=now,
        )  # fmt: skip
        self._on_beat = on_beat
        self._awaited: Callable[[], bool] | None = None
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"kvcached-{name}-{rank}", daemon=True)
            for name, loop in (("worker", self.work.loop), ("clock", self._clock.loop))
        ]

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the threads. Links must be started by the caller with :meth:`on_message` and :meth:`on_link_down`."""
        self.work.measure()
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float) -> None:
        """Say goodbye, stop the threads, close the links. Idempotent.

        Args:
            wait_s: how long to wait for the others' goodbye and for running driver work.
        """
        if self._closing.is_set():
            return
        if not self.ending.is_down:
            self._say_goodbye(wait_s)
        self.stop(wait_s)

    def _say_goodbye(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        with self.changed:
            self.links.send_all(Bye(self.epoch))
            while self.ending.failure is None and not self.links.all_left and time.monotonic() < deadline:
                self.changed.wait(max(0.0, min(deadline - time.monotonic(), 0.1)))

    def stop(self, wait_s: float) -> None:
        """Stop the threads and close the links; driver work that was issued is finished first (rule M2).

        Args:
            wait_s: how long to wait for running driver work.

        Raises:
            WaitTimeout: driver work still runs.

        Blocks: at most ``wait_s``, or as long as one link takes to end.
        """
        deadline = time.monotonic() + wait_s
        self._closing.set()
        self.work.wake()
        self._clock.wake()
        self.links.close()
        for thread in self._threads:
            if thread.ident is None or thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise WaitTimeout(f"rank {self.rank}", f"end of {thread.name}", wait_s)

    @property
    def failure(self) -> GroupFailed | None:
        """The first cause, once the coordinator has failed."""
        return self.ending.failure

    def raise_if_failed(self) -> None:
        """Raise the first cause, if there is one; see :meth:`Ending.raise_if_failed`."""
        self.ending.raise_if_failed()

    @property
    def lost(self) -> Cause | None:
        """The follower whose loss has ended this epoch."""
        return self.ending.lost

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
                self.routing.broken(error)
                self.raise_if_failed()
            finally:
                self.routing.settle()
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
        if reached is None or self.ending.is_down or reached():
            self.changed.notify_all()

    # ------------------------------------------------------------------ news from links

    def on_message(self, peer: Rank, message: Message) -> None:
        """A frame has arrived on a link. Threads: the link's reader."""
        with self.changed:
            if not self._closing.is_set():
                self._handle(lambda: self.routing.deliver(peer, message))

    def on_link_down(self, peer: Rank, down: LinkDown) -> None:
        """A link has ended. Threads: the link's reader or writer."""
        with self.changed:
            if not self._closing.is_set():
                self._handle(lambda: self.routing.link_down(peer, down))

    def _handle(self, event: Callable[[], None]) -> None:
        """Lock held: let the core see an event, carry out what it asks for, wake who waits."""
        self.routing.handle(event)
        self._wake()

    # ------------------------------------------------------------------ marks

    def broadcast(self, mark: Mark) -> None:
        """Send a mark to every follower. Threads: under :meth:`entered`, on the leader."""
        self.links.send_all(MarkMessage(self.epoch, mark))

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
        while not self.marks.waiting:
            self.raise_if_failed()
            left = deadline - time.monotonic()
            if left <= 0:
                what = f"no mark for {kind.name.lower()} {position} for {wait_s:.1f} s"
                self.ending.fail(Cause(CauseKind.RANK_HUNG, LEADER, what), "waiting for the leader's mark")
                self.raise_if_failed()
            if LEADER in self.links.left:
                what = f"its coordinator was closed, and this rank is at {kind.name.lower()} {position}"
                self.ending.fail(Cause(CauseKind.CLOSED, LEADER, what), "waiting for the leader's mark")
                self.raise_if_failed()
            self.wait(lambda: bool(self.marks.waiting) or LEADER in self.links.left, min(left, 0.5))
        self.raise_if_failed()
        return self.marks.take(kind, position)

    def apply(self, mark: Mark) -> None:
        """Put the entries of a mark in force on this rank. Threads: the scheduler, under :meth:`entered`."""
        self.marks.apply(mark)

    # ------------------------------------------------------------------ threads

    def _run(self, loop: Callable[[threading.Event], None]) -> None:
        """Run a thread of this agent. Whatever ends it ends the coordinator: nothing may stop without a word."""
        try:
            loop(self._closing)
        except Exception as error:
            _log.exception("event=thread_ended rank=%d thread=%s", self.rank, threading.current_thread().name)
            with self.changed:
                self.routing.broken(InvariantViolation("L1", f"a thread of the agent ended: {error!r}"))
                self._wake()

    def _work_done(self, done: WorkDone) -> None:
        """Driver work has ended. Threads: whoever did it, without the lock."""
        with self.changed:
            self._handle(lambda: self.participant.on_work_done(done))

    def _fences_passed(self, passed: Sequence[Pending]) -> None:
        """Work that was launched before a retirement has ended. Threads: the clock's, without the lock."""

        def report() -> None:
            for item in passed:
                self.fences.waiting.remove(item)
                self.participant.on_fence(item.txn, item.lag_steps)

        self._faults.at("drained")
        with self.changed:
            self._handle(report)

    def take_fence(self, txn: Txn) -> None:
        """Record a fence behind the work that was launched before a retirement. Threads: under the lock."""
        self.fences.take(txn, self.marks.lag_steps)
        self._clock.wake()

    def tick(self) -> float:
        """Let the leader look at the clock; seconds until it should again. Other ranks have no deadlines."""
        leader = self.routing.leader
        if leader is None:
            return math.inf
        with self.changed:
            self._handle(self.routing.tick)
        return leader.policy.look_interval / 1e6

    def beat(self) -> None:
        """Tell the others that this rank lives, and what it holds. Threads: the clock's."""
        with self.changed:
            # Under the lock: an answer about memory that goes out in between would be overtaken by an older number.
            self._handle(lambda: self.routing.beat(*self.work.memory()))
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


__all__ = ["Agent", "Faults", "Fence", "Timing", "Worker", "ticks"]
