"""When compaction is asked for, and what becomes of the memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from kvcached_dist import InvariantViolation
from kvcached_dist.config import Config
from kvcached_dist.coord.core.entries import Entry, Evict
from kvcached_dist.pools.specs import DomainSpec, StageSpec
from kvcached_dist.sglang import compaction, engine, specs
from kvcached_dist.sglang.compaction import Compaction
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.runtime import Mark
from tests.sglang.families import Rank, configurator
from tests.sglang.loaded import BLOCKS, Engine, equal
from tests.sglang.prefixes import idle_scheduler, keep, prefix_cache


@pytest.fixture
def small(engine_settings: Any) -> Engine:
    """After a load, with pages of a token."""
    return Engine(1, "heads")


# ---------------------------------------------------------------------- at marks


class Log:
    """A coordinator whose mark has the entries that a test wants."""

    leads, calm, overage_bytes = True, False, 0

    def __init__(self, engine: Engine) -> None:
        self.backing = SimpleNamespace(lanes=engine.lanes.__getitem__)
        self.entries: tuple[Entry, ...] = ()
        self.evictions: list[int] = []
        self.compactions = 0
        self.world = SimpleNamespace(rank=3)
        domains = (DomainSpec(specs.FULL, 304, 1),)
        self.stage = StageSpec("test", "", 0, 1, 0, 1, domains, ())

    def apply(self, _frames: object) -> tuple[Entry, ...]:
        return self.entries

    def decide(self, *_: object, **__: object) -> tuple[bytes, ...]:
        return ()

    def evict(self, tokens: int) -> None:
        self.evictions.append(tokens)

    def compact(self) -> None:
        self.compactions += 1

    def broken(self, violation: InvariantViolation) -> NoReturn:
        raise violation


class Idle:
    """Needs of an engine with nothing to do, or with something."""

    coming_pages = 0

    def __init__(self) -> None:
        self.now = True

    def idle(self, _pulled: object) -> bool:
        return self.now

    def pages_and_rows(self, _pulled: object) -> tuple[int, int]:
        return 0, 0

    def running_pages(self) -> int:
        return 0


def serving(engine: Engine, log: Log, budget: int, *, wanted: bool = True) -> Plugin:
    plugin = Plugin(Config.preset("tests", max_cached_tokens=budget, compaction=wanted))
    plugin.runtime.take_over(
        specs.Takeover(log.stage, {specs.FULL: BLOCKS}), cast(Any, log), {specs.FULL: engine.known}
    )  # fmt: skip
    plugin.runtime.serve(engine.scheduler)
    return plugin


def test_at_the_mark_of_an_eviction_of_nothing_what_is_kept_is_moved(
    small: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(small)
    plugin = serving(small, log, 10_000)
    plugin.runtime.apply(Mark((b"x",)))
    assert plugin.runtime.compacted_tokens == 0, "no eviction, nothing moves"
    log.entries, before = (Evict(5),), small.cached
    plugin.runtime.apply(Mark((b"x",)))
    assert plugin.runtime.compacted_tokens == 0, "memory may be short and a prompt waiting"
    assert small.cached < before
    log.entries, before = (Evict(0),), small.cached
    caplog.set_level("INFO", "kvcached_dist.sglang")
    plugin.runtime.apply(Mark((b"x",)))
    assert small.cached == before
    assert sum(small.runs_held()) <= 8
    moved = plugin.runtime.compacted_tokens
    assert moved > 0
    assert f"event=compacted rank=0 tokens={moved} of={small.cached}" in caplog.text
    answer = SimpleNamespace(internal_state={})
    plugin_state(plugin, answer)
    assert answer.internal_state["kvcached_dist"]["compacted_tokens"] == moved


def plugin_state(plugin: Plugin, answer: Any) -> None:
    (hook,) = (hook for hook in plugin.hooks if hook.target.endswith("Scheduler.get_internal_state"))
    hook.call(answer, None)


def test_an_idle_engine_within_its_budget_asks_once_for_a_mark(small: Engine) -> None:
    log, needs = Log(small), Idle()
    plugin = serving(small, log, 10_000)
    plugin.runtime._needs = cast(Any, needs)
    needs.now = False
    plugin.runtime.decide([])
    assert log.evictions == []
    needs.now = True
    plugin.runtime.decide([])
    plugin.runtime.decide([])
    assert (log.evictions, log.compactions) == ([], 1)
    needs.now = False
    plugin.runtime.decide([])
    needs.now = True
    plugin.runtime.decide([])
    assert (log.evictions, log.compactions) == ([], 2), "it was busy in between"
    log.entries = (Evict(0),)
    plugin.runtime.apply(Mark((b"x",)))
    needs.now = False
    plugin.runtime.decide([])
    needs.now = True
    plugin.runtime.decide([])
    assert (log.evictions, log.compactions) == ([], 2), "there is nothing left to move"


def test_switched_off_nothing_moves_and_the_log_says_so(small: Engine, caplog: pytest.LogCaptureFixture) -> None:
    log = Log(small)
    plugin = serving(small, log, 10_000, wanted=False)
    plugin.runtime._needs = cast(Any, Idle())
    caplog.set_level("INFO", "kvcached_dist.sglang")
    plugin.runtime.decide([])
    log.entries, state = (Evict(0),), small.state()
    plugin.runtime.apply(Mark((b"x",)))
    assert (log.compactions, plugin.runtime.compacted_tokens) == (0, 0)
    assert equal(small.state(), state)
    assert "possible=no why='cached prefixes stay where they are: KVCACHED_DIST_COMPACTION is off'" in caplog.text


def test_a_rank_that_cannot_move_ends_the_group_with_a_reason(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(small)
    plugin = serving(small, log, 10_000)
    log.entries = (Evict(0),)

    def short(*_: object) -> NoReturn:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "index_copy_", short)
    state = small.state()
    with pytest.raises(InvariantViolation, match=r"S5 violated: rank 3: .* \(CUDA out of memory\); restart the engine"):
        plugin.runtime.apply(Mark((b"x",)))
    assert equal(small.state(), state)


@pytest.mark.parametrize(
    ("built", "moves"), [((True,), True), ((True, True), True), ((False,), False), ((True, False), False), ((), False)]
)
def test_with_drafts_only_where_what_they_keep_moves_too(
    built: tuple[bool, ...], moves: bool, small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.context
    drafting = SimpleNamespace(speculative_algorithm="EAGLE")
    monkeypatch.setattr(engine, "context", lambda name: drafting if name == "spec" else original(name))
    log = Log(small)
    plugin = serving(small, log, 10_000)
    for elastic in built:
        plugin.runtime.draft_built(elastic=elastic)
    log.entries = (Evict(0),)
    plugin.runtime.apply(Mark((b"x",)))
    assert (plugin.runtime.compacted_tokens > 0) == moves


def test_what_has_to_go_goes_before_the_rest_moves(small: Engine) -> None:
    log = Log(small)
    plugin = serving(small, log, small.cached - 5)
    plugin.runtime._needs = cast(Any, Idle())
    plugin.runtime.decide([])
    assert (log.evictions, log.compactions) == ([5], 0)
    log.entries = (Evict(5),)
    plugin.runtime.apply(Mark((b"x",)))
    plugin.runtime.decide([])
    assert (log.evictions, log.compactions) == ([5], 1)


def test_an_idle_engine_is_looked_at_again_when_what_was_in_the_way_may_be_gone(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is closed at idle, for one: that is no work, and no request comes after it."""
    now = [100.0]
    monkeypatch.setattr(compaction, "time", SimpleNamespace(monotonic=lambda: now[0]))
    looks: list[int] = []
    mover = small.compaction
    protected = small.scheduler.tree_cache.protected_size

    def locked() -> int:
        looks.append(1)
        return 7

    monkeypatch.setattr(small.scheduler.tree_cache, "protected_size", locked)
    assert [mover.due(idle=True) for _ in range(3)] == [False] * 3
    assert len(looks) == 1
    monkeypatch.setattr(small.scheduler.tree_cache, "protected_size", protected)
    assert not mover.due(idle=True)
    now[0] += compaction.LOOK_AGAIN_S
    assert mover.due(idle=True)
    now[0] += 10 * compaction.LOOK_AGAIN_S
    assert not mover.due(idle=True), "asked for already"


