"""What only the in-process link has: death on demand, lost and late messages."""

from __future__ import annotations

import time

from kvcached_dist.coord.core.messages import Drained, Map, Message
from kvcached_dist.coord.core.types import Epoch, Rank, Txn
from kvcached_dist.coord.links.memory import Hooks, memory_pair
from tests.links.conftest import End

EPOCH = Epoch(1)


def ends(**options: object) -> tuple[End, End]:
    leader, follower = memory_pair(Rank(0), Rank(1), **options)  # type: ignore[arg-type]
    return End(leader, beat=False), End(follower, beat=False)


def test_death_of_an_end_is_seen_at_once_by_the_other_only() -> None:
    leader, follower = ends()
    leader.link.send(Map(EPOCH, Txn(1)))
    follower.wait_for(1)
    follower.link.die()  # type: ignore[attr-defined]
    _, down = leader.wait_down(1.0)
    assert (down.eof, down.peer) == (True, 1)
    follower.finish()
    assert follower.downs == []


def test_what_was_sent_before_the_death_still_arrives() -> None:
    leader, follower = memory_pair(Rank(0), Rank(1))
    for txn in range(10):
        follower.send(Map(EPOCH, Txn(txn)))
    follower.die()
    end = End(leader, beat=False)
    assert len(end.wait_for(10)) == 10
    assert end.wait_down(1.0)[1].eof


def test_dropped_messages_leave_no_gap() -> None:
    dropped: list[Message] = []

    def drop(message: Message) -> bool:
        if isinstance(message, Drained):
            dropped.append(message)
            return True
        return False

    leader, follower = ends(follower_hooks=Hooks(drop=drop))
    follower.link.send(Map(EPOCH, Txn(1)))
    follower.link.send(Drained(EPOCH, Txn(1), 0))
    follower.link.send(Map(EPOCH, Txn(2)))
    assert leader.wait_for(2) == [Map(EPOCH, Txn(1)), Map(EPOCH, Txn(2))]
    assert dropped == [Drained(EPOCH, Txn(1), 0)]
    assert leader.link.down is None


def test_late_message_holds_up_those_behind_it() -> None:
    def delay_s(message: Message) -> float:
        return 0.1 if message == Map(EPOCH, Txn(1)) else 0.0

    leader, follower = ends(leader_hooks=Hooks(delay_s=delay_s))
    started = time.monotonic()
    for txn in (1, 2):
        leader.link.send(Map(EPOCH, Txn(txn)))
    assert follower.wait_for(2) == [Map(EPOCH, Txn(1)), Map(EPOCH, Txn(2))]
    assert time.monotonic() - started >= 0.1
