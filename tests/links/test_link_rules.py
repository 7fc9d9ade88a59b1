"""What every link promises, tested on the in-process link and on gloo alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvcached_dist.coord.core.errors import LinkDown
from kvcached_dist.coord.core.messages import Bye, Drained, Fail, Map, Mapped, Message, Snapshot, SnapshotRun
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Epoch, PageId, Rank, Run, Txn
from kvcached_dist.coord.links import memory, outbox
from kvcached_dist.coord.links.bounded import StoreConnections, run_bounded
from kvcached_dist.coord.links.gloo import GlooLink
from kvcached_dist.coord.links.link import OUTBOX_FRAMES_MAX, Link
from kvcached_dist.coord.links.memory import memory_pair
from tests.links.blank import EPOCH, make
from tests.links.conftest import End

pytestmark = pytest.mark.slow

LEADER, FOLLOWER = Rank(0), Rank(1)
OpenPair = Callable[..., tuple[Link, Link]]


@pytest.fixture(params=["memory", "gloo"])
def open_pair(request: pytest.FixtureRequest, connections: StoreConnections, session: int) -> Iterator[OpenPair]:
    """Opens both ends of a link in this process, the leader's first."""
    links: list[Link] = []

    def open_memory(lease_s: float = 5.0) -> tuple[Link, Link]:
        return memory_pair(LEADER, FOLLOWER, session=session, epoch=EPOCH, lease_s=lease_s)

    def open_gloo(lease_s: float = 5.0) -> tuple[Link, Link]:
        ends: dict[Rank, Link] = {}

        def open_end(rank: Rank) -> None:
            ends[rank] = GlooLink.open(
                connections,
                session=session,
                epoch=EPOCH,
                rank=rank,
                leader=LEADER,
                follower=FOLLOWER,
                lease_s=lease_s,
                connect_s=10.0,
            )

        threads = [threading.Thread(target=open_end, args=(rank,)) for rank in (LEADER, FOLLOWER)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        return ends[LEADER], ends[FOLLOWER]

    def open_either(lease_s: float = 5.0) -> tuple[Link, Link]:
        pair = (open_memory if request.param == "memory" else open_gloo)(lease_s)
        links.extend(pair)
        return pair

    yield open_either
    for link in links:
        link.kill("end of the test")
        link.close()


def open_ends(open_pair: OpenPair, *, lease_s: float = 5.0) -> tuple[End, End]:
    leader, follower = open_pair(lease_s)
    return End(leader, beat=False), End(follower, beat=False)


def test_names_and_a_first_message(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    assert (leader.link.peer, follower.link.peer, leader.link.epoch) == (1, 0, EPOCH)
    leader.link.send(Map(EPOCH, Txn(1)))
    assert follower.wait_for(1) == [Map(EPOCH, Txn(1))]
    assert leader.link.waiting_frames == 0


def test_messages_of_several_threads_all_arrive_in_the_order_of_each(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    count, senders = 300, 4

    def send(lag: int) -> None:
        for txn in range(count):
            leader.link.send(Drained(EPOCH, Txn(txn), lag))

    threads = [threading.Thread(target=send, args=(lag,)) for lag in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    messages = follower.wait_for(count * senders, 20.0)
    for lag in range(senders):
        mine = [message.txn for message in messages if isinstance(message, Drained) and message.lag_steps == lag]
        assert mine == list(range(count))


def test_long_message_arrives_whole_between_short_ones(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    runs = tuple(SnapshotRun(Run(DomainId(0), PageId(i), 1), True) for i in range(20_000))
    sent: list[Message] = [Map(EPOCH, Txn(1)), make(Snapshot, runs=runs), Map(EPOCH, Txn(2))]
    for message in sent:
        follower.link.send(message)
    assert leader.wait_for(3, 20.0) == sent


def test_reply_from_inside_the_handler(open_pair: OpenPair) -> None:
    leader, follower_link = open_pair()
    follower_link.start(lambda message: follower_link.send(Mapped(EPOCH, Txn(8))), lambda down: None)
    end = End(leader, beat=False)
    leader.send(Map(EPOCH, Txn(8)))
    assert end.wait_for(1) == [Mapped(EPOCH, Txn(8))]


def test_silence_of_a_lease_ends_both_ends(open_pair: OpenPair) -> None:
    started = time.monotonic()
    leader, follower = open_ends(open_pair, lease_s=0.4)
    (when, down), (_, other) = leader.wait_down(), follower.wait_down()
    assert 0.35 <= when - started < 1.4
    assert {down.eof, other.eof} in ({False}, {False, True})
    assert "silent for a lease of 0.4 s" in (down.reason + other.reason)


def test_kill_reports_its_reason_once_and_the_peer_sees_the_end(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    started = time.monotonic()
    leader.link.kill("fenced")
    leader.link.kill("too late")
    _, down = leader.wait_down()
    _, other = follower.wait_down()
    assert time.monotonic() - started < 1.0
    assert (down.reason, down.eof, other.eof) == ("fenced", False, True)
    for end in (leader, follower):
        end.finish()
        assert len(end.downs) == 1
        assert end.link.down is not None


def test_many_threads_may_kill_at_once(open_pair: OpenPair) -> None:
    leader, _ = open_ends(open_pair)
    threads = [threading.Thread(target=leader.link.kill, args=(f"reason {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2)
        assert not thread.is_alive()
    _, down = leader.wait_down()
    leader.finish()
    assert down.reason.startswith("reason")
    assert len(leader.downs) == 1


def test_nothing_is_delivered_after_a_kill_from_the_handler(open_pair: OpenPair) -> None:
    leader_link, follower_link = open_pair()
    seen: list[Message] = []
    downs: list[LinkDown] = []
    ended = threading.Event()

    def on_message(message: Message) -> None:
        seen.append(message)
        follower_link.kill("enough")

    def on_down(down: LinkDown) -> None:
        downs.append(down)
        ended.set()

    for txn in range(5):
        leader_link.send(Map(EPOCH, Txn(txn)))
    follower_link.start(on_message, on_down)
    assert ended.wait(5)
    assert seen == [Map(EPOCH, Txn(0))]
    assert [down.reason for down in downs] == ["enough"]


def test_sending_on_an_ended_link_raises_the_first_cause_every_time(open_pair: OpenPair) -> None:
    leader, _ = open_ends(open_pair)
    leader.link.kill("fenced")
    for _ in range(3):
        with pytest.raises(LinkDown, match="rank 1 is down: fenced") as error:
            leader.link.send(Map(EPOCH, Txn(1)))
        assert error.value.eof is False


def test_close_is_orderly_whoever_comes_first(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    leader.link.send(Fail(EPOCH, Cause(CauseKind.CLOSED, LEADER, "going")))
    leader.finish()
    messages = follower.wait_for(2)
    assert [type(message) for message in messages] == [Fail, Bye]
    follower.finish()
    leader.finish()
    assert leader.downs == follower.downs == []
    with pytest.raises(LinkDown):
        leader.link.send(Map(EPOCH, Txn(1)))


def test_both_ends_may_close_at_once(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    threads = [threading.Thread(target=end.link.close) for end in (leader, follower)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - started < 2.0
    assert leader.downs == follower.downs == []


def test_bye_of_the_owner_is_not_repeated_by_close(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    leader.link.send(Bye(EPOCH))
    leader.finish()
    assert follower.wait_for(1) == [Bye(EPOCH)]
    follower.finish()
    assert follower.messages == [Bye(EPOCH)]


def test_close_from_inside_the_handler_does_not_wait_for_itself(open_pair: OpenPair) -> None:
    leader, follower_link = open_pair()
    closed = threading.Event()

    def on_message(_: Message) -> None:
        follower_link.close()
        closed.set()

    follower_link.start(on_message, lambda down: None)
    leader.send(Map(EPOCH, Txn(1)))
    assert closed.wait(5)


def test_failing_handler_ends_the_link(open_pair: OpenPair) -> None:
    leader_link, follower_link = open_pair()
    downs: list[LinkDown] = []
    ended = threading.Event()

    def on_message(message: Message) -> None:
        raise KeyError(type(message).__name__)

    def on_down(down: LinkDown) -> None:
        downs.append(down)
        ended.set()

    follower_link.start(on_message, on_down)
    leader = End(leader_link, beat=False)
    leader.link.send(Map(EPOCH, Txn(1)))
    assert ended.wait(5)
    assert downs[0].reason == "handling Map failed on this rank"
    assert leader.wait_down()[1].eof


def test_old_epoch_is_not_sent_and_a_newer_one_is_an_error(open_pair: OpenPair) -> None:
    leader, follower = open_ends(open_pair)
    leader.link.send(Map(Epoch(EPOCH - 1), Txn(1)))
    with pytest.raises(ValueError, match="epoch 8 on a link of epoch 7"):
        leader.link.send(Map(Epoch(EPOCH + 1), Txn(2)))
    leader.link.send(Map(EPOCH, Txn(3)))
    assert follower.wait_for(1) == [Map(EPOCH, Txn(3))]


def test_link_is_started_once(open_pair: OpenPair) -> None:
    leader, _ = open_ends(open_pair)
    with pytest.raises(RuntimeError, match="rank 1 was started before"):
        leader.start()


def test_link_that_was_never_started_can_be_killed_and_closed(open_pair: OpenPair) -> None:
    leader, _ = open_pair()
    leader.kill("not needed")
    leader.close()
    with pytest.raises(LinkDown, match="not needed"):
        leader.start(lambda message: None, lambda down: None)


def test_full_outbox_ends_the_link_instead_of_blocking_or_losing(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OUTBOX_FRAMES_MAX >= 1024
    for module in (outbox, memory):
        monkeypatch.setattr(module, "OUTBOX_FRAMES_MAX", 50)
    leader_link, follower_link = open_pair()
    release = threading.Event()

    def take_nothing(_: Message) -> None:
        release.wait(5)

    follower_link.start(take_nothing, lambda down: None)
    leader = End(leader_link, beat=False)

    def fill() -> None:
        for txn in range(200):
            leader.link.send(Map(EPOCH, Txn(txn)))

    with pytest.raises(LinkDown, match=r"outbox is full: 51 frames wait, rank 1"):
        run_bounded(fill, 5.0, who="send", what="return")
    _, down = leader.wait_down()
    release.set()
    assert "outbox is full" in down.reason
