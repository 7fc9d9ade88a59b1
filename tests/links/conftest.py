"""Stores, peers and ends of links for the tests of this folder."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcached_dist.coord.core.errors import LinkDown
from kvcached_dist.coord.core.messages import Beat, Message
from kvcached_dist.coord.core.types import Epoch, Rank
from kvcached_dist.coord.links.bounded import StoreConnections
from kvcached_dist.coord.links.gloo import GlooLink
from kvcached_dist.coord.links.link import Link
from kvcached_dist.coord.links.store import connect_store
from tests.links.blank import make
from tests.links.peer import BEAT_S, LEASE_S, ForkedPeer, Peer, PeerProcess

CONNECTIONS = 8

# A store looks up names for every connection; tests must not wait long for a resolver that is slow.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_sessions = itertools.count(1)


@pytest.fixture(scope="session")
def store() -> Any:
    """A store whose server runs in this process."""
    return connect_store("127.0.0.1", 0, True, 2, 10.0)


@pytest.fixture(scope="session")
def connections(store: Any) -> StoreConnections:
    """Connections to it, as many as a test needs at once: making one may wait for a name lookup."""
    made = StoreConnections(store)
    together = threading.Barrier(CONNECTIONS)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        calls = [
            pool.submit(made.call, lambda own: together.wait(60), 60.0, what="connect") for _ in range(CONNECTIONS)
        ]
        for call in calls:
            call.result()
    return made


@pytest.fixture
def session() -> int:
    """A session id that no other test uses."""
    return next(_sessions)


@pytest.fixture(scope="module")
def fork_server() -> None:
    """Starts the process that peers are forked from; it stays until the end of the session."""
    ForkedPeer().end()


@pytest.fixture(scope="module")
def gentle_peer(store: Any, fork_server: None) -> Iterator[Peer]:
    """A peer that every test of the module leaves as it found it."""
    peer = ForkedPeer()
    peer.connect(store.port)
    yield peer
    peer.end()


@pytest.fixture
def new_peer(store: Any, fork_server: None) -> Iterator[Callable[..., Peer]]:
    """Starts peers that are connected to the store and end with the test."""
    peers: list[Peer] = []

    def start(*, connect: bool = True, interpreter: bool = False, **environment: str) -> Peer:
        peer = PeerProcess(**environment) if interpreter else ForkedPeer(**environment)
        peers.append(peer)
        if connect:
            peer.connect(store.port)
        return peer

    yield start
    for peer in peers:
        peer.end()


class End:
    """This process's end of a link, with what arrived at it."""

    def __init__(self, link: Link, *, beat: bool = True, start: bool = True) -> None:
        self.link = link
        self.messages: list[Message] = []
        self.downs: list[tuple[float, LinkDown]] = []
        self._changed = threading.Condition()
        self._beater = threading.Thread(target=self._beat, daemon=True)
        self._beats = beat
        if start:
            self.start()

    def start(self) -> None:
        """Start the link and its beats."""
        self.link.start(self.on_message, self.on_down)
        if self._beats:
            self._beater.start()

    def _beat(self) -> None:
        beat = make(Beat, epoch=self.link.epoch)
        while self.link.down is None:
            try:
                self.link.send(beat)
            except LinkDown:
                return
            time.sleep(BEAT_S)

    def on_message(self, message: Message) -> None:
        if not isinstance(message, Beat):
            with self._changed:
                self.messages.append(message)
                self._changed.notify_all()

    def on_down(self, down: LinkDown) -> None:
        with self._changed:
            self.downs.append((time.monotonic(), down))
            self._changed.notify_all()

    def wait_for(self, count: int, timeout_s: float = 10.0) -> list[Message]:
        """Wait until so many messages other than beats have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, timeout_s), (
                f"{len(self.messages)} of {count} messages after {timeout_s} s, link down: {self.link.down}"
            )
            return list(self.messages)

    def wait_down(self, timeout_s: float = 5.0) -> tuple[float, LinkDown]:
        """Wait for ``on_down``; returns when it came and what it said."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.downs), timeout_s), f"not down after {timeout_s} s"
            return self.downs[0]

    def finish(self) -> None:
        """Close and see that no thread stays."""
        self.link.close()
        if self._beater.is_alive():
            self._beater.join(2)
        prefix = f"kvcached-link-{self.link.peer}-epoch-{self.link.epoch}-"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.fixture
def lead(connections: StoreConnections, session: int) -> Iterator[Callable[..., End]]:
    """Opens the leader's end towards a peer."""
    ends: list[End] = []

    def open_end(peer: Peer, *, epoch: int = 1, follower: int = 1, lease_s: float = LEASE_S, **more: Any) -> End:
        peer.open(session=session, epoch=epoch, follower=follower, lease_s=lease_s, **more)
        link = GlooLink.open(
            connections,
            session=session,
            epoch=Epoch(epoch),
            rank=Rank(0),
            leader=Rank(0),
            follower=Rank(follower),
            lease_s=lease_s,
            connect_s=10.0,
        )
        end = End(link)
        ends.append(end)
        peer.expect("opened")
        return end

    yield open_end
    for end in ends:
        end.finish()
