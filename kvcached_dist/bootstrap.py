"""From separate processes to a world: links, introductions, one table of sizes that every rank agrees to."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from .agent import Agent
from .coord.core.errors import ConfigError, GroupFailed, LinkDown, RankLost, WaitTimeout
from .coord.core.messages import Beat, Bye, Fail, Hello, Message, Reform, Snapshot
from .coord.core.types import Cause, CauseKind, Epoch, Rank, Txn
from .coord.links.bounded import Poll, Store, StoreConnections
from .coord.links.gloo import GlooLink
from .coord.links.link import Link, OnDown, OnMessage
from .coord.links.star import open_star
from .coord.links.store import EpochRegister
from .rank_links import close_links
from .world import World

LEADER = Rank(0)

M = TypeVar("M", bound=Message)


class Inbox:
    """Receives for a rank until its agent exists, then hands everything over in order.

    Until then it also beats on every link, because a rank that waits for others must not look hung.

    Args:
        epoch: epoch of the links.
        beat_s: seconds between beats.

    Threads: the owner's thread collects; the links' readers fill; one thread beats.
    """

    def __init__(self, epoch: Epoch, beat_s: float) -> None:
        self.links: dict[Rank, Link] = {}
        self._epoch = epoch
        self._beat_s = beat_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Rank, Message]] = deque()
        self._down: dict[Rank, LinkDown] = {}
        self._agent: Agent | None = None
        self._done = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="kvcached-start-beats", daemon=True)
        self._beats.start()

    def add(self, link: Link) -> None:
        """Receive on a link that was just connected. Threads: any."""
        with self._changed:
            self.links[link.peer] = link
        link.start(self._receiver(link.peer), self._mourner(link.peer))

    def _beat(self) -> None:
        beat = Beat(self._epoch, 0, 0, (), 0, Txn(0))
        while not self._done.wait(self._beat_s):
            with self._changed:
                links = list(self.links.values())
            for link in links:
                # A link that is down has reported itself to collect().
                with contextlib.suppress(LinkDown):
                    link.send(beat)

    def collect(self, kind: type[M], timeout_s: float, what: str) -> dict[Rank, M]:
        """One message of ``kind`` from every peer.

        Raises:
            GroupFailed: a peer reported a failure or went away.
            RankLost: the leader has given this epoch up, because another follower went away.
            WaitTimeout: names the ranks that did not answer.

        Blocks: at most ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[Rank, M] = {}
        with self._changed:
            while True:
                self._take(kind, found)
                missing = sorted(set(self.links) - set(found))
                if not missing:
                    return found
                for peer in missing:
                    if peer in self._down:
                        down = self._down[peer]
                        lost = CauseKind.RANK_LOST if down.eof else CauseKind.RANK_HUNG
                        raise GroupFailed(Cause(lost, peer, down.reason), f"start-up ({what})")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(f"ranks {missing}", what, timeout_s)
                self._changed.wait(left)

    def _take(self, kind: type[M], found: dict[Rank, M]) -> None:
        rest: deque[tuple[Rank, Message]] = deque()
        for peer, message in self._waiting:
            if isinstance(message, Fail):
                raise GroupFailed(message.cause, "start-up")
            if isinstance(message, Reform):
                raise RankLost(message.cause)
            if isinstance(message, Bye):
                raise GroupFailed(Cause(CauseKind.CLOSED, peer, "its coordinator was closed"), "start-up")
            if isinstance(message, kind) and peer not in found:
                found[peer] = message
            else:
                rest.append((peer, message))
        self._waiting = rest

    def hand_over(self, agent: Agent) -> None:
        """Deliver what came and everything that comes to ``agent`` from now on."""
        with self._changed:
            for peer, message in self._waiting:
                agent.on_message(peer, message)
            self._waiting.clear()
            for peer, down in self._down.items():
                agent.on_link_down(peer, down)
            # Last: a reader that sees the agent delivers past this lock, and must not overtake what waited here.
            self._agent = agent

    def stop_beats(self) -> None:
        """An agent beats from now on: a beat from here, which knows no budget, must not follow one of its own."""
        self._done.set()
        self._beats.join(1.0)

    def give_up(self, cause: Cause) -> None:
        """Tell all followers that this epoch ends before it has begun. On the leader."""
        for link in self.links.values():
            # One that is down has nobody to be told.
            with contextlib.suppress(LinkDown):
                link.send(Reform(self._epoch, cause))

    def close(self) -> None:
        """End all links in order. Idempotent."""
        self.stop_beats()
        close_links(self.links.values())

    def _receiver(self, peer: Rank) -> OnMessage:
        def on_message(message: Message) -> None:
            agent = self._agent
            if agent is None:
                with self._changed:
                    agent = self._agent
                    if agent is None and isinstance(message, Beat):
                        return
                    if agent is None:
                        self._waiting.append((peer, message))
                        self._changed.notify_all()
                        return
            agent.on_message(peer, message)

        return on_message

    def _mourner(self, peer: Rank) -> OnDown:
        def on_down(down: LinkDown) -> None:
            with self._changed:
                self._down[peer] = down
                agent = self._agent
                self._changed.notify_all()
            if agent is not None:
                agent.on_link_down(peer, down)

        return on_down


