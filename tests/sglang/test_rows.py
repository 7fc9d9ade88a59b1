"""The free list of request rows against the engine's own class."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.rows import RowList
from kvcached_dist.sglang.runtime import LIST_ATTRIBUTE
from tests.sglang.conftest import undone


@pytest.fixture(scope="module", autouse=True)
def hooks(engine_settings: Any) -> Iterator[None]:
    """The plugin's hooks in the engine's classes, for all tests of this file: applying them takes half a second."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    with undone(HookRegistry):
        Plugin(Config.preset("tests")).register(HookRegistry, HookType)
        HookRegistry.apply_hooks()
        yield


def bound(rows: int, per_page: int) -> tuple[Any, RowList]:
    """The engine's rows with all of ours published."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(rows, 32, "cpu", False)
    known = RowList("rows", -(-(rows + 1) // per_page) * per_page, per_page, rows)
    known.publish(0, known.book.pages)
    known.bind(pool)
    setattr(pool, LIST_ATTRIBUTE, known)
    return pool, known


def test_request_rows() -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(8, 32, "cpu", False)
    known = RowList("rows", 9, 1, 8)
    known.publish(0, 3)
    known.bind(pool)
    assert known.available() == pool.available_size() == 2
    assert pool.alloc_rows(3) is None
    assert pool.alloc_rows(2) == [2, 1], "low rows first: the tail is handed out"
    known.publish(3, 2)
    assert not known.run_is_free(1, 1)
    pool.free_rows([1, 2])
    known.retire(4, 1)
    known.sort()
    assert pool.alloc_rows(3) == [3, 2, 1]
    assert known.missing == 8 - 3


@pytest.mark.parametrize("per_page", [1, 4])
def test_free_rows_are_counted_as_they_come_and_go(per_page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, known = bound(30, per_page)
    monkeypatch.setattr(known, "_count", lambda: pytest.fail("the whole list was walked through"))
    pages = range(1, known.book.pages)  # page 0 stays
    chance = random.Random(per_page)
    gone: set[int] = set()
    taken: list[int] = []
    for _ in range(600):
        match chance.randrange(5):
            case 0:
                taken += pool.alloc_rows(chance.randrange(3)) or []
            case 1 if taken:
                pool.free_rows([taken.pop(chance.randrange(len(taken))) for _ in range(min(2, len(taken)))])
            case 2 if free := [page for page in pages if known.run_is_free(page, 1)]:
                gone.add(page := chance.choice(free))
                known.retire(page, 1)
            case 3 if gone:
                known.publish(gone.pop(), 1)
            case 4:
                known.sort()
        for page in pages:
            rows = set(known.book.ids_of(page, 1).tolist())
            assert known.run_is_free(page, 1) == (page not in gone and not rows & set(taken))
    assert len(pool.free_slots) + len(taken) == known.published()


def test_a_list_that_changed_where_nobody_told_is_counted_anew() -> None:
    pool, known = bound(8, 3)
    assert known.run_is_free(1, 2)
    pool.free_slots.remove(5)
    assert not known.run_is_free(1, 1)
    assert known.run_is_free(2, 1)
    pool.free_rows([5])
    assert known.run_is_free(1, 2)
    pool.free_slots.remove(7)
    pool.free_rows([7])
    assert known.run_is_free(1, 2)
    pool.clear()
    assert known.run_is_free(0, 3)
    with pytest.raises(InvariantViolation, match="the engine freed row 3 twice"):
        known.admit([3])


@pytest.mark.parametrize("per_page", [1, 4])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_row_that_is_freed_twice_is_found(per_page: int, at_once: bool) -> None:
    """Also where other rows of its page are in use, and in one call."""
    pool, known = bound(8, per_page)
    row = pool.alloc_rows(7)[-1]
    if not at_once:
        pool.free_rows([row])
    with pytest.raises(InvariantViolation, match=f"S6 violated: domain rows: the engine freed row {row} twice"):
        known.admit([row, row] if at_once else [row])


@pytest.mark.parametrize("per_page", [1, 4])
def test_rows_in_use_do_not_leave_the_list(per_page: int) -> None:
    pool, known = bound(8, per_page)
    (row,) = pool.alloc_rows(1)
    page = row // per_page
    with pytest.raises(ValueError, match=rf"domain rows: rows of pages {page}\+2 are not entirely free"):
        known.retire(page, 2)
    assert (known.published(), known.available()) == (8, 7)
    pool.free_rows([row])
    known.retire(page, 2)
    assert known.available() == known.published() == 8 - min(2 * per_page, 7 if page == 0 else 8)
