"""Carries a plan out: makes each fault happen, sees what the ranks make of it, restarts what was killed."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from ..coord.core.errors import KVDistError
from .checks import (
    HUNG_BOUND_S,
    check_detection,
    check_digests,
    check_entered,
    check_left,
    check_work,
    detection_bound_s,
    surviving_backlog,
)
from .cluster import ActorGone, Cluster, Process, RigError
from .options import START_TIMEOUT_S, ChaosOptions
from .plan import Effect, Fault, Kind, Means
from .rank import Entered, Left, Seat, Status, Work
from .report import Outcome, Report
from .workload import Backlog

_log = logging.getLogger(__name__)

FIRES_S: Final = 40.0
"""How long a fault may take to meet its step; the workload passes every step about once a second."""

SLACK_S: Final = 10.0
"""How much longer than a bound is waited before the wait itself is given up."""

POLL_S: Final = 0.03

STORE_PAUSE_S: Final = 1.0
"""How long the store stands still in the middle of a rejoin."""

ORPHAN_GRACE_S: Final = 10.0


class BrokenWorldError(KVDistError):
    """The world is not what the supervisor takes it for; it is thrown away and started again.

    Args:
        violations: what was found.
    """

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


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
        self._run_dir = str(cluster.warden("directory"))
        self._port = int(cluster.warden("start_store", timeout_s=START_TIMEOUT_S))
        self._worlds = 0
        self._session = ""
        self._epoch = 0
        self._backlog = Backlog()
        self._members: dict[int, Process] = {}
        self._works: dict[int, Any] = {}
        self._stopped_s = 0.0
        self._fired = 0

    def run(self) -> Report:
        """Carry out the whole plan, end the world in order, look for what is left.

        Raises:
            RigError: Ray or the host failed.
        """
        began = time.monotonic()
        self._start_world()
        for fault in self._plan:
            outcome = Outcome(fault)
            try:
                self._carry_out(fault, outcome)
            except BrokenWorldError as error:
                outcome.violations += error.violations
                outcome.unanswered = len(self._backlog.waiting)
                self._rebuild()
            self.report.outcomes.append(outcome)
            self._on_outcome(outcome)
        self._finish()
        self.report.wall_s = time.monotonic() - began
        return self.report

    # ------------------------------------------------------------------ one fault

    def _carry_out(self, fault: Fault, outcome: Outcome) -> None:
        self._cluster.order_spares()
        if fault.effect is not Effect.SURVIVES:
            self._cluster.await_spares()
        time.sleep(fault.delay_s)
        match fault.means:
            case Means.STORE:
                self._hurt_store(fault, outcome)
            case Means.SIGNAL if fault.effect is Effect.SURVIVES:
                at = self._signal(fault.rank, signal.SIGSTOP)
                outcome.fired = True
                time.sleep(fault.stop_s)
                self._signal(fault.rank, signal.SIGCONT)
                self._see_survival(fault, outcome, at)
            case Means.SIGNAL:
                at = self._signal(fault.rank, signal.SIGSTOP if fault.stop_s else signal.SIGKILL)
                outcome.fired = True
                self._see_loss(fault, outcome, at)
            case Means.INJECTOR:
                self._order(fault.rank, "inject", fault.spec)
                at = self._await_fired(fault)
                outcome.fired = True
                if fault.effect is Effect.SURVIVES:
                    self._see_survival(fault, outcome, at)
                    self._order(fault.rank, "inject", "")
                else:
                    self._see_loss(fault, outcome, at)

    def _await_fired(self, fault: Fault) -> float:
        """Wait until the journal says that the fault has happened; returns the wall clock of that moment."""
        deadline = time.monotonic() + FIRES_S + self._options.lease_s
        while time.monotonic() < deadline:
            if fault.effect is Effect.SURVIVES:
                # Driver faults are only counted where they happen; a look at the rank enters them in the journal.
                self._ask_status({fault.rank}, POLL_S)
            journal = self._cluster.warden("fired")
            new, self._fired = journal[self._fired :], len(journal)
            for fired in new:
                if fired.spec == fault.spec and fired.fault != "resumed":
                    return float(fired.time_s)
            self._raise_if_ended(set() if fault.effect is Effect.SURVIVES else None)
            time.sleep(POLL_S)
        raise BrokenWorldError([f"it did not happen within {FIRES_S + self._options.lease_s:g} s"])

    def _see_survival(self, fault: Fault, outcome: Outcome, at: float) -> None:
        """Nobody may be lost: a whole wave that begins after the fault must end on every rank."""
        self._stopped_s = max(self._stopped_s, fault.stop_s)
        began = max(at, time.time()) if fault.means is Means.SIGNAL else at
        progress = self._await_wave(began, set(self._members))
        outcome.recovered_ms = 1000 * (progress - at)

    def _await_wave(self, since: float, ranks: set[int]) -> float:
        """Wait for the end of a wave that began after ``since``, on all ``ranks``.

        Returns:
            Wall clock of the first pages that rank 0 published or gave back after ``since``.
        """
        wait_s = 2 * (6 * self._options.call_bound_s + 30)
        deadline = time.monotonic() + wait_s
        pending, progress = set(ranks), 0.0
        while pending:
            self._raise_if_ended(set())
            for rank, status in self._ask_status(pending, POLL_S).items():
                if rank == 0 and not progress:
                    progress = next((at for at in status.progress if at > since), 0.0)
                if any(rest.began > since for rest in status.rests) and (rank != 0 or progress):
                    pending.discard(rank)
            if time.monotonic() > deadline:
                raise BrokenWorldError([f"L5: ranks {sorted(pending)} ended no wave within {wait_s:g} s"])
            time.sleep(POLL_S)
        return progress

    # ------------------------------------------------------------------ a lost rank

    def _see_loss(self, fault: Fault, outcome: Outcome, at: float) -> None:
        survivors = set(self._members) - {fault.rank}
        works = self._await_survivors(fault, survivors, at)
        outcome.detected_ms = [1000 * (w.problem.at - at) for w in works.values() if w.problem is not None]
        outcome.violations += check_detection(fault, at, works, self._options.lease_s)
        self._take_works(works.values(), outcome)
        began = time.time()
        self._end_victim(fault, outcome, at)
        if fault.effect is Effect.REJOINS:
            # A victim that woke up by itself has kept the others waiting; that is not the rejoin's time.
            ordered = time.time() if fault.wakes else began
            outcome.rejoin_ms = 1000 * (self._rejoin({fault.rank}) - ordered)
        else:
            outcome.restart_ms = 1000 * (self._restart(outcome) - time.time())
        self._see_service(outcome, at)

    def _see_service(self, outcome: Outcome, at: float) -> None:
        entered = time.time()
        outcome.recovered_ms = 1000 * (entered - at)
        self._await_wave(entered, set(self._members))

    def _await_survivors(self, fault: Fault, survivors: set[int], at: float) -> dict[int, Work]:
        """The reports of all survivors.

        Raises:
            BrokenWorldError: one did not come within the bound and a slack, or a survivor died.
        """
        bound_s = detection_bound_s(fault, self._options.lease_s)
        deadline = time.monotonic() + bound_s + SLACK_S - (time.time() - at)
        works: dict[int, Work] = {}
        while missing := survivors - set(works):
            left = deadline - time.monotonic()
            if left <= 0:
                raise BrokenWorldError([f"L2: ranks {sorted(missing)} knew nothing {bound_s + SLACK_S:g} s after it"])
            references = {self._works[rank]: rank for rank in missing}
            for reference in self._cluster.finished(list(references), left):
                works[references[reference]] = self._result(references[reference])
        return works

    def _result(self, rank: int) -> Work:
        try:
            work: Work = self._cluster.get(self._works[rank], SLACK_S)
        except ActorGone as error:
            raise BrokenWorldError([f"rank {rank} died, which no fault asked for: {error}"]) from error
        del self._works[rank]
        return work

    def _end_victim(self, fault: Fault, outcome: Outcome, at: float) -> None:
        """The victim is gone when this returns, or it has woken up, found itself fenced, and is a spare again."""
        victim = self._members.pop(fault.rank)
        reference = self._works.pop(fault.rank)
        if not fault.wakes:
            if fault.stop_s:
                self._cluster.warden("signal_rank", victim.identity, signal.SIGKILL)
            self._cluster.bury(victim)
            return
        left = max(0.0, at + fault.stop_s - time.time())
        if fault.means is Means.SIGNAL:
            time.sleep(left)
            self._cluster.warden("signal_rank", victim.identity, signal.SIGCONT)
            left = 0.0
        bound_s = self._options.lease_s + HUNG_BOUND_S
        try:
            work: Work = self._cluster.get(reference, left + bound_s + SLACK_S)
            late = work.problem.at - (at + fault.stop_s) if work.problem is not None else 0.0
            if work.problem is None or work.problem.kind not in ("GroupFailed", "RankLost"):
                outcome.violations.append(f"S8: rank {fault.rank} woke up and was not fenced: {work.problem}")
            elif late > bound_s:
                outcome.violations.append(
                    f"L1: rank {fault.rank} knew {late:.2f} s after it woke up, bound {bound_s:g} s"
                )
            outcome.violations += check_work(work, float("inf"))
            self._leave_one(victim, outcome.violations)
        except (ActorGone, TimeoutError) as error:
            outcome.violations.append(f"L1: rank {fault.rank} did not come out of its work after it woke up: {error}")
            self._cluster.end(victim)

    def _leave_one(self, process: Process, violations: list[str]) -> None:
        left: Left = self._cluster.get(process.actor.leave.remote(), 60.0)
        violations += check_left(left)
        self.report.leaked_bytes += left.leaked_bytes
        self._cluster.give_back(process)

    def _take_works(self, works: Iterable[Work], outcome: Outcome | None) -> None:
        """Enter what ended works tell; the next epoch begins where they stopped."""
        known = list(works)
        bound_s = self._options.call_bound_s + self._stopped_s
        found = check_digests(known) + [text for work in known for text in check_work(work, bound_s)]
        (outcome.violations if outcome is not None else self.report.violations).extend(found)
        for work in known:
            self.report.verified += work.verified
            self.report.corrupt += work.corrupt
            self.report.leaked_bytes += max(0, work.leaked_bytes)
        self.report.misses += max((work.misses for work in known), default=0)
        self._backlog = surviving_backlog(known, self._backlog)
        self._stopped_s = 0.0

    # ------------------------------------------------------------------ epochs and worlds

    def _rejoin(self, restarted: set[int]) -> float:
        """The survivors and new processes for the lost ranks enter the next epoch; returns when all had."""
        for rank in restarted:
            self._members[rank] = self._cluster.take_spare()
        self._epoch += 1
        return self._enter()

    def _start_world(self) -> float:
        """All ranks, under a new session; returns when all had entered."""
        self._worlds += 1
        self._session = f"chaos-{self._cluster.run_id}-{self._worlds}"
        self._epoch = 1
        for rank in range(self._options.world_size):
            self._members[rank] = self._cluster.take_spare()
        return self._enter()

    def _enter(self) -> float:
        references = self._order_enter(set(self._members))
        return self._begin(self._await_entered(references))

    def _order_enter(self, ranks: set[int]) -> dict[int, Any]:
        seats = {rank: Seat(rank, self._session, self._port, self._run_dir) for rank in ranks}
        return {rank: self._members[rank].actor.enter.remote(seats[rank]) for rank in sorted(ranks)}

    def _await_entered(self, references: dict[int, Any]) -> list[Entered]:
        entered: list[Entered] = []
        deadline = time.monotonic() + 2 * START_TIMEOUT_S + SLACK_S
        for rank, reference in references.items():
            try:
                entered.append(self._cluster.get(reference, max(0.1, deadline - time.monotonic())))
            except (ActorGone, TimeoutError) as error:
                raise BrokenWorldError(
                    [f"L1: rank {rank} did not come back from its start or rejoin: {error}"]
                ) from error
        return entered

    def _begin(self, entered: list[Entered]) -> float:
        violations = check_entered(entered, self._epoch)
        if violations:
            raise BrokenWorldError(violations)
        for rank, process in sorted(self._members.items()):
            self._works[rank] = process.actor.work.remote(self._backlog)
        return max(item.at for item in entered)

    def _restart(self, outcome: Outcome) -> float:
        """The survivors close and a new world begins, with the same requests waiting."""
        self._leave(outcome.violations)
        return self._start_world()

    def _leave(self, violations: list[str]) -> None:
        references = {rank: process.actor.leave.remote() for rank, process in self._members.items()}
        for rank, reference in references.items():
            process = self._members.pop(rank)
            try:
                left: Left = self._cluster.get(reference, 60.0)
            except (ActorGone, TimeoutError) as error:
                violations.append(f"L1: rank {rank} did not close: {error}")
                self._cluster.end(process)
                continue
            violations += check_left(left)
            self.report.leaked_bytes += left.leaked_bytes
            self._cluster.give_back(process)

    def _rebuild(self) -> None:
        """After a violation: throw everything away and start again, so that the rest of the plan says something."""
        for process in list(self._members.values()):
            self._cluster.end(process)
        self._members.clear()
        self._works.clear()
        self._cluster.order_spares(self._options.world_size)
        try:
            self._start_world()
        except BrokenWorldError as error:
            raise RigError(f"a new world does not start either: {error}") from error

    # ------------------------------------------------------------------ the store

    def _hurt_store(self, fault: Fault, outcome: Outcome) -> None:
        killed = fault.kind in (Kind.STORE_KILLED, Kind.STORE_KILLED_RANK_LOST)
        at = float(self._cluster.warden("signal_store", signal.SIGKILL if killed else signal.SIGSTOP))
        outcome.fired = True
        try:
            if fault.rank >= 0:
                self._lose_rank_without_store(fault, outcome, killed)
                return
            outcome.recovered_ms = 1000 * (self._await_wave(at, set(self._members)) - at)
        finally:
            if fault.rank < 0:
                self._mend_store(killed)
        if killed:
            # The new server knows nothing of this session; the next change of epoch would end the world.
            self._stop_work(outcome.violations)
            self._restart(outcome)

    def _mend_store(self, killed: bool) -> None:
        if killed:
            self._cluster.warden("start_store", timeout_s=START_TIMEOUT_S)
        else:
            self._cluster.warden("signal_store", signal.SIGCONT)

    def _lose_rank_without_store(self, fault: Fault, outcome: Outcome, killed: bool) -> None:
        """A follower is lost while the store is gone, or stands still for a while."""
        mended = False
        try:
            at = self._signal(fault.rank, signal.SIGKILL)
            works = self._await_survivors(fault, set(self._members) - {fault.rank}, at)
            outcome.detected_ms = [1000 * (w.problem.at - at) for w in works.values() if w.problem is not None]
            outcome.violations += check_detection(fault, at, works, self._options.lease_s)
            self._take_works(works.values(), outcome)
            self._end_victim(fault, outcome, at)
            began = time.time()
            if killed:
                self._see_rejoin_fail(self._await_entered(self._order_enter(set(self._members))), outcome)
                self._mend_store(killed)
                mended = True
                outcome.restart_ms = 1000 * (self._restart(outcome) - began)
            else:
                self._members[fault.rank] = self._cluster.take_spare()
                self._epoch += 1
                references = self._order_enter(set(self._members))
                time.sleep(STORE_PAUSE_S)
                self._mend_store(killed)
                mended = True
                outcome.rejoin_ms = 1000 * (self._begin(self._await_entered(references)) - began)
            self._see_service(outcome, at)
        finally:
            if not mended:
                self._mend_store(killed)

    def _see_rejoin_fail(self, entered: Iterable[Entered], outcome: Outcome) -> None:
        """Without a store nobody may believe in a next epoch, and nobody may wait for it for ever."""
        for item in entered:
            if item.problem is None:
                outcome.violations.append(f"S8: rank {item.rank} entered epoch {item.epoch} without a store")
            elif item.problem.kind == "RuntimeError":
                outcome.violations.append(f"rank {item.rank} failed to rejoin with {item.problem.text}")

    # ------------------------------------------------------------------ ranks

    def _signal(self, rank: int, signum: int) -> float:
        return float(self._cluster.warden("signal_rank", self._members[rank].identity, signum))

    def _order(self, rank: int, method: str, *arguments: Any) -> None:
        try:
            self._cluster.get(getattr(self._members[rank].actor, method).remote(*arguments), 30.0)
        except (ActorGone, TimeoutError) as error:
            raise BrokenWorldError([f"rank {rank} did not take the order {method!r}: {error}"]) from error

    def _ask_status(self, ranks: Iterable[int], seconds: float) -> dict[int, Status]:
        """News of the ranks that answer at once; one that stands still does not."""
        references = {self._members[rank].actor.status.remote(): rank for rank in ranks}
        done, _ = self._cluster.ray.wait(list(references), num_returns=len(references), timeout=1.0 + seconds)
        found: dict[int, Status] = {}
        for reference in done:
            try:
                found[references[reference]] = self._cluster.get(reference, SLACK_S)
            except ActorGone:
                continue  # its work has ended too, which _raise_if_ended sees
        return found

    def _raise_if_ended(self, allowed: set[int] | None) -> None:
        """No rank's work may end now, except on the ``allowed`` ranks; ``None`` allows all."""
        if allowed is None:
            return
        references = {reference: rank for rank, reference in self._works.items() if rank not in allowed}
        ended = self._cluster.finished(list(references), 0)
        if not ended:
            return
        violations = []
        works = []
        for reference in ended:
            rank = references[reference]
            work = self._result(rank)
            works.append(work)
            text = "without an error" if work.problem is None else f"{work.problem.kind}: {work.problem.text}"
            violations.append(f"rank {rank} ended its work, which this fault must not cause: {text}")
        self._take_works(works, None)
        raise BrokenWorldError(violations)

    def _stop_work(self, violations: list[str]) -> None:
        """End the work of all ranks in order, at the same step."""
        self._order(0, "stop")
        works: list[Work] = []
        for rank in sorted(self._members):
            try:
                work: Work = self._cluster.get(self._works[rank], 6 * self._options.call_bound_s + 60)
            except (ActorGone, TimeoutError) as error:
                raise BrokenWorldError([f"L5: rank {rank} did not come to an end: {error}"]) from error
            del self._works[rank]
            if work.problem is not None:
                violations.append(f"rank {rank} did not end in order: {work.problem.kind}: {work.problem.text}")
            works.append(work)
        self._take_works(works, None)

    # ------------------------------------------------------------------ the end

    def _finish(self) -> None:
        report, cluster = self.report, self._cluster
        try:
            self._stop_work(report.violations)
        except BrokenWorldError as error:
            report.violations += error.violations
        self._leave(report.violations)
        report.answered = self._backlog.answered
        report.unanswered = len(self._backlog.waiting)
        report.files = cluster.warden("files")
        report.orphans = cluster.end_all(ORPHAN_GRACE_S)


__all__ = ["BrokenWorldError", "Supervisor"]
