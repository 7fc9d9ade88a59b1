"""The floor: the same extents through the native backing alone, and through nothing but the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvcached_dist import _native
from kvcached_dist.pools.backing import StageBacking
from kvcached_dist.pools.specs import StageSpec

from .meeting import Meeting
from .plan import NULL_PAGES, Cell
from .samples import WARM_UP, now_us

NULL_TXN = 1


class Floor:
    """Reserve, map, unmap and release of runs without any protocol around them.

    Args:
        device: where memory comes from.
        stage: pools and domains.
        meet: waits for the other rank processes.
    """

    def __init__(self, device: _native.Device, stage: StageSpec, meet: Meeting) -> None:
        self._meet = meet
        self._backing = StageBacking.open(device, stage)
        self._native = self._backing.native
        self._domain = 0
        self._txn = NULL_TXN
        nulls = [(index, 0, NULL_PAGES) for index in range(len(stage.domains))]
        self._must(self._native.reserve(NULL_TXN, nulls))
        self._must(self._native.map(nulls))

    def close(self) -> None:
        self._backing.close()

    def measure(self, cell: Cell) -> dict[str, Any]:
        """First growth, reclaim and sustained growth of a cell, in microseconds of this rank."""
        grow, reserve, back = [], [], []
        run = (self._domain, NULL_PAGES, cell.run)
        extents = 0
        for repeat in range(WARM_UP + cell.repeats):
            self._meet()
            began = now_us()
            created = self._reserve([run])
            reserved = now_us()
            self._must(self._native.map([run]))
            ended = now_us()
            extents = created
            self._meet()
            reclaim_began = now_us()
            self._must(self._native.unmap([run]))
            self._must(self._native.release([run]))
            reclaim_ended = now_us()
            if repeat >= WARM_UP:
                grow.append(ended - began)
                reserve.append(reserved - began)
                back.append(reclaim_ended - reclaim_began)
        sustained, sustained_reserve, extents_sustained = self._sustained(cell)
        return {
            "grow_us": grow, "reserve_us": reserve, "reclaim_us": back, "sustained_us": sustained,
            "sustained_reserve_us": sustained_reserve, "extents": extents, "extents_sustained": extents_sustained,
        }  # fmt: skip

    def ranges(self, run: int) -> list[tuple[int, int, int]]:
        """(pool, offset, bytes) of the extents that the first growth of a run creates."""
        key = (self._domain, NULL_PAGES, run)
        pools = range(len(self._backing.layouts))
        before = {(pool, item[0]) for pool in pools for item in self._native.extents(pool)}
        self._reserve([key])
        found = [
            (pool, item[0], item[1])
            for pool in pools
            for item in self._native.extents(pool)
            if (pool, item[0]) not in before
        ]
        self._must(self._native.release([key]))
        return found

    def lock_step(self, cell: Cell) -> dict[str, list[float]]:
        """Sustained growth again, but every growth waits for the slowest rank, after reserve and after map and fill.

        What a growth takes that needs every rank's answer twice and pays for no message: the barrier's own awakenings
        are in ``sustained_us``, not in the others.

        Returns:
            Microseconds of this rank per growth.
        """
        runs = self._row(cell)
        sustained, reserve, mapping = [], [], []
        self._meet()
        for run in runs:
            began = now_us()
            self._reserve([run])
            reserved = now_us()
            self._meet.at_once()
            map_began = now_us()
            self._must(self._native.map([run]))
            mapped = now_us()
            self._meet.at_once()
            sustained.append(now_us() - began)
            reserve.append(reserved - began)
            mapping.append(mapped - map_began)
        self._give_back(runs)
        return {"sustained_us": sustained, "reserve_us": reserve, "map_us": mapping}

    def _sustained(self, cell: Cell) -> tuple[list[float], list[float], int]:
        runs = self._row(cell)
        micros: list[float] = []
        reserve: list[float] = []
        created = 0
        self._meet()
        for run in runs:
            began = now_us()
            created += self._reserve([run])
            reserve.append(now_us() - began)
            self._must(self._native.map([run]))
            micros.append(now_us() - began)
        self._give_back(runs)
        return micros, reserve, created

    def _row(self, cell: Cell) -> list[tuple[int, int, int]]:
        return [(self._domain, NULL_PAGES + i * cell.run, cell.run) for i in range(cell.sustained)]

    def _give_back(self, runs: list[tuple[int, int, int]]) -> None:
        self._meet()
        self._must(self._native.unmap(runs))
        self._must(self._native.release(runs))

    def _reserve(self, runs: list[tuple[int, int, int]]) -> int:
        self._txn += 1
        outcome = self._native.reserve(self._txn, runs)
        self._must(outcome)
        return sum(outcome.handles_created)

    @staticmethod
    def _must(outcome: _native.Outcome) -> None:
        if not outcome.ok:
            raise RuntimeError(outcome.detail)


class BareDriver:
    """The driver calls alone, from one C++ loop: create, map, set access; unmap, release. CUDA only.

    Args:
        library: built by :func:`bare.build`.
        ordinal: device.
    """

    def __init__(self, library: str, ordinal: int) -> None:
        self._library = ctypes.CDLL(library)
        code = self._library.bare_open(ordinal)
        if code:
            raise RuntimeError(f"the bare driver loop cannot open device {ordinal}: code {code}")

    def measure(self, sizes: list[int], repeats: int, meet: Callable[[], None]) -> dict[str, list[float]]:
        """Microseconds per repetition for extents of these sizes."""
        count = len(sizes)
        array = (ctypes.c_uint64 * count)(*sizes)
        grow, back = [], []
        times = (ctypes.c_double * 2)()
        for repeat in range(WARM_UP + repeats):
            meet()
            code = self._library.bare_cycle(array, count, times)
            if code:
                raise RuntimeError(f"the bare driver loop failed with code {code}")
            if repeat >= WARM_UP:
                grow.append(times[0])
                back.append(times[1])
        return {"grow_us": grow, "reclaim_us": back}
