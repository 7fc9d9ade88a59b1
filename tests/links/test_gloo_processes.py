"""GlooLink between two processes, with the faults that processes have."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest

from kvcached_dist.coord.core.errors import LinkDown, WaitTimeout
from kvcached_dist.coord.core.messages import Abort, Drained, Map, Mapped
from kvcached_dist.coord.core.types import Epoch, Rank, Txn
from kvcached_dist.coord.links.bounded import StoreConnections
from kvcached_dist.coord.links.gloo import GlooLink
from kvcached_dist.coord.links.star import open_star
from tests.links.conftest import End
from tests.links.peer import LEASE_S, START_S, Peer

pytestmark = pytest.mark.slow

Lead = Callable[..., End]
NewPeer = Callable[..., Peer]


def ask(end: End, txn: int = 1) -> None:
    """One round trip: shows that a link works."""
    before = len(end.messages)
    end.link.send(Map(end.link.epoch, Txn(txn)))
    assert end.wait_for(before + 1)[-1] == Mapped(end.link.epoch, Txn(txn))


def test_messages_stay_in_order_both_ways(gentle_peer: Peer, lead: Lead) -> None:
    count = 5000
    end = lead(gentle_peer, lease_s=5.0)
    gentle_peer.tell("expect", count=count)
    gentle_peer.tell("stream", count=count)
    for txn in range(1, count + 1):
        while end.link.waiting_frames > 1000:
            time.sleep(0.001)
        end.link.send(Abort(Epoch(1), Txn(txn)))
    messages = end.wait_for(count, 30.0)
    assert messages == [Drained(Epoch(1), Txn(txn), 0) for txn in range(1, count + 1)]
    assert gentle_peer.expect("received", 30.0)["count"] == count


def test_round_trip_is_a_fraction_of_a_millisecond(gentle_peer: Peer, lead: Lead) -> None:
    end = lead(gentle_peer, epoch=2)
    times = []
    for txn in range(1, 301):
        started = time.perf_counter()
        ask(end, txn)
        times.append(time.perf_counter() - started)
    assert statistics.median(times) < 0.01, "a round trip of the median message takes 10 ms on an idle interpreter"


def test_killed_peer_is_known_within_a_second(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer()
    end = lead(peer, lease_s=30.0)
    ask(end)
    killed = peer.kill()
    when, down = end.wait_down()
    assert when - killed < 1.0
    assert (down.eof, down.peer) == (True, 1)
    with pytest.raises(LinkDown, match="rank 1"):
        end.link.send(Map(Epoch(1), Txn(2)))
    end.finish()
    assert len(end.downs) == 1


def test_death_of_one_follower_leaves_the_other_link_alone(gentle_peer: Peer, new_peer: NewPeer, lead: Lead) -> None:
    doomed = new_peer()
    first, second = lead(doomed, follower=1), lead(gentle_peer, follower=2)
    ask(first)
    ask(second)
    doomed.kill()
    first.wait_down()
    for txn in range(2, 40):
        ask(second, txn)
    assert second.link.down is None


def test_pause_shorter_than_the_lease_is_not_noticed(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer()
    end = lead(peer, lease_s=3.0)
    ask(end)
    peer.stop()
    time.sleep(0.5)
    peer.go_on()
    ask(end, 2)
    assert end.link.down is None
    assert peer.silent_for(0.1)


def test_pause_longer_than_the_lease_ends_the_link_on_both_sides(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer()
    end = lead(peer)
    ask(end)
    stopped = time.monotonic()
    peer.stop()
    when, down = end.wait_down(LEASE_S + 3.0)
    assert LEASE_S * 0.9 <= when - stopped < LEASE_S + 1.0
    assert not down.eof
    assert "silent for a lease" in down.reason
    peer.go_on()
    peer.expect("down")


def test_sender_notices_a_peer_that_takes_nothing(new_peer: NewPeer, lead: Lead) -> None:
    """The outbox fills while the peer is stopped, ``send`` never blocks, and the lease ends it."""
    peer = new_peer()
    end = lead(peer)
    ask(end)
    peer.stop()
    started = time.monotonic()
    for txn in range(1, 1001):
        end.link.send(Abort(Epoch(1), Txn(txn)))
    assert time.monotonic() - started < LEASE_S * 0.8
    assert end.link.waiting_frames > 900
    _, down = end.wait_down(LEASE_S + 3.0)
    assert not down.eof
    assert "for a lease" in down.reason


def test_link_is_rebuilt_under_a_new_epoch(new_peer: NewPeer, lead: Lead) -> None:
    """A fenced follower that was only slow comes back with the next epoch; old messages are not sent."""
    peer = new_peer()
    first = lead(peer)
    first.link.kill("moved to the next epoch")
    _, down = first.wait_down()
    assert (down.eof, down.reason) == (False, "moved to the next epoch")
    assert peer.expect("down")["eof"] is True
    second = lead(peer, epoch=2)
    ask(second)
    second.link.send(Map(Epoch(1), Txn(9)))
    ask(second, 2)
    assert [message.txn for message in second.messages if isinstance(message, Mapped)] == [1, 2]


def test_restarted_follower_joins_under_a_new_epoch(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer()
    first = lead(peer)
    peer.kill()
    first.wait_down()
    second = lead(new_peer(), epoch=2)
    ask(second)


def test_closing_in_order_reports_no_failure_on_either_side(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer(interpreter=True)
    end = lead(peer)
    ask(end)
    started = time.monotonic()
    end.finish()
    assert time.monotonic() - started < 1.0
    assert end.downs == []
    peer.expect("bye")
    peer.tell("close")
    peer.expect("closed")
    peer.tell("exit")
    peer.expect("exiting")
    assert peer.wait(30) == 0


def test_process_with_an_open_link_exits_by_itself(new_peer: NewPeer, lead: Lead) -> None:
    """Daemon threads inside gloo neither hang nor abort an interpreter that ends."""
    peer = new_peer(interpreter=True)
    end = lead(peer, lease_s=30.0)
    ask(end)
    peer.tell("exit")
    peer.expect("exiting")
    assert peer.wait(30) == 0
    _, down = end.wait_down()
    assert down.eof


def test_busy_interpreter_of_the_follower_does_not_end_the_link(new_peer: NewPeer, lead: Lead) -> None:
    peer = new_peer()
    end = lead(peer)
    peer.tell("busy", seconds=1.5)
    started = time.monotonic()
    while time.monotonic() - started < 1.5:
        ask(end, len(end.messages) + 1)
        time.sleep(0.02)
    assert end.link.down is None


class TestLazyInitialisation:
    """gloo waits without a bound for a peer that exits before the first use, if it connects lazily."""

    LIMIT_S = 2.0

    def test_peer_that_exits_before_the_first_use_is_lost(
        self, new_peer: NewPeer, lead: Lead, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        peer = new_peer(TORCH_GLOO_LAZY_INIT="1")
        end = lead(peer, lease_s=self.LIMIT_S, beat_s=0)
        started = time.monotonic()
        peer.tell("exit_hard")
        when, _ = end.wait_down(self.LIMIT_S + 3.0)
        assert when - started < self.LIMIT_S + 1.0

    def test_follower_that_never_comes_is_named(
        self, connections: StoreConnections, session: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
        started = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"rank 5.*epoch 3") as error:
            GlooLink.open(
                connections,
                session=session,
                epoch=Epoch(3),
                rank=Rank(0),
                leader=Rank(0),
                follower=Rank(5),
                lease_s=1800.0,
                connect_s=0.5,
            )
        assert time.monotonic() - started < 2.0
        assert error.value.who == "rank 5"


def test_star_names_every_follower_that_is_missing(
    gentle_peer: Peer, connections: StoreConnections, session: int
) -> None:
    gentle_peer.open(session=session, epoch=1, follower=1)
    with pytest.raises(WaitTimeout) as error:
        open_star(
            connections,
            session=session,
            epoch=Epoch(1),
            leader=Rank(0),
            followers=[Rank(1), Rank(2), Rank(3)],
            lease_s=1.0,
            connect_s=1.0,
        )
    assert error.value.who == "rank(s) 2, 3"
    gentle_peer.expect("opened")
    gentle_peer.expect("down")


def test_star_opens_all_links(
    gentle_peer: Peer, new_peer: NewPeer, connections: StoreConnections, session: int
) -> None:
    peers = [gentle_peer, new_peer()]
    for follower, peer in enumerate(peers, 1):
        peer.open(session=session, epoch=1, follower=follower)
    links = open_star(
        connections,
        session=session,
        epoch=Epoch(1),
        leader=Rank(0),
        followers=[Rank(1), Rank(2)],
        lease_s=LEASE_S,
        connect_s=START_S,
    )
    ends = [End(links[Rank(follower)]) for follower in (1, 2)]
    for end, peer in zip(ends, peers, strict=True):
        peer.expect("opened")
        ask(end)
    for end in ends:
        end.finish()
