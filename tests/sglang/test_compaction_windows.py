"""Cached prefixes of engines with a sliding window: both kinds of ids move, and still belong to one another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcached_dist.coord.core.types import DomainId, PageId, Run, Txn
from kvcached_dist.sglang import compaction, placement, specs
from tests.sglang import test_dsv4_pools as dsv4
from tests.sglang.loaded import equal
from tests.sglang.windowed import BLOCKS, RUNS, Windowed, heads

DOMAINS = (specs.FULL, specs.SWA)

COMPRESSED = {specs.FULL: ("c4_kv", "c128_kv", "c4_indexer"), specs.SWA: ("swa_kv", "c4_state", "c4_indexer_state")}
"""Pools of DeepSeek-V4 that ids of a domain index."""


@pytest.fixture(params=["heads-1", "heads-16", "dsv4"])
def engine(request: Any, engine_settings: Any, registry: Any) -> Iterator[Windowed]:
    if request.param != "dsv4":
        page = int(request.param.split("-")[1])
        yield Windowed(*heads(page), page)
        return
    made = dsv4.Elastic(registry, full_pages=BLOCKS[specs.FULL], swa_pages=BLOCKS[specs.SWA])
    for domain, name in enumerate(DOMAINS):
        assert made.taken.stage.domain_index(name) == domain
        run = [Run(DomainId(domain), PageId(1), sum(RUNS[name]) - 1)]
        assert made.backing.reserve(Txn(100 + domain), run).ok
        assert made.backing.map(run).ok
    yield Windowed(made.pool, {name: made.backing.lanes(name) for name in DOMAINS}, dsv4.PAGE)
    made.backing.close()


@pytest.fixture
def small(engine_settings: Any) -> Windowed:
    """One where the kind does not matter."""
    return Windowed(*heads(16), 16)


def test_what_lies_behind_each_node_moves_with_it_and_runs_are_left(engine: Windowed) -> None:
    contents, hits = engine.contents(), [len(engine.tokens(prompt)) for prompt in engine.prompts]
    held = {name: engine.runs_held(name) for name in DOMAINS}
    used = {name: len(engine.used(name)) for name in DOMAINS}
    windows = [window for _, window in engine.nodes().values()]
    assert 0 < sum(window is None for window in windows) < len(windows)
    assert sum(map(bool, hits)) >= 2
    moved = engine.compaction.run()
    assert 0 < moved <= sum(used.values()) * engine.page
    assert equal(list(engine.contents().values()), list(contents.values()))
    assert [len(engine.tokens(prompt)) for prompt in engine.prompts] == hits
    for name in DOMAINS:
        assert len(engine.used(name)) == used[name]
        assert engine.runs_held(name) <= held[name] // 2
    engine.cache.sanity_check()


def test_a_full_id_finds_its_window_and_no_other_does(engine: Windowed) -> None:
    table = engine.allocator.full_to_swa_index_mapping
    assert engine.compaction.run()
    assert engine.allocator.full_to_swa_index_mapping is table, "captured graphs have its address"
    assert int(table[-1]) == -1
    found = 0
    for full, window in engine.nodes().values():
        expected = torch.zeros_like(full) if window is None else window
        assert torch.equal(table[full], expected)
        found += int((expected > 0).sum())
    assert int((table[:-1] > 0).sum()) == found


def test_all_that_is_published_is_free_or_cached_and_can_be_had_again(engine: Windowed) -> None:
    assert engine.compaction.run()
    for name, known in engine.lists.items():
        assert sorted([*engine.used(name), *known.free_ids().tolist()]) == list(range(1, sum(RUNS[name])))
    engine.make_room(*(sum(RUNS[name]) - 1 for name in DOMAINS))
    assert all(engine.used(name) == [] for name in DOMAINS)
    assert not engine.table.any()
    some = engine.alloc(sum(RUNS[specs.SWA]) - 1)
    assert len(torch.unique(engine.table[some])) == len(some)
    assert engine.compaction.run() == 0, "a request has them"


def test_what_has_been_moved_stays(engine: Windowed) -> None:
    assert engine.compaction.run()
    state = engine.state()
    assert engine.compaction.run() == 0
    assert equal(engine.state(), state)


def test_load_after_load(engine: Windowed) -> None:
    moved = 0
    for seed in range(4):
        engine.load(random.Random(seed))
        contents = engine.contents()
        moved += engine.compaction.run()
        assert equal(list(engine.contents().values()), list(contents.values()))
    assert moved > 20 * engine.page


@pytest.mark.parametrize("stays", DOMAINS)
def test_one_kind_moves_where_the_other_lies_well(
    stays: str, engine: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full ids that move take the table with them, and window ids that move change it."""
    monkeypatch.setattr(
        compaction, "plan", lambda book, used: None if book.name == stays else placement.plan(book, used)
    )
    contents, used = engine.contents(), {name: engine.used(name) for name in DOMAINS}
    free = engine.lists[stays].free_ids().tolist()
    assert engine.compaction.run()
    assert [name for name in DOMAINS if engine.used(name) == used[name]] == [stays]
    assert engine.lists[stays].free_ids().tolist() == free
    assert equal(list(engine.contents().values()), list(contents.values()))
    for full, window in engine.nodes().values():
        assert window is None or torch.equal(engine.table[full], window)
    assert int(engine.table.count_nonzero()) == len(engine.used(specs.SWA)) * engine.page


