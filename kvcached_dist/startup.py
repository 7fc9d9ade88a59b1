"""Bringing a rank into an epoch: the first one at start, a later one after a follower was lost.

Both go the same way: links, introductions, one snapshot of what is to be held, work until that is held,
``JOINED`` by every rank, and the mark of step 0. At the first start the snapshot is empty and the null pages
are grown; a restarted follower finds published runs in it and maps them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from . import _native
from .agent import Agent, Fence, ticks
from .bootstrap import Inbox, await_seat, introduce, open_links
from .coord.core import epoch as epoch_change
from .coord.core.demand import SHORT_SHARE
from .coord.core.entries import PositionKind
from .coord.core.errors import ConfigError, GroupFailed, RankLost, WaitTimeout
from .coord.core.leader import Leader
from .coord.core.ledger import Peer
from .coord.core.messages import Hello, Joined, Snapshot
from .coord.core.pages import PageState
from .coord.core.replica import FreeList, Replica
from .coord.core.transaction import Verdict
from .coord.core.types import CauseKind, DomainId, Epoch, PageId, Rank, Run
from .coord.links.bounded import StoreConnections
from .coord.links.store import EpochRegister, agree_session
from .parts import FIRST_EPOCH, ListFactory, Parts, policy_of, timing_of

if TYPE_CHECKING:
    from ._native import Device
    from .config import Config
    from .coord.links.bounded import Store
    from .faults import FaultPlan
    from .pools.specs import StageSpec
    from .world import World

LEADER = Rank(0)

WAKE_S = 0.05
"""Longest sleep of a waiting caller between two looks; it is woken earlier by every event."""

NULL_PAGE_RETRY_S = 0.1
"""Pause before the null pages are asked for again when memory is short at start."""

_WAITABLE = (CauseKind.EXHAUSTED, CauseKind.ADMISSION, CauseKind.DEADLINE, CauseKind.LIMIT)
"""Refusals of the null pages that may pass by themselves; anything else ends the start at once."""


_LOSSES = (CauseKind.RANK_LOST, CauseKind.RANK_HUNG, CauseKind.CLOSED)
"""Ends of a follower after which a world that may rejoin tries again."""


def assemble(
    world: World,
    stage: StageSpec,
    device: Device,
    config: Config,
    store: Store | None,
    session: str,
    faults: FaultPlan | None,
    fence: Callable[[], Fence] | None,
    make_lists: ListFactory | None = None,
) -> Parts:
    """Reserve addresses, agree on the session and connect for the epoch in force. Starts no thread of the agent.

    Raises:
        ConfigError, GroupFailed, WaitTimeout: see :meth:`Coordinator.start`; nothing is left behind.
    """
    if world.size > 1 and store is None:
        raise ConfigError(f"store=None: a world of {world.size} ranks needs a TCPStore that all of them can reach")
    config.announce(world.rank)
    parts = Parts.make(world, stage, device, config, faults, fence, make_lists)
    try:
        if store is not None and world.size > 1:
            parts.store = store
            _agree_on_session(parts, store, session)
        connect(parts, config.start_timeout_s)
    except BaseException:
        parts.faults.close()
        parts.physical.close()
        if parts.connections is not None:
            parts.connections.close()
        parts.backing.close()
        raise
    return parts


def _agree_on_session(parts: Parts, store: Store, session: str) -> None:
    config = parts.config
    parts.connections = StoreConnections(store)
    parts.session = agree_session(parts.connections, session, parts.rank == LEADER, config.start_timeout_s)
    parts.name = config.ipc_name or f"engine-{parts.session:016x}"
    parts.register = EpochRegister(parts.connections, parts.session, parts.rank, config.ipc_timeout_s)


# ---------------------------------------------------------------------- entering an epoch


def connect(parts: Parts, timeout_s: float) -> None:
    """Take this rank's seat in the epoch in force (the leader puts a new one in force) and get its snapshot.

    Raises:
        ConfigError, GroupFailed, WaitTimeout: see :meth:`Coordinator.start`.
    """
    hello_blocks = tuple(domain.blocks for domain in parts.stage.domains)
    if parts.store is None:
        parts.snapshot = Snapshot(parts.epoch, hello_blocks, (), (), 0, 0, 0)
        parts.hellos = {LEADER: _hello(parts)}
        return
    if parts.rank == LEADER:
        _put_epoch_in_force(parts)
    else:
        connections, register = cast(StoreConnections, parts.connections), cast(EpochRegister, parts.register)
        parts.epoch = await_seat(connections, register, parts.session, parts.rank, timeout_s)
    parts.inbox = inbox = Inbox(parts.epoch, parts.config.beat_s)
    try:
        open_links(
            cast(StoreConnections, parts.connections),
            parts.session,
            parts.epoch,
            parts.world,
            inbox,
            lease_s=parts.config.lease_s,
            timeout_s=timeout_s,
        )
        hello = _hello(parts)
        with _losses_end_the_epoch(parts, inbox):
            parts.snapshot, others = introduce(
                inbox, hello, parts.world, lambda blocks: _snapshot(parts, blocks), timeout_s
            )
        parts.hellos = {LEADER: hello, **others}
    except BaseException:
        inbox.close()
        raise


@contextlib.contextmanager
def _losses_end_the_epoch(parts: Parts, inbox: Inbox) -> Iterator[None]:
    """A follower that is lost on the way into a later epoch ends that epoch, as it would a moment afterwards."""
    try:
        yield
    except GroupFailed as error:
        cause = error.cause
        if parts.leader is None or cause.rank == LEADER or cause.kind not in _LOSSES:
            raise
        inbox.give_up(cause)
        raise RankLost(cause) from error


def _put_epoch_in_force(parts: Parts) -> None:
    register = cast(EpochRegister, parts.register)
    before = parts.epoch_value
    parts.epoch = FIRST_EPOCH if before is None else Epoch(before.epoch + 1)
    parts.epoch_value = register.advance(before, parts.epoch)
    if parts.epoch_value is None:
        raise ConfigError(
            f"another leader has put an epoch in force for this session (store key {register.key}):"
            " a restarted leader needs a new session name, because it restarts the whole world"
        )


def _snapshot(parts: Parts, blocks: tuple[int, ...]) -> Snapshot:
    leader = parts.leader
    if leader is None:
        return Snapshot(parts.epoch, blocks, (), (), 0, 0, 0)
    return epoch_change.snapshot(leader, parts.epoch, parts.blocks, leader.replica.next_index)


def _hello(parts: Parts) -> Hello:
    stage, device, config = parts.stage, parts.device, parts.config
    return Hello(
        parts.epoch,
        spec_digest=stage.digest(),
        config_digest=config.world_digest(),
        domain_blocks=tuple(domain.blocks for domain in stage.domains),
        page_bytes=tuple(stage.page_bytes(domain.name) for domain in stage.domains),
        device=device.card_id or device.kind,
        pid=os.getpid(),
        total_bytes=device.total_bytes(),
        free_bytes=parts.physical.budget_bytes(),
    )


def join(parts: Parts, timeout_s: float) -> None:
    """Hold what the snapshot names, answer ``JOINED``, and begin the epoch once every rank has.

    Raises:
        GroupFailed, WaitTimeout: a rank failed, went away or did not come.

    Blocks: at most ``timeout_s`` for each of the two.
    """
    snapshot = cast(Snapshot, parts.snapshot)
    replica = Replica.from_snapshot(parts.rank, _free_lists(parts), parts.blocks_per_page, snapshot)
    parts.agent = agent = _agent(parts, replica)
    if parts.inbox is not None:
        parts.inbox.stop_beats()
    agent.start()
    with agent.entered():
        agent.participant.on_snapshot(snapshot)
    _wait_until(agent, lambda: not agent.participant.joining, timeout_s, "the memory that the snapshot names")
    # After it: what is published already may be above a limit that is still being reached.
    parts.physical.set_limit(snapshot.limit_bytes)
    if parts.rank != LEADER:
        cast(Inbox, parts.inbox).hand_over(agent)
        return
    joined: dict[Rank, Joined] = {}
    if parts.inbox is not None:
        with _losses_end_the_epoch(parts, parts.inbox):
            joined = parts.inbox.collect(Joined, timeout_s, "readiness of every rank")
    handles = {LEADER: agent.participant.handles, **{rank: answer.handles for rank, answer in joined.items()}}
    with agent.entered():
        parts.leader = agent.routing.leader = _leader(parts, replica, handles)
    if parts.inbox is not None:
        parts.inbox.hand_over(agent)


def _free_lists(parts: Parts) -> Sequence[FreeList]:
    if parts.make_lists is not None:
        return parts.make_lists(parts.blocks, parts.blocks_per_page)
    sizes = zip(parts.blocks, parts.blocks_per_page, strict=True)
    parts.pools = [_native.BlockPool(blocks // size, size) for blocks, size in sizes]
    return cast("Sequence[FreeList]", parts.pools)


def _agent(parts: Parts, replica: Replica) -> Agent:
    def call_all() -> None:
        for call in parts.on_beat:
            call()

    return Agent(
        rank=parts.rank,
        epoch=parts.epoch,
        replica=replica,
        participant=parts.participant,
        links=parts.inbox.links if parts.inbox is not None else {},
        worker=parts.physical,
        timing=timing_of(parts.config),
        describe=parts.world.describe,
        faults=parts.faults if parts.faults.active else None,
        make_fence=parts.fence,
        on_beat=call_all,
        scarce_bytes=sum(layout.reservation_bytes for layout in parts.backing.layouts) // SHORT_SHARE,
        page_bytes=min(
            filter(None, (parts.stage.page_bytes(domain.name) for domain in parts.stage.domains)), default=0
        ),
    )


def _leader(parts: Parts, replica: Replica, handles: Mapping[Rank, tuple[int, ...]]) -> Leader:
    now = ticks()
    peers = [
        Peer(hello.page_bytes, hello.free_bytes, now, handles[rank]) for rank, hello in sorted(parts.hellos.items())
    ]
    if parts.leader is not None:
        parts.leader.begin_epoch(parts.epoch, replica, peers, now)
        return parts.leader
    pages = [blocks // size for blocks, size in zip(parts.blocks, parts.blocks_per_page, strict=True)]
    return Leader(parts.epoch, policy_of(parts.config, parts.name), replica, pages, peers, now)


def _wait_until(agent: Agent, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    with agent.changed:
        while not reached():
            agent.raise_if_failed()
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"rank {agent.rank}", what, timeout_s)
            agent.changed.wait(min(left, WAKE_S))
        agent.raise_if_failed()


# ---------------------------------------------------------------------- step 0


def begin(parts: Parts) -> None:
    """Publish page 0 of every domain on every rank if that has not happened, and pass the mark of step 0.

    Memory that is short may come back while a neighbour gives up some: the leader asks again until the start
    timeout. Any other refusal ends the start at once.

    Raises:
        GroupFailed: the null pages cannot be had; names the rank and the bytes.
    """
    agent, leader = parts.agent, parts.leader
    if leader is None:
        with agent.entered():
            agent.apply(agent.next_mark(PositionKind.STEP, 0, wait_s=parts.config.start_timeout_s))
        return
    deadline = time.monotonic() + parts.config.start_timeout_s
    if leader.tables[0].state(0) is not PageState.PUBLISHED:
        while not _try_null_pages(parts, leader, deadline):
            time.sleep(NULL_PAGE_RETRY_S)
    with agent.entered():
        mark = leader.mark(PositionKind.STEP, 0, ticks())
        agent.broadcast(mark)
        agent.apply(mark)


def _try_null_pages(parts: Parts, leader: Leader, deadline: float) -> bool:
    agent = parts.agent
    runs = tuple(Run(DomainId(index), PageId(0), 1) for index in range(len(parts.stage.domains)))
    with agent.entered():
        leader.now = ticks()
        retry = next((batch for batch in leader.commit.retained if batch.runs == runs), None)
        leader.commit.open_grow(runs, foreground=True, retry=retry)
    while leader.commit.txn is not None:
        if parts.world.size == 1:
            agent.work.do()
        with agent.changed:
            agent.raise_if_failed()
            txn = leader.commit.txn
            if txn is not None:
                if txn.late and time.monotonic() > deadline:
                    what = f"its {txn.step.value} of the null page of every domain"
                    raise WaitTimeout(f"rank(s) {sorted(txn.waiting)}", what, parts.config.start_timeout_s)
                agent.changed.wait(WAKE_S)
    agent.raise_if_failed()
    last = leader.commit.closed[-1]
    if last.verdict is Verdict.PUBLISHED:
        return True
    cause = last.cause
    if cause is not None and cause.kind in _WAITABLE and time.monotonic() < deadline:
        return False
    if last.verdict is Verdict.RETAINED and leader.commit.retained:
        return False
    with agent.entered():
        if cause is not None:
            leader.fail(cause, "backing the null page of every domain at start")
    agent.raise_if_failed()
    raise WaitTimeout("the null pages", "no cause was reported", parts.config.start_timeout_s)


__all__ = ["WAKE_S", "assemble", "begin", "connect", "join"]
