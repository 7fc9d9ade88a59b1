"""One rank's loop on a coordinator without processes: order, idleness, flush, stamps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvcached_dist.coordinator import Coordinator
from kvcached_dist.pools import catalogue
from kvcached_dist.pools.specs import ModelSpec
from kvcached_dist.replay.engine import Engine
from kvcached_dist.replay.options import shape_of
from kvcached_dist.replay.pipeline import Pipeline, depth_of
from kvcached_dist.replay.workload import Request
from tests.replay.fakes import FakeCoordinator


def model() -> ModelSpec:
    return catalogue.get("tiny-dsv4", max_requests=7).with_tokens(1 << 14)


def engine_of(requests: list[Request], coordinator: FakeCoordinator) -> Engine:
    for name, space in coordinator.domains.items():
        coordinator.domains[name] = SimpleNamespace(
            blocks=space.blocks, growable=0, available=len(coordinator.store.free_ids[name])
        )
    return Engine(
        cast(Coordinator, coordinator), Pipeline(0, 1, 1, None, 1.0), requests, shape_of(model()), cached_tokens=10_000
    )


REQUESTS = [Request(0, 0, 1500, 8, (1, 2, 3)), Request(1, 300_000, 1400, 6, (1, 2, 4)), Request(2, 9_000_000, 700, 4)]


def test_a_trace_runs_to_its_end_and_everything_is_given_back() -> None:
    coordinator = FakeCoordinator(model().stage(0, 1))
    engine = engine_of(REQUESTS, coordinator)
    engine.run()
    outcome = engine.outcome()
    assert outcome.totals["completed"] == 3
    assert (outcome.corrupt_blocks, outcome.failure) == (0, None)
    assert outcome.verified_blocks > 20
    assert coordinator.store.in_use == dict.fromkeys(coordinator.store.sizes, 0)
    assert outcome.physical_final == 1000
    assert outcome.physical_peak > outcome.physical_mean > outcome.physical_final


def test_idle_time_is_told_to_the_coordinator_and_skipped() -> None:
    coordinator = FakeCoordinator(model().stage(0, 1))
    engine = engine_of(REQUESTS, coordinator)
    engine.run()
    assert coordinator.idles == [False, True] * 3
    assert engine.clock.now_us > 9_000_000
    assert engine.step < 100


def test_corrupt_memory_is_counted_and_described() -> None:
    coordinator = FakeCoordinator(model().stage(0, 1))
    engine = engine_of(REQUESTS[:1], coordinator)
    original, struck = engine.scheduler.begin, []

    def begin(step: int, now_us: int) -> object:
        if step == 3:
            coordinator.tensors["c4_kv"][0, 1:, 0] ^= 1
            struck.append(step)
        return original(step, now_us)

    engine.scheduler.begin = begin  # type: ignore[method-assign,assignment]
    engine.run()
    outcome = engine.outcome()
    assert struck == [3]
    assert outcome.corrupt_blocks > 0
    assert "c4_kv lane 0" in outcome.corruptions[0]


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (2, 3), (4, 7)])
def test_depth_leaves_every_stage_two_steps_behind_the_one_before(stages: int, depth: int) -> None:
    assert depth_of(stages) == depth
