"""How a coordinator ends, and what an epoch that ended leaves to the next one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvcached_dist import GroupFailed
from kvcached_dist.bootstrap import Inbox
from kvcached_dist.coord.core import epoch as epoch_change
from kvcached_dist.coord.core.entries import Limit
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import Bye, MarkMessage, Message
from kvcached_dist.coord.core.policy import Policy
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.types import CauseKind, Epoch, Rank, Tick
from tests.simulation.pool import ListPool

from .world import Rank as Seat
from .world import config, run_world


@pytest.mark.slow
def test_a_follower_learns_at_once_that_the_leader_has_closed() -> None:
    def body(rank: Seat) -> Any:
        if rank.coordinator.world.rank == 0:
            rank.coordinator.step()
            return None
        rank.coordinator.step()
        began = time.monotonic()
        with pytest.raises(GroupFailed) as caught:
            rank.coordinator.step()
        return caught.value.cause.kind, caught.value.rank, time.monotonic() - began

    _, (kind, rank, waited) = run_world(body, tp=2, settings=config(lease_s=20.0))
    assert (kind, rank) == (CauseKind.CLOSED, 0)
    assert waited < 10.0


def leader_of_two() -> Leader:
    replica = Replica(Rank(0), [ListPool(8, 1, ordered=False)], [1])
    peers = [Peer((4096,), 1 << 20, Tick(0), (0,)) for _ in range(2)]
    return Leader(Epoch(1), Policy(rejoin=True), replica, [8], peers, Tick(0))


def test_nothing_is_logged_in_an_epoch_that_has_ended() -> None:
    leader = leader_of_two()
    leader.on_link_down(Rank(1), "gone", eof=True, now=Tick(1))
    leader.evict(100)
    assert epoch_change.snapshot(leader, Epoch(2), (8,), 0).runs == ()


def test_a_limit_that_was_answered_survives_the_end_of_the_epoch() -> None:
    leader = leader_of_two()
    leader.limits.request(1 << 20, revision=7)
    assert leader.log.due() == [Limit(7, 1 << 20)]
    leader.on_link_down(Rank(1), "gone", eof=True, now=Tick(1))
    snapshot = epoch_change.snapshot(leader, Epoch(2), (8,), 0)
    assert (snapshot.limit_revision, snapshot.limit_bytes) == (7, 1 << 20)


class _Slow:
    """An agent that takes its first message slowly."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.seen: list[Message] = []

    def on_message(self, _peer: Rank, message: Message) -> None:
        if not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(10)
        self.seen.append(message)


def test_a_message_does_not_overtake_those_that_waited_for_the_agent() -> None:
    inbox = Inbox(Epoch(1), beat_s=60.0)
    agent = _Slow()
    first, second = (MarkMessage(Epoch(1), None), Bye(Epoch(1)))  # type: ignore[arg-type]
    receive = inbox._receiver(Rank(0))
    receive(first)
    handing = threading.Thread(target=inbox.hand_over, args=(agent,))
    handing.start()
    assert agent.entered.wait(10)
    reading = threading.Thread(target=receive, args=(second,))
    reading.start()
    reading.join(0.05)
    agent.go_on.set()
    handing.join(10)
    reading.join(10)
    inbox.close()
    assert agent.seen == [first, second]
