"""Public reports of what goes wrong in the field, as tests of their kind on a whole world of coordinators."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.coord.core.types import CauseKind, Health
from kvcached_dist.errors import ConfigError, GroupFailed

from .world import GRANULE, Rank, config, run_world, simple_model, values

pytestmark = pytest.mark.slow


def ids(taken: torch.Tensor | None) -> list[int] | None:
    return None if taken is None else taken.tolist()


def last_cause(rank: Rank) -> Any:
    leader = rank.coordinator._leader
    return leader.commit.closed[-1].cause if leader is not None else None


def test_r2_create_fails_on_one_rank_is_a_miss_everywhere_and_the_next_growth_succeeds() -> None:
    def body(rank: Rank) -> dict[str, Any]:
        full = rank.coordinator.domains["full"]
        before = full.available
        missed = full.alloc(4)
        rank.coordinator.step()
        nothing_held = rank.returns_to_start()
        rank.meet()
        while (taken := full.alloc(2)) is None:
            rank.coordinator.step()
            threading.Event().wait(0.01)
        return {
            "missed": ids(missed),
            "nothing held": nothing_held,
            "available": (before, full.available),
            "taken": ids(taken),
            "health": rank.coordinator.health["full"],
        }

    results = values(run_world(body, tp=2, faults=["rank=1,op=create,nth=3"]))
    for result in results:
        assert result == {
            "missed": None,
            "nothing held": True,
            "available": (0, 0),
            "taken": [1, 2],
            "health": Health.HEALTHY,
        }


def test_r6_r32_failure_on_a_late_stage_names_stage_rank_and_cause() -> None:
    def body(rank: Rank) -> Any:
        missed = rank.coordinator.domains["full"].alloc(2)
        rank.coordinator.step()
        return (
            ids(missed),
            rank.returns_to_start() and rank.held(),
            last_cause(rank),
            rank.coordinator.world.describe(3),
        )

    results = values(run_world(body, tp=2, pp=2, model=simple_model(layers=8), faults=["rank=3,op=create,nth=2"]))
    null_page = [2 * 4 * GRANULE] * 4
    assert [result[0] for result in results] == [None] * 4
    assert [result[1] for result in results] == null_page
    cause = results[0][2]
    assert cause.rank == 3
    assert cause.kind is CauseKind.EXHAUSTED
    assert "create" in str(cause)
    assert "full_kv" in str(cause)
    assert results[0][3] == "rank 3 (pp=1, tp=1)"


def test_r7_refusal_before_mapping_unmaps_nothing() -> None:
    def body(rank: Rank) -> Any:
        missed = rank.coordinator.domains["full"].alloc(2)
        rank.coordinator.step()
        assert rank.returns_to_start()
        return ids(missed), rank.device.counters().unmaps - rank.counters_at_start.unmaps

    assert values(run_world(body, tp=2, faults=["rank=1,op=create,nth=1"])) == [(None, 0)] * 2


def test_r18_a_miss_takes_nothing_and_leaves_the_free_list_as_it_was() -> None:
    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        first = full.alloc(3)
        assert first is not None
        full.free(first[1:])
        free = full.available
        missed = full.alloc(100)
        return ids(missed), free == full.available, ids(full.alloc(2))

    model = simple_model(pages=3, blocks_per_page=4, block_bytes=GRANULE // 4)
    assert values(run_world(body, tp=2, model=model)) == [(None, True, [2, 3])] * 2


def test_r19_engines_on_one_card_meet_exhaustion_as_a_miss_only(tmp_path: Path) -> None:
    card = str(tmp_path / "card")
    results: list[Any] = [None] * 4
    settings = config(physical_growth_lock_dir=str(tmp_path), gpu_utilization=1.0)

    def engine(index: int) -> None:
        device = _native.HostDevice(8 * GRANULE * 12, GRANULE, "card-0", card)

        def body(rank: Rank) -> int:
            rng, full, misses = random.Random(index), rank.coordinator.domains["full"], 0
            live: list[torch.Tensor] = []
            for _ in range(150):
                taken = full.alloc(rng.randint(1, 3))
                if taken is None:
                    misses += 1
                    for blocks in live:
                        full.free(blocks)
                    live.clear()
                else:
                    live.append(taken)
                rank.coordinator.step()
            for blocks in live:
                full.free(blocks)
            return misses

        results[index] = run_world(body, settings=settings, devices=[device])[0]

    threads = [threading.Thread(target=engine, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert all(isinstance(result, int) for result in results), results
    assert sum(results) > 0, "the engines never met: the test shows nothing"
    assert _native.HostDevice(8 * GRANULE * 12, GRANULE, "card-0", card).free_bytes() == 8 * GRANULE * 12


def test_r26_null_pages_wait_for_memory_but_not_for_a_broken_driver(tmp_path: Path) -> None:
    card = str(tmp_path / "card")
    settings = config(physical_growth_lock_dir=str(tmp_path), gpu_utilization=1.0)
    room = 8 * GRANULE * 2
    hog_device = _native.HostDevice(room, GRANULE, "card-0", card)
    hog = _native.Backing(
        hog_device,
        [_native.PoolGeometry(name="hog", domain=0, pages=1, reservation_bytes=room, lanes=[(0, room)])],
    )
    assert hog.reserve(1, [(0, 0, 1)]).ok
    threading.Timer(0.5, hog.close).start()
    devices = [_native.HostDevice(room, GRANULE, "card-0", card)]
    assert values(
        run_world(lambda rank: rank.coordinator.domains["full"].published, settings=settings, devices=devices)
    ) == [1]


def test_r27_the_null_block_is_block_zero_with_growth_running_ahead() -> None:
    def body(rank: Rank) -> Any:
        rank.coordinator.step()
        return ids(rank.coordinator.domains["full"].alloc(1))

    settings = config(min_reserved_pages=5, max_reserved_pages=8)
    for _ in range(5):
        assert values(run_world(body, tp=2, settings=settings)) == [[1], [1]]


def test_r29_availability_costs_no_driver_query_and_sees_the_own_growth_at_once() -> None:
    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        growable = full.growable
        queries = rank.coordinator.physical.memory_queries
        for _ in range(1000):
            assert full.available + full.growable == growable
        asked = rank.coordinator.physical.memory_queries - queries
        taken = full.alloc(1)
        assert taken is not None
        return asked, growable - full.growable - full.available

    settings = config(beat_s=20.0, lease_s=60.0)
    assert values(run_world(body, settings=settings)) == [(0, 1)]


def test_r31_runtime_pools_are_subtracted_once_and_cleared_on_hand_over() -> None:
    def body(rank: Rank) -> Any:
        coordinator, seen = rank.coordinator, []
        for name, units in {"swa": 4, "c4": 2, "c128": 1, "indexer": 1, "state": 1}.items():
            coordinator.register_runtime_pool(name, units * GRANULE * 8)
        seen.append(coordinator.physical.elastic_bytes() // (GRANULE * 8))
        for _ in range(2):
            coordinator.register_runtime_pool("swa", 0)
            seen.append(coordinator.physical.elastic_bytes() // (GRANULE * 8))
        return seen

    assert values(run_world(body, capacity=40 * GRANULE * 8)) == [[31, 35, 35]]


def test_r34_a_block_larger_than_a_page_says_which_page_would_do() -> None:
    model = simple_model(block_bytes=3 << 20, pages=3)
    (error,) = run_world(lambda rank: None, model=model, capacity=1 << 30)
    assert isinstance(error, ConfigError)
    assert "4 MiB" in str(error)


def test_r58_a_second_free_or_close_changes_nothing() -> None:
    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        taken = full.alloc(3)
        assert taken is not None
        full.free(taken)
        available = full.available
        for bad in (taken, torch.tensor([0]), torch.tensor([99]), torch.tensor([1, 1])):
            with pytest.raises(ValueError, match=r"block|id"):
                full.free(bad)
        unchanged = available == full.available
        rank.coordinator.close()
        rank.coordinator.close()
        counters = rank.device.counters()
        assert isinstance(rank.device, _native.HostDevice)
        return unchanged, counters.handles_created - counters.handles_released, rank.device.resident_bytes()

    assert values(run_world(body)) == [(True, 0, 0)]


@pytest.mark.parametrize("call", ["map", "access", "fill"])
def test_r57_r66_r71_failed_mapping_is_adopted_by_the_identical_retry(call: str) -> None:
    """What is mapped stays mapped and unpublished; the retry creates nothing and unmaps nothing."""

    def body(rank: Rank) -> Any:
        before = rank.counters_at_start
        taken = rank.coordinator.domains["full"].alloc(2)
        after = rank.device.counters()
        created = after.handles_created - before.handles_created
        return ids(taken), created, after.unmaps - before.unmaps, rank.coordinator.stats.grow_retained

    results = values(run_world(body, tp=2, faults=[f"rank=1,op={call},nth=5"]))
    assert [result[:3] for result in results] == [([1, 2], 2 * 8, 0)] * 2
    assert results[0][3] == 1


def test_r57_failed_unmap_restores_and_the_next_reclaim_gives_everything_back() -> None:
    def body(rank: Rank) -> Any:
        coordinator = rank.coordinator
        full = coordinator.domains["full"]
        taken = full.alloc(4)
        assert taken is not None
        full.free(taken)
        coordinator.idle(True)
        rank.settle()
        return rank.held() - rank.held_at_start, coordinator.stats.reclaim_restored, coordinator.health["full"]

    results = values(run_world(body, tp=2, faults=["rank=1,op=unmap,nth=2"]))
    assert [result[0] for result in results] == [0, 0]
    assert results[0][1] == 1
    assert {result[2] for result in results} == {Health.HEALTHY}


def test_release_refused_once_is_retried_with_the_same_number() -> None:
    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        taken = full.alloc(4)
        assert taken is not None
        full.free(taken)
        rank.coordinator.idle(True)
        rank.settle()
        return rank.held() - rank.held_at_start

    assert values(run_world(body, tp=2, faults=["rank=1,op=release,nth=2"])) == [0, 0]


def test_r3_mapping_that_keeps_failing_is_quarantined_and_other_pages_go_on() -> None:
    def body(rank: Rank) -> Any:
        coordinator, pause = rank.coordinator, threading.Event()
        full = coordinator.domains["full"]
        while (taken := full.alloc(1)) is None or coordinator.health["full"] is Health.HEALTHY:
            assert taken is None
            coordinator.step()
            pause.wait(0.005)
        limit = coordinator.set_limit(1 << 19, 1).status.value if coordinator.world.rank == 0 else "refused"
        return ids(taken), coordinator.health["full"], [str(run) for run in coordinator.quarantined], limit

    results = values(run_world(body, tp=2, faults=["rank=1,op=map,nth=1,count=3"]))
    assert results == [([2], Health.DEGRADED, ["0:[1,2)"], "refused")] * 2


def test_r61_capacity_is_the_minimum_over_ranks() -> None:
    """Two ranks with devices for 7 and 3 usable pages: the fullest one decides, on both."""

    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        taken = []
        while (blocks := full.alloc(1)) is not None:
            taken.append(int(blocks[0]))
        return taken

    page = 8 * GRANULE
    assert values(run_world(body, tp=2, capacity=[8 * page, 4 * page])) == [[1, 2, 3]] * 2


def test_ranks_with_different_models_or_settings_do_not_start() -> None:
    settings = [config(), config(run_pages_max=2)]
    first, second = run_world(lambda rank: None, tp=2, settings=settings)
    assert isinstance(first, ConfigError)
    assert "other settings" in str(first)
    assert isinstance(second, GroupFailed)
    assert "other settings" in str(second)


def test_r4_r9_lost_answer_is_asked_for_and_the_growth_completes() -> None:
    def body(rank: Rank) -> Any:
        taken = rank.coordinator.domains["full"].alloc(2)
        return ids(taken), rank.coordinator.stats.queries

    for message in ("RESERVED", "MAPPED"):
        results = values(run_world(body, tp=2, faults=[f"rank=1,op=drop,message={message},nth=1"]))
        assert [result[0] for result in results] == [[1, 2]] * 2
        assert results[0][1] == 1


def test_r4_r9_unknown_outcome_fails_closed_on_every_rank_and_sends_nothing_more() -> None:
    def body(rank: Rank) -> Any:
        coordinator = rank.coordinator
        with pytest.raises(GroupFailed, match="rank 1") as first:
            coordinator.domains["full"].alloc(2)
        leader = coordinator._leader
        sent = leader.counters.messages if leader is not None else 0
        with pytest.raises(GroupFailed, match="restart the engine"):
            coordinator.domains["full"].alloc(1)
        with pytest.raises(GroupFailed):
            coordinator.step()
        again = leader.counters.messages if leader is not None else 0
        return first.value.cause.kind, again - sent, coordinator.health["full"]

    faults = ["rank=1,op=drop,message=RESERVED,nth=1", "rank=1,op=drop,message=STATE,nth=1,count=2"]
    results = values(run_world(body, tp=2, faults=faults))
    assert results == [(CauseKind.UNKNOWN_OUTCOME, 0, Health.FAILED)] * 2


def test_r23_limits_have_revisions_and_are_in_force_on_all_ranks() -> None:
    page = 8 * GRANULE

    def body(rank: Rank) -> Any:
        coordinator = rank.coordinator
        full = coordinator.domains["full"]
        statuses = []

        def ask(limit: int, revision: int) -> None:
            if coordinator.world.rank == 0:
                statuses.append(coordinator.set_limit(limit, revision).status.value)

        ask(4 * page, 5)
        ask(3 * page, 5)
        ask(9 * page, 4)
        coordinator.step()
        rank.meet()
        first = ids(full.alloc(3))
        miss = ids(full.alloc(1))
        threading.Event().wait(0.12)
        rank.meet()
        ask(2 * page, 6)
        coordinator.step()
        full.free(torch.tensor(first))
        rank.settle()
        return statuses, first, miss, rank.held() <= 2 * page

    results = values(run_world(body, tp=2))
    assert results[0][0] == ["applied", "conflict", "stale", "deferred"]
    assert {(tuple(result[1]), result[2], result[3]) for result in results} == {((1, 2, 3), None, True)}
