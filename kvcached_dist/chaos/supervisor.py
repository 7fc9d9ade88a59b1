"""Carries a plan out: makes each fault happen, sees what the ranks make of it, restarts what was killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import Final

from .checks import HUNG_BOUND_S, check_detection, check_work, detection_bound_s
from .cluster import ActorGone, Cluster
from .options import START_TIMEOUT_S, ChaosOptions
from .plan import Effect, Fault, Kind, Means
from .rank import Entered, Work
from .report import Outcome, Report
from .world import POLL_S, SLACK_S, BrokenWorldError, RankWorld

FIRES_S: Final = 40.0
"""How long a fault may take to meet its step; the workload passes every step about once a second."""

STORE_PAUSE_S: Final = 1.0
"""How long the store stands still in the middle of a rejoin."""

ORPHAN_GRACE_S: Final = 10.0


class Supervisor:
    """Runs one plan on one cluster.

    Args:
        options: of the run.
        plan: faults, in order.
        cluster: actors.
        on_outcome: called after every fault.

    Threads: one.
    """

    def __init__(
        self,
        options: ChaosOptions,
        plan: Iterable[Fault],
        cluster: Cluster,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.report = Report(options.tp, options.pp, options.seed, options.lease_s)
        self._options = options
        self._plan = tuple(plan)
        self._cluster = cluster
        self._on_outcome = on_outcome or (lambda outcome: None)
        self._world = RankWorld(options, cluster, self.report)
        self._journal_read = 0

    def run(self) -> Report:
        """Carry out the whole plan, end the world in order, look for what is left.

        Raises:
            RigError: Ray or the host failed.
        """
        began, began_at = time.monotonic(), time.time()
        self._start()
        for fault in self._plan:
            outcome = Outcome(fault)
            try:
                self._carry_out(fault, outcome)
            except BrokenWorldError as error:
                outcome.violations += error.violations
                outcome.unanswered = len(self._world.backlog.waiting)
                self._world.rebuild()
            self.report.outcomes.append(outcome)
            self._on_outcome(outcome)
        self.report.lag_s = float(self._cluster.warden("lag_s", began_at))
        self._finish()
        self.report.wall_s = time.monotonic() - began
        return self.report

    def _start(self) -> None:
        try:
            self._world.start()
        except BrokenWorldError as error:
            self.report.violations += error.violations
            self._world.rebuild()

    def _finish(self) -> None:
        report, world = self.report, self._world
        try:
            world.stop_work(report.violations)
        except BrokenWorldError as error:
            report.violations += error.violations
        world.leave(report.violations)
        report.answered = world.backlog.answered
        report.unanswered = len(world.backlog.waiting)
        report.files = self._cluster.warden("files")
        report.orphans = self._cluster.end_all(ORPHAN_GRACE_S)

    # ------------------------------------------------------------------ one fault

    def _carry_out(self, fault: Fault, outcome: Outcome) -> None:
        world = self._world
        self._cluster.order_spares()
        if fault.effect is not Effect.SURVIVES:
            self._cluster.await_spares()
        time.sleep(fault.delay_s)
        match fault.means:
            case Means.STORE if fault.rank < 0:
                self._hurt_store(fault, outcome)
            case Means.STORE:
                self._lose_rank_without_store(fault, outcome)
            case Means.SIGNAL if fault.effect is Effect.SURVIVES:
                at = world.signal(fault.rank, signal.SIGSTOP)
                outcome.fired = True
                time.sleep(fault.stop_s)
                world.signal(fault.rank, signal.SIGCONT)
                self._see_survival(fault, outcome, at)
            case Means.SIGNAL:
                at = world.signal(fault.rank, signal.SIGSTOP if fault.stop_s else signal.SIGKILL)
                outcome.fired = True
                self._see_loss(fault, outcome, at)
            case Means.INJECTOR:
                world.order(fault.rank, "inject", fault.spec)
                at = self._await_fired(fault)
                outcome.fired = True
                if fault.effect is Effect.SURVIVES:
                    self._see_survival(fault, outcome, at)
                    world.order(fault.rank, "inject", "")
                else:
                    self._see_loss(fault, outcome, at)

    def _await_fired(self, fault: Fault) -> float:
        """Wait until the journal says that the fault has happened; returns the wall clock of that moment."""
        wait_s = FIRES_S + self._options.lease_s
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if fault.effect is Effect.SURVIVES:
                # Driver faults are only counted where they happen; a look at the rank enters them in the journal.
                self._world.status({fault.rank})
                self._world.raise_if_ended()
            journal = self._cluster.warden("fired")
            new, self._journal_read = journal[self._journal_read :], len(journal)
            for fired in new:
                if fired.spec == fault.spec and fired.fault != "resumed":
                    return float(fired.time_s)
            time.sleep(POLL_S)
        raise BrokenWorldError([f"it did not happen within {wait_s:g} s"])

    def _see_survival(self, fault: Fault, outcome: Outcome, at: float) -> None:
        """Nobody may be lost: a whole wave that begins after the fault must end on every rank."""
        self._world.stopped_s = max(self._world.stopped_s, fault.stop_s)
        outcome.recovered_ms = 1000 * (self._world.await_wave(at + fault.stop_s) - at)

    # ------------------------------------------------------------------ a lost rank

    def _see_loss(self, fault: Fault, outcome: Outcome, at: float) -> None:
        began = self._see_detection(fault, outcome, at)
        self._end_victim(fault, outcome, at)
        if fault.effect is Effect.REJOINS:
            # A victim that woke up by itself has kept the others waiting; that is not the rejoin's time.
            ordered = time.time() if fault.wakes else began
            entered = self._world.rejoin(fault.rank)
            outcome.rejoin_ms = 1000 * (entered - ordered)
        else:
            entered = self._restart(outcome)
            outcome.restart_ms = 1000 * (entered - began)
        self._see_service(outcome, at, entered)

    def _see_detection(self, fault: Fault, outcome: Outcome, at: float) -> float:
        """Every survivor has ended its work with the right error; returns the wall clock after that."""
        bound_s = detection_bound_s(fault, self._options.lease_s)
        survivors = self._world.ranks - {fault.rank}
        works = self._world.await_works(survivors, max(0.0, bound_s - (time.time() - at)) + SLACK_S)
        outcome.detected_ms = [1000 * (work.problem.at - at) for work in works.values() if work.problem is not None]
        outcome.violations += check_detection(fault, at, works, self._options.lease_s, self._lag_s(fault, at))
        self._world.take(works.values(), outcome.violations)
        return time.time()

    def _lag_s(self, fault: Fault, at: float) -> float:
        """What of the time since a fault was the host's: no core for anybody, or none for a killed process to end."""
        lag_s = float(self._cluster.warden("lag_s", at))
        if fault.stop_s:
            return lag_s
        ended_at = float(self._cluster.warden("ended_at", self._world.members[fault.rank].identity))
        return max(lag_s, ended_at - at)

    def _see_service(self, outcome: Outcome, at: float, entered: float) -> None:
        outcome.recovered_ms = 1000 * (entered - at)
        self._world.await_wave(entered)

    def _restart(self, outcome: Outcome) -> float:
        """The survivors close and a new world begins, with the same requests waiting."""
        self._world.leave(outcome.violations)
        return self._world.start()

    def _end_victim(self, fault: Fault, outcome: Outcome, at: float) -> None:
        """The victim is gone when this returns, or it has woken up, found itself fenced, and is a spare again."""
        victim, reference = self._world.lose(fault.rank)
        if not fault.wakes:
            self._world.kill(victim)
            return
        wakes_at = at + fault.stop_s
        if fault.means is Means.SIGNAL:
            time.sleep(max(0.0, wakes_at - time.time()))
            self._cluster.warden("signal_rank", victim.identity, signal.SIGCONT)
        bound_s = self._options.lease_s + HUNG_BOUND_S
        try:
            work: Work = self._cluster.get(reference, max(0.0, wakes_at - time.time()) + bound_s + SLACK_S)
        except (ActorGone, TimeoutError) as error:
            outcome.violations.append(f"L1: rank {fault.rank} did not come out of its work after it woke up: {error}")
            self._cluster.end(victim)
            return
        outcome.violations += self._check_fenced(fault, work, wakes_at, bound_s)
        self._world.see_left(victim, victim.actor.leave.remote(), outcome.violations)

    @staticmethod
    def _check_fenced(fault: Fault, work: Work, wakes_at: float, bound_s: float) -> list[str]:
        """A rank that woke up after its lease must learn that it is out, in time, and must have harmed nobody."""
        found = check_work(work, float("inf"))
        if work.problem is None or work.problem.kind not in ("GroupFailed", "RankLost"):
            found.append(f"S8: rank {fault.rank} woke up and was not fenced: {work.problem}")
        elif (late := work.problem.at - wakes_at) > bound_s:
            found.append(f"L1: rank {fault.rank} knew {late:.2f} s after it woke up, bound {bound_s:g} s")
        return found

    # ------------------------------------------------------------------ the store

    def _hurt_store(self, fault: Fault, outcome: Outcome) -> None:
        """Running growth must not notice that the store is gone or stands still."""
        at = self._signal_store(fault)
        outcome.fired = True
        try:
            outcome.recovered_ms = 1000 * (self._world.await_wave(at) - at)
        finally:
            self._mend_store(fault)
        if fault.kind is Kind.STORE_KILLED:
            # The new server knows nothing of this session; the next change of epoch would end the world.
            self._world.stop_work(outcome.violations)
            self._restart(outcome)

    def _lose_rank_without_store(self, fault: Fault, outcome: Outcome) -> None:
        """A follower is lost while the store is gone, or stands still for a while."""
        mended = False
        self._signal_store(fault)
        try:
            at = self._world.signal(fault.rank, signal.SIGKILL)
            outcome.fired = True
            began = self._see_detection(fault, outcome, at)
            self._end_victim(fault, outcome, at)
            if fault.effect is Effect.REJOINS:
                self._world.replace(fault.rank)
                references = self._world.order_enter()
                time.sleep(STORE_PAUSE_S)
            else:
                _see_rejoin_fail(self._world.await_entered(self._world.order_enter()), outcome)
            self._mend_store(fault)
            mended = True
            if fault.effect is Effect.REJOINS:
                entered = self._world.begin(self._world.await_entered(references))
                outcome.rejoin_ms = 1000 * (entered - began)
            else:
                entered = self._restart(outcome)
                outcome.restart_ms = 1000 * (entered - began)
        finally:
            if not mended:
                self._mend_store(fault)
        self._see_service(outcome, at, entered)

    def _signal_store(self, fault: Fault) -> float:
        killed = fault.kind in (Kind.STORE_KILLED, Kind.STORE_KILLED_RANK_LOST)
        return float(self._cluster.warden("signal_store", signal.SIGKILL if killed else signal.SIGSTOP))

    def _mend_store(self, fault: Fault) -> None:
        if fault.kind in (Kind.STORE_KILLED, Kind.STORE_KILLED_RANK_LOST):
            self._cluster.warden("start_store", timeout_s=START_TIMEOUT_S)
        else:
            self._cluster.warden("signal_store", signal.SIGCONT)


def _see_rejoin_fail(entered: Iterable[Entered], outcome: Outcome) -> None:
    """Without a store nobody may believe in a next epoch, and each must say so as the library's own error."""
    for item in entered:
        if item.problem is None:
            outcome.violations.append(f"S8: rank {item.rank} entered epoch {item.epoch} without a store")
        elif item.problem.kind == "RuntimeError":
            outcome.violations.append(f"rank {item.rank} failed to rejoin with a RuntimeError: {item.problem.text}")


__all__ = ["Supervisor"]
