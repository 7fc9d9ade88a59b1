"""How much the leader grows and gives back, and when: one rank, no driver, answers by hand."""

from __future__ import annotations

import pytest

from kvcached_dist.coord.core.entries import Growable
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import (
    Drained,
    MapFailed,
    Refused,
    Released,
    Reserved,
    Unmapped,
)
from kvcached_dist.coord.core.pages import PageState
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Epoch, Health, PageId, Rank, Run, Tick
from tests.unit.core.rig import ME, PAGE, PAGES, Rig


def run(first: int, count: int, domain: int = 0) -> Run:
    return Run(DomainId(domain), PageId(first), count)


def driver_refusal(required: int, free: int) -> Cause:
    return Cause(CauseKind.EXHAUSTED, ME, "refused", required, free, 0)


def test_domains_that_are_short_together_get_a_part_each() -> None:
    rig = Rig(12 * PAGE, domains=2)
    rig.step(wanted={0: 8, 1: 8})
    assert rig.open_runs == {0: 6, 1: 6}


@pytest.mark.parametrize(
    ("coming", "wanted", "free", "share", "grown"),
    [
        (20, 8, 0, 4, 20),
        (20, 8, 6, 4, 14),
        (200, 8, 0, 4, 4 * 8),
        (200, 50, 0, 4, PAGES // 4),
        (200, 8, 0, 0, 8),
        (0, 8, 0, 4, 8),
        (200, 8, 8, 4, 0),
    ],
    ids=[
        "all of it",
        "what is free counts",
        "of a few steps",
        "not what is short",
        "never long runs",
        "none",
        "enough",
    ],
)
def test_what_waits_behind_a_step_is_grown_with_it(coming: int, wanted: int, free: int, share: int, grown: int) -> None:
    rig = Rig(1000 * PAGE, run_pages_max=2, run_share=share)
    if free:
        rig.leader.commit.open_grow((run(0, free),), foreground=False)
        rig.finish()
        rig.step()
    rig.leader.demand.coming = [coming]
    rig.step(wanted={0: wanted})
    assert rig.open_runs == ({0: grown} if grown else {})


@pytest.mark.parametrize("coming", [0, 40, 400])
def test_what_waits_takes_nothing_that_is_short(coming: int) -> None:
    rig = Rig(40 * PAGE)
    rig.leader.demand.coming = [coming]
    rig.step(wanted={0: 10})
    assert rig.open_runs == {0: 10}, "a quarter of 40"


def test_a_long_run_that_was_refused_is_not_asked_for_again() -> None:
    """A neighbour has taken what the last beat said there was, and the next beat is a second away."""
    rig = Rig(280 * PAGE, run_share=4, backoff_min=1000, backoff_max=1000)
    asked = []
    for _ in range(20):
        rig.leader.demand.coming = [40]
        rig.step(wanted={0: 10})
        if pages := sum(rig.open_runs.values()):
            asked.append(pages)
            if pages > 30:
                rig.answer(Refused, cause=driver_refusal(pages * PAGE, 30 * PAGE))
            else:
                rig.finish()
    assert asked == [40, 10]
    rig.beat(280 * PAGE)
    rig.lists[0].take(10)
    rig.leader.demand.coming = [40]
    rig.step(wanted={0: 10})
    assert rig.open_runs == {0: 40}


def queue_of_cached_prompts(*, free: int, taken: int) -> Rig:
    """An engine with ``free`` pages and a queue of 60 that was grown for, but takes only ``taken``, the first ones."""
    rig = Rig(1000 * PAGE, run_pages_max=2, run_share=4, reserved_pages_min=5, reserved_pages_max=10)
    rig.grow(run(0, 21))
    rig.lists[0].take(21 - free)
    rig.leader.demand.coming = [60]
    rig.step(wanted={0: 30})
    assert rig.open_runs == {0: 60 - free}
    rig.finish()
    rig.step(wanted={0: 30})
    rig.leader.demand.coming = [0]
    rig.lists[0].take(taken)
    return rig


def seconds_until_returned(rig: Rig, longest_s: int) -> tuple[float, int]:
    """Steps of 1 ms that just decode, until the engine gives something back: seconds and pages; 0 pages: nothing."""
    for step in range(longest_s * 1000):
        rig.step(wanted={0: 2})
        if pages := sum(rig.open_runs.values()):
            rig.finish()
            return step / 1000, pages
    return longest_s, 0


def test_what_was_grown_for_cached_prompts_goes_back_while_the_engine_is_busy() -> None:
    """Nobody has needed it for a whole window; W of the prompts counts for as long."""
    rig = queue_of_cached_prompts(free=15, taken=3)
    assert rig.leader.tables[0].count(PageState.PUBLISHED) == 21 + 45
    seconds, pages = seconds_until_returned(rig, 10)
    assert pages == 45
    assert 2 <= seconds <= 2 * 2 + 0.1


def test_what_was_grown_for_cached_prompts_stays_while_a_part_of_it_is_what_is_kept_free() -> None:
    """A run goes whole: seven pages would be left, and while busy ten stay free. Three more, and it goes."""
    rig = queue_of_cached_prompts(free=15, taken=8)
    assert seconds_until_returned(rig, 10) == (10, 0)
    rig.lists[0].give(3)
    seconds, pages = seconds_until_returned(rig, 10)
    assert pages == 45
    assert 2 <= seconds <= 2 * 2 + 0.1


def test_a_share_of_less_than_a_page_is_a_page_where_it_fits() -> None:
    found = Rig(10 * PAGE, domains=2).leader.memory.fitting({DomainId(0): 95, DomainId(1): 5})
    assert found == {0: 9, 1: 1}


def test_pages_that_are_held_already_cost_nothing() -> None:
    rig = Rig(4 * PAGE, domains=2)
    rig.leader.commit.open_grow((run(1, 4),), foreground=False)
    rig.answer(Reserved, handles=(1,))
    assert rig.peer.budget_bytes == 0
    assert rig.leader.memory.fitting({DomainId(0): 4, DomainId(1): 3}) == {0: 4}


def test_an_operation_that_waits_for_a_release_need_not_wait_for_a_beat_too() -> None:
    rig = Rig(20 * PAGE)
    rig.grow(run(1, 10))
    rig.beat(0)
    rig.step(idle=True)
    rig.answer(Drained, lag_steps=0)
    rig.leader.demand.idle = False
    waiting = rig.leader.demand.wait_for({DomainId(0): 5})
    rig.answer(Unmapped)
    assert waiting.verdict is None
    rig.answer(Released, handles=(1,))
    assert waiting.verdict is None
    assert rig.open_runs == {0: 5}
    rig.finish()
    assert waiting.verdict is True


def test_a_beat_between_the_creates_and_their_answer_is_not_paid_for_twice() -> None:
    rig = Rig(10 * PAGE)
    rig.leader.commit.open_grow((run(1, 4),), foreground=False)
    rig.beat(6 * PAGE)
    rig.answer(Reserved, handles=(1,))
    assert rig.peer.budget_bytes == 6 * PAGE
    rig.beat(7 * PAGE)
    assert rig.peer.budget_bytes == 7 * PAGE


def test_a_batch_keeps_its_tries_when_its_retirement_is_taken_back() -> None:
    rig = Rig(1000 * PAGE, map_retries=2)
    broken = Cause(CauseKind.DRIVER, ME, "first")
    rig.leader.commit.open_grow((run(1, 4),), foreground=False)
    rig.answer(Reserved, handles=(1,))
    rig.answer(MapFailed, cause=broken)
    rig.step(idle=True)
    rig.leader.demand.idle = False
    assert rig.leader.commit.txn is not None
    rig.leader.commit.cancel_retirement("an operation needs the blocks")
    (batch,) = rig.leader.commit.retained
    assert (batch.tries, batch.cause) == (1, broken)
    rig.step(wanted={0: 4})
    for _ in range(2):
        assert rig.leader.health == [Health.HEALTHY]
        if rig.leader.commit.txn is None:
            rig.step(wanted={0: 4})
        rig.answer(Reserved, handles=(1,))
        rig.answer(MapFailed, cause=broken)
    assert rig.leader.health == [Health.DEGRADED]


def test_an_exchange_that_memory_does_not_reach_for_is_not_begun() -> None:
    rig = Rig(1000 * PAGE, reserved_pages_min=5, reserved_pages_max=10)
    rig.grow(run(100, 20))
    rig.beat(3 * PAGE)
    for _ in range(3):
        rig.step(idle=True)
        assert rig.open_runs == {}
    rig.beat(5 * PAGE)
    rig.step(idle=True)
    assert rig.open_runs == {0: 5}


def test_a_refusal_that_memory_does_not_explain_is_not_repeated_at_every_beat() -> None:
    rig = Rig(100 * PAGE, backoff_min=1_000_000, backoff_max=1_000_000)
    rig.leader.commit.open_grow((run(1, 4),), foreground=False)
    rig.answer(Refused, cause=driver_refusal(4 * PAGE, 80 * PAGE))
    for more in range(1, 10):
        rig.beat(80 * PAGE + more)
        assert rig.leader.backoff.active(rig.leader.now)
    rig.beat(90 * PAGE + 1)
    assert not rig.leader.backoff.active(rig.leader.now)


def test_a_refusal_that_memory_explains_ends_with_what_was_asked_for() -> None:
    rig = Rig(100 * PAGE, backoff_min=1_000_000, backoff_max=1_000_000)
    rig.leader.commit.open_grow((run(1, 4),), foreground=False)
    rig.answer(Refused, cause=driver_refusal(4 * PAGE, PAGE))
    rig.beat(4 * PAGE - 1)
    assert rig.leader.backoff.active(rig.leader.now)
    rig.beat(4 * PAGE)
    assert not rig.leader.backoff.active(rig.leader.now)


def test_a_look_that_falls_due_during_a_transaction_is_made_behind_it() -> None:
    rig = Rig(1000 * PAGE, reclaim_interval_steps=4, demand_window=0)
    rig.grow(run(1, 10), run(20, 10))
    rig.leader.commit.open_grow((run(50, 1),), foreground=False)
    for _ in range(4):
        rig.step()
    rig.finish()
    rig.step()
    assert rig.leader.commit.txn is not None
    assert rig.leader.tables[0].count(PageState.RETIRING) > 0


def test_a_new_epoch_counts_with_the_budgets_of_its_own_ranks_and_tells_of_them_again() -> None:
    rig = Rig(100 * PAGE, rejoin=True)
    leader, domain = rig.leader, DomainId(0)
    rig.step()
    assert leader.memory.backable(domain) == 100
    leader.lose(Cause(CauseKind.RANK_LOST, Rank(1), "lost"))
    peer = Peer((PAGE,), 40 * PAGE, Tick(0), (0,))
    leader.begin_epoch(Epoch(2), Replica(ME, rig.lists, [1]), [peer], Tick(rig.now))
    assert leader.memory.backable(domain) == 40
    assert Growable(domain, 40) in rig.step().entries
    peer.budget_bytes = 0
    leader.memory.budgets_changed()
    # What is wanted is measured against the same memory that the log tells of.
    assert leader.demand.short_blocks(domain) == PAGES // 8
