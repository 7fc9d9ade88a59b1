"""Cached prefixes that are moved together: the same tokens have the same rows, and whole runs are free."""

from __future__ import annotations

import random
import time
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from kvcached_dist.sglang import compaction, specs
from kvcached_dist.sglang.compaction import Compaction
from tests.sglang.late import Late
from tests.sglang.loaded import PER_PAGE, PUBLISHED, RUNS, Engine, equal
from tests.sglang.prefixes import keep


@pytest.fixture(params=[(1, "heads"), (1, "latent"), (16, "heads"), (16, "latent")], ids=lambda p: f"page{p[0]}-{p[1]}")
def engine(request: pytest.FixtureRequest, engine_settings: Any) -> Engine:
    return Engine(*request.param)


@pytest.fixture
def small(engine_settings: Any) -> Engine:
    """One where the kind does not matter."""
    return Engine(1, "heads")


# ---------------------------------------------------------------------- what is moved


def test_every_cached_prefix_has_the_rows_that_it_had_and_runs_are_left(engine: Engine) -> None:
    rows, before, tokens = engine.rows(), engine.runs_held(), [engine.tokens(prompt) for prompt in engine.prompts]
    assert sum(before) >= 20, "the load has scattered nothing"
    cached = engine.cached
    moved = engine.compaction.run()
    assert 0 < moved <= cached * engine.page
    assert equal(engine.rows(), rows)
    assert engine.cached == cached == len(engine.used())
    assert sum(engine.runs_held()) <= 8
    assert any(not torch.equal(old, engine.tokens(p)) for old, p in zip(tokens, engine.prompts, strict=True))
    engine.cache.sanity_check()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("page", "kind"), [(1, "heads"), (16, "heads"), (1, "latent"), (16, "latent")])
