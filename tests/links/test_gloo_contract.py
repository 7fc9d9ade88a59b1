"""Facts about gloo on which links rest. If a torch version breaks one, the design has to be looked at.

Each test says which decision of ``coord.links`` depends on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from kvcached_dist.coord.links.bounded import StoreConnections
from kvcached_dist.coord.links.pair import Pair, connect_pair, poison
from tests.links.peer import Peer

pytestmark = pytest.mark.slow

FRAME = 4096
SECOND = timedelta(seconds=1)
FIVE_SECONDS = timedelta(seconds=5)

Pairs = tuple[Pair, Pair]


def frame(value: int = 0, size: int = FRAME) -> list[torch.Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8)]


def ended_with(call: Callable[[], Any]) -> tuple[str, float]:
    """What a call that must fail says, and after how long."""
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value).lower(), time.monotonic() - started


@pytest.fixture
def open_pair(connections: StoreConnections, session: int) -> Iterator[Callable[[str], Pairs]]:
    """Opens both ranks of a group in this process."""
    opened: list[Pair] = []

    def both(name: str) -> Pairs:
        ranks: dict[int, Pair] = {}

        def one(rank: int) -> None:
            prefix = f"contract/{session}/{name}"
            ranks[rank] = connections.call(lambda own: connect_pair(own, prefix, rank, 10.0), 11.0, what=prefix)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        opened.extend(ranks.values())
        return ranks[0], ranks[1]

    yield both
    for pair in opened:
        poison(pair, 0 if pair.rank() else 1)  # type: ignore[attr-defined]


@pytest.fixture
def pair(open_pair: Callable[[str], Pairs]) -> Pairs:
    return open_pair("a")


def test_timed_out_wait_closes_the_group_and_tells_the_peer(pair: Pairs) -> None:
    """The lease is the timeout of a receive, and fences both ends."""
    one, other = pair
    waiting = other.recv(frame(), 0, 1)
    first, second = one.recv(frame(), 1, 2), one.recv(frame(), 1, 2)
    text, _ = ended_with(lambda: first.wait(timedelta(milliseconds=100)))
    assert "timed out" in text
    text, seconds = ended_with(lambda: second.wait(FIVE_SECONDS))
    assert "timeout caused pair closure" in text
    assert seconds < 1
    text, seconds = ended_with(lambda: waiting.wait(FIVE_SECONDS))
    assert "connection" in text
    assert seconds < 1
    ended_with(lambda: one.send(frame(), 1, 1))


def test_timeout_on_one_group_leaves_another_alone(open_pair: Callable[[str], Pairs]) -> None:
    """One group per follower: fencing one follower must not disturb the others."""
    first, second = open_pair("first"), open_pair("second")
    receive = second[1].recv(frame(), 0, 1)
    ended_with(lambda: first[0].recv(frame(), 1, 2).wait(timedelta(milliseconds=50)))
    sent = second[0].send(frame(7), 1, 1)
    assert sent.wait(FIVE_SECONDS)
    assert receive.wait(FIVE_SECONDS)


def test_abort_does_not_wake_a_waiting_thread_and_a_short_timeout_does(pair: Pairs) -> None:
    """Why ``kill`` is a receive that times out."""
    one, _ = pair
    ended = threading.Event()
    work = one.recv(frame(), 1, 2)

    def wait() -> None:
        ended_with(lambda: work.wait(timedelta(seconds=20)))
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.abort()  # type: ignore[attr-defined]
    woken_by_abort = ended.wait(0.3)
    started = time.monotonic()
    poison(one, 1)
    assert ended.wait(2)
    thread.join(2)
    assert time.monotonic() - started < 1
    if woken_by_abort:
        pytest.fail("abort() wakes waiting threads on this torch: kill() can use it")


def test_receives_of_one_tag_complete_in_the_order_in_which_they_were_posted(pair: Pairs) -> None:
    """The ring of receives posted ahead keeps the order."""
    one, other = pair
    buffers = [frame() for _ in range(8)]
    receives = [other.recv(buffer, 0, 1) for buffer in buffers]
    sends = [one.send(frame(value), 1, 1) for value in range(8)]
    assert all(work.wait(FIVE_SECONDS) for work in [*receives, *sends])
    assert [int(buffer[0][0]) for buffer in buffers] == list(range(8))


def test_frames_that_arrived_before_the_end_can_still_be_waited_for(pair: Pairs) -> None:
    """The last words of a peer that closes are delivered."""
    one, other = pair
    buffer = frame()
    receive = other.recv(buffer, 0, 1)
    assert one.send(frame(9), 1, 1).wait(FIVE_SECONDS)
    barrier = other.recv(frame(), 0, 3)
    assert one.send(frame(), 1, 3).wait(FIVE_SECONDS)
    assert barrier.wait(FIVE_SECONDS)
    poison(one, 1)
    poison(other, 0)
    assert receive.wait(FIVE_SECONDS)
    assert int(buffer[0][0]) == 9


def test_completion_is_not_visible_before_the_wait(pair: Pairs) -> None:
    """Why nothing polls: ``is_completed`` stays false for a receive that has arrived."""
    one, other = pair
    receive = other.recv(frame(), 0, 1)
    assert one.send(frame(), 1, 1).wait(FIVE_SECONDS)
    answer = one.recv(frame(), 1, 2)
    assert other.send(frame(), 0, 2).wait(FIVE_SECONDS)
    assert answer.wait(FIVE_SECONDS)
    assert not receive.is_completed()  # type: ignore[attr-defined]
    assert receive.wait(FIVE_SECONDS)


def test_posting_a_send_does_not_wait_for_the_receiver(pair: Pairs) -> None:
    """``send`` of a link posts in the caller's thread; it must not block while the peer takes nothing."""
    one, other = pair
    started = time.monotonic()
    works = [one.send(frame(value), 1, 1) for value in range(64)]
    assert time.monotonic() - started < 1
    buffers = [frame() for _ in works]
    receives = [other.recv(buffer, 0, 1) for buffer in buffers]
    assert all(work.wait(FIVE_SECONDS) for work in receives + works)
    assert [int(buffer[0][0]) for buffer in buffers] == list(range(64))