def test_two_ranks_with_the_same_history_move_the_same_ids(engine_settings: Any) -> None:
    one, other = Windowed(*heads(16), 16), Windowed(*heads(16), 16, seed=1)
    assert one.compaction.run() == other.compaction.run() > 0
    assert equal(one.state()[:3], other.state()[:3])
    assert not equal(one.state(), other.state())
    assert [known.ids_crc() for known in one.lists.values()] == [known.ids_crc() for known in other.lists.values()]


def test_a_copy_that_fails_in_the_second_domain_leaves_everything_as_it_was(
    small: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, table, contents = [small.used(name) for name in DOMAINS], small.table.clone(), small.contents()
    free = [known.free_ids().tolist() for known in small.lists.values()]
    calls: list[int] = []
    original = torch.Tensor.index_copy_

    def fails(lane: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == sum(map(len, small.lanes.values())):
            raise RuntimeError("out of memory")
        return original(lane, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        small.compaction.run()
    monkeypatch.undo()
    assert [small.used(name) for name in DOMAINS] == used
    assert [known.free_ids().tolist() for known in small.lists.values()] == free
    assert torch.equal(small.table, table)
    assert equal(list(small.contents().values()), list(contents.values()))
    assert small.compaction.run()


@pytest.mark.parametrize("call", ["_values", "_window", "_held"])
def test_a_full_card_is_asked_again_before_anything_has_changed(
    call: str, small: Windowed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may have moved: for what torch's allocator keeps to itself the group must not end."""
    made, contents = small.compaction, small.contents()
    emptied: list[int] = []
    original = getattr(made, call)

    def short(*args: Any) -> Any:
        if not emptied:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    monkeypatch.setattr(made, call, short)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    assert made.run() > 0
    assert emptied == [1]
    assert equal(list(small.contents().values()), list(contents.values()))


def a_window_of_nobody(engine: Windowed) -> None:
    """Somebody has a window without its full ids: the table says so, or the counts do."""
    engine.allocator.swa_attn_allocator.alloc(engine.page)


def an_entry_of_nobody(engine: Windowed) -> None:
    free = int(engine.lists[specs.FULL].free_ids()[0])
    engine.table[free * engine.page] = engine.page


def an_entry_of_another(engine: Windowed) -> None:
    (first, *_) = [full for full, window in engine.nodes().values() if window is not None]
    engine.table[first[0]] += 1


def a_locked_window(engine: Windowed) -> None:
    (node, *_) = [node for node, (_, window) in engine.nodes().items() if window is not None]
    engine.cache.inc_lock_ref(node)


def in_a_free_group(engine: Windowed) -> None:
    engine.allocator.free_group_begin()


@pytest.mark.parametrize(
    "why", [a_window_of_nobody, an_entry_of_nobody, an_entry_of_another, a_locked_window, in_a_free_group]
)
def test_not_now(why: Any, small: Windowed) -> None:
    why(small)
    state = small.state()
    assert small.compaction.run() == 0
    assert not small.compaction.due(idle=True)
    assert equal(small.state(), state)


def test_it_is_possible_in_both_families(engine: Windowed) -> None:
    assert engine.compaction.unsupported == ""


def test_not_where_an_id_says_nothing_of_what_lies_behind_it(small: Windowed) -> None:
    small.allocator._swa_req_ring = True
    assert small.compaction.unsupported == "a window that is a ring of each request"
    small.allocator._swa_req_ring = False
    small.allocator.swa_attn_allocator.__class__ = type("Another", (type(small.allocator.swa_attn_allocator),), {})
    assert small.compaction.unsupported == "a SWATokenToKVPoolAllocator"
    del small.allocator.full_to_swa_index_mapping
    small.allocator.swa_attn_allocator.__class__ = type(small.allocator.full_attn_allocator)
    assert small.compaction.unsupported.startswith("this version of the engine is laid out differently")


def test_not_where_the_indexer_is_in_two_buffers(engine_settings: Any, registry: Any) -> None:
    """Keys and scales apart are pools of the engine itself, which would stay where they are."""
    pool = dsv4.engine_pool(full_pages=BLOCKS[specs.FULL], swa_pages=BLOCKS[specs.SWA])
    named = dsv4.tensors(pool)
    blocks = {name: sum(RUNS[name]) for name in DOMAINS}
    lanes = {
        name: [
            lane.view(torch.uint8).flatten()[: blocks[name] * 64].view(blocks[name], 64)
            for pools in COMPRESSED[name]
            for lane in named[pools]
        ]
        for name in DOMAINS
    }
    engine = Windowed(pool, lanes, dsv4.PAGE)
    assert engine.compaction.unsupported == ""
    pool.c4_indexer_kv_pool.uses_aiter_fp4_layout = True
    assert engine.compaction.unsupported == "an indexer of two buffers"
