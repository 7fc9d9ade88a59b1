"""Putting a coordinator together and bringing a world to its first published page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from . import _native
from .admission import AdmissionTurn
from .agent import Agent, Fence, Timing, ticks
from .bootstrap import Inbox, introduce, open_links, wait_joined
from .coord.core.entries import PositionKind
from .coord.core.errors import ConfigError, WaitTimeout
from .coord.core.leader import Leader, Peer
from .coord.core.messages import Hello, Joined
from .coord.core.participant import Participant
from .coord.core.policy import Policy
from .coord.core.replica import FreeList, Replica
from .coord.core.transaction import Verdict
from .coord.core.types import CauseKind, DomainId, Epoch, PageId, Rank, Run
from .coord.links.store import agree_session
from .faults import Injector
from .physical import PhysicalWorker
from .pools.backing import StageBacking
from .snapshot import unique_name

if TYPE_CHECKING:
    from .coord.links.bounded import Store
    from ._native import BlockPool, Device
    from .config import Config
    from .faults import FaultPlan
    from .pools.specs import StageSpec
    from .world import World

FIRST_EPOCH = Epoch(1)
LEADER = Rank(0)

WAKE_S = 0.05
"""Longest sleep of a waiting caller between two looks; it is woken earlier by every event."""

CLOSE_WAIT_S = 3.0
"""How long a close waits for the others' goodbye."""

NULL_PAGE_RETRY_S = 0.1
"""Pause before the null pages are asked for again when memory is short at start."""

_WAITABLE = (CauseKind.EXHAUSTED, CauseKind.ADMISSION, CauseKind.DEADLINE, CauseKind.LIMIT)
"""Refusals of the null pages that may pass by themselves; anything else ends the start at once."""


@dataclass
class Parts:
    """The parts of one coordinator, in the order in which they depend on one another."""

    world: World
    stage: StageSpec
    config: Config
    device: Device
    name: str
    backing: StageBacking
    physical: PhysicalWorker
    faults: Injector
    blocks: tuple[int, ...]
    pools: list[BlockPool]
    agent: Agent
    inbox: Inbox | None
    on_beat: list[Callable[[], None]] = field(default_factory=list)


def policy_of(config: Config) -> Policy:
    """The leader's settings, in its own units."""
    return Policy(
        growth_deadline=_ticks(config.growth_deadline_s),
        query_interval=_ticks(min(1.0, config.growth_deadline_s)),
        lease=_ticks(config.lease_s),
        drain_deadline=_ticks(config.drain_deadline_s),
        map_retries=config.map_retries,
        run_pages_min=config.run_pages_min,
        run_pages_max=config.run_pages_max,
        reserved_pages_min=config.min_reserved_pages,
        reserved_pages_max=config.max_reserved_pages,
        seed=config.seed,
    )


def _ticks(seconds: float) -> int:
    return round(seconds * 1e6)


def assemble(
    world: World,
    stage: StageSpec,
    device: Device,
    config: Config,
    store: Store | None,
    session: str,
    faults: FaultPlan | None,
    fence: Callable[[], Fence] | None,
) -> Parts:
    """Reserve addresses, connect, agree on sizes, and build the state machines. Starts no thread of the agent.

    Raises:
        ConfigError: see :meth:`Coordinator.start`; nothing is left behind.
    """
    if world.size > 1 and store is None:
        raise ConfigError(f"store=None: a world of {world.size} ranks needs a TCPStore that all of them can reach")
    backing = StageBacking.open(device, stage)
    inbox: Inbox | None = None
    try:
        physical = _physical(world, device, config, backing)
        name = config.ipc_name or unique_name()
        hello = _hello(stage, device, config, physical)
        if store is None or world.size == 1:
            blocks: tuple[int, ...] = hello.domain_blocks
            hellos: dict[Rank, Hello] = {}
        else:
            number = agree_session(store, session, world.rank == LEADER, config.start_timeout_s)
            name = config.ipc_name or f"engine-{number:016x}"
            links = open_links(
                store, number, FIRST_EPOCH, world, lease_s=config.lease_s, timeout_s=config.start_timeout_s
            )
            inbox = Inbox(links)
            snapshot, hellos = introduce(inbox, hello, world, FIRST_EPOCH, config.start_timeout_s)
            blocks = snapshot.domain_blocks
        return _build(
            world,
            stage,
            device,
            config,
            name,
            backing,
            physical,
            inbox,
            blocks,
            {LEADER: hello, **hellos},
            faults,
            fence,
        )
    except BaseException:
        for link in (inbox.links if inbox is not None else {}).values():
            link.close()
        backing.close()
        raise


def _physical(world: World, device: Device, config: Config, backing: StageBacking) -> PhysicalWorker:
    turn = None
    if device.card_id:
        turn = AdmissionTurn(config.physical_growth_lock_dir, device.card_id, seed=config.seed + world.rank)
    # The capacity of a private host card is the rank's own: nothing else needs to stay free on it.
    private = device.kind == "host" and not device.card_id
    return PhysicalWorker(
        rank=Rank(world.rank),
        device=device,
        backing=backing,
        turn=turn,
        utilization=1.0 if private else config.gpu_utilization,
        limit_bytes=config.physical_limit_bytes,
        turn_deadline_s=config.growth_deadline_s,
    )


