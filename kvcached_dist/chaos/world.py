"""The world of ranks as the supervisor sees it: who is which rank, how their work goes, how epochs begin and end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import Any, Final

from ..coord.core.errors import KVDistError
from .checks import check_digests, check_entered, check_left, check_work, surviving_backlog
from .cluster import ActorGone, Cluster, Process, RigError
from .options import START_TIMEOUT_S, ChaosOptions
from .rank import Entered, Left, Seat, Status, Work
from .report import Report
from .workload import Backlog

SLACK_S: Final = 10.0
"""How much longer than a bound is waited before the wait itself is given up."""

LEAVE_S: Final = 60.0

POLL_S: Final = 0.03

STATUS_S: Final = 1.0
"""How long a rank may take to say how its work goes; one that stands still does not answer."""


class BrokenWorldError(KVDistError):
    """The world is not what the supervisor takes it for; it is thrown away and started again.

    Args:
        violations: what was found.
    """

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


class RankWorld:
    """All ranks of the run, over all their incarnations.

    Args:
        options: of the run.
        cluster: actors.
        report: takes sums, and violations that belong to no fault.

    Attributes:
        members: process of each rank.
        works: the running call of each rank.
        epoch: epoch in force.
        backlog: requests at the begin of the epoch.
        stopped_s: longest time that a rank of this epoch was made to stand still.

    Threads: one.
    """

    def __init__(self, options: ChaosOptions, cluster: Cluster, report: Report) -> None:
        self.members: dict[int, Process] = {}
        self.works: dict[int, Any] = {}
        self.epoch = 0
        self.backlog = Backlog()
        self.stopped_s = 0.0
        self._options = options
        self._cluster = cluster
        self._report = report
        self._session = ""
        self._worlds = 0
        self._began = time.time()
        self._run_dir = str(cluster.warden("directory"))
        self._port = int(cluster.warden("start_store", timeout_s=START_TIMEOUT_S))

    @property
    def ranks(self) -> set[int]:
        """Ranks that have a process."""
        return set(self.members)

    # ------------------------------------------------------------------ epochs

    def start(self) -> float:
        """All ranks, under a new session.

        Returns:
            Wall clock of the moment when all had entered.

        Raises:
            BrokenWorldError: they did not.
        """
        self._worlds += 1
        self._session = f"chaos-{self._cluster.run_id}-{self._worlds}"
        self.epoch = 1
        for rank in range(self._options.world_size):
            self.members[rank] = self._cluster.take_spare()
        return self.begin(self.await_entered(self.order_enter()))

    def rejoin(self, restarted: int) -> float:
        """The survivors and a new process for a lost rank enter the next epoch; returns as :meth:`start`."""
        self.replace(restarted)
        return self.begin(self.await_entered(self.order_enter()))

    def replace(self, rank: int) -> None:
        """A spare process becomes a rank, for the next epoch."""
        self.members[rank] = self._cluster.take_spare()
        self.epoch += 1

    def order_enter(self) -> dict[int, Any]:
        """Tell every rank to start or to rejoin; returns the running calls."""
        return {
            rank: process.actor.enter.remote(Seat(rank, self._session, self._port, self._run_dir))
            for rank, process in sorted(self.members.items())
        }

    def await_entered(self, references: dict[int, Any]) -> list[Entered]:
        """How entering went on every rank.

        Raises:
            BrokenWorldError: a rank died over it or takes longer than all bounds.
        """
        deadline = time.monotonic() + 2 * START_TIMEOUT_S + SLACK_S
        entered: list[Entered] = []
        for rank, reference in references.items():
            try:
                entered.append(self._cluster.get(reference, max(0.1, deadline - time.monotonic())))
            except (ActorGone, TimeoutError) as error:
                text = f"L1: rank {rank} did not come back from its start or rejoin: {error}"
                raise BrokenWorldError([text]) from error
        return entered

    def begin(self, entered: list[Entered]) -> float:
        """The work of an epoch begins on all ranks; returns as :meth:`start`.

        Raises:
            BrokenWorldError: not all ranks have entered the same epoch.
        """
        violations = check_entered(entered, self.epoch)
        if violations:
            raise BrokenWorldError(violations)
        self._began = time.time()
        for rank, process in sorted(self.members.items()):
            self.works[rank] = process.actor.work.remote(self.backlog)
        return max(item.at for item in entered)

    # ------------------------------------------------------------------ work

    def await_wave(self, since: float) -> float:
        """Wait for the end of a wave that began after ``since``, on all ranks.

        Returns:
            Wall clock of the first pages that rank 0 published or gave back after ``since``.

        Raises:
            BrokenWorldError: no such wave, or a rank's work has ended.
        """
        wait_s = 2 * self._options.wave_bound_s
        deadline = time.monotonic() + wait_s
        pending, progress = self.ranks, 0.0
        while pending:
            self.raise_if_ended()
            for rank, status in self.status(pending).items():
                if rank == 0 and not progress:
                    progress = next((at for at in status.progress if at > since), 0.0)
                if any(rest.began > since for rest in status.rests) and (rank != 0 or progress):
                    pending.discard(rank)
            if pending and time.monotonic() > deadline:
                raise BrokenWorldError([f"L5: ranks {sorted(pending)} ended no wave within {wait_s:g} s"])
            time.sleep(POLL_S)
        return progress

    def status(self, ranks: Iterable[int]) -> dict[int, Status]:
        """News of those ranks that answer at once."""
        references = {self.members[rank].actor.status.remote(): rank for rank in ranks}
        found: dict[int, Status] = {}
        for reference in self._cluster.all_finished(list(references), STATUS_S):
            try:
                found[references[reference]] = self._cluster.get(reference, SLACK_S)
            except ActorGone:
                continue  # its work has ended too, which raise_if_ended sees
        return found

    def raise_if_ended(self) -> None:
        """No rank's work may end now.

        Raises:
            BrokenWorldError: one has.
        """
        references = {reference: rank for rank, reference in self.works.items()}
        ended = [self.result(references[reference]) for reference in self._cluster.finished(list(references), 0)]
        if not ended:
            return
        violations = []
        for work in ended:
            text = "without an error" if work.problem is None else f"{work.problem.kind}: {work.problem.text}"
            violations.append(f"rank {work.rank} ended its work, which this fault must not cause: {text}")
        self.take(ended, self._report.violations)
        raise BrokenWorldError(violations)

    def await_works(self, ranks: set[int], seconds: float) -> dict[int, Work]:
        """The ends of the work of all ``ranks``, after at most ``seconds``.

        Raises:
            BrokenWorldError: one did not come, or a rank died.
        """
        deadline = time.monotonic() + seconds
        works: dict[int, Work] = {}
        while missing := ranks - set(works):
            left = deadline - time.monotonic()
            if left <= 0:
                raise BrokenWorldError([f"L2: ranks {sorted(missing)} went on for {seconds:.1f} s"])
            references = {self.works[rank]: rank for rank in missing}
            for reference in self._cluster.finished(list(references), left):
                works[references[reference]] = self.result(references[reference])
        return works

    def result(self, rank: int) -> Work:
        """The end of one rank's work, which has come.

        Raises:
            BrokenWorldError: the rank's process has died.
        """
        try:
            work: Work = self._cluster.get(self.works.pop(rank), SLACK_S)
        except (ActorGone, TimeoutError) as error:
            raise BrokenWorldError([f"rank {rank} died, which no fault asked for: {error}"]) from error
        return work

    def take(self, works: Iterable[Work], violations: list[str]) -> None:
        """Enter what ended works tell; the next epoch begins where they stopped."""
        known = list(works)
        bound_s = self._options.call_bound_s + self.stopped_s + float(self._cluster.warden("lag_s", self._began))
        violations += check_digests(known)
        for work in known:
            violations += check_work(work, bound_s)
            self._report.verified += work.verified
            self._report.corrupt += work.corrupt
            self._report.leaked_bytes += max(0, work.leaked_bytes)
        self._report.misses += max((work.misses for work in known), default=0)
        self.backlog = surviving_backlog(known, self.backlog)
        self.stopped_s = 0.0

    def order(self, rank: int, method: str, *arguments: Any) -> None:
        """Call a method of a rank that takes no time.

        Raises:
            BrokenWorldError: it does not answer.
        """
        try:
            self._cluster.get(getattr(self.members[rank].actor, method).remote(*arguments), SLACK_S + LEAVE_S)
        except (ActorGone, TimeoutError) as error:
            raise BrokenWorldError([f"rank {rank} did not take the order {method!r}: {error}"]) from error

    def signal(self, rank: int, signum: int) -> float:
        """Send a signal to a rank; returns the wall clock of that moment."""
        return float(self._cluster.warden("signal_rank", self.members[rank].identity, signum))

    # ------------------------------------------------------------------ ends

    def stop_work(self, violations: list[str]) -> None:
        """End the work of all ranks in order, at the same step.

        Raises:
            BrokenWorldError: a rank does not come to an end.
        """
        self.order(0, "stop")
        works = self.await_works(self.ranks, 2 * self._options.wave_bound_s)
        for work in works.values():
            if work.problem is not None:
                text = f"{work.problem.kind}: {work.problem.text}"
                violations.append(f"rank {work.rank} did not end in order: {text}")
        self.take(works.values(), violations)

    def leave(self, violations: list[str]) -> None:
        """All ranks close; their processes are spares afterwards."""
        references = {rank: process.actor.leave.remote() for rank, process in self.members.items()}
        for rank, reference in references.items():
            self.see_left(self.members.pop(rank), reference, violations)
        self.works.clear()

    def see_left(self, process: Process, reference: Any, violations: list[str]) -> None:
        """What a closed rank has left; its process is a spare afterwards, or gone where it did not close."""
        try:
            left: Left = self._cluster.get(reference, LEAVE_S)
        except (ActorGone, TimeoutError) as error:
            violations.append(f"L1: a rank did not close within {LEAVE_S:g} s: {error}")
            self._cluster.end(process)
            return
        violations += check_left(left)
        self._report.leaked_bytes += left.leaked_bytes
        self._cluster.give_back(process)

    def lose(self, rank: int) -> tuple[Process, Any]:
        """A rank is no member any more; returns its process and its running call."""
        return self.members.pop(rank), self.works.pop(rank)

    def rebuild(self) -> None:
        """After a violation: throw everything away and start again, so that the rest of the plan says something.

        Raises:
            RigError: a new world does not start either.
        """
        for process in list(self._cluster.processes):
            self._cluster.end(process)
        self.members.clear()
        self.works.clear()
        self._cluster.order_spares(self._options.world_size)
        try:
            self.start()
        except BrokenWorldError as error:
            raise RigError(f"a new world does not start either: {error}") from error

    def kill(self, process: Process) -> None:
        """Kill a process, whatever it does, and wait until it is gone."""
        self._cluster.warden("signal_rank", process.identity, signal.SIGKILL)
        self._cluster.bury(process)


__all__ = ["POLL_S", "SLACK_S", "BrokenWorldError", "RankWorld"]