def test_rows_of_eight_bits_are_bytes_in_the_pool(
    page: int, kind: str, dtype: torch.dtype, engine_settings: Any
) -> None:
    """Torch has no ``index_copy_`` for these types themselves."""
    engine = Engine(page, kind, dtype=dtype)
    assert {buffer.dtype for buffer in engine.buffers} == {torch.uint8}
    rows = engine.rows()
    assert max(int(found.max()) for prompt in rows for found in prompt if len(found)) > 200
    assert engine.compaction.run()
    assert equal(engine.rows(), rows)


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_all_published_ids_are_free_or_cached_once_each(page: int, need_sort: bool, engine_settings: Any) -> None:
    engine = Engine(page, "heads", need_sort=need_sort)
    assert engine.compaction.run()
    assert sorted([*engine.used(), *engine.known.free_ids().tolist()]) == list(range(1, PUBLISHED + 1))
    assert engine.allocator.available_size() == (PUBLISHED - engine.cached) * page
    engine.evict(engine.cached)
    assert sorted((engine.alloc(PUBLISHED) // page).tolist()) == sorted(list(range(1, PUBLISHED + 1)) * page)


def test_all_runs_but_those_that_hold_something_can_be_retired(engine: Engine) -> None:
    engine.compaction.run()
    firsts, counts = engine.known.book.runs()
    free = [engine.known.run_is_free(int(f), int(n)) for f, n in zip(firsts, counts, strict=True)]
    assert sum(int(n) for n, gone in zip(counts, free, strict=True) if not gone) == sum(engine.runs_held()) <= 8
    for first, count, gone in zip(firsts, counts, free, strict=True):
        if gone:
            engine.known.retire(int(first), int(count))
    assert engine.known.published() - engine.known.available() == engine.cached


def test_what_has_been_moved_stays(engine: Engine) -> None:
    assert engine.compaction.run()
    state = engine.state()
    assert engine.compaction.run() == 0
    assert equal(engine.state(), state)
    for first, count in zip(*engine.known.book.runs(), strict=True):
        if engine.known.run_is_free(int(first), int(count)):
            engine.known.retire(int(first), int(count))
    assert engine.compaction.run() == 0, "nor when what was free has gone"


def test_load_after_load(engine: Engine) -> None:
    moved = 0
    for seed in range(6):
        engine.evict(engine.cached - 10)
        engine.load(random.Random(seed))
        rows = engine.rows()
        moved += engine.compaction.run()
        assert equal(engine.rows(), rows)
        assert sorted([*engine.used(), *engine.known.free_ids().tolist()]) == list(range(1, PUBLISHED + 1))
        assert sum(engine.runs_held()) <= 8
    assert moved > 100 * engine.page


def test_two_ranks_with_the_same_history_move_the_same_ids(engine_settings: Any) -> None:
    one, other = Engine(1, "heads"), Engine(1, "heads", seed=1)
    assert not equal(one.rows(), other.rows())
    # The order in which a process walks its tree is nobody's business.
    children = other.cache.tree_core.root_node.children
    for key in reversed(list(children)):
        children[key] = children.pop(key)
    assert one.compaction.run() == other.compaction.run() > 0
    assert one.known.free_ids().tolist() == other.known.free_ids().tolist()
    assert [one.tokens(p).tolist() for p in one.prompts] == [other.tokens(p).tolist() for p in other.prompts]


def test_a_rank_that_moves_by_itself_differs_at_the_next_mark(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device nobody reads the list for it, and neither length nor count of what is published tells."""
    one, other = Engine(1, "heads"), Engine(1, "heads")
    on_a_device = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]

    def said(engine: Engine) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(engine.known, "_parts", lambda: on_a_device)
            return engine.known.ids_crc()

    assert said(one) == said(other) == 0
    assert one.compaction.run()
    assert said(one) != said(other)
    assert other.compaction.run()
    assert said(one) == said(other)


@pytest.mark.parametrize("page", [1, 16])
def test_a_session_that_has_timed_out_on_one_rank_so_far(page: int, engine_settings: Any) -> None:
    """The engine looks for timeouts once a second, by each rank's own clock."""
    one, other = Engine(page, "heads"), Engine(page, "heads")
    for engine in (one, other):
        streaming_session(engine)
        assert not engine.compaction.due(idle=True)
    one.scheduler.session_controller.maybe_reap(time.monotonic(), interval=-1.0)
    assert one.compaction.due(idle=True)
    assert not other.compaction.due(idle=True)
    assert one.compaction.run() == other.compaction.run() > 0
    assert one.known.free_ids().tolist() == other.known.free_ids().tolist()
    assert not other.scheduler.session_controller.sessions


def streaming_session(engine: Engine) -> None:
    """One of three pages that has timed out."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import SessionSlot

    tokens = engine.alloc(3)
    rows = engine.cache.req_to_token_pool = ReqToTokenPool(2, 3 * 16, "cpu", enable_memory_saver=False)
    (row,) = rows.alloc_rows(1)
    rows.write((row, slice(0, len(tokens))), tokens.to(torch.int32))
    kv = ReqKvInfo(req_pool_idx=row, kv_committed_len=len(tokens), kv_allocated_len=len(tokens))
    engine.cache.session.slots["s"] = SessionSlot(kv=kv)
    session = Session(0, "s", streaming=True, timeout=1.0)
    session.last_active_time -= 1.1
    engine.scheduler.session_controller.sessions["s"] = session


def test_the_next_request_is_given_ids_of_runs_that_stay(small: Engine) -> None:
    small.compaction.run()
    held, spare = sum(small.runs_held()) * PER_PAGE, small.runs_held()
    given = small.alloc(held - 1 - small.cached if 1 in spare else held - small.cached)
    before = sum(small.runs_held())
    keep(small.cache, [7000 + k for k in range(len(given))], given)
    assert sum(small.runs_held()) == before


def test_rows_are_copied_in_parts_that_take_little_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = engine.rows()
    width = engine.lanes[specs.FULL][0][0].nbytes
    monkeypatch.setattr(compaction, "CHUNK_BYTES", 5 * width)
    taken: list[int] = []
    select = torch.Tensor.index_select

    def noted(buffer: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        found = select(buffer, dim, index)
        taken.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    assert engine.compaction.run()
    monkeypatch.undo()
    assert max(taken) == 5 * width
    assert equal(engine.rows(), rows)


def test_on_a_device_that_answers_late(engine_settings: Any) -> None:
    late = Late()
    engine = Engine(1, "heads", copy=late)
    last = len(RUNS) - 1
    first = sum(RUNS[:last])
    engine.known.run_is_free(first, RUNS[last])
    late.pass_time()
    rows = engine.rows()
    assert engine.compaction.run()
    assert equal(engine.rows(), rows)
    assert not engine.known.run_is_free(first, RUNS[last]), "counted before, in another order"
    late.pass_time()
    assert engine.known.run_is_free(first, RUNS[last])
    engine.known.retire(first, RUNS[last])
    engine.evict(engine.cached)
    engine.known.verify()
    (check,) = engine.known.take_checks()
    late.pass_time()
    engine.known.verify()
    assert check.confirmed()


# ---------------------------------------------------------------------- when nothing is moved


def test_a_full_card_makes_the_parts_smaller(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, select = engine.rows(), torch.Tensor.index_select
    width = engine.lanes[specs.FULL][0][0].nbytes
    monkeypatch.setattr(compaction, "SMALL_CHUNK_BYTES", 2 * width)
    refused: list[int] = []

    def short(buffer: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        if len(index) > 2:
            refused.append(1)
            raise torch.cuda.OutOfMemoryError
        return select(buffer, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", short)
    assert engine.compaction.run()
    monkeypatch.undo()
    assert len(refused) == len(engine.buffers)
    assert equal(engine.rows(), rows)


def test_a_copy_that_fails_leaves_everything_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    used, free, rows = engine.used(), engine.known.free_ids().tolist(), engine.rows()
    calls: list[int] = []
    original = torch.Tensor.index_copy_

    def fails(buffer: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == len(engine.buffers):
            raise RuntimeError("out of memory")
        return original(buffer, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.compaction.run()
    monkeypatch.undo()
    assert (engine.used(), engine.known.free_ids().tolist()) == (used, free)
    assert equal(engine.rows(), rows)
    assert engine.compaction.run()


def busy(engine: Engine) -> None:
    engine.scheduler.is_fully_idle = lambda: False


def locked(engine: Engine) -> None:
    node = next(iter(engine.cache.tree_core.root_node.children.values()))
    engine.cache.inc_lock_ref(node.id)


def held_elsewhere(engine: Engine) -> None:
    engine.alloc(3)


def in_a_free_group(engine: Engine) -> None:
    engine.allocator.free_group_begin()


def freed_twice(engine: Engine) -> None:
    """As many ids are free as should be, one of them twice: the census will find it."""
    free = engine.allocator.free_pages
    engine.allocator.free_pages = torch.cat((free[:-1], free[:1]))


def nothing_cached(engine: Engine) -> None:
    engine.evict(engine.cached)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("why", [busy, locked, held_elsewhere, in_a_free_group, freed_twice, nothing_cached])
def test_not_now(why: Any, page: int, engine_settings: Any) -> None:
    engine = Engine(page, "heads")
    why(engine)
    state = engine.state()
    assert engine.compaction.run() == 0
    assert not engine.compaction.due(idle=True)
    assert equal(engine.state(), state)


def unsupported(engine: Engine, stages: int = 1, **more: Any) -> str:
    made = Compaction({specs.FULL: engine.known, **more}, engine.scheduler, engine.lanes, stages)
    state = engine.state()
    assert (made.run(), made.due(idle=True)) == (0, False)
    assert equal(engine.state(), state)
    return made.unsupported


def test_it_is_possible_in_a_plain_engine(engine: Engine) -> None:
    assert engine.compaction.unsupported == ""


def test_not_with_pipeline_stages_nor_with_other_domains(small: Engine) -> None:
    assert unsupported(small, stages=2) == "pipeline stages"
    assert unsupported(small, mamba=small.known) == "pools besides those of full attention and of a window"
    assert unsupported(small, swa=small.known) == "nodes of full"


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("disable", True, "the prefix cache is off"),
        ("cache_controller", object(), "a host or external cache"),
        ("linker", object(), "a host or external cache"),
    ],
)
def test_not_with_other_ways_of_caching(place: str, value: object, why: str, small: Engine) -> None:
    cache = small.cache
    before = getattr(cache, place)
    setattr(cache, place, value)
    assert Compaction({specs.FULL: small.known}, small.scheduler, small.lanes, 1).unsupported == why
    setattr(cache, place, before)
    assert small.compaction.unsupported == ""


def test_not_in_caches_of_another_kind(small: Engine) -> None:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    cache = small.cache
    cache.tree_components = (ComponentType.FULL, ComponentType.SWA)
    assert small.compaction.unsupported == "nodes of full and swa"
    cache.tree_core = type("RustUnifiedTreeCore", (), {})()
    assert small.compaction.unsupported == "the prefix cache is a UnifiedRadixCache over a RustUnifiedTreeCore"
    small.scheduler.tree_cache = type("ChunkCache", (), {})()
    assert small.compaction.unsupported == "the prefix cache is a ChunkCache"


def test_not_where_something_else_is_kept_beside_each_token(
    engine_settings: Any, small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcached_dist.sglang import engine as asked

    groups = {"exec": SimpleNamespace(features=SimpleNamespace(enable_return_routed_experts=True))}
    original = asked.context
    monkeypatch.setattr(asked, "context", lambda name: groups.get(name) or original(name))
    returned = "routed experts or indexer choices that are returned"
    assert unsupported(small) == returned
    groups["spec"] = SimpleNamespace(speculative_algorithm="EAGLE")
    small.scheduler.tp_worker.model_runner.canary_manager = object()
    assert unsupported(small) == f"speculative decoding with pools of its own, {returned}, the KV canary"


def test_not_in_pools_and_allocators_of_another_kind(small: Engine) -> None:
    small.allocator.__class__ = type("Another", (type(small.allocator),), {})
    small.pool.__class__ = type("Packed", (type(small.pool),), {})
    assert unsupported(small) == "a Another, a Packed"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("cache.tree_core", "root_node"), ("allocator", "free_group"),
        ("scheduler", "page_size"), ("scheduler", "is_fully_idle"), ("scheduler", "session_controller"),
    ],
)  # fmt: skip
def test_not_in_a_version_that_is_laid_out_differently(place: str, name: str, small: Engine) -> None:
    """Found out at the start, not when an engine is idle for the first time."""
    delattr(attrgetter(place)(small), name)
    why = small.compaction.unsupported
    assert why.startswith("this version of the engine is laid out differently")
    assert name in why


def test_not_on_a_card_where_the_stream_of_batches_is_not_known(small: Engine) -> None:
    """What they have written there has to be copied after them."""
    small.allocator.free_pages = small.allocator.free_pages.to("meta")
    assert "forward_stream" in small.compaction.unsupported
    small.scheduler.forward_stream = object()
    assert small.compaction.unsupported == ""


def test_who_else_holds_ids_is_known_without_the_device(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open session is in the way for hours, and every second a walk of a large tree would take a tenth of one."""
    held_elsewhere(small)
    mover = small.compaction

    def looked(*_: Any) -> NoReturn:
        raise AssertionError("looked at the tree or the device")

    monkeypatch.setattr(small.known, "free_ids", looked)
    monkeypatch.setattr(mover, "_nodes", looked)
    assert not mover.due(idle=True)
