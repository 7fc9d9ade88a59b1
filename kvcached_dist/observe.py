"""What can be seen of a coordinator: statistics for its process, a snapshot for tools outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .coord.core.runs import RunState
from .coord.core.transaction import Verdict
from .coord.core.types import DomainId
from .snapshot import SnapshotWriter
from .snapshot_schema import CounterState, DomainState, PoolState, SnapshotState

if TYPE_CHECKING:
    from ._native import Device
    from .agent import Agent
    from .config import Config
    from .coord.core.errors import GroupFailed
    from .coord.core.leader import Leader
    from .coord.core.ledger import Closed
    from .coord.core.types import Health, Run
    from .physical import PhysicalWorker
    from .pools.backing import StageBacking
    from .pools.specs import StageSpec
    from .world import World

SNAPSHOT_INTERVAL_S = 0.1
LOG_TAIL = 20


class ObservedDomain(Protocol):
    """What is shown of one domain, in blocks."""

    index: int

    @property
    def blocks(self) -> int:
        """Logical capacity, the null block included."""

    @property
    def published(self) -> int:
        """Backed and usable, the null block included."""

    @property
    def available(self) -> int:
        """Published and free."""

    @property
    def growable(self) -> int:
        """What every rank could still back."""


class Observed(Protocol):
    """A coordinator, whoever allocates in it (``Coordinator``, ``StreamCoordinator``)."""

    world: World
    stage: StageSpec
    config: Config
    device: Device
    backing: StageBacking
    physical: PhysicalWorker
    name: str
    started: float
    misses: int

    @property
    def domains(self) -> Mapping[str, ObservedDomain]:
        """Domains by name."""

    @property
    def failure(self) -> GroupFailed | None:
        """The first cause, once it has failed."""

    @property
    def health(self) -> dict[str, Health]:
        """Health per domain."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Finished transactions of one kind; milliseconds from opening to verdict, leader only."""

    count: int
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, closed: Iterable[Closed]) -> Durations:
        """Summarise finished transactions."""
        spans = sorted((item.ended - item.started) / 1000 for item in closed)
        if not spans:
            return cls(0, 0.0, 0.0)
        return cls(len(spans), spans[len(spans) // 2], spans[min(len(spans) - 1, int(len(spans) * 0.99))])


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the start. Transactions are counted by the leader, the rest by every rank.

    Attributes:
        grow: published grows.
        grow_foreground: published grows that an operation waited for.
        grow_background: published grows ahead of demand.
        grow_aborted: grows refused or given up.
        grow_retained: grows whose mapping failed on some rank.
        reclaim: completed reclaims.
        reclaim_cancelled: retirements taken back before anything was unmapped.
        reclaim_restored: reclaims undone after a failed unmap.
        misses: operations on this rank that found no memory.
        queries: queries about missing answers.
        stage_lag_steps_max: largest lag of this rank behind the leader when it applied a RETIRE.
        memory_queries: free-memory queries to the device on this rank.
    """

    grow: Durations
    grow_foreground: int
    grow_background: int
    grow_aborted: int
    grow_retained: int
    reclaim: Durations
    reclaim_cancelled: int
    reclaim_restored: int
    misses: int
    queries: int
    stage_lag_steps_max: int
    memory_queries: int


def stats(coordinator: Observed, agent: Agent, leader: Leader | None) -> Stats:
    """Counters and durations of one coordinator."""
    with agent.changed:
        closed = list(leader.commit.closed) if leader is not None else []
        counts = dict(leader.counters.closed) if leader is not None else dict.fromkeys(Verdict, 0)
        queries = leader.counters.queries if leader is not None else 0
    grown = [item for item in closed if item.verdict is Verdict.PUBLISHED]
    reclaimed = [item for item in closed if item.verdict is Verdict.RECLAIMED]
    foreground = sum(1 for item in grown if item.foreground)
    return Stats(
        grow=Durations.of(grown),
        grow_foreground=foreground,
        grow_background=len(grown) - foreground,
        grow_aborted=counts[Verdict.ABORTED],
        grow_retained=counts[Verdict.RETAINED],
        reclaim=Durations.of(reclaimed),
        reclaim_cancelled=counts[Verdict.CANCELLED],
        reclaim_restored=counts[Verdict.RESTORED],
        misses=coordinator.misses,
        queries=queries,
        stage_lag_steps_max=agent.fences.lag_steps_max,
        memory_queries=coordinator.physical.memory_queries,
    )


def open_writer(coordinator: Observed) -> SnapshotWriter:
    """The snapshot file of this rank."""
    config = coordinator.config
    return SnapshotWriter.open(
        config.state_dir, coordinator.name, coordinator.world.rank, interval_s=SNAPSHOT_INTERVAL_S
    )


def snapshot(coordinator: Observed, agent: Agent, leader: Leader | None) -> SnapshotState:
    """The state of one rank as plain data; see :mod:`kvcached_dist.snapshot_schema`."""
    world, failure = coordinator.world, coordinator.failure
    with agent.changed:
        retained = agent.participant.held.runs(RunState.MAPPED, RunState.PARTIAL)
        events = list(agent.ending.events)[-LOG_TAIL:]
    return SnapshotState(
        schema=1,
        name=coordinator.name,
        rank=world.rank,
        tp=world.tp,
        pp=world.pp,
        pid=0,
        started=coordinator.started,
        updated=0.0,
        epoch=agent.epoch,
        step=agent.marks.step_done,
        failure=None if failure is None else str(failure),
        pools=_pools(coordinator, retained),
        domains=_domains(coordinator, agent),
        counters=_counters(coordinator, agent, leader),
        device={
            "card_id": coordinator.device.card_id or coordinator.device.kind,
            # As last measured: this runs in the clock thread, which must not wait for the driver.
            "total": coordinator.physical.total_bytes,
            "free": coordinator.physical.free_bytes_seen,
        },
        runtime_pools=coordinator.physical.runtime_pools(),
        log=events,
    )


def _pools(coordinator: Observed, retained: list[Run]) -> dict[str, PoolState]:
    backing, stage = coordinator.backing, coordinator.stage
    held, mapped = backing.held_bytes(), backing.mapped_bytes()
    retained_bytes = backing.expected_bytes(retained) if retained else {}
    limits = _limit_shares(coordinator)
    states: dict[str, PoolState] = {}
    for index, pool in enumerate(stage.pools):
        kept = min(mapped[index], retained_bytes.get(pool.name, 0))
        states[pool.name] = PoolState(
            domain=pool.domain,
            virtual_bytes=backing.layouts[index].reservation_bytes,
            mapped_bytes=mapped[index],
            reserved_bytes=held[index] - mapped[index],
            retained_bytes=kept,
            limit_bytes=limits[index],
            static_bytes=pool.static_bytes(stage.blocks(pool)),
        )
    return states


def _limit_shares(coordinator: Observed) -> list[int]:
    """The rank's limit over its pools by capacity; the last pool takes the remainder. Zeros without a limit."""
    stage = coordinator.stage
    sizes = [pool.static_bytes(stage.blocks(pool)) for pool in stage.pools]
    limit, total = coordinator.physical.limit_bytes, sum(sizes)
    if not limit or not total:
        return [0] * len(sizes)
    shares = [limit * size // total for size in sizes]
    shares[-1] += limit - sum(shares)
    return shares


def _domains(coordinator: Observed, agent: Agent) -> dict[str, DomainState]:
    health = coordinator.health
    failure = coordinator.failure
    causes = [agent.replica.degraded_by(DomainId(index)) for index in range(len(coordinator.domains))]
    if failure is not None:
        causes = [known or failure.cause for known in causes]
    return {
        name: DomainState(
            blocks=domain.blocks,
            blocks_per_page=coordinator.stage.domain(name).blocks_per_page,
            published=domain.published,
            free=domain.available,
            growable=domain.growable,
            health=health[name].value,
            first_cause=None if cause is None else str(cause),
        )
        for (name, domain), cause in zip(coordinator.domains.items(), causes, strict=True)
    }


def _counters(coordinator: Observed, agent: Agent, leader: Leader | None) -> CounterState:
    counters = CounterState(misses=coordinator.misses)
    if leader is not None:
        with agent.changed:
            closed = dict(leader.counters.closed)
            foreground = leader.counters.foreground_grows
            counters["refused"] = leader.counters.refusals
            counters["queries"] = leader.counters.queries
            counters["reclaimed_runs"] = leader.counters.reclaimed_runs
        counters["grow_foreground"] = foreground
        counters["grow_background"] = closed[Verdict.PUBLISHED] - foreground
        counters["grow_aborted"] = closed[Verdict.ABORTED]
    return counters
