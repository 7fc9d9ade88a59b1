"""Evictions of the engine's prefix cache: what its nodes held enters the list together, and nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import pytest
import torch

from kvcached_dist import InvariantViolation
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.census import CopyFactory, HostCopy
from kvcached_dist.sglang.engine import evict
from kvcached_dist.sglang.eviction import Evictions
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.sglang.runtime import LIST_ATTRIBUTE, Phase, Runtime
from tests.sglang.conftest import undone
from tests.sglang.late import Late
from tests.sglang.prefixes import PROMPTS, keep, node_by_node, prefix_cache, watch_entering

BLOCKS, PER_PAGE, PUBLISHED = 64, 8, 6
"""Ids of the allocator, ids of a page of ours, pages that are published."""

USABLE = PUBLISHED * PER_PAGE - 1
"""Ids that the engine can have."""

CACHED = len({block for prompt in PROMPTS for block in prompt})
"""Blocks that the cache holds."""

STALE = 60
"""An id that is not published."""


class Broken(Exception):
    """What the coordinator was told."""


class Coordinator:
    """Takes what the engine broke."""

    def broken(self, violation: InvariantViolation) -> NoReturn:
        raise Broken(violation)


@pytest.fixture(scope="module")
def hooked(engine_settings: Any) -> Iterator[Runtime]:
    """The plugin's hooks in the engine's classes, for all tests of this file: applying them takes a second."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcached_dist.config import Config
    from kvcached_dist.sglang.plugin import Plugin

    with undone(HookRegistry):
        plugin = Plugin(Config.preset("tests"))
        plugin.runtime.coordinator = cast(Any, Coordinator())
        plugin.register(HookRegistry, HookType)
        HookRegistry.apply_hooks()
        yield plugin.runtime


@pytest.fixture
def runtime(hooked: Runtime) -> Iterator[Runtime]:
    """Of an engine whose pools are elastic."""
    hooked.phase = Phase.BOUND
    yield hooked
    hooked.phase = Phase.UNDECIDED
    hooked.lists = {}


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def page(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Engine:
    """The engine's prefix cache and allocator, and a list over it.

    Args:
        runtime: of the hooks.
        page: tokens of a block.
        need_sort: as the engine's allocators.
        copy: starts a copy of device numbers; anything but the default stands for a device.
    """

    def __init__(self, runtime: Runtime, page: int, *, need_sort: bool = False, copy: CopyFactory = HostCopy) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        self.page = page
        self.allocator: Any = (
            TokenToKVPoolAllocator(BLOCKS, torch.bfloat16, "cpu", None, need_sort)
            if page == 1
            else PagedTokenToKVPoolAllocator(BLOCKS * page, page, torch.bfloat16, "cpu", None, need_sort)
        )
        self.known = TokenList(specs.FULL, BLOCKS + PER_PAGE, PER_PAGE, BLOCKS, copy)
        self.known.publish(0, PUBLISHED)
        setattr(self.allocator, LIST_ATTRIBUTE, self.known)
        self.known.bind(self.allocator)
        runtime.lists = {specs.FULL: self.known}
        self.cache = prefix_cache(self.allocator, page, "FULL")
        for prompt in PROMPTS:
            keep(self.cache, prompt, self.alloc(len(prompt)))

    @property
    def cached(self) -> int:
        """Blocks that the cache could give back."""
        return int(self.cache.evictable_size()) // self.page

    @property
    def free(self) -> list[int]:
        """All free ids, in the order of the list and of what waits to be sorted into it."""
        return [i for part in self.known._parts() for i in part.tolist()]

    def alloc(self, blocks: int) -> torch.Tensor:
        ids: torch.Tensor | None = self.allocator.alloc(blocks * self.page)
        assert ids is not None
        return ids

    def evict(self, blocks: int) -> None:
        """As the budget does: so much, whatever is free."""
        evict(self.cache, blocks * self.page)

    def make_room(self, blocks: int) -> None:
        """As a step does that is about to allocate so much more than is free."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.cache, (len(self.free) + blocks) * self.page)

    def after_each_node(self, call: Any) -> None:
        """Something more happens whenever an eviction is done with a node."""
        leaf = self.cache._evict_device_leaf

        def and_more(*args: Any) -> Any:
            done = leaf(*args)
            call()
            return done

        self.cache._evict_device_leaf = and_more


@pytest.fixture
def engine(runtime: Runtime, page: int) -> Engine:
    return Engine(runtime, page)


@pytest.fixture
def looks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is about to enter the list of the engine."""
    found: list[tuple[str, int]] = []
    watch_entering(engine.known, found, monkeypatch)
    return found


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("how", ["evict", "make_room"])
@pytest.mark.parametrize("blocks", [1, 9, CACHED])
def test_the_same_ids_are_free_in_the_same_order_as_node_by_node(
    blocks: int, how: str, need_sort: bool, page: int, runtime: Runtime
) -> None:
    found: list[tuple[list[int], int]] = []
    for way in (node_by_node(runtime), contextlib.nullcontext()):
        engine = Engine(runtime, page, need_sort=need_sort)
        assert len(engine.free) + engine.cached == USABLE
        with way:
            getattr(engine, how)(blocks)
        assert len(engine.free) + engine.cached == USABLE
        found.append((engine.free, engine.cached))
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["evict", "make_room"])
def test_all_nodes_of_an_eviction_enter_with_one_look(
    how: str, engine: Engine, looks: list[tuple[str, int]], runtime: Runtime
) -> None:
    before = len(engine.free)
    getattr(engine, how)(9)
    assert looks == [(specs.FULL, len(engine.free) - before)]
    looks.clear()
    with node_by_node(runtime):
        getattr(engine, how)(6)
    assert len(looks) >= 3, "these prompts are nodes of a few blocks"


