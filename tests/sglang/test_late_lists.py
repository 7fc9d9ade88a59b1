"""Lists on a device that answers late: nothing waits, no run in use is ever picked, no bad id gets in unnoticed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import pytest
import torch

from kvcached_dist import InvariantViolation
from kvcached_dist.sglang.census import CopyFactory, HostCopy
from kvcached_dist.sglang.fence import StreamFence
from kvcached_dist.sglang.gate import UNSEEN_MAX
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.sglang.rows import RowList
from kvcached_dist.sglang.runtime import LIST_ATTRIBUTE
from tests.sglang.conftest import undone
from tests.sglang.late import Late

TOKENS, PER_PAGE = 64, 8


class Broken(Exception):
    """What the coordinator was told."""


class Coordinator:
    """Takes what the engine broke."""

    def broken(self, violation: InvariantViolation) -> NoReturn:
        raise Broken(violation)


@pytest.fixture(scope="module", autouse=True)
def hooks(engine_settings: Any) -> Iterator[None]:
    """The plugin's hooks in the engine's classes, for all tests of this file: applying them takes a second."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcached_dist.config import Config
    from kvcached_dist.sglang.plugin import Plugin

    with undone(HookRegistry):
        plugin = Plugin(Config.preset("tests"))
        plugin.runtime.coordinator = cast(Any, Coordinator())
        plugin.register(HookRegistry, HookType)
        HookRegistry.apply_hooks()
        yield


class Device:
    """The engine's allocator and a list over it, on a device that answers late."""

    def __init__(self, page_size: int, *, need_sort: bool = False, copy: CopyFactory | None = None) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        self.page_size = page_size
        self.allocator: Any = (
            TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", None, need_sort)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(TOKENS * page_size, page_size, torch.bfloat16, "cpu", None, need_sort)
        )
        self.late = Late()
        self.known = TokenList("full", TOKENS + PER_PAGE, PER_PAGE, TOKENS, copy or self.late)
        self.known.publish(0, 4)
        setattr(self.allocator, LIST_ATTRIBUTE, self.known)
        self.known.bind(self.allocator)

    def alloc(self, count: int) -> torch.Tensor:
        ids: torch.Tensor | None = self.allocator.alloc(count * self.page_size)
        assert ids is not None
        return ids

    def free(self, ids: torch.Tensor) -> None:
        self.allocator.free(ids)

    def really_free(self, page: int) -> bool:
        here = set(self.allocator.get_all_free_pages().tolist())
        return here >= set(self.known.book.ids_of(page, 1).tolist())


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(int(request.param))


def test_nothing_is_known_before_the_device_has_answered(device: Device) -> None:
    assert not device.known.run_is_free(3, 1)
    assert not device.known.run_is_free(3, 1)
    device.late.pass_time()
    assert device.known.run_is_free(3, 1)


def test_what_was_handed_out_meanwhile_is_not_free(device: Device) -> None:
    device.known.run_is_free(1, 1)
    device.late.pass_time()
    assert device.known.run_is_free(1, 1)
    device.alloc(7)
    assert device.known.run_is_free(1, 1), "page 0 was handed out, page 1 lies deeper"
    device.alloc(1)
    assert not device.known.run_is_free(1, 1)
    assert device.known.run_is_free(2, 2)


def test_what_came_back_meanwhile_waits_for_the_next_look(device: Device) -> None:
    taken = device.alloc(15)
    device.known.run_is_free(1, 1)
    device.late.pass_time()
    device.free(taken)
    assert not device.known.run_is_free(1, 1)
    device.late.pass_time()
    assert device.known.run_is_free(1, 1)


def test_what_is_retired_above_a_run_brings_it_nearer(device: Device) -> None:
    device.known.run_is_free(1, 1)
    device.late.pass_time()
    for page in (1, 2):
        device.known.retire(page, 1)
    assert device.known.run_is_free(3, 1)
    device.alloc(8)
    assert not device.known.run_is_free(3, 1), "its first id is out: 7 of page 0 went, and one more"
    assert not device.really_free(3)


def test_a_page_that_was_retired_and_came_back_is_looked_at_anew(device: Device) -> None:
    device.known.run_is_free(3, 1)
    device.known.retire(3, 1)
    device.late.pass_time()
    device.known.publish(3, 1)
    assert not device.known.run_is_free(3, 1)
    device.late.pass_time()
    assert device.known.run_is_free(3, 1)


