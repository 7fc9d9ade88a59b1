"""The parts of one rank's coordinator: what outlives an epoch, and what is new in each."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from .admission import AdmissionTurn
from .agent import Agent, Fence, Timing
from .bootstrap import Inbox
from .coord.core.demand import verdict_wait
from .coord.core.leader import Leader
from .coord.core.messages import Hello, Snapshot
from .coord.core.participant import Participant
from .coord.core.policy import Policy
from .coord.core.replica import FreeList
from .coord.core.types import Epoch, Rank
from .coord.links.bounded import StoreConnections
from .coord.links.store import EpochRegister, EpochValue
from .faults import Injector
from .physical import PhysicalWorker
from .pools.backing import StageBacking
from .snapshot import unique_name

if TYPE_CHECKING:
    from ._native import BlockPool, Device
    from .config import Config
    from .coord.links.bounded import Store
    from .faults import FaultPlan
    from .pools.specs import StageSpec
    from .world import World

FIRST_EPOCH = Epoch(1)

CLOSE_WAIT_S = 3.0
"""How long a close waits for the others' goodbye."""

ListFactory = Callable[[Sequence[int], Sequence[int]], Sequence[FreeList]]
"""Free lists of all domains for agreed sizes: blocks and blocks per page of each."""


@dataclass
class Parts:
    """The parts of one coordinator. Those below ``epoch`` are new in every epoch."""

    world: World
    stage: StageSpec
    config: Config
    device: Device
    backing: StageBacking
    physical: PhysicalWorker
    participant: Participant
    faults: Injector
    fence: Callable[[], Fence] | None
    name: str
    store: Store | None = None
    connections: StoreConnections | None = None
    session: int = 0
    register: EpochRegister | None = None
    epoch_value: EpochValue | None = None
    leader: Leader | None = None
    make_lists: ListFactory | None = None
    """Makes the free lists of an engine that allocates by itself; ``None``: native block pools."""
    on_beat: list[Callable[[], None]] = field(default_factory=list)

    epoch: Epoch = FIRST_EPOCH
    inbox: Inbox | None = None
    snapshot: Snapshot | None = None
    hellos: dict[Rank, Hello] = field(default_factory=dict)
    pools: list[BlockPool] = field(default_factory=list)
    """Block pools, one per domain; empty for an engine that allocates by itself."""
    agent: Agent = field(init=False)

    @classmethod
    def make(
        cls,
        world: World,
        stage: StageSpec,
        device: Device,
        config: Config,
        faults: FaultPlan | None,
        fence: Callable[[], Fence] | None,
        make_lists: ListFactory | None,
    ) -> Parts:
        """Reserve addresses and make what needs no other rank.

        Raises:
            ConfigError: the stage cannot be backed by this device; nothing is left behind.
        """
        backing = StageBacking.open(device, stage, page_bytes=config.page_size_mb << 20)
        name = config.ipc_name or unique_name()
        try:
            return cls(
                world=world,
                stage=stage,
                config=config,
                device=device,
                backing=backing,
                physical=_physical(world, device, config, backing, name),
                participant=Participant(Rank(world.rank), FIRST_EPOCH, len(stage.pools)),
                faults=Injector(faults, world.rank, config.fault_journal),
                fence=fence or _default_fence(device),
                name=name,
                make_lists=make_lists,
            )
        except BaseException:
            backing.close()
            raise

    def close(self) -> None:
        """End in order: tell the others, stop the threads, give all memory back. Call once.

        Raises:
            WaitTimeout: a driver call does not end; the memory is given back with the process.

        Blocks: a few seconds at most.
        """
        self.faults.close()
        agent = getattr(self, "agent", None)
        try:
            if agent is not None:
                agent.close(CLOSE_WAIT_S)
            if self.inbox is not None:
                self.inbox.close()
            # Not after a timeout: a driver call that still runs holds the backing. Its memory goes with the process.
            self.backing.close()
        finally:
            self.physical.close()
            if self.connections is not None:
                self.connections.close()

    @property
    def rank(self) -> Rank:
        """World rank."""
        return Rank(self.world.rank)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Logical capacity per domain, the minimum over ranks."""
        return cast(Snapshot, self.snapshot).domain_blocks

    @property
    def blocks_per_page(self) -> tuple[int, ...]:
        """B, per domain."""
        return tuple(domain.blocks_per_page for domain in self.stage.domains)


def timing_of(config: Config) -> Timing:
    """Beats and waits of the agent."""
    return Timing(config.beat_s, config.lease_s + verdict_wait(policy_of(config)) / 1e6)


def query_interval_s(config: Config) -> float:
    """Seconds between two queries about a missing answer."""
    return min(1.0, config.growth_deadline_s)


def policy_of(config: Config, name: str = "") -> Policy:
    """The leader's settings, in its own units.

    Args:
        config: all settings.
        name: of the engine; engines of the same settings on one card must not pause in step.
    """

    def ticks_of(seconds: float) -> int:
        return round(seconds * 1e6)

    return Policy(
        growth_deadline=ticks_of(config.growth_deadline_s),
        query_interval=ticks_of(query_interval_s(config)),
        lease=ticks_of(config.lease_s),
        drain_deadline=ticks_of(config.drain_deadline_s),
        map_retries=config.map_retries,
        run_pages_min=config.run_pages_min,
        run_pages_max=config.run_pages_max,
        run_share=config.run_share,
        reserved_pages_min=config.min_reserved_pages,
        reserved_pages_max=config.max_reserved_pages,
        rejoin=config.on_rank_lost == "rejoin",
        seed=_seed(config, name),
    )


def _seed(config: Config, name: str) -> int:
    return zlib.crc32(f"{config.seed} {name}".encode())


def _physical(world: World, device: Device, config: Config, backing: StageBacking, name: str) -> PhysicalWorker:
    # A host device of its own is nobody else's: no turns to take, nothing to leave free.
    private = device.private
    turn = None
    if not private:
        turn = AdmissionTurn(
            config.physical_growth_lock_dir, device.card_id, seed=_seed(config, f"{name} {world.rank}")
        )
    return PhysicalWorker(
        rank=Rank(world.rank),
        device=device,
        backing=backing,
        turn=turn,
        utilization=1.0 if private else config.gpu_utilization,
        limit_bytes=config.physical_limit_bytes,
        turn_deadline_s=config.growth_deadline_s,
    )


def _default_fence(device: Device) -> Callable[[], Fence] | None:
    if device.kind != "cuda":
        return None
    from .cuda_fence import CudaFence

    return CudaFence


__all__ = ["FIRST_EPOCH", "ListFactory", "Parts", "policy_of", "timing_of"]
