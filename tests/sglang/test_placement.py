"""Where compaction lets ids go: whole runs, of which the fewest ids stay published."""

from __future__ import annotations

import random
import time
from itertools import combinations

import numpy as np
import pytest

from kvcached_dist.sglang import placement
from kvcached_dist.sglang.book import PageBook
from kvcached_dist.sglang.placement import Move, plan


def book(*runs: tuple[int, int], ids: int = 4000) -> PageBook:
    made = PageBook("full", 4096, 1, ids)
    for first, count in runs:
        made.add(first, count)
    return made


def places(move: Move | None, used: list[int]) -> list[int]:
    assert move is not None
    goes = dict(zip(move.sources.tolist(), move.targets.tolist(), strict=True))
    assert not set(goes) & set(goes.values())
    return sorted(goes.get(i, i) for i in used)


def test_the_run_of_the_null_block_is_filled_first_and_then_long_runs_that_fit() -> None:
    used = [1, 9, 30, 33, 60, 61, 62, 90, 99]
    move = plan(book((0, 4), (8, 4), (16, 2), (32, 32), (64, 64)), np.array(used))
    assert places(move, used) == [1, 2, 3, 8, 9, 10, 11, 16, 17]


def test_the_run_of_the_null_block_saves_a_longer_one() -> None:
    used = list(range(32, 64, 4))
    move = plan(book((0, 4), (8, 8), (16, 5), (32, 32)), np.array(used))
    assert places(move, used) == [1, 2, 3, 16, 17, 18, 19, 20]


def test_the_run_of_the_null_block_costs_nothing() -> None:
    """It is published in any case, so a short run that is left for it is all gain."""
    used = [108, 109]
    assert places(plan(book((0, 100), (108, 3)), np.array(used)), used) == [1, 2]


def test_what_is_left_goes_into_the_shortest_run() -> None:
    used = [40, 70, 71, 72, 100]
    move = plan(book((0, 1), (8, 4), (32, 32), (64, 64), (200, 3)), np.array(used))
    assert places(move, used) == [8, 9, 10, 11, 200]
    assert move is not None
    assert move.free[:2].tolist() == [201, 202], "what is free in a run that stays is given first"


def test_low_long_runs_go_too() -> None:
    """Not the lowest ids: a long run below would be kept by a few of them."""
    used = list(range(1, 400, 50))
    move = plan(book((0, 1), (1, 1000), (1001, 8)), np.array(used))
    assert places(move, used) == list(range(1001, 1009))


def test_of_equal_runs_the_fuller_ones_stay() -> None:
    used = [10, 20, 21, 22, 30]
    move = plan(book((0, 1), (10, 5), (20, 5), (30, 5)), np.array(used))
    assert places(move, used) == [20, 21, 22, 23, 24]


@pytest.mark.parametrize(("spare", "moves"), [(2, True), (1, False)])
def test_what_frees_too_little_is_not_moved(spare: int, moves: bool) -> None:
    """Of 32 ids in use, a run of two that goes is a sixteenth."""
    used = np.array([*range(100, 131), 200])
    assert (plan(book((0, 1), (100, 32), (200, spare)), used) is not None) == moves


def test_nothing_is_moved_where_no_run_would_go() -> None:
    assert plan(book((0, 1), (8, 4), (16, 4)), np.array([8, 9, 16, 17, 18])) is None
    assert plan(book((0, 9)), np.array([1, 7, 8])) is None


def test_full_runs_stay_where_an_empty_one_would_hold_them_all() -> None:
    """Long empty runs are usual after a load; full ones need not move there, and it goes by itself."""
    full, half = [(10 + 10 * run, 10) for run in range(10)], [(110, 10), (120, 10)]
    used = [block for first, count in full for block in range(first, first + count)]
    used += [*range(110, 115), *range(120, 125)]
    move = plan(book((0, 1), *full, *half, (200, 110)), np.array(used))
    assert move is not None
    assert (len(move.sources), move.targets.max() < 200) == (5, True)


@pytest.mark.parametrize("seed", range(60))
def test_no_runs_with_fewer_ids_would_hold_what_is_in_use(seed: int) -> None:
    """Beside all sets of runs there are. Of the last page of a domain there may be only a part."""
    choose = random.Random(seed)
    lengths, per_page = [choose.choice((1, 2, 3, 5, 8, 13, 21)) for _ in range(9)], choose.choice((1, 4))
    runs, pages = [], 0
    for length in [1, *lengths]:
        runs.append((pages, length))
        pages += length + choose.randrange(3)
    made = PageBook("full", pages * per_page, per_page, sum(runs[-1]) * per_page - 1 - choose.randrange(per_page))
    for run in runs:
        made.add(*run)
    used = choose.randrange(1, made.count + 1)
    firsts, counts = made.runs()
    sizes = np.array([made.ids_of(int(at), int(n)).size for at, n in zip(firsts, counts, strict=True)])
    chosen = placement._least(firsts, sizes, np.zeros_like(firsts), used, per_page)
    sums = (sum(some) for few in range(10) for some in combinations(sizes[1:].tolist(), few))
    assert len(set(chosen)) == len(chosen)
    assert sizes[chosen].sum() == sizes[0] + min(found for found in sums if sizes[0] + found >= used)


def test_what_lies_together_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine becomes idle all day."""
    made = PageBook("full", 400, 1, 399)
    for first, count in ((0, 4), (8, 32), (64, 64)):
        made.add(first, count)
    monkeypatch.delattr(placement, "_least")
    assert plan(made, np.array([1, 2, 3, *range(8, 40)])) is None


def test_thousands_of_runs_take_no_time_that_anybody_notices() -> None:
    choose = random.Random(1)
    made, first = PageBook("full", 1 << 20, 1, 1 << 20), 0
    for _ in range(3000):
        made.add(first, length := choose.randrange(1, 300))
        first += length
    used = np.array(sorted(choose.sample(made.all_ids().tolist(), 100_000)))
    begin = time.monotonic()
    assert plan(made, used) is not None
    assert time.monotonic() - begin < 5.0


def test_a_run_of_which_a_part_went_is_two() -> None:
    made = book((0, 4), (4, 8), (12, 2))
    made.remove(6, 2)
    firsts, counts = made.runs()
    assert list(zip(firsts.tolist(), counts.tolist(), strict=True)) == [(0, 4), (4, 2), (8, 4), (12, 2)]
