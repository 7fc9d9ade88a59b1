"""Free lists on a card: publishing, retiring, counting and checking never make the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvcached_dist import InvariantViolation
from kvcached_dist.config import Config
from kvcached_dist.coord.core.types import DomainId, PageId, Run
from kvcached_dist.pools.specs import DomainSpec, StageSpec
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.fence import StreamFence
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.sglang.runtime import Runtime

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

IDS, PER_PAGE = 64_000, 64


class Allocator:
    """A free list of an engine on the card: given from the head, taken back at the tail."""

    need_sort = False

    def __init__(self) -> None:
        self.free_pages = torch.arange(1, IDS + 1, device="cuda")

    def alloc(self, count: int) -> torch.Tensor:
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def free(self, known: TokenList, ids: torch.Tensor) -> None:
        self.free_pages = torch.cat((self.free_pages, known.admit(ids)))


@pytest.fixture
def lists() -> tuple[Allocator, TokenList]:
    known = TokenList("full", IDS + PER_PAGE, PER_PAGE, IDS)
    known.publish(0, 100)
    allocator = Allocator()
    known.bind(allocator)
    return allocator, known


@pytest.fixture(scope="module")
def loaded() -> None:
    """Every kernel once: loading one for the first time waits for the device, whoever launches it."""
    known, allocator = TokenList("full", IDS + PER_PAGE, PER_PAGE, IDS), Allocator()
    known.publish(0, 100)
    known.bind(allocator)
    for ids in (allocator.alloc(10), allocator.alloc(10).int()):
        allocator.free(known, ids)
    known.publish(100, 4)
    known.run_is_free(90, 2)
    torch.cuda.synchronize()
    known.run_is_free(90, 2)
    known.retire(90, 2)
    known.sort()
    known.take_checks()
    known.verify()


@pytest.fixture
def never_waiting(loaded: None) -> Iterator[None]:
    """Whatever would make the host wait for the device is an error, and the device is busy all the time."""
    stay = torch.ones(4096, 4096, device="cuda")
    stay = stay @ stay * 1e-4
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            stay = stay @ stay * 1e-4
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def eventually(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_run_is_counted_retired_and_confirmed_without_waiting(
    lists: tuple[Allocator, TokenList], never_waiting: None
) -> None:
    allocator, known = lists
    taken = allocator.alloc(1000)
    known.publish(100, 4)
    assert not known.run_is_free(90, 2), "the device is busy: it cannot have answered"
    allocator.free(known, taken[:200])
    allocator.free(known, taken[200:500].int())
    eventually(lambda: known.run_is_free(90, 2))
    assert not known.run_is_free(10, 1)
    known.retire(90, 2)
    fence = StreamFence((torch.cuda.current_stream(),), known.take_checks())
    known.sort()
    eventually(fence.done)
    known.verify()
    assert known.available() == 104 * PER_PAGE - 1 - 500 - 2 * PER_PAGE


def test_the_same_lists_are_left_as_on_the_host(lists: tuple[Allocator, TokenList]) -> None:
    allocator, known = lists
    host = Allocator()
    host.free_pages = host.free_pages.cpu()
    twin = TokenList("full", IDS + PER_PAGE, PER_PAGE, IDS)
    twin.publish(0, 100)
    twin.bind(host)
    for each, mine in ((allocator, known), (host, twin)):
        each.free(mine, each.alloc(3000))
        mine.publish(120, 2)
        mine.retire(70, 3)
        mine.retire(121, 1)
    assert allocator.free_pages.cpu().tolist() == host.free_pages.tolist()
    known.sort()
    twin.sort()
    assert allocator.free_pages.cpu().tolist() == host.free_pages.tolist()


def test_a_stale_id_is_reported_without_waiting(lists: tuple[Allocator, TokenList], never_waiting: None) -> None:
    allocator, known = lists
    allocator.free(known, torch.arange(40_000, 40_010, device="cuda"))
    found: list[str] = []

    def reported() -> bool:
        try:
            known.verify()
        except InvariantViolation as violation:
            found.append(str(violation))
        return bool(found)

    eventually(reported)
    assert "the engine freed id 40009, which is not published" in found[0]
    torch.cuda.set_sync_debug_mode("default")
    assert not (allocator.free_pages >= 40_000).any()


def test_a_run_in_use_never_drains(lists: tuple[Allocator, TokenList], never_waiting: None) -> None:
    allocator, known = lists
    allocator.alloc(200)
    known.retire(1, 1)
    stream = torch.cuda.current_stream()
    fence, behind = StreamFence((stream,), known.take_checks()), StreamFence((stream,))
    eventually(behind.done)
    assert not fence.done()
    with pytest.raises(InvariantViolation, match="not entirely free: 0 ids"):
        known.verify()


def test_rows_that_name_what_is_gone_are_cleared_without_waiting(never_waiting: None) -> None:
    runtime = Runtime(Config.preset("tests"))
    stage = StageSpec("test", "", 0, 1, 0, 1, (DomainSpec(specs.FULL, 1024, 1, 16),), ())
    table = torch.arange(1024, dtype=torch.int32, device="cuda").view(4, 256)
    runtime.take_over(specs.Takeover(stage, {specs.FULL: 1000}), cast(Any, SimpleNamespace(stage=stage)), {})
    runtime.serve(SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)))
    runtime.handed_out(None, [0, 3])
    runtime._forget_ids([Run(DomainId(0), PageId(3), 2)])
    torch.cuda.set_sync_debug_mode("default")
    assert table.view(-1)[47:81].tolist() == [47, *[0] * 32, 80]
