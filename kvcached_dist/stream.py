"""Elastic pools for an engine that has an ordered stream of its own and allocates by itself.

Such an engine (SGLang) sends the same list of requests to every rank in every iteration. Entries of the log ride
on it: the leader *decides* right before it broadcasts, every rank *applies* where it processes the list. In between
nothing touches the engine's free lists (rule M5). A step without an entry sends nothing.

The engine keeps choosing block ids; its free lists are told which ids exist (:class:`EngineList`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from . import startup
from .agent import Fence, ticks
from .coord.core.entries import Entry, PositionKind
from .coord.core.errors import InvariantViolation
from .coord.core.invariants import require
from .coord.core.leader import Leader
from .coord.core.messages import MarkMessage
from .coord.core.replica import FreeList, OpKind, Replica
from .coord.core.transaction import TxnStep
from .coord.core.types import DomainId, Tick
from .coord.links.codec import Decoder, Encoder
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

DIGEST_INTERVAL = 1_000_000
"""Ticks after which a mark is sent even without entries, so that ranks that differ are found."""

_GIVING_BACK = (TxnStep.UNMAPPING, TxnStep.RESTORING, TxnStep.RELEASING)
"""Steps of a reclaim that cannot be cancelled. A growth comes behind them; only what runs already waits for it."""


class EngineList(FreeList, Protocol):
    """A free list of the engine, as far as this library may touch it. The null block is never in it.

    Threads: the engine's scheduler thread only, at marks.
    """

    def published(self) -> int:
        """Ids that are backed and usable, free or in use."""

    def ids_crc(self) -> int:
        """Checksum of the free ids in their order; of what is known of them where reading them would wait."""

    def verify(self) -> None:
        """Look at what the device has reported about ids since the last mark; ``InvariantViolation`` if it is bad.

        Never waits for the device.
        """


EngineListFactory = Callable[[Sequence[int], Sequence[int]], Sequence[EngineList]]
"""Free lists of all domains for agreed sizes: blocks and blocks per page of each."""


class StreamDomain:
    """One id space, as the engine's views need it. Numbers are blocks.

    Threads: the scheduler thread; the numbers may be read from any thread.
    """

    def __init__(self, name: str, index: int, blocks: int, replica: Replica, free_list: EngineList) -> None:
        self.name = name
        self.index = index
        self.blocks = blocks
        self.free_list = free_list
        self._replica = replica

    @property
    def published(self) -> int:
        """Blocks that are backed and usable, the null block included, which is in no list of the engine."""
        return self.free_list.published() + 1

    @property
    def available(self) -> int:
        """Ids published and free."""
        return self.free_list.available()

    @property
    def growable(self) -> int:
        """Blocks that every rank could still back, as the applied log says."""
        return self._replica.growable(DomainId(self.index))


class StreamCoordinator(RankCoordinator[StreamDomain]):
    """Elastic pools of one rank of an engine with an ordered stream.

    Make it with :meth:`start`. Rank 0 calls :meth:`decide` before each broadcast and puts the frames, if there are
    any, into it; every rank calls :meth:`apply` with them before it handles anything else of the same list.

    Threads: ``decide`` and ``apply`` in the scheduler thread; the rest is safe from any thread.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.marks = 0
        """Marks decided (rank 0) or applied (elsewhere)."""
        self._encoder: Encoder
        self._decoder: Decoder
        self._position = 0
        self._next_digest = Tick(0)

    # ------------------------------------------------------------------ life

    @classmethod
    def start(
        cls,
        *,
        world: World,
        stage: StageSpec,
        device: Device,
        config: Config,
        make_lists: EngineListFactory,
        store: Store | None = None,
        session: str = "kvcached",
        faults: FaultPlan | None = None,
        fence: Callable[[], Fence] | None = None,
    ) -> StreamCoordinator:
        """Start this rank's part. Collective: every rank of the world calls it.

        Args:
            world: which rank this is.
            stage: pools and domains of this rank's pipeline stage.
            device: device that holds them.
            config: settings; those marked world-wide must be equal on all ranks.
            make_lists: makes the engine's free lists, one per domain, for the agreed sizes.
            store: bootstrap store of all ranks; not needed for a world of one.
            session: name of this incarnation, equal on all ranks, new after every restart.
            faults: faults to inject, tests only.
            fence: records a point behind all work launched so far; default as in ``Coordinator.start``.

        Returns:
            A coordinator whose null page is backed and published on every rank.

        Raises:
            ConfigError: ranks disagree, or a setting or the capacity is unusable.
            GroupFailed, WaitTimeout: a rank failed, went away or did not come.

        Blocks: at most the start timeout.
        """
        return cls._started(startup.assemble(world, stage, device, config, store, session, faults, fence, make_lists))

    def _make_domains(self) -> dict[str, StreamDomain]:
        parts, replica = self._parts, self._replica
        self._encoder = Encoder(parts.session, parts.epoch)
        self._decoder = Decoder(parts.session, parts.epoch)
        lists = cast("list[EngineList]", replica.free_lists)
        return {
            domain.name: StreamDomain(domain.name, index, parts.blocks[index], replica, lists[index])
            for index, domain in enumerate(self.stage.domains)
        }

    # ------------------------------------------------------------------ the stream

    @property
    def calm(self) -> bool:
        """Whether the last decision found nothing to do, and nothing has happened since; ``False`` on followers.

        Memory is not short then. Threads: any.
        """
        return self._leader is not None and self._leader.calm.holds

    def goes_on(self, wanted: Sequence[int]) -> bool:
        """Whether a step needs no decision: :meth:`decide` would have nothing to say, and what it costs is saved.

        Args:
            wanted: W in blocks of every domain, in their order.

        Returns:
            ``False``: ask :meth:`decide`. Always on followers, and where the coordinator has failed.

        Threads: the scheduler thread. Blocks: never.
        """
        leader = self._leader
        if leader is None or not leader.calm.holds:
            return False
        with self._agent.lock:
            leader.demand.step_blocks[:] = wanted
            return leader.calm.lasts(ticks())

    def decide(
        self,
        wanted: Mapping[str, int],
        *,
        idle: bool,
        running: Mapping[str, int] | None = None,
        coming: Mapping[str, int] | None = None,
    ) -> tuple[bytes, ...]:
        """Decide what the broadcast that follows at once carries. Rank 0 only.

        Grows in the foreground where less than ``wanted`` is published and free while every rank could back more.

        Args:
            wanted: W, the largest allocation until the next possible mark, in blocks per domain.
            idle: the engine has nothing to do: memory is given back down to the reserve.
            running: the part of ``wanted`` that the engine takes for requests which run already. What is new can wait
                for memory that is just being given back; a request that runs and finds nothing is ended.
            coming: what requests in hand will take in all, this step and later ones, as far as it is known. What has to
                grow grows for them at once, out of memory that is not short.

        Returns:
            Frames for the broadcast; empty: nothing to say.

        Raises:
            GroupFailed: the coordinator has failed.

        Blocks: not while ``wanted`` is free; otherwise for one growth, at most its deadline. For driver calls that give
            memory back only where less than ``running`` is free, and within the same deadline.
        """
        agent, leader = self._agent, self._leader
        if leader is None:
            raise ValueError(f"rank {self.world.rank}: only rank 0 decides")
        agent.raise_if_failed()
        with agent.lock:
            step_blocks = leader.demand.step_blocks
            for name, blocks in wanted.items():
                step_blocks[self.domains[name].index] = blocks
                leader.demand.coming[self.domains[name].index] = 0 if coming is None else coming.get(name, 0)
            if not idle and leader.calm.lasts(ticks()):
                return ()
        with agent.entered():
            leader.now = ticks()
            leader.demand.idle = idle
            short = self._reachable(leader, wanted, running or {})
            if not short:
                return self._mark(leader)
            waiting = leader.demand.wait_for(short)
        self._await_verdict(waiting, time.monotonic() + self.config.growth_deadline_s)
        with agent.entered():
            # A rank lost since the verdict has taken the entries with it that the verdict counts on.
            agent.raise_if_failed()
            leader.demand.foreground = None
            self.misses += waiting.verdict is not True
            return self._mark(leader)

    @staticmethod
    def _gives_back(leader: Leader) -> bool:
        """Whether a reclaim is in a step that cannot be cancelled."""
        return leader.commit.txn is not None and leader.commit.txn.step in _GIVING_BACK

    def _reachable(self, leader: Leader, wanted: Mapping[str, int], running: Mapping[str, int]) -> dict[DomainId, int]:
        """Free blocks to wait for, per domain that is short: what one growth can bring ``wanted`` closer to.

        Where the memory of all ranks does not reach for ``wanted`` in all domains together, first of all ``running``.
        """
        if self._gives_back(leader):
            # Whatever could be grown now: what is given back can be had again behind it.
            domains = {DomainId(self.domains[name].index): blocks for name, blocks in running.items()}
            return {domain: blocks for domain, blocks in domains.items() if self._free(leader, domain) < blocks}
        lacking = self._lacking(leader, wanted)
        if not lacking:
            return {}
        runs = self._lacking(leader, running)
        fitting = leader.memory.fitting(lacking)
        if fitting != lacking and runs:
            fitting = leader.memory.fitting(runs)
        return self._levels(leader, fitting)

    def _lacking(self, leader: Leader, blocks: Mapping[str, int]) -> dict[DomainId, int]:
        """Pages that are missing and that one growth could bring, for each domain by itself."""
        pages: dict[DomainId, int] = {}
        for name, count in blocks.items():
            domain = DomainId(self.domains[name].index)
            missing = count - self._free(leader, domain)
            if missing > 0 and (growable := leader.memory.growable(domain)) > 0:
                pages[domain] = min(-(-missing // leader.replica.blocks_per_page[domain]), growable)
        return pages

    def _levels(self, leader: Leader, pages: Mapping[DomainId, int]) -> dict[DomainId, int]:
        """Free blocks once so many pages more are published."""
        return {
            domain: self._free(leader, domain) + count * leader.replica.blocks_per_page[domain]
            for domain, count in pages.items()
        }

    @staticmethod
    def _free(leader: Leader, domain: DomainId) -> int:
        return leader.replica.available(domain) + leader.due_blocks(domain)

    def _mark(self, leader: Leader) -> tuple[bytes, ...]:
        """Close the log here; under the agent's lock, in the call that broadcasts (rule M5)."""
        now = ticks()
        entries = leader.close_log(PositionKind.STEP, now)
        if not entries and now < self._next_digest:
            leader.demand.background()
            leader.calm.begins(self._next_digest)
            return ()
        self._next_digest = Tick(now + DIGEST_INTERVAL)
        self._position += 1
        mark = leader.seal(PositionKind.STEP, self._position, entries)
        self._record_lists()
        mark = dataclasses.replace(mark, op_index=self._replica.op_index, digest=self._replica.digest)
        return tuple(self._encoder.encode(MarkMessage(mark.epoch, mark)))

    def apply(self, frames: Sequence[bytes]) -> tuple[Entry, ...]:
        """Put the entries of one mark in force on this rank, on the caller's current stream.

        Args:
            frames: what rank 0's :meth:`decide` returned.

        Returns:
            The entries, equal on all ranks; those about the engine's own state (EVICT) are the caller's to perform.

        Raises:
            GroupFailed: the coordinator has failed; a mark was lost or repeated, or this rank differs from rank 0.
        """
        agent = self._agent
        agent.raise_if_failed()
        with agent.entered():
            message = None
            for frame in frames:
                message = self._decoder.feed(frame)
            require(
                isinstance(message, MarkMessage),
                "S12",
                f"rank {self.world.rank}: a mark of the engine's stream is lost, repeated or damaged"
                f" ({self._decoder.broken or 'not the next one'})",
            )
            mark = cast(MarkMessage, message).mark
            self.marks += 1
            if self._leader is None:
                self._record_lists()
            self.faults.step = mark.position
            agent.apply(mark)
            if self._leader is not None:
                self._leader.demand.background()
        return mark.entries

    def broken(self, violation: InvariantViolation) -> NoReturn:
        """The engine broke a rule on this rank: the coordinator fails, and every rank learns the cause.

        Raises:
            GroupFailed: always; the first cause, which may be an older one.
        """
        with self._agent.entered():
            raise violation
        raise violation

    def _record_lists(self) -> None:
        """Enter the lists as they stand into the digest that the mark carries."""
        for domain in self.domains.values():
            domain.free_list.verify()
            self._replica.record(
                OpKind.LISTS, DomainId(domain.index), domain.free_list.published(), domain.free_list.ids_crc()
            )
        self._replica.end_op()


__all__ = ["EngineList", "EngineListFactory", "StreamCoordinator", "StreamDomain"]
