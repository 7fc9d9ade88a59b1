"""The logical machine: order of the log, digest, and where a divergence is found."""

from __future__ import annotations

import pytest

from kvcached_dist.coord.core.entries import (
    Growable,
    Limit,
    Mark,
    PositionKind,
    Publish,
    Quarantine,
    Reclaimed,
    Retire,
    Sort,
    Unretire,
)
from kvcached_dist.coord.core.errors import Divergence, InvariantViolation
from kvcached_dist.coord.core.replica import OP_RING_MAX, OpKind, Replica
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Epoch, PageId, Rank, Run, Txn
from tests.simulation.pool import ListPool
from tests.simulation.rules import provokes

FULL = DomainId(0)
RUN = Run(FULL, PageId(1), 2)


def replica(rank: int = 1) -> Replica:
    return Replica(Rank(rank), [ListPool(8, 2, ordered=False)], [2])


def mark_of(leader: Replica, step: int = 1, *, index: int | None = None) -> Mark:
    first = leader.next_index if index is None else index
    return Mark(Epoch(1), PositionKind.STEP, step, first, (), leader.op_index, leader.digest)


def operate(target: Replica, kind: OpKind = OpKind.ALLOC, blocks: int = 1, crc: int = 0) -> None:
    target.record(kind, FULL, blocks, crc)
    target.end_op()


def test_equal_operations_and_entries_are_equal() -> None:
    ranks = [replica(0), replica(1)]
    for each in ranks:
        each.apply(Publish(Txn(1), (RUN,)))
        operate(each, blocks=2, crc=99)
        ranks[1].check(mark_of(each)) if each is ranks[1] else None
    assert ranks[0].digest == ranks[1].digest != 0
    ranks[1].check(mark_of(ranks[0]))


@provokes("S5")
@pytest.mark.parametrize(
    ("kind", "blocks", "crc"),
    [(OpKind.ALLOC, 2, 7), (OpKind.FREE, 1, 7), (OpKind.ALLOC, 1, 8)],
    ids=["count", "kind", "ids"],
)
def test_a_divergence_names_the_interval_since_the_last_equal_mark(kind: OpKind, blocks: int, crc: int) -> None:
    leader, follower = replica(0), replica(1)
    for _ in range(3):
        operate(leader, crc=7)
        operate(follower, crc=7)
    follower.check(mark_of(leader))
    operate(leader, crc=7)
    operate(follower, kind, blocks, crc)
    operate(leader)
    operate(follower)
    with pytest.raises(Divergence, match=r"rank 1: at step 9 .* equal up to operation 3"):
        follower.check(mark_of(leader, 9))


@provokes("S5")
def test_the_rings_show_the_first_operation_that_differs() -> None:
    leader, follower = replica(0), replica(1)
    for op in range(40):
        operate(leader, blocks=1 + op % 3)
        operate(follower, blocks=(1 + op % 3) if op != 17 else 9)
    pairs = zip(leader.ring(), follower.ring(), strict=True)
    first = next(ours.op for ours, theirs in pairs if ours.digest != theirs.digest)
    assert first == 17


def test_a_rank_that_is_an_operation_ahead_is_seen() -> None:
    leader, follower = replica(0), replica(1)
    operate(follower)
    with pytest.raises(Divergence, match=r"the leader had done 0\s+operations .* this rank 1"):
        follower.check(mark_of(leader))


def test_the_ring_is_bounded() -> None:
    target = replica()
    for _ in range(OP_RING_MAX + 5):
        operate(target)
    assert len(target.ring()) == OP_RING_MAX
    assert target.ring()[0].op == 5


@provokes("S12")
@pytest.mark.parametrize("index", [0, 2])
def test_entries_that_are_missing_or_repeated_are_refused(index: int) -> None:
    leader, follower = replica(0), replica(1)
    for each in (leader, follower):
        each.apply(Growable(FULL, 4))
    with pytest.raises(InvariantViolation, match=r"^S12 violated"):
        follower.check(mark_of(leader, index=index))


@provokes("S6")
def test_retire_of_a_run_in_use_is_refused() -> None:
    target = replica()
    target.apply(Publish(Txn(1), (RUN,)))
    pool = target.free_lists[0]
    assert isinstance(pool, ListPool)
    pool.alloc(1)
    with pytest.raises(InvariantViolation, match="not entirely free"):
        target.apply(Retire(Txn(2), (RUN,)))


@provokes("S12")
def test_unretire_of_what_was_never_retired_is_refused() -> None:
    with pytest.raises(InvariantViolation, match=r"^S12 violated"):
        replica().apply(Unretire(Txn(4)))


def test_what_can_be_reached_is_what_the_log_says() -> None:
    target = replica()
    target.apply(Publish(Txn(1), (RUN,)))
    target.apply(Growable(FULL, 6))
    assert target.may_grow_to(FULL, 10)
    assert not target.may_grow_to(FULL, 11)
    target.apply(Retire(Txn(2), (RUN,)))
    assert target.available(FULL) == 0
    assert target.may_grow_to(FULL, 10), "a retirement can still be cancelled"
    target.apply(Unretire(Txn(2)))
    assert (target.available(FULL), target.may_grow_to(FULL, 10)) == (4, True)
    target.apply(Retire(Txn(3), (RUN,)))
    target.apply(Reclaimed(Txn(3)))
    assert target.may_grow_to(FULL, 6)
    assert not target.may_grow_to(FULL, 7)


def test_a_restored_retirement_comes_back_by_publish() -> None:
    target = replica()
    target.apply(Publish(Txn(1), (RUN,)))
    target.apply(Retire(Txn(2), (RUN,)))
    target.apply(Publish(Txn(2), (RUN,)))
    assert target.available(FULL) == 4
    assert not target.may_grow_to(FULL, 5), "its blocks are counted once"


def test_retained_runs_were_in_no_free_list() -> None:
    target = replica()
    target.apply(Retire(Txn(2), (RUN,), retained=True))
    target.apply(Unretire(Txn(2)))
    assert target.available(FULL) == 0


def test_the_other_entries() -> None:
    target = replica()
    target.apply(Publish(Txn(1), (RUN,)))
    pool = target.free_lists[0]
    assert isinstance(pool, ListPool)
    pool.free(pool.alloc(1))
    target.apply(Sort(FULL))
    assert pool.alloc(4) == (2, 3, 4, 5)
    target.apply(Limit(3, 1024))
    target.apply(Quarantine((RUN,), Cause(CauseKind.DRIVER, Rank(0))))
    assert (target.limit.revision, target.quarantined, target.next_index) == (3, frozenset({RUN}), 4)