def open_links(
    connections: StoreConnections,
    session: int,
    epoch: Epoch,
    world: World,
    inbox: Inbox,
    *,
    lease_s: float,
    timeout_s: float,
) -> None:
    """Connect this rank: the leader to every follower, a follower to the leader. Collective.

    Args:
        connections: to the bootstrap store.
        session: id of the run.
        epoch: epoch of the links.
        world: which rank this is.
        inbox: gets each link as soon as it is connected, and keeps it alive.
        lease_s: longest silence of a peer.
        timeout_s: deadline for all of them.

    Raises:
        WaitTimeout: ranks did not come; names them.
        LinkDown: a rank went away meanwhile.

    Blocks: at most ``timeout_s`` and a grace of half a second; all followers are waited for at once.
    """
    if world.rank == LEADER:
        open_star(
            connections,
            session=session,
            epoch=epoch,
            leader=LEADER,
            followers=[Rank(rank) for rank in range(1, world.size)],
            lease_s=lease_s,
            connect_s=timeout_s,
            on_open=inbox.add,
        )
        return
    rank = Rank(world.rank)
    link = GlooLink.open(
        connections,
        session=session,
        epoch=epoch,
        rank=rank,
        leader=LEADER,
        follower=rank,
        lease_s=lease_s,
        connect_s=timeout_s,
    )
    inbox.add(link)


def agree(hello: Hello, others: Mapping[Rank, Hello], world: World) -> tuple[int, ...]:
    """Compare introductions; the logical capacity is the minimum over ranks.

    Args:
        hello: the leader's own introduction.
        others: those of the followers.
        world: for the names of ranks.

    Returns:
        Blocks per domain that every rank can address.

    Raises:
        ConfigError: ranks were given different models or settings; names the rank.
    """
    for rank, other in sorted(others.items()):
        who = world.describe(rank)
        if other.spec_digest != hello.spec_digest:
            raise ConfigError(
                f"{who} describes another model ({other.spec_digest[:12]}) than rank 0 ({hello.spec_digest[:12]}):"
                " start every rank with the same model, page size and parallel sizes"
            )
        if other.config_digest != hello.config_digest:
            raise ConfigError(
                f"{who} has other settings than rank 0: the settings that docs/settings.md marks as world-wide"
                " must be equal on all ranks"
            )
        if len(other.domain_blocks) != len(hello.domain_blocks):
            raise ConfigError(f"{who} has {len(other.domain_blocks)} domains, rank 0 has {len(hello.domain_blocks)}")
    return tuple(
        min(blocks) for blocks in zip(hello.domain_blocks, *(o.domain_blocks for o in others.values()), strict=True)
    )


def introduce(
    inbox: Inbox, hello: Hello, world: World, snapshot_of: Callable[[tuple[int, ...]], Snapshot], timeout_s: float
) -> tuple[Snapshot, dict[Rank, Hello]]:
    """Exchange introductions over fresh links; every rank leaves with the same snapshot.

    Args:
        inbox: receives on the links of the new epoch.
        hello: this rank's introduction.
        world: for the names of ranks.
        snapshot_of: the leader's snapshot for agreed sizes; not called on followers.
        timeout_s: deadline in seconds.

    Returns:
        The leader's snapshot and, on the leader, the introductions of all followers.

    Raises:
        ConfigError: on the leader, ranks disagree (the followers get ``GroupFailed`` with the same text).
        GroupFailed, WaitTimeout: a rank failed, went away or did not answer.

    Blocks: at most ``timeout_s``.
    """
    if world.rank != LEADER:
        inbox.links[LEADER].send(hello)
        found = inbox.collect(Snapshot, timeout_s, "the leader's snapshot")
        return found[LEADER], {}
    others = inbox.collect(Hello, timeout_s, "introductions")
    try:
        snapshot = snapshot_of(agree(hello, others, world))
    except ConfigError as error:
        for link in inbox.links.values():
            link.send(Fail(hello.epoch, Cause(CauseKind.DIVERGENCE, LEADER, str(error))))
        raise
    for link in inbox.links.values():
        link.send(snapshot)
    return snapshot, others


def await_seat(
    connections: StoreConnections, register: EpochRegister, session: int, rank: Rank, timeout_s: float
) -> Epoch:
    """Wait for an epoch in which no process has been this rank yet, and take the seat.

    A survivor waits for the epoch after its own; a restarted rank does so too, without knowing which one its
    predecessor died in.

    Raises:
        WaitTimeout: no such epoch came.
        StoreLost: the store is gone.

    Blocks: at most ``timeout_s`` and one bounded store call.
    """
    poll = Poll(time.monotonic() + timeout_s)
    refused = Epoch(0)
    while True:
        value = register.read()
        if value is not None and value.epoch > refused:
            if _claim(connections, session, value.epoch, rank, timeout_s):
                return value.epoch
            refused = value.epoch
        if not poll.again():
            raise WaitTimeout("rank 0", f"an epoch after {refused} with a seat for rank {rank}", timeout_s)


def _claim(connections: StoreConnections, session: int, epoch: Epoch, rank: Rank, timeout_s: float) -> bool:
    key = f"kvcached_dist/{session:016x}/seat/{epoch}/{rank}"
    mine = f"pid{os.getpid()}-{secrets.token_hex(8)}"

    def claim(connection: Store) -> bool:
        # Only a reply equal to the desired value is success (see the contract tests of compare_set).
        return connection.compare_set(key, "", mine) == mine.encode("ascii")

    return connections.call(claim, timeout_s, what=f"give rank {rank} its seat of epoch {epoch} (key {key})")
