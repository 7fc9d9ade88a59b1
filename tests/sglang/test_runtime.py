"""What a mark does to the engine's scheduler, and what the engine's checks are told."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.coord.core.entries import Entry, Evict, Growable, Publish, Reclaimed, Retire
from kvcached_dist.coord.core.types import DomainId, PageId, Run, Txn
from kvcached_dist.pools.specs import DomainSpec, StageSpec
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.rows import RowList
from kvcached_dist.sglang.runtime import Mark

PAGE = 16


class Log:
    """A coordinator whose mark has the entries that a test wants."""

    def __init__(self, entries: Sequence[Entry] = (), *, leads: bool = True, growable: int = 0) -> None:
        self.entries = tuple(entries)
        self.leads = leads
        self.applied: list[tuple[bytes, ...]] = []
        self.evictions: list[int] = []
        self.overage_bytes = 0
        self.calm = False
        self.short_blocks = lambda _domain: 0
        self.wanted: list[dict[str, int]] = []
        self.domains = {name: SimpleNamespace(growable=growable) for name in (specs.FULL, specs.ROWS)}
        self.going_on: list[list[int]] = []
        self.stage = stage()
        self.backing = SimpleNamespace(lanes=lambda _domain: [])

    def goes_on(self, wanted: list[int]) -> bool:
        self.going_on.append(wanted)
        return self.calm

    def apply(self, frames: tuple[bytes, ...]) -> tuple[Entry, ...]:
        self.applied.append(frames)
        return self.entries

    def decide(
        self, wanted: dict[str, int], *, idle: bool, running: dict[str, int], coming: dict[str, int]
    ) -> tuple[bytes, ...]:
        self.wanted.append(wanted)
        self.coming = coming
        return (b"frame",) if self.entries else ()

    def evict(self, tokens: int) -> None:
        self.evictions.append(tokens)


class Fixed:
    """Needs that a test wants."""

    def __init__(self, pages: int, rows: int, idle: bool) -> None:
        self.pages_and_rows = lambda _pulled: (pages, rows)
        self.idle = lambda _pulled: idle
        self.running_pages = lambda: 0
        self.nothing_runs = lambda: True
        self.coming_pages = 3 * pages
        self.decoding = lambda _pulled: 0 if rows else pages


def stage() -> StageSpec:
    domains = (DomainSpec(specs.FULL, 9, PAGE), DomainSpec(specs.ROWS, 9, 0))
    return StageSpec("test", "", 0, 1, 0, 1, domains, ())


def batch() -> Any:
    return SimpleNamespace(batch_is_full=True, reqs=[])


def scheduler(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "running_batch": batch(), "running_mbs": [batch(), batch()], "last_batch": None, "waiting_queue": [],
        "chunked_req": None, "page_size": PAGE, "chunked_prefill_size": 256, "max_prefill_tokens": 1024,
        "max_running_requests": 8, "is_fully_idle": lambda: False,
        "tree_cache": SimpleNamespace(evictable_size=lambda: 0),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros((3, 4), dtype=torch.int32)),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def serving(log: Log, engine: Any = None, **settings: Any) -> Plugin:
    plugin = Plugin(Config.preset("tests", **settings))
    known = TokenList(specs.FULL, 9, 1, 8)
    known.publish(0, 4)
    rows = RowList(specs.ROWS, 9, 1, 8)
    rows.publish(0, 3)
    takeover = specs.Takeover(stage(), {specs.FULL: 8, specs.ROWS: 8})
    plugin.runtime.take_over(takeover, cast(Any, log), {specs.FULL: known, specs.ROWS: rows})
    plugin.runtime.serve(engine or scheduler())
    return plugin


def run(first: int, count: int = 1) -> Run:
    return Run(DomainId(0), PageId(first), count)


@pytest.mark.parametrize("entry", [Publish(Txn(1), (run(4),)), Growable(DomainId(0), 3)])
def test_a_refused_batch_is_tried_again_in_every_micro_batch(entry: Entry) -> None:
    engine = scheduler()
    serving(Log([entry]), engine).runtime.apply(Mark((b"x",)))
    assert not any(b.batch_is_full for b in (engine.running_batch, *engine.running_mbs))


def test_other_entries_leave_a_full_batch_alone() -> None:
    engine = scheduler()
    serving(Log([Reclaimed(Txn(1))]), engine).runtime.apply(Mark((b"x",)))
    assert engine.running_batch.batch_is_full


def test_no_stale_row_names_an_id_that_is_gone() -> None:
    engine = scheduler()
    table = engine.req_to_token_pool.req_to_token
    table[1] = torch.tensor([31, 32, 47, 48])
    table[2] = table[1]
    plugin = serving(Log([Retire(Txn(1), (run(2),))]), engine)
    plugin.building.rows_handed_out([1], None)
    plugin.runtime.apply(Mark((b"x",)))
    assert table[1].tolist() == [31, 0, 0, 48]
    assert table[2].tolist() == [31, 32, 47, 48], "never handed out: nothing reads it"
    plugin.building.rows_handed_out([2], None)
    plugin.runtime.apply(Mark((b"x",)))
    assert table[2].tolist() == [31, 0, 0, 48]


def test_every_rank_evicts_what_the_log_says(engine_settings: Any) -> None:
    gone: list[int] = []
    tree = SimpleNamespace(evictable_size=lambda: 0, evict=lambda params: gone.append(params.num_tokens))
    serving(Log([Evict(5)]), scheduler(tree_cache=tree)).runtime.apply(Mark((b"x",)))
    assert gone == [5]


@pytest.mark.parametrize(("idle", "evicted"), [(True, [40]), (False, [])])
def test_the_budget_of_the_prefix_cache_is_kept_at_idle(idle: bool, evicted: list[int]) -> None:
    log = Log()
    engine = scheduler(tree_cache=SimpleNamespace(evictable_size=lambda: 100))
    plugin = serving(log, engine, max_cached_tokens=60)
    plugin.runtime._needs = cast(Any, Fixed(3, 1, idle))
    assert plugin.runtime.decide([]) is None
    assert log.evictions == evicted
    assert log.wanted == [{specs.FULL: 3, specs.ROWS: 1}]
    assert log.coming == {specs.FULL: 9}


def test_marks_are_applied_first_and_stay_in_the_list_for_the_next_stage() -> None:
    log = Log([Reclaimed(Txn(1))])
    mark, request = Mark((b"x",)), object()
    received = [request, mark]
    (_, handled), _ = serving(log)._requests_arrived(with_sessions(), received)
    assert handled == [request]
    assert received == [request, mark]
    assert log.applied == [(b"x",)]


def test_a_list_without_marks_is_left_as_it_is() -> None:
    assert serving(Log())._requests_arrived(with_sessions(), [object()]) is None
    assert serving(Log())._requests_arrived(with_sessions(), []) is None


def with_sessions(**sessions: Any) -> Any:
    """A scheduler with the engine's own sessions, which has looked for timeouts just now."""
    from sglang.srt.session.session_controller import SessionController

    controller = SessionController(
        cast(Any, SimpleNamespace(release_radix_session=lambda _: 0, release_session=lambda _: None))
    )
    controller.sessions.update(sessions)
    controller.maybe_reap(time.monotonic())
    return SimpleNamespace(session_controller=controller)


