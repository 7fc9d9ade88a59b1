"""A slow model of the extent tables, written from the definition: a granule at a time, nothing remembered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcached_dist._native import PoolGeometry

Run = tuple[int, int, int]
Range = tuple[int, int]


def ranges_of(pool: PoolGeometry, run: Run) -> list[Range]:
    """The (offset, bytes) that belong to a run in a pool."""
    domain, first, count = run
    if domain != pool.domain:
        return []
    ranges = [(base + first * page_bytes, count * page_bytes) for base, page_bytes in pool.lanes]
    return ranges + (list(pool.pinned) if first == 0 else [])


def extents_of(pool: PoolGeometry, run: Run, granule: int, extent_bytes_max: int = 1 << 30) -> set[Range]:
    """The (offset, bytes) of the extents of a run in a pool: interiors, and border granules one by one."""
    extents: set[Range] = set()
    for offset, length in ranges_of(pool, run):
        inside = [
            index
            for index in range(offset // granule, (offset + length - 1) // granule + 1)
            if offset <= index * granule and (index + 1) * granule <= offset + length
        ]
        touched = set(range(offset // granule, (offset + length - 1) // granule + 1))
        extents |= {(index * granule, granule) for index in touched - set(inside)}
        per_extent = extent_bytes_max // granule
        for start in range(0, len(inside), per_extent):
            piece = inside[start : start + per_extent]
            extents.add((piece[0] * granule, len(piece) * granule))
    return extents


@dataclass
class Model:
    """Which runs a backing holds and has mapped, at rest."""

    pools: list[PoolGeometry]
    granule: int
    extent_bytes_max: int
    held: set[Run] = field(default_factory=set)
    mapped: set[Run] = field(default_factory=set)

    def expected(self, pool: int) -> list[tuple[int, int, str, int]]:
        """What ``Backing.extents(pool)`` has to say."""
        users: dict[Range, int] = defaultdict(int)
        mapped: set[Range] = set()
        for run in self.held:
            extents = self.extents(pool, run)
            for extent in extents:
                users[extent] += 1
            if run in self.mapped:
                mapped |= extents
        return [(*extent, "mapped" if extent in mapped else "held", count) for extent, count in sorted(users.items())]

    def extents(self, pool: int, run: Run) -> set[Range]:
        """The extents of one run."""
        return extents_of(self.pools[pool], run, self.granule, self.extent_bytes_max)

    def missing(self, runs: Iterable[Run]) -> list[tuple[int, int]]:
        """What ``Backing.plan`` has to say."""
        answer = []
        for pool in range(len(self.pools)):
            have = set().union(*(self.extents(pool, run) for run in self.held))
            want = set().union(*(self.extents(pool, run) for run in runs))
            answer.append((len(want - have), sum(length for _, length in want - have)))
        return answer

    def overlaps(self, run: Run) -> bool:
        """Whether a run shares a page with a held one."""
        domain, first, count = run
        return any(d == domain and f < first + count and first < f + c for d, f, c in self.held)
