"""Backing against the slow model, with random geometry, random operations and a fault at any driver call."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcached_dist._native import Backing, HostDevice, PoolGeometry, Status

from .oracle import Model, Run, ranges_of

GRANULE = 4096
PAGES = 6
STRIDES = (149_760, 37_440, 8_448, 1_728, 584 * 4, 4_096, 12_288, 64)
FILLS: tuple[list[tuple[int, int, int]], ...] = (
    [],
    [(0, 32, 0)],
    [(0, 32, 0x7F7F7F7F)],
    [(0, 8, 0x7F800000), (8, 24, 0)],
    [(4, 4, 0xC2280000)],
)


def random_pool(random_: random.Random, name: str, domain: int) -> PoolGeometry:
    """A pool of one to three lanes, with gaps or none, and now and then a pinned range behind a lane."""
    lanes, pinned, at = [], [], 0
    for _ in range(random_.randint(1, 3)):
        stride = random_.choice(STRIDES)
        lanes.append((at, stride))
        at += PAGES * stride
        if random_.random() < 0.4:
            pinned.append((at, 4 * random_.randint(1, 3000)))
            at += pinned[-1][1]
        at += random_.choice((0, 0, 4, 1000, 5 * GRANULE))
    return PoolGeometry(
        name=name,
        domain=domain,
        pages=PAGES,
        reservation_bytes=at,
        lanes=lanes,
        pinned=pinned,
        fill=random_.choice(FILLS),
        fill_row_bytes=random_.choice((32, 68)),
    )


def pattern_of(pool: PoolGeometry, run: Run) -> list[np.ndarray[Any, Any]]:
    """Per byte range of a run: what the fill leaves there, -1 where it leaves what was there."""
    row = np.full(pool.fill_row_bytes, -1, np.int64)
    for offset, length, pattern in pool.fill:
        row[offset : offset + length] = np.resize(np.frombuffer(pattern.to_bytes(4, "little"), np.uint8), length)
    lanes = [np.tile(np.resize(row, page_bytes), run[2]) for _, page_bytes in pool.lanes]
    return lanes + [np.resize(row, length) for _, length in ranges_of(pool, run)[len(lanes) :]]


class Driver:
    """Does to a backing what an agent does, keeps the model beside it, and knows every byte of every mapped run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pools = [random_pool(self.random, f"pool{i}", self.random.randint(0, 1)) for i in range(3)]
        self.extent_bytes_max = self.random.choice((1 << 30, 3 * GRANULE))
        self.device = HostDevice(1 << 30, GRANULE)
        self.backing = Backing(self.device, pools, extent_bytes_max=self.extent_bytes_max)
        self.model = Model(pools, GRANULE, self.extent_bytes_max)
        self.memory = [np.from_dlpack(self.backing.array(i)) for i in range(len(pools))]
        self.bytes: dict[Run, list[list[np.ndarray[Any, Any]]]] = {}
        self.txn = 0

    def random_runs(self) -> list[Run]:
        runs: list[Run] = []
        for _ in range(self.random.randint(1, 3)):
            first = self.random.choice((0, self.random.randrange(PAGES)))
            run = (self.random.randint(0, 1), first, self.random.randint(1, PAGES - first))
            taken = any(r[0] == run[0] and r[1] < run[1] + run[2] and run[1] < r[1] + r[2] for r in runs)
            if not taken and not self.model.overlaps(run):
                runs.append(run)
        return runs

    def arm(self, *calls: str) -> None:
        if self.random.random() < 0.6:
            count = self.random.choice((1, 1, 2))
            self.device.faults.arm(self.random.choice(calls), nth=self.random.randint(1, 12), count=count)

    def write(self, run: Run) -> None:
        """Gives a run bytes of its own, after checking that it was filled."""
        self.bytes[run] = []
        for index, pool in enumerate(self.model.pools):
            kept = []
            if pool.domain == run[0]:
                for (offset, length), pattern in zip(ranges_of(pool, run), pattern_of(pool, run), strict=True):
                    view = self.memory[index][offset : offset + length]
                    filled = pattern >= 0
                    np.testing.assert_array_equal(view[filled], pattern[filled])
                    kept.append(np.full(length, self.random.randrange(256), np.uint8))
                    view[:] = kept[-1]
            self.bytes[run].append(kept)

    def check_bytes(self, run: Run) -> None:
        for index, pool in enumerate(self.model.pools):
            for (offset, length), kept in zip(ranges_of(pool, run), self.bytes[run][index], strict=True):
                np.testing.assert_array_equal(self.memory[index][offset : offset + length], kept)

    def check(self, *, at_rest: bool = True) -> None:
        """Holds at every moment: no neighbour's byte changed, and the books agree with the card."""
        for run in self.model.mapped:
            self.check_bytes(run)
        counters = self.device.counters()
        assert counters.handles_created - counters.handles_released == sum(self.backing.held())
        assert counters.bytes_created == sum(self.backing.held_bytes()) == self.device.resident_bytes()
        assert counters.bytes_mapped == sum(self.backing.mapped_bytes())
        if at_rest:
            for pool in range(len(self.model.pools)):
                expected = self.model.expected(pool)
                assert self.backing.extents(pool) == expected
                assert self.backing.held()[pool] == len(expected)

    def grow(self) -> None:
        runs = self.random_runs()
        self.txn += 1
        planned = self.model.missing(runs)
        assert self.backing.plan(runs) == planned
        self.arm("create", "release")
        outcome = self.backing.reserve(self.txn, runs)
        self.device.faults.clear()
        if not outcome.ok:
            assert (outcome.exhausted, outcome.status, outcome.call) == (True, Status.INJECTED, "create")
            self.repair_release(runs)
            self.check()
            return
        assert outcome.handles_created == [handles for handles, _ in planned]
        self.model.held |= set(runs)
        self.check()
        if self.random.random() < 0.25:
            self.arm("release")
            self.backing.abort(self.txn)
            self.device.faults.clear()
            self.repair_release(runs)
            self.model.held -= set(runs)
            self.check()
            return
        self.map(runs)

    def map(self, runs: list[Run]) -> None:
        self.arm("map", "access", "fill")
        outcome = self.backing.map(runs)
        self.device.faults.clear()
        if not outcome.ok:
            assert (outcome.status, outcome.exhausted) == (Status.INJECTED, False)
            self.check(at_rest=False)
            if self.random.random() < 0.5:  # retained and given up
                assert self.backing.unmap(runs).ok
                assert self.backing.release(runs).ok
                self.model.held -= set(runs)
                self.check()
                return
            assert self.backing.reserve(self.txn + 10_000, runs).handles_created == [0] * len(self.model.pools)
            assert self.backing.abort(self.txn + 10_000).ok
            assert self.backing.map(runs).ok
        for run in runs:
            self.write(run)
        self.model.mapped |= set(runs)
        self.check()

    def reclaim(self) -> None:
        runs = [run for run in sorted(self.model.mapped) if self.random.random() < 0.5]
        self.model.mapped -= set(runs)
        self.arm("unmap")
        outcome = self.backing.unmap(runs)
        self.device.faults.clear()
        self.check(at_rest=outcome.ok)
        if not outcome.ok or self.random.random() < 0.2:
            assert self.backing.restore(runs).ok
            for run in runs:
                self.write(run)
            self.model.mapped |= set(runs)
            self.check()
            return
        self.arm("release")
        self.backing.release(runs)
        self.device.faults.clear()
        self.repair_release(runs)
        self.model.held -= set(runs)
        self.check()

    def repair_release(self, runs: list[Run]) -> None:
        """A handle that was refused stays in the count until the same release is asked for again."""
        self.check(at_rest=False)
        assert self.backing.release(runs).ok

    def close(self) -> None:
        self.backing.close()
        counters = self.device.counters()
        assert counters.handles_created == counters.handles_released
        assert counters.bytes_mapped == counters.bytes_created == self.device.resident_bytes() == 0


@pytest.mark.parametrize("seed", range(24))
def test_backing_agrees_with_the_model(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(10):
        driver.random.choice((driver.grow, driver.grow, driver.reclaim))()
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_backing_agrees_with_the_model_for_longer(seed: int) -> None:
    driver = Driver(seed)
    for _ in range(60):
        driver.random.choice((driver.grow, driver.grow, driver.reclaim))()
    driver.close()