def test_a_session_that_was_closed_under_its_request_goes_in_the_step_behind_it(
    engine_settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine would close it within a second, on each rank at another time: their lists would differ until then."""
    from sglang.srt.session.session_controller import Session

    closing, opened = Session(0, "closing", streaming=True), Session(0, "open", streaming=True)
    closing._inflight = closing.close_on_finish = True
    scheduler = with_sessions(closing=closing, open=opened)
    held: list[list[str]] = []

    class Looking(Log):
        def apply(self, frames: tuple[bytes, ...]) -> tuple[Entry, ...]:
            held.append(list(scheduler.session_controller.sessions))
            return super().apply(frames)

    plugin = serving(Looking())
    caplog.set_level("INFO")
    for _ in range(3):
        plugin._requests_arrived(scheduler, [])
    assert "Deferr" not in caplog.text, "nothing to do while it runs, and nothing to say"
    closing._inflight = False
    plugin._requests_arrived(scheduler, [Mark((b"x",))])
    assert held == [["closing", "open"]], "rank 0 has made the mark before it closed anything"
    assert list(scheduler.session_controller.sessions) == ["open"]


def test_only_the_rank_that_pulls_puts_a_mark_and_only_when_there_is_something_to_say() -> None:
    needs = cast(Any, Fixed(1, 1, idle=False))
    speaking, silent = serving(Log([Reclaimed(Txn(1))])), serving(Log())
    speaking.runtime._needs = silent.runtime._needs = needs
    (_, pulled, local), _ = speaking._about_to_broadcast("receiver", ["request"], ["abort"])
    assert pulled == ["request"]
    assert local[0] == "abort"
    assert isinstance(local[1], Mark)
    assert silent._about_to_broadcast("receiver", ["request"], None) is None
    assert speaking._about_to_broadcast("receiver", None, None) is None


@pytest.mark.parametrize("calm", [True, False])
def test_a_step_that_only_decodes_is_decided_where_there_is_something_to_decide(calm: bool) -> None:
    log = Log([Reclaimed(Txn(1))])
    log.calm = calm
    plugin = serving(log)
    plugin.runtime._needs = cast(Any, Fixed(5, 0, idle=False))
    said = plugin._about_to_broadcast("receiver", [], None)
    assert log.going_on == [[5, 0]]
    assert (said is None) == calm
    assert log.wanted == ([] if calm else [{specs.FULL: 5, specs.ROWS: 0}])


def test_a_chunk_that_was_parked_is_looked_at_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait ends here once it is not the engine's chunk any more, or the same request would be aborted early."""
    log, request = Log(), SimpleNamespace(rid="long")
    log.calm = True
    engine = scheduler(chunked_req=request)
    plugin = serving(log, engine)
    plugin.runtime._needs = cast(Any, Fixed(5, 0, idle=False))
    plugin.runtime.parked.found_nothing(request)
    plugin._about_to_broadcast("receiver", [], None)
    engine.chunked_req = None
    plugin._about_to_broadcast("receiver", [], None)
    assert log.going_on == []
    assert not plugin.runtime.parked.waits
    plugin._about_to_broadcast("receiver", [], None)
    assert log.going_on == [[5, 0]]


def test_a_mark_travels_as_the_engine_pickles_it() -> None:
    assert pickle.loads(pickle.dumps([Mark((b"a", b"b"))]))[0].frames == (b"a", b"b")


def test_unpublished_ids_are_free_to_the_engines_accounts(engine_settings: Any) -> None:
    from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

    # 8 pages of 16 tokens; 3 published, 1 of them in use: natively 7 pages would be free.
    stats = PoolStats(full_num_used=96, full_token_usage=0.75, full_available_size=32, full_evictable_size=0)
    serving(Log())._pool_stats(stats, None)
    assert (stats.full_num_used, stats.full_available_size, stats.full_token_usage) == (16, 112, 0.125)


def test_unpublished_rows_do_not_look_leaked() -> None:
    pool = SimpleNamespace(free_slots=[2, 1], size=8)
    seen: list[int] = []
    checker = SimpleNamespace(req_to_token_pool=pool)
    serving(Log())._check_rows(lambda c: seen.append(len(c.req_to_token_pool.free_slots)), checker)
    assert seen == [8]
    assert pool.free_slots == [2, 1]


def test_growth_never_promises_more_than_the_engine_has_ids_for() -> None:
    assert serving(Log(growable=2)).runtime.growable_tokens() == 2 * PAGE
    assert serving(Log(growable=100)).runtime.growable_tokens() == 5 * PAGE