def test_a_list_in_another_order_is_looked_at_anew(device: Device) -> None:
    device.free(device.alloc(20))
    device.known.run_is_free(3, 1)
    device.late.pass_time()
    device.known.sort()
    assert not device.known.run_is_free(3, 1)
    device.late.pass_time()
    assert device.known.run_is_free(3, 1)


def test_a_list_that_the_engine_sorts_is_believed_only_while_it_is_unchanged() -> None:
    device = Device(1, need_sort=True)
    device.known.run_is_free(3, 1)
    device.late.pass_time()
    assert device.known.run_is_free(3, 1)
    device.alloc(1)
    assert not device.known.run_is_free(3, 1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(8))
def test_no_run_in_use_is_ever_picked(page_size: int, seed: int) -> None:
    """Any order of allocations, frees, growth, sorting and late answers; whatever is said to be free may be retired."""
    choose = random.Random(seed)
    device = Device(page_size)
    live: list[torch.Tensor] = []
    published, picked, known = {0, 1, 2, 3}, 0, device.known
    for _ in range(300):
        match choose.randrange(8):
            case 0 | 1 | 2 if known.available():
                live.append(device.alloc(choose.randint(1, min(6, known.available()))))
            case 3 | 4:
                for _ in range(min(2, len(live))):
                    device.free(live.pop(choose.randrange(len(live))))
            case 5:
                device.late.pass_time()
            case 6 if choose.random() < 0.3:
                known.sort()
            case 7 if absent := sorted({1, 2, 3, 4, 5, 6, 7} - published):
                known.publish(absent[0], 1)
                published.add(absent[0])
        free = [page for page in sorted(published - {0}, reverse=True) if known.run_is_free(page, 1)]
        assert all(device.really_free(page) for page in free)
        if free and choose.random() < 0.3:
            known.retire(free[0], 1)
            published.remove(free[0])
            picked += 1
        known.verify()
    device.late.pass_time()
    known.verify()
    assert picked >= 5


# ---------------------------------------------------------------------- runs that leave


def test_a_fence_passes_only_when_the_device_has_confirmed_the_run(device: Device) -> None:
    device.known.retire(3, 1)
    fence = StreamFence((), device.known.take_checks())
    assert not fence.done()
    device.late.pass_time()
    assert fence.done()
    device.known.verify()
    assert device.known.available() == 3 * PER_PAGE - 1


def test_a_run_in_use_is_reported_and_its_fence_never_passes(device: Device) -> None:
    device.alloc(8)
    device.known.retire(1, 1)
    fence = StreamFence((), device.known.take_checks())
    device.known.verify()
    device.late.pass_time()
    assert not fence.done()
    with pytest.raises(InvariantViolation, match=r"domain full: pages 1\+1 are not entirely free: 7 ids"):
        device.known.verify()


def test_the_rest_of_the_list_keeps_its_order(device: Device) -> None:
    device.free(device.alloc(13))
    before = device.allocator.free_pages.tolist()
    device.known.retire(2, 1)
    assert device.allocator.free_pages.tolist() == [i for i in before if not 16 <= i < 24]


# ---------------------------------------------------------------------- ids that enter


@pytest.mark.parametrize(
    ("bad", "named"),
    [(-5, 0), (0, 0), (40, 40), (TOKENS + 1, None), (10_000, None)],
    ids=["negative", "null", "retired", "above", "far"],
)
def test_a_stale_or_foreign_id_never_enters_a_list_and_is_reported(bad: int, named: int | None, device: Device) -> None:
    device.known.publish(5, 1)
    device.known.retire(5, 1)
    taken = device.alloc(2)
    device.late.pass_time()
    device.free(torch.cat((taken, torch.tensor([bad * device.page_size]))))
    assert bad == 0 or bad not in device.allocator.get_all_free_pages().tolist()
    device.known.verify()
    device.late.pass_time()
    named = device.known.book.ids + 1 if named is None else named
    with pytest.raises(
        InvariantViolation, match=rf"^S4 violated: domain full: the engine freed id {named}, which is not"
    ):
        device.known.verify()


def test_good_ids_are_never_reported(device: Device) -> None:
    for _ in range(4):
        device.free(device.alloc(9))
        device.late.pass_time()
        device.known.verify()