def test_an_idle_engine_on_a_full_card_is_looked_at_again(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking takes memory, and nothing depends on it: rank 0 must not end for it."""
    now = [100.0]
    monkeypatch.setattr(compaction, "time", SimpleNamespace(monotonic=lambda: now[0]))
    mover, calls = small.compaction, []

    def short(*_: object) -> NoReturn:
        calls.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", short)
        assert [mover.due(idle=True) for _ in range(3)] == [False] * 3
    assert len(calls) == 1
    now[0] += compaction.LOOK_AGAIN_S
    assert mover.due(idle=True)


# ---------------------------------------------------------------------- with real memory


@pytest.fixture
def rank(engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(registry, monkeypatch, configurator(), run_pages_max=16, run_share=0)
    made.build(lambda: elastic_pool(), lambda pool, _rows: elastic_allocator(pool))
    yield made
    made.close()


def elastic_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        2048, page_size=1, dtype=torch.bfloat16, kv_lora_rank=96, qk_rope_head_dim=32, layer_num=4, device="cpu",
        enable_memory_saver=False, start_layer=0, end_layer=4,
    )  # fmt: skip


def elastic_allocator(pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    return TokenToKVPoolAllocator(2048, torch.bfloat16, "cpu", pool, False)


@pytest.mark.slow
def test_memory_goes_down_to_what_is_kept_and_the_reserve(rank: Rank) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = prefix_cache(rank.allocator, 1, "FULL")
    start = rank.mapped_bytes()

    def find(key: int) -> torch.Tensor:
        tokens = array("q", [1000 * key])
        found: torch.Tensor = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_indices
        return found

    for number in range(1500):
        rank.publish({specs.FULL: 1})
        keep(cache, [number], token := rank.allocator.alloc(1))
        for layer, buffer in enumerate(rank.pool.kv_buffer):
            buffer[token] = float(number % 251 + layer)
    kept = random.Random(1).sample(range(1500), 100)
    for number in kept:
        find(number)
    cache.evict(EvictParams(num_tokens=1400))
    full = rank.mapped_bytes()
    lanes = {name: rank.coordinator.backing.lanes(name) for name in rank.runtime.lists}
    made = Compaction(rank.runtime.lists, idle_scheduler(1, cache), lanes, 1)
    for _ in range(100):
        rank.step({specs.FULL: 0}, idle=True)
    assert rank.mapped_bytes() > 0.8 * full, "100 of 1500 tokens keep all of it"
    assert made.run() > 0
    per_token = rank.pool.kv_buffer[0][0].numel() * 2 * 4
    rank.settle(lambda: rank.mapped_bytes() <= start + 200 * per_token)
    for number in kept:
        (place,) = find(number).tolist()
        for layer, buffer in enumerate(rank.pool.kv_buffer):
            assert buffer[place].unique().tolist() == [float(number % 251 + layer)]
