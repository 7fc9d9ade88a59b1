"""From separate processes to a world: links, introductions, one table of sizes that every rank agrees to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .agent import Agent
from .coord.core.errors import ConfigError, GroupFailed, LinkDown, WaitTimeout
from .coord.core.messages import Beat, Fail, Hello, Joined, Message, Snapshot
from .coord.core.types import Cause, CauseKind, Epoch, Rank
from .coord.links.bounded import Store
from .coord.links.gloo import GlooLink
from .coord.links.link import Link, OnDown, OnMessage
from .world import World

LEADER = Rank(0)

M = TypeVar("M", bound=Message)


def open_links(
    store: Store, session: int, epoch: Epoch, world: World, *, lease_s: float, timeout_s: float
) -> dict[Rank, Link]:
    """Connect this rank: the leader to every follower, a follower to the leader. Collective.

    Raises:
        WaitTimeout: a rank did not come; names it.
        LinkDown: a rank went away meanwhile.

    Blocks: at most ``timeout_s`` and a grace of half a second; all followers are waited for at once.
    """

    def connect(follower: Rank) -> GlooLink:
        return GlooLink.open(
            store,
            session=session,
            epoch=epoch,
            rank=Rank(world.rank),
            leader=LEADER,
            follower=follower,
            lease_s=lease_s,
            connect_s=timeout_s,
        )

    if world.rank != LEADER:
        return {LEADER: connect(Rank(world.rank))}
    followers = [Rank(rank) for rank in range(1, world.size)]
    with ThreadPoolExecutor(max_workers=len(followers), thread_name_prefix="kvcached-connect") as pool:
        return dict(zip(followers, pool.map(connect, followers), strict=True))


class Inbox:
    """Receives for a rank until its agent exists, then hands everything over in order.

    Args:
        links: the links of this rank, not started yet.

    Threads: the owner's thread collects; the links' readers fill.
    """

    def __init__(self, links: Mapping[Rank, Link]) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Rank, Message]] = deque()
        self._down: dict[Rank, LinkDown] = {}
        self._agent: Agent | None = None
        self.links = dict(links)
        for peer, link in self.links.items():
            link.start(self._receiver(peer), self._mourner(peer))

    def collect(self, kind: type[M], timeout_s: float, what: str) -> dict[Rank, M]:
        """One message of ``kind`` from every peer.

        Raises:
            GroupFailed: a peer reported a failure or went away.
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
            if isinstance(message, kind) and peer not in found:
                found[peer] = message
            elif not isinstance(message, Beat):
                rest.append((peer, message))
        self._waiting = rest

    def hand_over(self, agent: Agent) -> None:
        """Deliver what came and everything that comes to ``agent`` from now on."""
        with self._changed:
            self._agent = agent
            for peer, message in self._waiting:
                agent.on_message(peer, message)
            self._waiting.clear()
            for peer, down in self._down.items():
                agent.on_link_down(peer, down)

    def _receiver(self, peer: Rank) -> OnMessage:
        def on_message(message: Message) -> None:
            agent = self._agent
            if agent is None:
                with self._changed:
                    agent = self._agent
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
    inbox: Inbox, hello: Hello, world: World, epoch: Epoch, timeout_s: float
) -> tuple[Snapshot, dict[Rank, Hello]]:
    """Exchange introductions over fresh links; every rank leaves with the same table of sizes.

    Returns:
        The leader's snapshot and, on the leader, the introductions of all followers.

    Raises:
        ConfigError: on the leader, ranks disagree (the followers get ``GroupFailed`` with the same text).
        GroupFailed, WaitTimeout: a rank failed, went away or did not answer.

    Blocks: at most ``timeout_s``.
    """
    if world.rank != LEADER:
        inbox.links[LEADER].send(hello)
        found = inbox.collect(Snapshot, timeout_s, "the leader's table of sizes")
        return found[LEADER], {}
    others = inbox.collect(Hello, timeout_s, "introductions")
    try:
        blocks = agree(hello, others, world)
    except ConfigError as error:
        for link in inbox.links.values():
            link.send(Fail(epoch, Cause(CauseKind.DIVERGENCE, LEADER, str(error))))
        raise
    snapshot = Snapshot(epoch, blocks, (), 0, 0, 0)
    for link in inbox.links.values():
        link.send(snapshot)
    return snapshot, others


def wait_joined(inbox: Inbox, timeout_s: float) -> None:
    """The leader waits until every follower can take part: no resize happens before.

    Raises:
        GroupFailed, WaitTimeout: a rank failed, went away or did not answer.
    """
    inbox.collect(Joined, timeout_s, "readiness of every rank")
