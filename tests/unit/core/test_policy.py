"""Quantities: run lengths, pauses, watermarks."""

from __future__ import annotations

import pytest

from kvcached_dist.coord.core.policy import (
    Backoff,
    Policy,
    RecentLow,
    RecentPeak,
    RunLength,
    growth_target,
    may_retire,
)
from kvcached_dist.coord.core.types import Tick


def test_runs_get_longer_under_sustained_demand_and_short_again() -> None:
    length = RunLength(Policy(run_pages_min=1, run_pages_max=10))
    seen = []
    for _ in range(6):
        seen.append(length.pages)
        length.grew(length.pages, 1000)
    assert seen == [1, 2, 4, 8, 10, 10]
    length.relaxed()
    assert length.pages == 1


def test_runs_follow_what_is_held_where_demand_outlasts_the_longest_ordinary_one() -> None:
    length = RunLength(Policy(run_pages_min=1, run_pages_max=4, run_share=8))
    seen, held = [], 0
    for _ in range(16):
        seen.append(length.pages)
        held += length.pages
        length.grew(length.pages, held)
    assert seen == [1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 6, 6, 7]
    length.relaxed()
    assert length.pages == 1
    after = []
    for _ in range(6):
        length.grew(1, 1000)
        after.append(length.pages)
    assert after == [2, 4, 4, 4, 4, 125], "after four growths of the longest ordinary run since then"
    for _ in range(3):
        length.grew(1, 0)
    assert length.pages == 125, "never shorter while demand goes on"


def test_a_growth_that_had_to_be_long_makes_the_next_one_long() -> None:
    length = RunLength(Policy(run_pages_min=1, run_pages_max=16, run_share=2))
    length.grew(6, 6)
    assert length.pages == 6
    for held in (46, 86, 126):
        length.grew(40, held)
        assert length.pages == 16, "no longer than the longest ordinary run until growth has lasted"
    length.grew(40, 166)
    assert length.pages == 83


def test_only_what_was_free_for_a_whole_window_counts_as_lasting() -> None:
    low = RecentLow(100)
    low.note(8, Tick(1000))
    assert low.least(8) == 0, "nothing is known yet"
    low.note(5, Tick(1050))
    low.note(9, Tick(1100))
    assert low.least(9) == 5
    low.note(9, Tick(1200))
    assert low.least(9) == 9
    assert low.least(2) == 2, "what is free now is the most"
    low.note(7, Tick(1500))
    assert low.least(9) == 7, "however long ago the last step was"
    low.note(9, Tick(1900))
    low.note(9, Tick(2300))
    assert low.least(9) == 9
    assert RecentLow(0).least(7) == 7


def test_demand_is_remembered_for_one_to_two_windows_and_forgotten_when_it_is_over() -> None:
    peak = RecentPeak(100)
    peak.note(8, Tick(1000))
    seen = []
    for now in (1050, 1100, 1199, 1200, 1250):
        peak.note(1, Tick(now))
        seen.append(peak.blocks)
    assert seen == [8, 8, 8, 1, 1]
    peak.note(9, Tick(1260))
    peak.note(1, Tick(1700))
    assert peak.blocks == 1, "a pause longer than a window is over at once"
    peak.note(7, Tick(1701))
    peak.forget()
    assert peak.blocks == 0
    never = RecentPeak(0)
    never.note(8, Tick(5))
    assert never.blocks == 0


def test_pauses_double_up_to_the_longest_and_end() -> None:
    policy = Policy(backoff_min=100, backoff_max=1000, seed=4)
    backoff = Backoff(policy)
    now = Tick(0)
    for pause in (100, 200, 400, 800, 1000, 1000):
        backoff.refused(now)
        assert now + pause <= backoff.until <= now + pause + pause // 2
        assert backoff.active(Tick(backoff.until - 1))
        assert not backoff.active(backoff.until)
        now = backoff.until
    backoff.refused(now)
    backoff.succeeded()
    assert not backoff.active(now)
    backoff.refused(now)
    assert backoff.until <= now + 150, "after a success the pauses are short again"


def test_engines_with_other_seeds_do_not_pause_in_step() -> None:
    def pauses(seed: int) -> list[int]:
        backoff = Backoff(Policy(seed=seed))
        ends = []
        for _ in range(5):
            backoff.refused(Tick(0))
            ends.append(int(backoff.until))
        return ends

    assert pauses(1) == pauses(1)
    assert pauses(1) != pauses(2)


@pytest.mark.parametrize(
    ("free", "low", "run_pages", "absent", "target"),
    [(0, 0, 4, 9, 0), (2, 2, 4, 9, 0), (1, 2, 4, 9, 4), (0, 6, 4, 9, 6), (0, 6, 4, 3, 3), (0, 6, 4, 0, 0)],
)
def test_growth_target(free: int, low: int, run_pages: int, absent: int, target: int) -> None:
    assert growth_target(free, low, run_pages, absent) == target


@pytest.mark.parametrize(
    ("growth", "query", "drain", "lease"), [(2.0, 1.0, 10.0, 30.0), (0.3, 0.3, 0.5, 1.0), (2.0, 1.0, 10.0, 0.9)]
)
def test_the_clock_is_looked_at_often_enough(growth: float, query: float, drain: float, lease: float) -> None:
    in_ticks = [round(seconds * 1e6) for seconds in (growth, query, drain, lease)]
    policy = Policy(
        growth_deadline=in_ticks[0], query_interval=in_ticks[1], drain_deadline=in_ticks[2], lease=in_ticks[3]
    )
    assert policy.look_interval <= min(in_ticks[:3]) // 4
    assert 2 * policy.look_interval <= policy.lease // 4, "a gap must not look like a process that was stopped"


@pytest.mark.parametrize("low", range(4))
@pytest.mark.parametrize("high", range(6))
@pytest.mark.parametrize("run_pages", [1, 2, 5])
def test_what_was_retired_is_not_grown_again_at_once(low: int, high: int, run_pages: int) -> None:
    for idle in (False, True):
        for free in range(12):
            if may_retire(free, run_pages, low, high, idle=idle):
                left = free - run_pages
                assert growth_target(left, low, 1, 100) == 0, "the floor of a retirement is the growth watermark"
                assert idle or left >= high