def test_what_is_kept_counts_as_available_so_that_no_node_goes_in_vain(engine: Engine) -> None:
    """The engine asks after every node whether that suffices."""
    from sglang.srt.mem_cache.unified_radix_cache import ComponentType

    said: list[int] = []
    engine.after_each_node(lambda: said.append(engine.cache._component_available_size(ComponentType.FULL)))
    enough = (len(engine.free) + 6) * engine.page
    engine.make_room(6)
    assert len(said) > 2
    assert said[0] < said[-2] < enough <= said[-1] == len(engine.free) * engine.page


def test_everything_that_was_evicted_can_be_handed_out(engine: Engine) -> None:
    engine.make_room(CACHED)
    assert engine.cached == 0
    assert sorted(set((engine.alloc(USABLE) // engine.page).tolist())) == list(range(1, USABLE + 1))


# ---------------------------------------------------------------------- ids that are not published


def test_an_id_that_is_not_published_is_found_on_the_host_when_the_eviction_ends(engine: Engine) -> None:
    keep(engine.cache, [90], torch.arange(STALE * engine.page, (STALE + 1) * engine.page))
    before = engine.free
    with pytest.raises(Broken, match=f"S4 violated: domain full: the engine freed id {STALE}, which is not published"):
        engine.evict(CACHED + 1)
    assert engine.free == before


def test_an_id_that_is_not_published_is_found_on_a_device(
    page: int, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, looks = Late(), cast(list[tuple[str, int]], [])
    engine = Engine(runtime, page, copy=late)
    watch_entering(engine.known, looks, monkeypatch)
    keep(engine.cache, [90], torch.arange(STALE * page, (STALE + 1) * page))
    engine.evict(CACHED + 1)
    assert looks == [(specs.FULL, CACHED + 1)]
    assert STALE not in engine.free
    engine.known.verify()
    late.pass_time()
    with pytest.raises(InvariantViolation, match=f"id {STALE}, which is not published"):
        engine.known.verify()


# ---------------------------------------------------------------------- where an eviction begins and ends


def test_an_eviction_that_fails_frees_what_its_nodes_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> NoReturn:
        raise KeyError("metrics")

    monkeypatch.setattr(engine.cache, "update_eviction_metrics", fails)
    with pytest.raises(KeyError, match="metrics"):
        engine.evict(9)
    assert engine.cached <= CACHED - 9
    assert len(engine.free) + engine.cached == USABLE


@pytest.mark.parametrize("fails", [False, True])
def test_a_free_outside_an_eviction_is_immediate(
    fails: bool, engine: Engine, looks: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails:
        monkeypatch.setattr(engine.cache, "update_eviction_metrics", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        engine.evict(9)
    taken, free = engine.alloc(3), len(engine.free)
    looks.clear()
    for ids in taken.view(3, engine.page):
        engine.allocator.free(ids)
    assert len(engine.free) == free + 3
    assert looks == [(specs.FULL, 1)] * 3


def test_an_eviction_inside_a_free_group_of_the_engine_enters_with_the_group(
    engine: Engine, looks: list[tuple[str, int]]
) -> None:
    free = engine.free
    engine.allocator.free_group_begin()
    engine.evict(9)
    assert (engine.free, looks) == (free, [])
    engine.allocator.free_group_end()
    assert looks == [(specs.FULL, len(engine.free) - len(free))]
    assert len(engine.free) + engine.cached == USABLE


def test_an_eviction_inside_another_one_leaves_its_ids_where_an_allocation_finds_them(engine: Engine) -> None:
    """The engine forbids two evictions of one cache at a time; of two caches it does not."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    other = prefix_cache(engine.allocator, engine.page, "FULL")
    keep(other, [91, 92], engine.alloc(2))
    engine.alloc(len(engine.free))
    handed_out: list[torch.Tensor] = []

    def once() -> None:
        if not handed_out:
            other.evict(EvictParams(num_tokens=2 * engine.page))
            handed_out.append(engine.alloc(2))

    engine.after_each_node(once)
    engine.evict(CACHED)
    assert len(handed_out[0]) == 2 * engine.page
    assert len(engine.free) == CACHED


def test_whoever_says_by_itself_when_it_suffices_gets_node_by_node(engine: Engine, runtime: Runtime) -> None:
    """As newer versions do for a shared pool: that looks at the allocator, where nothing kept is to be seen."""
    evictions, entered = Evictions(runtime), cast(list[list[int]], [])

    def an_eviction(_cache: Any, *, satisfied: Any) -> None:
        for ids in (7, 8):
            evictions.free(lambda _, part: entered.append(part.tolist()), engine.allocator, (torch.tensor([ids]),))

    evictions.evict(an_eviction, engine.cache, satisfied=lambda: True)
    assert entered == [[7], [8]]
    evictions.evict(an_eviction, engine.cache, satisfied=None)
    assert entered == [[7], [8], [7, 8]]


# ---------------------------------------------------------------------- what is not ours


@pytest.mark.parametrize("ours", [False, True], ids=["native-allocator", "native-engine"])
def test_what_is_native_is_left_alone(ours: bool, engine: Engine, runtime: Runtime) -> None:
    """An engine without elastic pools; and an allocator without a list of this library in one that has them."""
    if ours:
        runtime.phase = Phase.NATIVE
    else:
        delattr(engine.allocator, LIST_ATTRIBUTE)
    free = [len(engine.free)]
    engine.after_each_node(lambda: free.append(len(engine.free)))
    engine.evict(9)
    assert len(free) > 3
    assert free == sorted(set(free))
