"""The coordinator that hands out block ids: elastic pools of one rank, in agreement with every other rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from . import startup
from .agent import Fence, ticks
from .coord.core.entries import Entry, Grant, PositionKind
from .coord.core.invariants import require
from .coord.core.leader import Leader
from .coord.core.replica import OpKind
from .coord.core.types import DomainId
from .domain import NULL_BLOCK, Domain
from .parts import Parts
from .pools.specs import StageSpec
from .rank import RankCoordinator
from .world import World

if TYPE_CHECKING:
    from ._native import Device
    from .config import Config
    from .coord.links.bounded import Store
    from .faults import FaultPlan

_log = logging.getLogger(__name__)

Ids = torch.Tensor | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What took effect at the end of an engine step, equal on all ranks.

    Attributes:
        step: number of the step.
        entries: log entries, in order.
        settled: the leader has nothing open and nothing to give back.
    """

    step: int
    entries: tuple[Entry, ...]
    settled: bool


class Coordinator(RankCoordinator[Domain]):
    """Elastic pools of one rank.

    Every rank of an engine starts one and performs the same operations in the same order: ``alloc``, ``free``
    and one ``step`` per engine step. Ids, misses and step reports are then equal on all ranks.

    Make it with :meth:`start`.

    Threads: one scheduler thread calls ``alloc``, ``free``, ``step``; the rest is safe from any thread.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._granted: list[Entry] = []
        self._step = 0

    # ------------------------------------------------------------------ life

    @classmethod
    def start(
        cls,
        *,
        world: World,
        stage: StageSpec,
        device: Device,
        config: Config,
        store: Store | None = None,
        session: str = "kvcached",
        faults: FaultPlan | None = None,
        fence: Callable[[], Fence] | None = None,
    ) -> Coordinator:
        """Start this rank's part. Collective: every rank of the world calls it.

        Args:
            world: which rank this is.
            stage: pools and domains of this rank's pipeline stage.
            device: device that holds them.
            config: settings; those marked world-wide must be equal on all ranks.
            store: bootstrap store of all ranks; not needed for a world of one.
            session: name of this incarnation, equal on all ranks, new after every restart.
            faults: faults to inject, tests only.
            fence: records a point behind all work launched so far; default: nothing on the host, a CUDA event on
                the current stream on CUDA.

        Returns:
            A coordinator whose null block is backed and published on every rank.

        Raises:
            ConfigError: ranks disagree, or a setting or the capacity is unusable.
            GroupFailed, WaitTimeout: a rank failed, went away or did not come.

        Blocks: at most the start timeout.
        """
        return cls._started(startup.assemble(world, stage, device, config, store, session, faults, fence))

    def _make_domains(self) -> dict[str, Domain]:
        self._step = 0
        self._granted.clear()
        parts = self._parts
        names = (domain.name for domain in self.stage.domains)
        return {
            name: Domain(self, name, index, pool, blocks)
            for index, (name, pool, blocks) in enumerate(zip(names, parts.pools, parts.blocks, strict=True))
        }

    def _epoch_begun(self) -> None:
        for domain in self.domains.values():
            self._reserve_null_block(domain)
        self._replica.end_op()

    def rejoin(self, timeout_s: float | None = None) -> dict[str, int]:
        """After ``RankLost``: meet again in the next epoch, with the lost rank once it was restarted.

        Collective over the survivors and the restarted rank, which calls :meth:`start` as ever. The caller has
        stopped using all blocks, and work that it launched on the device has finished. Afterwards every rank is at
        step 0 with published memory and no allocation: requests whose blocks were live are to be queued again, and
        :meth:`demand` and :meth:`idle` are to be told again.

        Args:
            timeout_s: how long to wait for the others; the start timeout by default.

        Returns:
            Blocks per domain that were allocated and are lost.

        Raises:
            GroupFailed: the world could not be formed again.
            RankLost: another follower was lost meanwhile; call this again.
            WaitTimeout: a rank did not come back.
            RuntimeError: no rank was lost.

        Blocks: at most the timeout.
        """
        if self._agent.lost is None:
            self._agent.raise_if_failed()
            raise RuntimeError("rejoin() without a lost rank: it follows a RankLost error")
        wait_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        lost = {name: domain.published - domain.available - 1 for name, domain in self.domains.items()}
        # Not self._agent: an attempt that failed may have left a younger one, whose driver work ends first (rule M2).
        self._parts.agent.stop(self.config.lease_s)
        startup.connect(self._parts, wait_s)
        self._enter_epoch()
        _log.info("event=rejoined rank=%d epoch=%d lost=%s", self.world.rank, self._parts.epoch, lost)
        return lost

    def _reserve_null_block(self, domain: Domain) -> None:
        ids = domain.pool.alloc(1)
        got = None if ids is None else int(ids[0])
        require(
            got == NULL_BLOCK,
            "S5",
            f"rank {self.world.rank}: the null block of domain {domain.name} must be block 0, got {got}",
        )
        domain.pool.pin(NULL_BLOCK)
        self._replica.record(OpKind.ALLOC, DomainId(domain.index), 1, domain.pool.ids_digest)

    # ------------------------------------------------------------------ blocks

    def alloc(self, needs: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        """Allocate in several domains as one operation, all or nothing.

        Args:
            needs: blocks per domain name.

        Returns:
            ``int64`` ids per domain on the CPU, or ``None``: memory is short on some rank and nothing was taken.

        Raises:
            ValueError: a negative number.
            GroupFailed: the coordinator has failed.

        Blocks: not while enough is published; otherwise for one growth, bounded by its deadline.
        """
        self._agent.raise_if_failed()
        wanted = [(self.domains[name], count) for name, count in needs.items()]
        for domain, count in wanted:
            if count < 0:
                raise ValueError(f"domain {domain.name}: cannot allocate {count} blocks")
        if all(count <= domain.pool.available() for domain, count in wanted) or self._meet(wanted):
            return self._take(wanted)
        self.misses += 1
        for domain, count in wanted:
            self._replica.record(OpKind.MISS, DomainId(domain.index), count)
        self._replica.end_op()
        return None

    def alloc_in(self, domain: Domain, count: int) -> torch.Tensor | None:
        """:meth:`alloc` in one domain; the path of every allocation of an engine without compressed layers."""
        if self._agent.ending.is_down:
            self._agent.raise_if_failed()
        pool = domain.pool
        ids = pool.alloc(count) if count >= 0 else None
        if ids is None:
            taken = self.alloc({domain.name: count})
            return None if taken is None else taken[domain.name]
        replica = self._replica
        replica.record(OpKind.ALLOC, domain.id, count, pool.ids_digest)
        replica.op_index += 1
        return torch.from_numpy(ids)

    def free_in(self, domain: Domain, ids: Ids) -> None:
        """:meth:`free` in one domain."""
        if self._agent.ending.is_down:
            self._agent.raise_if_failed()
        self._free_in(domain, ids)
        self._replica.op_index += 1

    def _take(self, wanted: Sequence[tuple[Domain, int]]) -> dict[str, torch.Tensor]:
        taken: dict[str, torch.Tensor] = {}
        for domain, count in wanted:
            ids = domain.pool.alloc(count)
            if ids is None:
                require(False, "S5", f"domain {domain.name}: {count} blocks were granted and are not free")
                continue
            self._replica.record(OpKind.ALLOC, DomainId(domain.index), count, domain.pool.ids_digest)
            taken[domain.name] = torch.from_numpy(ids)
        self._replica.end_op()
        return taken

    def _meet(self, wanted: Sequence[tuple[Domain, int]]) -> bool:
        """More is needed than is free: the leader decides, every rank learns the verdict at this operation."""
        replica = self._replica
        needs = {DomainId(domain.index): count for domain, count in wanted}
        if not all(replica.may_grow_to(domain, count) for domain, count in needs.items()):
            return False
        op = replica.op_index
        if self._leader is None:
            with self._agent.entered():
                mark = self._agent.next_mark(PositionKind.OP, op)
                self._agent.apply(mark)
        else:
            hit = self._foreground(self._leader, needs)
            with self._agent.entered():
                # A rank lost since the verdict has taken the entries with it that the verdict counts on.
                self._agent.raise_if_failed()
                mark = self._leader.mark(PositionKind.OP, op, ticks(), grant=hit)
                self._leader.demand.foreground = None
                self._agent.broadcast(mark)
                self._agent.apply(mark)
        self._granted.extend(mark.entries)
        return any(isinstance(entry, Grant) and entry.hit for entry in mark.entries)

    def take_granted(self) -> tuple[Entry, ...]:
        """Entries that took effect inside operations since the last call; :meth:`step` reports the others.

        Threads: the scheduler thread.
        """
        granted = tuple(self._granted)
        self._granted.clear()
        return granted

    def _foreground(self, leader: Leader, needs: Mapping[DomainId, int]) -> bool:
        agent = self._agent
        with agent.work.ours() if self.world.size == 1 else contextlib.nullcontext():
            with agent.entered():
                leader.now = ticks()
                waiting = leader.demand.wait_for(needs)
            self._await_verdict(waiting)
        return waiting.verdict is True

    def free(self, ids: Mapping[str, Ids]) -> None:
        """Give blocks of several domains back as one operation.

        Args:
            ids: ``int64`` ids per domain name.

        Raises:
            ValueError: an id that is out of range, not allocated or named twice; that domain frees nothing.
            GroupFailed: the coordinator has failed.
        """
        self._agent.raise_if_failed()
        for name, given in ids.items():
            domain = self.domains[name]
            self._free_in(domain, given)
        self._replica.end_op()

    def _free_in(self, domain: Domain, given: Ids) -> None:
        pool = domain.pool
        try:
            if (
                isinstance(given, torch.Tensor)
                and given.dtype is torch.int64
                and given.is_cpu
                and given.is_contiguous()
            ):
                count = given.numel()
                pool.free_at(given.data_ptr(), count)
            else:
                blocks = np.asarray(given, dtype=np.int64)
                count = blocks.size
                pool.free(blocks)
        except ValueError as error:
            raise ValueError(f"domain {domain.name}: {error}") from None
        self._replica.record(OpKind.FREE, domain.id, count, pool.ids_digest)

    # ------------------------------------------------------------------ steps

    def step(self) -> StepReport:
        """End an engine step: entries of the log take effect here, at the same step on every rank.

        Returns:
            What took effect.

        Raises:
            GroupFailed: the coordinator has failed, or no mark came in time.

        Blocks: the leader never; a follower until the leader has ended the same step, at most the lease and the
        longest wait of the leader for a hung rank.
        """
        agent = self._agent
        agent.raise_if_failed()
        self._step += 1
        self.faults.step = self._step
        with agent.entered():
            if self._leader is None:
                mark = agent.next_mark(PositionKind.STEP, self._step)
                agent.apply(mark)
            else:
                mark = self._leader.mark(PositionKind.STEP, self._step, ticks())
                agent.broadcast(mark)
                agent.apply(mark)
                self._leader.demand.background()
        return StepReport(self._step, mark.entries, mark.settled)

    def demand(self, blocks: Mapping[str, int]) -> None:
        """Say how many blocks one engine step can take at most, per domain; growth runs that far ahead.

        Only the leader's call has an effect; call it with equal values on all ranks.
        """
        if self._leader is not None:
            for name, count in blocks.items():
                self._leader.demand.step_blocks[self.domains[name].index] = count

    def idle(self, idle: bool) -> None:
        """Say whether the engine has nothing to do: then memory is given back down to the reserve."""
        if self._leader is not None:
            self._leader.demand.idle = idle

    def growable(self, domain: int) -> int:
        """Blocks of a domain that every rank could still back, as the applied log says."""
        return self._replica.growable(DomainId(domain))


__all__ = ["Coordinator", "StepReport"]
