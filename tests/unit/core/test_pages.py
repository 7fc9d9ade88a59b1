"""The leader's table of pages against a dumb list, and every transition that it must refuse."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.coord.core.pages import _EDGES, PageState, PageTable
from kvcached_dist.coord.core.types import DomainId, PageId, Run
from tests.simulation.rules import provokes


def run(first: int, count: int) -> Run:
    return Run(DomainId(0), PageId(first), count)


def table(*runs: Run, pages: int = 8) -> PageTable:
    made = PageTable(DomainId(0), pages)
    for each in runs:
        made.become(each, PageState.OPEN)
    return made


PATHS: dict[PageState, tuple[PageState, ...]] = {
    PageState.ABSENT: (),
    PageState.OPEN: (PageState.OPEN,),
    PageState.RETAINED: (PageState.OPEN, PageState.RETAINED),
    PageState.PUBLISHED: (PageState.OPEN, PageState.PUBLISHED),
    PageState.RETIRING: (PageState.OPEN, PageState.PUBLISHED, PageState.RETIRING),
    PageState.QUARANTINED: (PageState.OPEN, PageState.RETAINED, PageState.QUARANTINED),
}
"""How a fresh page comes into each state."""


@provokes("S6")
@pytest.mark.parametrize(("old", "new"), list(itertools.product(PageState, PageState)))
def test_every_edge_is_taken_or_refused(old: PageState, new: PageState) -> None:
    pages = PageTable(DomainId(0), 4)
    for state in PATHS[old]:
        pages.become(run(1, 2), state)
    if new in _EDGES[old]:
        pages.become(run(1, 2), new)
        assert pages.state(1) is pages.state(2) is new
        assert pages.count(new) == 2 + 2 * (new is PageState.ABSENT)
        return
    with pytest.raises(InvariantViolation, match="S6 violated") as caught:
        pages.become(run(1, 2), new)
    assert caught.value.rule == "S6"
    assert pages.state(1) is old, "a refused move changes nothing"


@pytest.mark.parametrize("part", [run(1, 1), run(2, 1), run(1, 3), run(0, 2)], ids=str)
def test_a_run_keeps_its_identity(part: Run) -> None:
    pages = table(run(1, 2))
    with pytest.raises(InvariantViolation, match=r"same=|known="):
        pages.become(part, PageState.PUBLISHED)


def test_a_run_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(InvariantViolation):
        PageTable(DomainId(0), 4).become(run(3, 2), PageState.OPEN)


def test_pick_prefers_low_pages_and_leaves_what_is_taken() -> None:
    pages = table(run(0, 1), run(2, 1), run(5, 2))
    assert pages.pick(4, 8) == [run(1, 1), run(3, 2), run(7, 1)]
    assert pages.pick(1, 8) == [run(1, 1)]
    assert pages.count(PageState.ABSENT) == 4, "picking takes nothing"


def test_pick_cuts_runs_at_their_largest_length_and_gives_what_there_is() -> None:
    pages = PageTable(DomainId(0), 5)
    assert pages.pick(9, 2) == [run(0, 2), run(2, 2), run(4, 1)]
    assert pages.pick(0, 2) == []


def test_the_lowest_absent_page_is_found_again_after_a_release() -> None:
    pages = table(run(0, 2), run(2, 2))
    assert pages.pick(1, 1) == [run(4, 1)]
    pages.become(run(0, 2), PageState.ABSENT)
    assert pages.pick(1, 1) == [run(0, 1)]


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)), max_size=40))
def test_the_table_agrees_with_a_dumb_one(moves: list[tuple[bool, int, int, int]]) -> None:
    pages, dumb = PageTable(DomainId(0), 12), [False] * 12
    held: list[Run] = []
    for grow, count, largest, which in moves:
        if grow:
            expected = [page for page, taken in enumerate(dumb) if not taken][:count]
            picked = pages.pick(count, largest)
            assert [page for each in picked for page in range(each.first, each.end)] == expected
            assert all(each.count <= largest for each in picked)
            for each in picked:
                pages.become(each, PageState.OPEN)
            held += picked
        elif held:
            pages.become(held.pop(which % len(held)), PageState.ABSENT)
        dumb = [any(each.first <= page < each.end for each in held) for page in range(12)]
        assert pages.count(PageState.ABSENT) == dumb.count(False)
        assert pages.runs(PageState.OPEN) == sorted(held)