def test_many_groups_of_ids_are_looked_at_before_the_next_mark(device: Device) -> None:
    """No mark for long: what waits to be looked at stays bounded."""
    device.free(torch.tensor([40 * device.page_size]))
    for _ in range(UNSEEN_MAX):
        device.free(device.alloc(1))
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


def test_an_id_freed_while_it_was_published_is_good_although_its_run_goes(device: Device) -> None:
    device.known.publish(5, 1)
    device.free(device.alloc(device.known.available()))
    device.known.retire(5, 1)
    device.known.verify()
    device.late.pass_time()
    device.known.verify()


def test_an_id_freed_before_it_was_published_is_bad_although_its_run_comes(device: Device) -> None:
    device.free(torch.tensor([40 * device.page_size]))
    device.known.publish(5, 1)
    device.known.verify()
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


def test_what_was_freed_is_looked_at_as_it_was_although_the_engine_writes_over_it(device: Device) -> None:
    row = device.alloc(1).clone()
    bad = torch.full_like(row, 40 * device.page_size)
    device.free(bad)
    bad.copy_(row)
    device.known.verify()
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


def test_freeing_nothing_is_nothing(device: Device) -> None:
    before = device.allocator.free_pages.tolist()
    assert not len(device.known.admit(torch.empty(0, dtype=torch.int64)))
    assert device.allocator.free_pages.tolist() == before


def test_ids_may_be_int32(device: Device) -> None:
    """As the engine's own groups of page ids are on a card."""
    device.free(device.alloc(9).int())
    device.known.verify()
    device.late.pass_time()
    device.known.verify()
    device.free(torch.tensor([40 * device.page_size], dtype=torch.int32))
    device.known.verify()
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_what_may_enter_has_the_type_of_what_came(kind: torch.dtype, device: Device) -> None:
    entering = device.known.admit(torch.tensor([3, 40], dtype=kind))
    assert (entering.dtype, entering.tolist()) == (kind, [3, 0])


def test_a_bad_id_behind_a_report_that_is_on_its_way_is_reported_next(device: Device) -> None:
    device.free(device.alloc(1))
    device.known.verify()
    device.free(torch.tensor([40 * device.page_size]))
    device.known.verify()
    device.late.pass_time()
    device.known.verify()
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


def test_an_id_in_a_free_group_is_looked_at_when_the_group_ends(device: Device) -> None:
    device.allocator.free_group_begin()
    device.free(torch.tensor([40 * device.page_size]))
    device.late.pass_time()
    device.known.verify()
    device.allocator.free_group_end()
    device.known.verify()
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="id 40"):
        device.known.verify()


def test_an_id_that_was_freed_twice_stops_reclaim(device: Device) -> None:
    taken = device.alloc(8)
    device.free(taken[: device.page_size])
    device.free(taken[: device.page_size])
    assert device.known.available() == 3 * PER_PAGE - 1 - 6 + PER_PAGE
    device.known.run_is_free(1, 1)
    device.late.pass_time()
    with pytest.raises(InvariantViolation, match="1 ids are in the free list twice"):
        device.known.run_is_free(1, 1)


# ---------------------------------------------------------------------- on the host


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("bad", [-5, 0, 40, TOKENS + 1])
def test_on_the_host_a_bad_id_is_found_at_the_call(page_size: int, bad: int) -> None:
    device = Device(page_size, copy=HostCopy)
    before = device.known.available()
    with pytest.raises(Broken, match=f"S4 violated: domain full: the engine freed id {bad}"):
        device.free(torch.tensor([bad * page_size]))
    assert device.known.available() == before
    device.free(device.alloc(3))
    assert device.known.available() == before


def test_a_row_that_is_not_published_never_enters_the_list() -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    pool = ReqToTokenPool(8, 32, "cpu", False)
    rows = RowList("rows", 9, 1, 8)
    rows.publish(0, 3)
    setattr(pool, LIST_ATTRIBUTE, rows)
    rows.bind(pool)
    pool.free_rows(pool.alloc_rows(2))
    with pytest.raises(Broken, match="domain rows: the engine freed id 5"):
        pool.free_rows([5])
    assert rows.available() == 2


def test_an_allocator_that_is_not_ours_frees_what_it_likes() -> None:
    device = Device(1, copy=HostCopy)
    delattr(device.allocator, LIST_ATTRIBUTE)
    device.free(torch.tensor([TOKENS + 5]))
    assert TOKENS + 5 in device.allocator.free_pages.tolist()
