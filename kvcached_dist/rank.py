"""What every coordinator of a rank has, whoever allocates in it: its life, its limits, and what can be read of it.

:class:`Coordinator` hands out block ids itself; :class:`StreamCoordinator` serves an engine that does. Both decide
and apply marks in ways of their own; everything else of a rank is here.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from . import observe, startup
from .coord.core.errors import GroupFailed, RankLost
from .coord.core.limits import LimitAnswer
from .coord.core.types import DomainId, Health, Run
from .parts import Parts

if TYPE_CHECKING:
    from ._native import Device
    from .agent import Agent
    from .config import Config
    from .coord.core.demand import Foreground
    from .coord.core.leader import Leader
    from .coord.core.replica import Replica
    from .faults import Injector
    from .physical import PhysicalWorker
    from .pools.backing import StageBacking
    from .pools.specs import StageSpec
    from .snapshot import SnapshotWriter
    from .snapshot_schema import SnapshotState
    from .world import World

FAILURE_LOOK_S = 1.0
"""Longest wait for a failure of one agent."""

D = TypeVar("D", bound=observe.ObservedDomain)


class RankCoordinator(ABC, Generic[D]):
    """One rank's part of a world. ``D`` is what it shows of a domain.

    A subclass assembles the parts, hands them to :meth:`_started`, and says what its domains are.

    Threads: safe from any thread; what a subclass adds for the scheduler thread says so.
    """

    def __init__(self, parts: Parts) -> None:
        self.world: World = parts.world
        self.stage: StageSpec = parts.stage
        self.config: Config = parts.config
        self.device: Device = parts.device
        self.backing: StageBacking = parts.backing
        self.physical: PhysicalWorker = parts.physical
        self.name: str = parts.name
        self.faults: Injector = parts.faults
        self.started = time.time()
        self.misses = 0
        self.domains: dict[str, D] = {}
        self._parts = parts
        self._agent: Agent
        self._replica: Replica
        self._leader: Leader | None = None
        self._writer: SnapshotWriter | None = None
        self._closed = False

    # ------------------------------------------------------------------ life

    @classmethod
    def _started(cls, parts: Parts) -> Self:
        """Enter the first epoch with assembled parts; after an error nothing is left behind."""
        coordinator = cls(parts)
        try:
            coordinator._enter_epoch()
            coordinator.faults.arm(parts.device.faults)
        except RankLost as lost:
            # A rejoin needs a world that has been whole once.
            coordinator.close()
            raise GroupFailed(lost.cause, "start-up", parts.world.describe(lost.cause.rank)) from lost
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    def _enter_epoch(self) -> None:
        """Hold what the epoch's snapshot names, show the rank to tools, and pass the mark of step 0."""
        parts = self._parts
        startup.join(parts, self.config.start_timeout_s)
        self._agent, self._replica, self._leader = parts.agent, parts.agent.replica, parts.leader
        self.domains = self._make_domains()
        if self._writer is None:
            self._writer = observe.open_writer(self)
            parts.on_beat.append(self._beaten)
        startup.begin(parts)
        self._epoch_begun()
        self._publish_snapshot()

    @abstractmethod
    def _make_domains(self) -> dict[str, D]:
        """The domains of the epoch that was just joined."""

    def _epoch_begun(self) -> None:
        """The null pages are published; before the first operation."""

    def close(self) -> None:
        """End in order: tell the others, stop the threads, give all memory back. Idempotent.

        Raises:
            WaitTimeout: a driver call does not end; the memory is given back with the process.

        Blocks: a few seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._parts.close()
        finally:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ what rank 0 decides

    def _await_verdict(self, waiting: Foreground, until: float = math.inf) -> None:
        """Wait until the leader has decided about ``waiting``; the caller looks at its verdict.

        Args:
            waiting: what ``leader.demand.wait_for`` has returned.
            until: when to go on without a verdict, on the monotonic clock.

        Threads: the scheduler's, on rank 0, without the lock.

        Raises:
            GroupFailed: the coordinator has failed.
        """
        agent = self._agent
        while waiting.verdict is None and (left := until - time.monotonic()) > 0:
            if self.world.size == 1:
                agent.work.do()
            with agent.changed:
                agent.raise_if_failed()
                if waiting.verdict is None:
                    agent.wait(lambda: waiting.verdict is not None, min(left, startup.WAKE_S))
            if waiting.verdict is None:
                # The clock does this too; the deadline must hold also where that thread is held up.
                agent.tick()
        agent.raise_if_failed()

    def evict(self, tokens: int) -> None:
        """Log an eviction: every rank sees ``Evict(tokens)`` in the same mark. No effect on followers."""
        if self._leader is not None:
            with self._agent.entered():
                self._leader.evict(tokens)

    def compact(self) -> None:
        """Log a compaction: every rank sees ``Evict(0)`` in the same mark, and may move together what its cache keeps.

        No effect on followers.
        """
        if self._leader is not None:
            with self._agent.entered():
                self._leader.compact()

    def set_limit(self, limit_bytes: int, revision: int) -> LimitAnswer:
        """Set the physical limit of every rank. On rank 0 only; in force on all ranks from the next mark on.

        Args:
            limit_bytes: most physical bytes per rank; 0: none.
            revision: number of the order; an older one than the newest known is stale.

        Returns:
            Whether it is applied, deferred (some rank holds more; its free runs are given back), stale, in
            conflict, refused (quarantined pages) or unavailable.

        Raises:
            ValueError: a negative number, or this is not rank 0.
        """
        if self._leader is None:
            raise ValueError(f"rank {self.world.rank}: limits are set on rank 0, which puts them into the log")
        with self._agent.entered():
            return self._leader.limits.request(limit_bytes, revision)

    @property
    def overage_bytes(self) -> int:
        """Bytes that the fullest rank holds above the limit; 0 on followers."""
        return 0 if self._leader is None else self._leader.limits.overage_bytes()

    def short_blocks(self, domain: str) -> int:
        """Blocks of a domain that should become free because memory is short; 0 on followers, and while it is not.

        For engines that keep what they could do without, such as a prefix cache. Threads: any.
        """
        if self._leader is None:
            return 0
        with self._agent.changed:
            return self._leader.demand.short_blocks(DomainId(self.stage.domain_index(domain)))

    def register_runtime_pool(self, name: str, size_bytes: int) -> None:
        """Account for a pool on this rank's device that the engine's runtime keeps itself.

        Its bytes are subtracted from what elastic pools may use. Taking a pool over clears its entry.

        Args:
            name: name of the pool; registering it again replaces the entry.
            size_bytes: exact size; 0 clears the entry.
        """
        self.physical.register_runtime_pool(name, size_bytes)

    # ------------------------------------------------------------------ reading

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._leader is not None

    @property
    def epoch(self) -> int:
        """Epoch in force on this rank."""
        return self._parts.epoch

    @property
    def digest(self) -> int:
        """Rolling digest over what was allocated so far; equal on all ranks at equal points of the stream."""
        return self._replica.digest

    @property
    def health(self) -> dict[str, Health]:
        """Health per domain."""
        if self.failure is not None:
            return dict.fromkeys(self.domains, Health.FAILED)
        bad = {run.domain for run in self._replica.quarantined}
        return {
            name: Health.DEGRADED if domain.index in bad else Health.HEALTHY for name, domain in self.domains.items()
        }

    @property
    def quarantined(self) -> frozenset[Run]:
        """Runs that could not be mapped and are out of use."""
        return self._replica.quarantined

    @property
    def failure(self) -> GroupFailed | None:
        """The first cause, once the coordinator has failed."""
        return self._agent.failure

    def await_failure(self, timeout_s: float) -> GroupFailed | None:
        """Wait for the first cause: an engine whose own collective broke asks here what happened.

        Returns:
            The failure, or ``None`` if the coordinator is still well after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        # In slices: after a rejoin there is another agent.
        while not (agent := self._agent).ending.failed.is_set() and (left := deadline - time.monotonic()) > 0:
            agent.ending.failed.wait(min(left, FAILURE_LOOK_S))
        return self._agent.failure

    @property
    def stats(self) -> observe.Stats:
        """Counters and durations since the start."""
        return observe.stats(self, self._agent, self._leader)

    def snapshot(self) -> SnapshotState:
        """What ``kvcached-dist status`` shows of this rank."""
        return observe.snapshot(self, self._agent, self._leader)

    def _beaten(self) -> None:
        """In the clock thread, with every beat."""
        self.faults.collect()
        # Asked before the snapshot is put together: beats may come much more often than anybody reads.
        if self._writer is not None and self._writer.due():
            self._publish_snapshot()

    def _publish_snapshot(self) -> None:
        if self._writer is not None and not self._closed:
            self._writer.publish(self.snapshot())


__all__ = ["RankCoordinator"]
