"""The only request of a replay finds no memory: it waits for as long as memory may still come, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvcached_dist import Coordinator
from kvcached_dist.errors import CapacityError
from kvcached_dist.replay import engine as replay_engine
from kvcached_dist.replay.engine import MEMORY_NOTICE_S, MEMORY_WAIT_S, Engine
from kvcached_dist.replay.options import shape_of
from kvcached_dist.replay.pipeline import Pipeline
from kvcached_dist.replay.workload import Request
from tests.coordinator.world import two_on_a_card
from tests.replay.fakes import FakeCoordinator
from tests.replay.test_engine import engine_of, model

ONE = [Request(0, 0, 1500, 4)]

CARD_BYTES = 4 << 20
"""The null pages of two engines are a quarter of it."""

HELD_S = 3.0
"""How long the neighbour keeps the card: longer than hundreds of steps of 2 ms."""


def starved(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> tuple[Engine, Callable[[float], None]]:
    """An engine whose allocations all miss, and what lets one step of it take so many seconds."""
    coordinator = FakeCoordinator(model().stage(0, 1))
    coordinator.world.rank = rank
    coordinator.store._misses = lambda _: True
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter, sleep=lambda _: None)
    monkeypatch.setattr(replay_engine, "time", clock)
    engine = engine_of(ONE, coordinator)

    def step(seconds: float) -> None:
        engine._one_step()
        engine.step += 1
        now[0] += seconds

    return engine, step


def test_rank_0_ends_the_run_when_memory_has_not_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = starved(monkeypatch)
    for _ in range(1000):
        step(MEMORY_WAIT_S / 1001)
    step(MEMORY_WAIT_S)
    with pytest.raises(CapacityError, match=r"no memory within 300 s for request 0 alone .* free what other processes"):
        step(0)


def test_other_ranks_leave_the_clock_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that judged each by its own clock would end at different steps."""
    engine, step = starved(monkeypatch, rank=1)
    for _ in range(10):
        step(MEMORY_WAIT_S)
    assert engine.scheduler.starving is not None


def test_the_wait_begins_anew_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = starved(monkeypatch)
    store = cast(FakeCoordinator, engine.coordinator).store
    for _ in range(3):
        store._misses = lambda _: True
        step(0)
        step(MEMORY_WAIT_S - 1)
        store._misses = lambda _: False
        step(2)
        assert engine.scheduler.starving is None


def test_the_operator_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, step = starved(monkeypatch)
    for _ in range(10):
        step(MEMORY_NOTICE_S)
    said = [record.getMessage() for record in caplog.records if "event=waits_for_memory" in record.getMessage()]
    assert len(said) == 1
    assert "it needs 12 full, 12 swa, 1 rows more block(s)" in said[0]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Coordinator]]:
    with two_on_a_card(tmp_path / "card", CARD_BYTES, model().stage(0, 1)) as engines:
        yield engines


@pytest.mark.slow
def test_a_neighbour_that_holds_the_card_for_seconds_ends_nothing(engines: list[Coordinator]) -> None:
    neighbour, mine = engines
    full, taken = neighbour.domains["full"], []
    while (block := full.alloc(1)) is not None:
        taken.append(block)
    assert len(taken) > 50

    def give_back() -> None:
        time.sleep(HELD_S)
        for block in taken:
            full.free(block)
        neighbour.idle(True)
        for _ in range(5000):
            if neighbour.step().settled:
                return
            time.sleep(0.001)

    engine = Engine(mine, Pipeline(0, 1, 1, None, 1.0), ONE, shape_of(model()), cached_tokens=0)
    later = threading.Thread(target=give_back)
    begin = time.monotonic()
    later.start()
    try:
        engine.run()
    finally:
        later.join()
    assert time.monotonic() - begin >= HELD_S, "the memory was there: this test shows nothing"
    outcome = engine.outcome()
    assert (outcome.totals["completed"], outcome.corrupt_blocks) == (1, 0)