def _hello(stage: StageSpec, device: Device, config: Config, physical: PhysicalWorker) -> Hello:
    return Hello(
        FIRST_EPOCH,
        spec_digest=stage.digest(),
        config_digest=config.world_digest(),
        domain_blocks=tuple(domain.blocks for domain in stage.domains),
        page_bytes=tuple(stage.page_bytes(domain.name) for domain in stage.domains),
        device=device.card_id or device.kind,
        pid=os.getpid(),
        total_bytes=device.total_bytes(),
        free_bytes=physical.budget_bytes(),
    )


def _build(
    world: World,
    stage: StageSpec,
    device: Device,
    config: Config,
    name: str,
    backing: StageBacking,
    physical: PhysicalWorker,
    inbox: Inbox | None,
    blocks: tuple[int, ...],
    hellos: dict[Rank, Hello],
    faults: FaultPlan | None,
    fence: Callable[[], Fence] | None,
) -> Parts:
    rank = Rank(world.rank)
    per_page = [domain.blocks_per_page for domain in stage.domains]
    pages = [count // size for count, size in zip(blocks, per_page, strict=True)]
    pools = [_native.BlockPool(count, size) for count, size in zip(pages, per_page, strict=True)]
    replica = Replica(rank, cast("Sequence[FreeList]", pools), per_page)
    leader = None
    if rank == LEADER:
        now = ticks()
        none = (0,) * len(stage.pools)
        peers = [Peer(hello.page_bytes, hello.free_bytes, now, none) for _, hello in sorted(hellos.items())]
        leader = Leader(FIRST_EPOCH, policy_of(config), replica, pages, peers, now)
    injector = Injector(faults, rank, config.fault_journal)
    on_beat: list[Callable[[], None]] = []

    def call_all() -> None:
        for call in on_beat:
            call()

    agent = Agent(
        rank=rank,
        epoch=FIRST_EPOCH,
        replica=replica,
        participant=Participant(rank, FIRST_EPOCH, len(stage.pools)),
        leader=leader,
        links=inbox.links if inbox is not None else {},
        worker=physical,
        timing=Timing(config.beat_s, config.lease_s),
        faults=injector if injector.active else None,
        make_fence=fence or _default_fence(device),
        on_beat=call_all,
    )
    return Parts(world, stage, config, device, name, backing, physical, injector, blocks, pools, agent, inbox, on_beat)


def _default_fence(device: Device) -> Callable[[], Fence] | None:
    if device.kind != "cuda":
        return None
    from .cuda_fence import CudaFence

    return CudaFence


def join(parts: Parts) -> None:
    """Start the agent's threads; the leader waits until every follower has done so.

    Raises:
        GroupFailed, WaitTimeout: a rank failed, went away or did not come.
    """
    inbox, agent = parts.inbox, parts.agent
    agent.start()
    if inbox is None:
        return
    if parts.world.rank == LEADER:
        wait_joined(inbox, parts.config.start_timeout_s)
        inbox.hand_over(agent)
    else:
        inbox.hand_over(agent)
        inbox.links[LEADER].send(Joined(FIRST_EPOCH, parts.physical.handles()))


def publish_null_pages(parts: Parts) -> None:
    """Page 0 of every domain on every rank, before anything else.

    Memory that is short may come back while a neighbour gives up some: the leader asks again until the start
    timeout. Any other refusal ends the start at once.

    Raises:
        GroupFailed: the null pages cannot be had; names the rank and the bytes.
    """
    agent = parts.agent
    if agent.leader is None:
        with agent.entered():
            agent.apply(agent.next_mark(PositionKind.STEP, 0, wait_s=parts.config.start_timeout_s))
        return
    deadline = time.monotonic() + parts.config.start_timeout_s
    while not _try_null_pages(parts, agent.leader, deadline):
        time.sleep(NULL_PAGE_RETRY_S)
    with agent.entered():
        mark = agent.leader.mark(PositionKind.STEP, 0, ticks())
        agent.broadcast(mark)
        agent.apply(mark)


def _try_null_pages(parts: Parts, leader: Leader, deadline: float) -> bool:
    agent = parts.agent
    runs = tuple(Run(DomainId(index), PageId(0), 1) for index in range(len(parts.stage.domains)))
    with agent.entered():
        leader.now = ticks()
        retry = next((batch for batch in leader.retained if batch.runs == runs), None)
        leader.open_grow(runs, foreground=True, retry=retry)
    while leader.txn is not None:
        if parts.world.size == 1:
            agent.do_work()
        with agent.changed:
            agent.raise_if_failed()
            if leader.txn is not None:
                agent.changed.wait(WAKE_S)
    agent.raise_if_failed()
    last = leader.closed[-1]
    if last.verdict is Verdict.PUBLISHED:
        return True
    cause = last.cause
    if cause is not None and cause.kind in _WAITABLE and time.monotonic() < deadline:
        return False
    if cause is not None and last.verdict is Verdict.RETAINED and leader.retained:
        return False
    with agent.entered():
        if cause is not None:
            leader.fail(cause, "backing the null page of every domain at start")
    agent.raise_if_failed()
    raise WaitTimeout("the null pages", "no cause was reported", parts.config.start_timeout_s)


__all__ = ["CLOSE_WAIT_S", "WAKE_S", "Parts", "assemble", "join", "policy_of", "publish_null_pages"]