def test_new_group_under_a_new_prefix_after_the_old_one_ended(open_pair: Callable[[str], Pairs]) -> None:
    """An epoch change is a new prefix."""
    poison(open_pair("epoch-1")[0], 1)
    started = time.monotonic()
    one, other = open_pair("epoch-2")
    assert time.monotonic() - started < 5
    receive = other.recv(frame(), 0, 1)
    assert one.send(frame(3), 1, 1).wait(FIVE_SECONDS)
    assert receive.wait(FIVE_SECONDS)


class TestOtherProcess:
    """Facts that need a peer that can be stopped or killed."""

    @pytest.fixture
    def towards(self, new_peer: Callable[..., Peer], connections: StoreConnections, session: int) -> tuple[Peer, Pair]:
        peer = new_peer()
        prefix = f"contract/{session}/process"
        peer.tell("raw", prefix=prefix, size=FRAME, receives=4, wait_s=20)
        one = connections.call(lambda own: connect_pair(own, prefix, 0, 10.0), 11.0, what=prefix)
        peer.expect("posted", 10.0)
        return peer, one

    def test_killed_peer_is_an_end_of_file_at_once(self, towards: tuple[Peer, Pair]) -> None:
        """A dead process is known within a second, whatever the lease is."""
        peer, one = towards
        work = one.recv(frame(), 1, 2)
        peer.kill()
        text, seconds = ended_with(lambda: work.wait(timedelta(seconds=20)))
        assert "connection" in text
        assert "timeout" not in text
        assert "timed out" not in text
        assert seconds < 1

    def test_send_to_a_stopped_peer_completes(self, towards: tuple[Peer, Pair]) -> None:
        """A completed send acknowledges nothing; frames carry acknowledgements of their own."""
        peer, one = towards
        peer.stop()
        assert one.send(frame(), 1, 1).wait(SECOND)
        peer.go_on()
        assert peer.expect("raw")["ended"] == "received"

    def test_message_larger_than_the_receive_ends_the_receiving_process(self, towards: tuple[Peer, Pair]) -> None:
        """Why every frame has the same size."""
        peer, one = towards
        works = [one.send(frame(0, 2 * FRAME), 1, 1)]
        assert peer.wait(10) != 0
        del works[0]
