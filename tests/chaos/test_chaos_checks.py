"""What counts as a violation: each check passes on a good report and finds the bad one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcached_dist.chaos import checks
from kvcached_dist.chaos.plan import Effect, Fault, Kind, Means
from kvcached_dist.chaos.rank import Entered, Left, Problem, Work
from kvcached_dist.chaos.workload import Backlog, Rest, Slowest

KILLED = Fault(7, Kind.KILL_FOLLOWER, Effect.REJOINS, Means.INJECTOR, 2, "rank=2,op=kill,at=map,nth=1")
HUNG_LEADER = Fault(8, Kind.STOP_LONG_LEADER, Effect.RESTARTS, Means.INJECTOR, 0, stop_s=8.0)
LOST = Problem("RankLost", "rank 2: rank lost", "RANK_LOST", 2, at=100.5)
HUNG = Problem("GroupFailed", "rank 0: rank hung", "RANK_HUNG", 0, at=105.2)


def work(rank: int, problem: Problem | None = None, **changes: Any) -> Work:
    made = Work(rank, 1, problem, Backlog((), 3), 50, (), 10, 10, 0, (), 0, 0, Slowest(0.1, "step"))
    return replace(made, **changes)


def test_a_loss_that_all_know_in_time_is_no_violation() -> None:
    works = {rank: work(rank, LOST) for rank in (0, 1, 3)}
    assert checks.check_detection(KILLED, 100.0, works, lease_s=5.0, lag_s=0.0) == []
    assert checks.check_detection(HUNG_LEADER, 100.0, {1: work(1, HUNG)}, lease_s=5.0, lag_s=0.0) == []


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (None, "without an error"),
        (replace(LOST, at=101.2), "knew after 1.20 s, bound 1 s"),
        (replace(LOST, cause_rank=0), "RANK_LOST of rank 2"),
        (replace(LOST, cause_kind="RANK_HUNG"), "expected RankLost"),
        (replace(LOST, kind="GroupFailed"), "expected RankLost"),
        (Problem("Divergence", "other operations", at=100.1), "got Divergence"),
    ],
)
def test_a_survivor_that_knows_something_else_is_a_violation(problem: Problem | None, says: str) -> None:
    found = checks.check_detection(KILLED, 100.0, {0: work(0, problem)}, lease_s=5.0, lag_s=0.0)
    assert any(says in text for text in found), found


def test_survivors_that_name_different_ranks_are_a_violation() -> None:
    works = {0: work(0, LOST), 1: work(1, replace(LOST, cause_rank=0))}
    assert any("different" in text for text in checks.check_detection(KILLED, 100.0, works, lease_s=5.0, lag_s=0.0))


def test_a_hung_rank_may_be_known_a_second_after_the_lease() -> None:
    late = replace(HUNG, at=106.1)
    assert checks.check_detection(HUNG_LEADER, 100.0, {1: work(1, late)}, lease_s=5.0, lag_s=0.0) != []


def test_time_without_a_core_is_not_the_ranks_time() -> None:
    late = {1: work(1, replace(LOST, at=101.4))}
    assert checks.check_detection(KILLED, 100.0, late, lease_s=5.0, lag_s=0.5) == []
    assert checks.check_detection(KILLED, 100.0, late, lease_s=5.0, lag_s=0.3) != []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"corrupt": 2, "corrupt_texts": ("swa_kv lane 0",)}, "S4: rank 1: 2 corrupt"),
        ({"leaked_bytes": 4096}, "S10: rank 1 held 4096"),
        ({"slowest": Slowest(7.0, "alloc at step 3")}, "L1: rank 1: alloc at step 3 took 7.00 s"),
    ],
)
def test_bytes_and_waits_of_a_rank(changes: dict[str, Any], says: str) -> None:
    assert checks.check_work(work(1), call_bound_s=6.0) == []
    found = checks.check_work(work(1, **changes), call_bound_s=6.0)
    assert len(found) == 1
    assert says in found[0]


def test_equal_waves_have_equal_digests() -> None:
    rest = Rest(4, 1.0, 2.0, 90, 0xABC)
    same = [work(rank, rests=(rest,)) for rank in range(3)]
    assert checks.check_digests(same) == []
    other_epoch = work(3, rests=(replace(rest, digest=1),), epoch=2)
    assert checks.check_digests([*same, other_epoch]) == []
    for change in ({"digest": 1}, {"step": 91}):
        assert len(checks.check_digests([*same, work(3, rests=(replace(rest, **change),))])) == 1


def test_ranks_enter_one_epoch_with_equal_pages() -> None:
    well = [Entered(rank, None, 2, 0xF00D, 0.1, 1.0) for rank in range(3)]
    assert checks.check_entered(well, 2) == []
    assert "S8" in checks.check_entered([*well, Entered(3, None, 1, 0xF00D, 0.1, 1.0)], 2)[0]
    assert "S3" in checks.check_entered([*well, Entered(3, None, 2, 0xBAD, 0.1, 1.0)], 2)[0]
    failed = Entered(3, Problem("WaitTimeout", "nobody came"), 0, 0, 9.0, 1.0)
    assert "nobody came" in checks.check_entered([*well, failed], 2)[0]


def test_a_closed_rank_has_nothing() -> None:
    assert checks.check_left(Left(1, 0, 0, 0.2)) == []
    assert "S10" in checks.check_left(Left(1, 4096, 0, 0.2))[0]
    assert "S10" in checks.check_left(Left(1, 0, 1, 0.2))[0]
    assert "L1" in checks.check_left(Left(1, 0, 0, 60.0))[0]
    assert "did not close" in checks.check_left(Left(1, 0, 0, 0.2, Problem("WaitTimeout", "a thread")))[0]


def test_the_backlog_is_that_of_the_front_end_or_of_who_has_seen_most() -> None:
    before = Backlog((1,), 1)
    leader, ahead = work(0, backlog=Backlog((5, 6), 2)), work(1, backlog=Backlog((6,), 2))
    assert checks.surviving_backlog([ahead, leader], before) == Backlog((5, 6), 2)
    assert checks.surviving_backlog([work(2, backlog=Backlog((5, 6, 7), 2)), ahead], before) == Backlog((6,), 2)
    assert checks.surviving_backlog([], before) is before
