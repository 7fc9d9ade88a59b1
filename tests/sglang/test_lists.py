"""Free lists against the engine's own allocators."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.sglang.runtime import LIST_ATTRIBUTE

TOKENS = 64
PER_PAGE = 8


def token_allocator(page_size: int, *, need_sort: bool = False) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", None, need_sort)
    return PagedTokenToKVPoolAllocator(TOKENS * page_size, page_size, torch.bfloat16, "cpu", None, need_sort)


def bound(page_size: int, pages: int = 1, *, need_sort: bool = False) -> tuple[Any, TokenList]:
    """An allocator whose first ``pages`` pages are published."""
    allocator = token_allocator(page_size, need_sort=need_sort)
    blocks = TOKENS + PER_PAGE
    known = TokenList("full", blocks, PER_PAGE, TOKENS)
    known.publish(0, pages)
    known.bind(allocator)
    return allocator, known


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_only_published_ids_are_handed_out_and_never_the_null_block(page_size: int, engine_settings: Any) -> None:
    allocator, known = bound(page_size)
    assert known.available() == known.published() == PER_PAGE - 1
    assert allocator.available_size() == (PER_PAGE - 1) * page_size
    assert allocator.alloc(PER_PAGE * page_size) is None
    ids = allocator.alloc((PER_PAGE - 1) * page_size)
    assert set((ids // page_size).tolist()) == set(range(1, PER_PAGE))
    assert known.missing == TOKENS - (PER_PAGE - 1)


def test_a_published_run_is_usable_and_a_retired_one_is_gone(page_size: int, engine_settings: Any) -> None:
    allocator, known = bound(page_size)
    known.publish(2, 2)
    assert known.available() == 3 * PER_PAGE - 1
    assert known.run_is_free(2, 2)
    known.retire(3, 1)
    everything = allocator.alloc(known.available() * page_size)
    assert set((everything // page_size).tolist()) == {*range(1, PER_PAGE), *range(16, 24)}


def test_a_run_with_a_block_in_use_is_not_free_and_cannot_go(page_size: int, engine_settings: Any) -> None:
    allocator, known = bound(page_size)
    known.publish(1, 1)
    taken = allocator.alloc(PER_PAGE * page_size)
    assert not known.run_is_free(1, 1)
    with pytest.raises(ValueError, match="not entirely free"):
        known.retire(1, 1)
    allocator.free(taken)
    assert known.run_is_free(1, 1)


def test_the_padding_of_the_last_page_is_never_handed_out(engine_settings: Any) -> None:
    allocator, known = bound(1, pages=0)
    last = TOKENS // PER_PAGE
    known.publish(last, 1)
    assert allocator.free_pages.tolist() == [TOKENS]
    assert known.run_is_free(last, 1)


def test_clear_rebuilds_from_what_is_published(page_size: int, engine_settings: Any, registry: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    from kvcached_dist.config import Config
    from kvcached_dist.sglang.plugin import Plugin

    Plugin(Config.preset("tests")).register(registry, HookType)
    registry.apply_hooks()
    allocator, known = bound(page_size)
    setattr(allocator, LIST_ATTRIBUTE, known)
    known.publish(4, 1)
    allocator.alloc(5 * page_size)
    known.retire(4, 1)
    allocator.clear()
    assert allocator.free_pages.tolist() == list(range(1, PER_PAGE))
    other = token_allocator(page_size)
    assert other.available_size() == TOKENS * page_size, "an allocator that is not ours keeps its own list"


def test_ids_that_wait_to_be_sorted_count_and_leave_with_their_run(page_size: int, engine_settings: Any) -> None:
    allocator, known = bound(page_size, pages=2, need_sort=True)
    taken = allocator.alloc(known.available() * page_size)
    allocator.free(taken)
    assert len(allocator.free_pages) == 0
    assert known.available() == 2 * PER_PAGE - 1
    known.retire(1, 1)
    assert known.available() == PER_PAGE - 1
    known.sort()
    assert allocator.free_pages.tolist() == list(range(1, PER_PAGE))


def test_frees_of_a_group_count_when_the_group_ends(page_size: int, engine_settings: Any) -> None:
    allocator, known = bound(page_size, pages=2)
    taken = allocator.alloc(known.available() * page_size)
    allocator.free_group_begin()
    allocator.free(taken)
    assert not known.run_is_free(1, 1)
    allocator.free_group_end()
    assert known.run_is_free(1, 1)


def test_several_runs_leave_at_one_mark(page_size: int, engine_settings: Any) -> None:
    _, known = bound(page_size, pages=6)
    for page in (5, 4, 3):
        assert known.run_is_free(page, 1)
        known.retire(page, 1)
    assert known.available() == 3 * PER_PAGE - 1


def test_equal_lists_have_equal_checksums_and_order_matters(page_size: int, engine_settings: Any) -> None:
    (one, first), (_, second) = bound(page_size), bound(page_size)
    assert first.ids_crc() == second.ids_crc()
    one.free_pages = one.free_pages.flip(0)
    assert first.ids_crc() != second.ids_crc()


def test_free_ids_are_read_where_there_is_no_memory_to_put_them_together(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full card, where the list alone is megabytes."""
    allocator, known = bound(page_size, pages=3, need_sort=True)
    taken = allocator.alloc(5 * page_size)
    allocator.free(taken[: 2 * page_size])
    parts = [part.tolist() for part in known._parts()]
    assert len(parts) > 1

    def short(*_: object) -> NoReturn:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", short)
    assert known.free_ids().tolist() == [number for part in parts for number in part]
