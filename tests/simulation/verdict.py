"""What is judged of a whole world: who must know of a loss, whether anything is still to happen, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_dist.coord.core.types import CauseKind, DomainId, PageId, Run

from .clock import MS
from .views import Violation

if TYPE_CHECKING:
    from .cluster import Cluster
    from .host import Host

AWAKE = 50 * MS
"""Time that a rank has after a stop to look at what came meanwhile."""


@dataclass(slots=True)
class Report:
    """What became of a schedule.

    Attributes:
        events: events dispatched.
        steps: engine steps of all ranks.
        digest: of the trace.
        hits: faults that struck, by (kind, phase).
        checks: checks made, by rule.
        failure: first cause, where the coordinator failed as the faults demand.
        cause_kind: its kind.
        calm: it came through the liveness phase.
        verdicts: transactions of the leader by verdict.
        misses: allocations that missed.
        epochs: changes of epoch that were completed.
        limits: answers to orders of a limit, by status.
    """

    events: int = 0
    steps: int = 0
    digest: int = 0
    hits: dict[tuple[str, str], int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    cause_kind: str = ""
    calm: bool = False
    verdicts: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    limits: dict[str, int] = field(default_factory=dict)
    epochs: int = 0


def losses_are_known(cluster: Cluster, running: Iterable[Host]) -> None:
    """After its deadline every survivor knows of a rank that died or hangs (L2).

    Args:
        cluster: the world.
        running: ranks that are neither dead nor at their end.
    """
    now = cluster.loop.now
    leader_sleeps = cluster.hosts[0].stopped_until + AWAKE > now
    for rank, when in cluster.deadlines.items():
        host = cluster.hosts[rank]
        if cluster.leader_slept and not host.dead and host.stopped_until and host.stopped_until <= now:
            continue  # it was back before the leader, which was stopped too, had counted a lease
        # While the leader is stopped nobody can tell; that it is stopped has a deadline of its own.
        if now > when + cluster.leader_slept and not (leader_sleeps and rank != 0):
            ignorant = [
                host.rank
                for host in running
                if host.failed_at is None and host.agent.lost is None
                if host.stopped_until + AWAKE <= now
                if cluster.reform is None or host.rank != cluster.reform.restarted
                if not _news_under_way(cluster, host)
            ]
            cluster.oracle.require(not ignorant, "L2", f"ranks {ignorant} do not know that rank {rank} is gone")


def _news_under_way(cluster: Cluster, host: Host) -> bool:
    """Whether the link of a rank is clogged, or lost and that has not had to be noticed yet."""
    now = cluster.loop.now
    own_deadline = cluster.deadlines.get(host.rank, 0)
    wires = (wire for wire in cluster.wires if wire.target is host)
    return any(wire.arrives_last > now or (wire.silent and now <= own_deadline) for wire in wires)


def working(cluster: Cluster) -> bool:
    """Whether something that has begun is still to end somewhere."""
    return bool(cluster.leader.log.due()) or any(
        host.agent.work.queue
        or host.worker.busy is not None
        or host.dead
        or host.stopped_until > cluster.loop.now
        or not _quiet(cluster, host)
        for host in cluster.hosts
    )


def _quiet(cluster: Cluster, host: Host) -> bool:
    return host.agent.participant.newest_txn >= cluster.leader.commit.last and _wires_empty(cluster, host)


def _wires_empty(cluster: Cluster, host: Host) -> bool:
    now = cluster.loop.now
    mine = (wire for wire in cluster.wires if host in (wire.source, wire.target))
    return all(wire.arrives_last <= now and not wire.silent for wire in mine)


def finish(cluster: Cluster) -> None:
    """The schedule is over: what became of it goes into the report.

    Raises:
        Violation: it failed without a reason, or did not come to rest.
    """
    failed = next((host.agent.failure for host in cluster.hosts if host.agent.failure is not None), None)
    report = cluster.report
    if failed is not None:
        report.failure = str(failed.cause)
        report.cause_kind = failed.cause.kind.name
        _check_causes(cluster)
    elif not cluster.leader.quiescent() and not any(host.dead for host in cluster.hosts):
        cluster.oracle.require(
            not cluster.diverged or cluster.plan.ranks == 1, "S5", "a rank did other operations and nobody noticed"
        )
        _check_calm(cluster)
        report.calm = True
    report.events = cluster.loop.events
    report.digest = cluster.loop.digest
    report.steps = sum(host.step_done for host in cluster.hosts)
    report.checks = cluster.oracle.checks
    report.verdicts = {verdict.value: count for verdict, count in cluster.leader.counters.closed.items()}
    report.misses = cluster.hosts[0].workload.misses


def _check_causes(cluster: Cluster) -> None:
    """The coordinator may fail only for a reason that the injected faults give."""
    for host in cluster.hosts:
        failure = host.agent.failure
        if failure is None or host.dead:
            continue
        key = (failure.cause.kind, int(failure.cause.rank))
        if key not in cluster.excuses and (failure.cause.kind, -1) not in cluster.excuses:
            rule = str(failure.cause.detail).split(" ", 1)[0] if failure.cause.kind is CauseKind.INVARIANT else ""
            raise Violation(rule or "L5", f"rank {host.rank} failed without a reason: {failure.cause}")


def _check_calm(cluster: Cluster) -> None:
    """After the liveness phase: everything was had and everything came back."""
    oracle = cluster.oracle
    limited = any(host.memory.limit for host in cluster.hosts)
    for host in () if limited else cluster.hosts:
        oracle.require(not host.workload.calm_misses, "L5", f"rank {host.rank}: {host.workload.calm_misses}")
    oracle.at_rest([peer.handles for peer in cluster.leader.peers])
    held = {run for run, (state, _) in oracle.runs.items() if state.value != "quarantined"}
    null = {Run(DomainId(domain), PageId(0), 1) for domain in range(len(cluster.plan.shape.pages))}
    oracle.require(held == null, "S10", f"after everything was given back {held - null} are still held")


__all__ = ["Report", "finish", "losses_are_known", "working"]
