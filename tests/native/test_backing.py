"""Backing: the failure contract, one case at a time. Numbers in brackets are field reports."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvcached_dist._native import Backing, HostDevice, Outcome, PoolGeometry, Status

from .support import GRANULE, grow, host, pool, shrink

PAGE_0, PAGE_1, PAGE_2 = (0, 0, 1), (0, 1, 1), (0, 2, 1)
OUTSIDE = (0, 7, 2)


def states(backing: Backing, index: int = 0) -> dict[int, str]:
    """State by offset in granules."""
    return {offset // GRANULE: state for offset, _, state, _ in backing.extents(index)}


def cause(outcome: Outcome) -> tuple[Status, str, int, int]:
    return outcome.status, outcome.call, outcome.pool, outcome.offset


# --- what is refused before anything is touched ----------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_batch_with_a_run_outside_touches_nothing(position: int) -> None:
    """[R1]: two layers of K and V; the bad run first, in the middle, last."""
    device, backing = host(pool(lanes=4))
    grow(backing, 1, PAGE_0)
    array = np.from_dlpack(backing.array(0))
    regions = [array[lane * 8 * GRANULE :][:GRANULE] for lane in range(4)]
    for value, region in enumerate(regions, start=1):
        region[:] = value
    before = device.counters()
    batch = [PAGE_0, PAGE_1]
    batch.insert(position, OUTSIDE)
    for outcome in (backing.reserve(2, batch), backing.map(batch), backing.unmap(batch), backing.release(batch)):
        assert outcome.status is Status.INVALID_ARGUMENT
        assert "run 0:[7,9) is outside the domain of 8 pages" in outcome.detail
    with pytest.raises(ValueError, match="outside"):
        backing.plan(batch)
    after = device.counters()
    assert (after.handles_created, after.maps, after.unmaps) == (before.handles_created, before.maps, before.unmaps)
    assert [set(region) for region in regions] == [{1}, {2}, {3}, {4}]
    assert set(states(backing)) == {0, 8, 16, 24}
    assert backing.reserve(3, [PAGE_1]).handles_created == [4]
    assert backing.map([PAGE_1]).ok
    assert backing.reserve(4, [PAGE_0]).handles_created == [0]
    assert device.counters().maps == before.maps + 4


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([(0, 0, 0)], "count >= 1"),
        ([(0, -1, 1)], "first >= 0"),
        ([(-1, 0, 1)], "domain >= 0"),
        ([(0, 1, 2)], "overlaps 0:[0,2)"),
        ([(0, 0, 1)], "overlaps 0:[0,2)"),
        ([(0, 4, 2), (0, 5, 1)], "of one call overlap"),
        ([(0, 4, 2), (0, 4, 2)], "of one call overlap"),
        ([(0, 1 << 62, 1 << 62)], "outside"),
    ],
)
def test_runs_that_contradict_what_is_known_are_refused(runs: list[tuple[int, int, int]], why: str) -> None:
    _, backing = host(pool())
    grow(backing, 1, (0, 0, 2))
    outcome = backing.reserve(2, runs)
    assert outcome.status is Status.INVALID_ARGUMENT
    assert why in outcome.detail
    assert backing.held() == [1]


def test_order_of_calls_is_guarded() -> None:
    _, backing = host(pool())
    assert "not reserved" in backing.map([PAGE_1]).detail
    grow(backing, 1, PAGE_1)
    assert "still mapped" in backing.release([PAGE_1]).detail
    assert states(backing) == {1: "mapped"}
    backing.close()
    assert "closed" in backing.reserve(2, [PAGE_2]).detail


# --- geometry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pages": 0}, "pages=0"),
        ({"domain": -1}, "domain=-1"),
        ({"lanes": [(0, 0)]}, "0 bytes per page"),
        ({"lanes": [(0, 4096), (4096, 4096)]}, "overlaps"),
        ({"lanes": [(8, 8192)]}, "outside the reservation"),
        ({"pinned": [(0, 100)]}, "overlaps"),
        ({"pinned": [(65_500, 100)]}, "outside the reservation"),
        ({"fill": [(0, 8, 0)], "fill_row_bytes": 0}, "fill_row_bytes=0"),
        ({"fill": [(60, 8, 0)], "fill_row_bytes": 64}, "not in the row"),
        ({"fill": [(0, 6, 1)], "fill_row_bytes": 64}, "multiple of 4"),
    ],
)
def test_geometry_that_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    right: dict[str, object] = {"pages": 8, "domain": 0, "lanes": [(0, 4096)], "reservation_bytes": 65_536}
    with pytest.raises(ValueError, match=message):
        PoolGeometry(name="p", **{**right, **wrong})  # type: ignore[arg-type]


def test_pools_of_one_domain_have_equal_pages() -> None:
    with pytest.raises(ValueError, match="pages=9"):
        host(pool(pages=8), pool(pages=9))


def test_a_failing_reservation_leaves_no_address_behind() -> None:
    device = HostDevice(1 << 20, GRANULE)
    device.faults.arm("reserve", nth=2)
    with pytest.raises(RuntimeError, match="cannot reserve 32768 bytes"):
        Backing(device, [pool(), pool()])
    assert device.counters().reservations == 0


def test_a_stage_without_layers_agrees_at_once() -> None:
    empty = PoolGeometry(name="none", domain=1, pages=4, reservation_bytes=0, lanes=[])
    _, backing = host(pool(), empty)
    for run in ((1, 0, 4), (2, 0, 100)):
        assert backing.plan([run]) == [(0, 0), (0, 0)]
        grow(backing, 1, run)
        assert backing.abort(1).ok
        assert backing.map([run]).ok
        shrink(backing, run)
    assert len(np.from_dlpack(backing.array(1))) == 0


def test_interiors_are_one_extent_up_to_the_limit() -> None:
    device = HostDevice(1 << 20, GRANULE)
    for limit, expected in ((1 << 30, [10]), (4 * GRANULE, [4, 4, 2]), (6 * GRANULE - 1, [5, 5])):
        backing = Backing(device, [pool(pages=10)], extent_bytes_max=limit)
        assert backing.reserve(1, [(0, 0, 10)]).ok
        assert [length // GRANULE for _, length, _, _ in backing.extents(0)] == expected
    with pytest.raises(ValueError, match="extent_bytes_max"):
        Backing(device, [pool()], extent_bytes_max=GRANULE - 1)


def test_border_granules_are_shared_and_go_with_their_last_run() -> None:
    device, backing = host(pool(page_bytes=GRANULE * 3 // 2))
    grow(backing, 1, PAGE_0, PAGE_1)
    assert [entry[2:] for entry in backing.extents(0)] == [("mapped", 1), ("mapped", 2), ("mapped", 1)]
    array = np.from_dlpack(backing.array(0))
    array[: GRANULE * 3] = 7
    shrink(backing, PAGE_0)
    assert (array[GRANULE * 3 // 2 : GRANULE * 3] == 7).all()
    assert states(backing) == {1: "mapped", 2: "mapped"}
    shrink(backing, PAGE_1)
    assert (backing.held(), device.resident_bytes()) == ([0], 0)


def test_many_small_pages_share_one_granule() -> None:
    device, backing = host(pool(pages=30, page_bytes=64, lanes=2))
    for page in range(30):
        grow(backing, page, (0, page, 1))
    assert backing.extents(0) == [(0, GRANULE, "mapped", 30)]
    for page in reversed(range(30)):
        assert device.resident_bytes() == GRANULE
        shrink(backing, (0, page, 1))
    assert device.resident_bytes() == 0


def test_pinned_ranges_come_with_page_zero_and_are_filled() -> None:
    tail = PoolGeometry(
        name="state",
        domain=0,
        pages=4,
        reservation_bytes=4 * GRANULE + 3 * GRANULE,
        lanes=[(0, GRANULE)],
        pinned=[(4 * GRANULE + 8, 2 * GRANULE)],
        fill=[(0, 4, 0xFF800000), (4, 4, 0)],
        fill_row_bytes=8,
    )
    _, backing = host(tail)
    grow(backing, 1, PAGE_1)
    assert set(states(backing)) == {1}
    grow(backing, 2, PAGE_0)
    assert set(states(backing)) == {0, 1, 4, 5, 6}
    rows = np.from_dlpack(backing.array(0)).view(np.uint32)
    first = (4 * GRANULE + 8) // 4
    assert rows[first : first + 2 * GRANULE // 4].reshape(-1, 2).tolist() == [[0xFF800000, 0]] * (GRANULE // 4)
    assert rows[first - 2] == rows[first + 2 * GRANULE // 4] == 0


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_refused_create_gives_back_every_plane() -> None:
    """[R2, R71]: four regions, the third create fails; the page works at once afterwards."""
    device, backing = host(pool(lanes=4))
    device.faults.arm("create", nth=3)
    outcome = backing.reserve(1, [PAGE_0])
    assert cause(outcome) == (Status.INJECTED, "create", 0, 16 * GRANULE)
    assert outcome.exhausted
    assert (backing.held(), backing.extents(0), device.resident_bytes()) == ([0], [], 0)
    assert (device.counters().handles_created, device.counters().handles_released) == (2, 2)
    grow(backing, 2, PAGE_0)
    assert len(backing.extents(0)) == 4


def test_refused_access_keeps_what_is_mapped_and_undoes_only_that() -> None:
    """[R66]: six pages, access fails at the fifth."""
    device, backing = host(pool())
    runs = [(0, page, 1) for page in range(6)]
    assert backing.reserve(1, runs).ok
    device.faults.arm("access", nth=5)
    assert cause(backing.map(runs)) == (Status.INJECTED, "access", 0, 4 * GRANULE)
    assert states(backing) == {0: "mapped", 1: "mapped", 2: "mapped", 3: "mapped", 4: "no_access", 5: "held"}
    shrink(backing, *runs)
    counters = device.counters()
    assert (counters.maps, counters.unmaps, counters.handles_created, counters.handles_released) == (5, 5, 6, 6)
    grow(backing, 2, *runs)
    backing.close()
    assert device.counters().reservations == 0


def test_a_retry_adopts_what_is_mapped() -> None:
    device, backing = host(pool(fill=[(0, 4, 5)], fill_row_bytes=4))
    runs = [PAGE_0, PAGE_1, PAGE_2]
    assert backing.reserve(1, runs).ok
    for call, nth in (("map", 2), ("access", 2), ("fill", 2)):
        device.faults.arm(call, nth=nth)
        assert backing.map(runs).call == call
        assert backing.reserve(2, runs).handles_created == [0]
        assert backing.abort(2).ok
    assert backing.map(runs).ok
    counters = device.counters()
    assert (counters.maps, counters.accesses, backing.held()) == (3, 3, [3])
    assert set(np.from_dlpack(backing.array(0)).view(np.uint32)[: 3 * GRANULE // 4]) == {5}


def test_abort_gives_back_only_what_its_transaction_took() -> None:
    device, backing = host(pool(page_bytes=GRANULE * 3 // 2))
    grow(backing, 1, PAGE_0)
    assert backing.reserve(2, [PAGE_1]).handles_created == [1]
    assert backing.abort(7).ok
    assert backing.held() == [3]
    assert backing.abort(1).ok  # mapped: not given back
    assert backing.held() == [3]
    for _ in range(2):
        assert backing.abort(2).ok
        assert (backing.held(), device.counters().handles_released) == ([2], 1)
    assert backing.extents(0)[1][3] == 1
    grow(backing, 3, PAGE_1)


def test_an_abort_in_the_middle_of_a_map_keeps_what_is_mapped() -> None:
    """The protocol never does this (M3); if somebody does, nothing mapped loses its memory, and the rest is told."""
    device, backing = host(pool(page_bytes=GRANULE * 3 // 2))
    assert backing.reserve(1, [PAGE_0]).ok
    device.faults.arm("map", nth=2)
    assert not backing.map([PAGE_0]).ok
    assert backing.abort(1).ok
    assert states(backing) == {0: "mapped"}
    assert "lacks handles" in backing.map([PAGE_0]).detail
    assert backing.plan([PAGE_0]) == [(1, GRANULE)]
    assert backing.reserve(2, [PAGE_0]).handles_created == [1]
    assert backing.map([PAGE_0]).ok


def test_a_refused_unmap_is_repaired_by_restore() -> None:
    device, backing = host(pool(fill=[(0, 4, 3)], fill_row_bytes=4))
    runs = [PAGE_0, PAGE_1, PAGE_2]
    grow(backing, 1, *runs)
    device.faults.arm("unmap", nth=2)
    assert cause(backing.unmap(runs)) == (Status.INJECTED, "unmap", 0, GRANULE)
    assert states(backing) == {0: "held", 1: "mapped", 2: "mapped"}
    for _ in range(2):
        assert backing.restore(runs).ok
    assert set(states(backing).values()) == {"mapped"}
    assert set(np.from_dlpack(backing.array(0)).view(np.uint32)[: 3 * GRANULE // 4]) == {3}
    assert device.counters().maps == 4


def test_a_refused_release_goes_on_with_the_others_and_stays_in_the_count() -> None:
    device, backing = host(pool())
    runs = [PAGE_0, PAGE_1, PAGE_2]
    grow(backing, 1, *runs)
    assert backing.unmap(runs).ok
    device.faults.arm("release", nth=2)
    assert cause(backing.release(runs)) == (Status.INJECTED, "release", 0, GRANULE)
    assert (backing.held(), backing.held_bytes(), device.resident_bytes()) == ([1], [GRANULE], GRANULE)
    grow(backing, 2, PAGE_2)
    shrink(backing, PAGE_2)  # the other run's trouble is not told here [R58]
    assert backing.held() == [1]
    assert backing.release(runs).ok
    assert (backing.held(), device.resident_bytes()) == ([0], 0)


def test_a_roll_back_that_fails_too_is_told_and_can_be_finished() -> None:
    """[R3]: the create fails, and so does giving back what was created before it."""
    device, backing = host(pool())
    device.faults.arm("create", nth=3)
    device.faults.arm("release", nth=1)
    outcome = backing.reserve(1, [PAGE_0, PAGE_1, PAGE_2])
    assert cause(outcome) == (Status.INJECTED, "create", 0, 2 * GRANULE)
    assert "1 created handles could not be released" in outcome.detail
    assert backing.held() == [1]
    grow(backing, 2, (0, 0, 3))  # the pages are not lost for it
    shrink(backing, (0, 0, 3))
    assert backing.release([PAGE_0, PAGE_1, PAGE_2]).ok
    assert (backing.held(), device.resident_bytes()) == ([0], 0)


def test_every_call_may_come_twice() -> None:
    """[R57, R58]: the second one is a no-op, and at the end everything created is released."""
    device, backing = host(pool(lanes=2))
    runs = [PAGE_0, PAGE_1]
    for _ in range(2):
        assert backing.reserve(1, runs).ok
    for _ in range(2):
        assert backing.map(runs).ok
    for _ in range(2):
        assert backing.unmap(runs).ok
    for _ in range(2):
        assert backing.release(runs).ok
    assert backing.unmap(runs).ok  # after release
    assert backing.abort(1).ok
    counters = device.counters()
    assert (counters.handles_created, counters.handles_released, counters.maps, counters.unmaps) == (4, 4, 4, 4)
    for _ in range(2):
        backing.close()


def test_an_error_is_told_once_and_where_it_happened() -> None:
    """[R58]: nothing sticks to a later operation on another page."""
    device, backing = host(pool())
    device.faults.arm("create", nth=1)
    assert not backing.reserve(1, [(0, 3, 1)]).ok
    outcome = backing.reserve(2, [(0, 5, 1)])
    assert (outcome.ok, outcome.status, outcome.call, outcome.detail, outcome.pool) == (True, Status.OK, "", "", -1)


def test_growing_and_shrinking_for_long_leaks_nothing() -> None:
    """[R69]: 200 times four pages."""
    device, backing = host(pool(page_bytes=1728, lanes=3))
    grow(backing, 0, PAGE_0)
    start = device.free_bytes()
    for txn in range(1, 201):
        grow(backing, txn, (0, 1, 4))
        shrink(backing, (0, 1, 4))
        assert device.free_bytes() == start
    counters = device.counters()
    assert counters.handles_created - counters.handles_released == backing.held()[0] == 4
    shrink(backing, PAGE_0)
    assert device.counters().bytes_created == 0


def test_close_gives_back_in_order_and_asks_a_refusing_driver_twice() -> None:
    """[R71]: the host device refuses to free addresses under a mapping, and to release what is mapped."""
    device, backing = host(pool(lanes=2), pool(page_bytes=1728))
    grow(backing, 1, (0, 0, 3))
    assert backing.reserve(2, [(0, 4, 2)]).ok
    device.faults.arm("unmap", nth=2)
    device.faults.arm("release", nth=1)
    backing.close()
    counters = device.counters()
    assert counters.handles_created == counters.handles_released > 0
    assert (counters.reservations, counters.bytes_mapped, device.resident_bytes()) == (0, 0, 0)


def test_close_under_a_driver_that_never_gives_in_keeps_the_addresses() -> None:
    device, backing = host(pool())
    grow(backing, 1, PAGE_0)
    device.faults.arm("unmap", nth=1, count=100)
    backing.close()
    counters = device.counters()
    assert (counters.reservations, counters.bytes_mapped, counters.handles_released) == (1, GRANULE, 0)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_a_slow_driver_call_holds_up_neither_the_interpreter_nor_the_totals() -> None:
    device, backing = host(pool())
    assert backing.reserve(1, [PAGE_0]).ok
    device.faults.arm("map", nth=1, delay_us=100_000, fail=False)
    outcomes: list[Outcome] = []
    worker = threading.Thread(target=lambda: outcomes.append(backing.map([PAGE_0])))
    begin = time.monotonic()
    worker.start()
    assert backing.held() == [1]
    assert backing.mapped_bytes() == [0]
    assert time.monotonic() - begin < 0.09
    assert not outcomes
    worker.join()
    assert outcomes[0].ok
    assert outcomes[0].micros >= 100_000
    assert device.faults.hits()["map"] == 1


def test_faults_count_from_arming_and_several_may_be_armed() -> None:
    device, backing = host(pool())
    faults = device.faults
    grow(backing, 1, PAGE_0)
    assert faults.seen()["create"] == 0  # nothing was armed
    faults.arm("create", nth=2, count=2)
    faults.arm("create", nth=4)
    answers = [backing.reserve(2 + page, [(0, page, 1)]).ok for page in range(1, 7)]
    assert answers == [True, False, False, False, True, True]
    assert (faults.hits()["create"], faults.seen()["create"]) == (3, 4)
    faults.arm("map", nth=1)
    faults.clear()
    assert backing.map([PAGE_1]).ok
    for wrong in ({"call": "open"}, {"nth": 0}, {"count": 0}, {"delay_us": -1}):
        with pytest.raises(ValueError, match=r"call 'open'|nth >= 1"):
            faults.arm(**{"call": "map", "nth": 1, **wrong})  # type: ignore[arg-type]
