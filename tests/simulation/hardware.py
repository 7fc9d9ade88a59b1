"""Cards and the memory of one rank: a model of the pool backing, kept outside the code under test.

A page of a run lies in every pool of its domain. The interior of a run in a pool is one extent; a granule that it
shares with a neighbour is an extent of its own, counted by the runs that use it, as in the native backing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvcached_dist.coord.core.effects import Work, WorkKind
from kvcached_dist.coord.core.types import Cause, CauseKind, Rank, Run

Extent = tuple[int, int, int]
"""Pool, first granule, number of granules."""


@dataclass(slots=True)
class Card:
    """One physical device. Ranks that share it create in turns.

    Attributes:
        capacity: bytes.
        reserve: bytes that must stay free (S14).
        hog: bytes that a neighbour holds who takes no turn.
        used: bytes that our ranks hold.
        turn: rank that has the admission turn.
    """

    capacity: int
    reserve: int
    hog: int = 0
    used: int = 0
    turn: int | None = None

    @property
    def free(self) -> int:
        """Bytes that nobody holds."""
        return self.capacity - self.hog - self.used


@dataclass(frozen=True, slots=True)
class PoolModel:
    """One pool of a rank.

    Attributes:
        domain: domain whose pages it backs.
        page_bytes: bytes of one page; 0 on a stage without layers of the family.
        granule: bytes of a granule.
    """

    domain: int
    page_bytes: int
    granule: int


@dataclass(slots=True)
class _Held:
    bytes: int
    txn: int
    holders: set[Run] = field(default_factory=set)
    mappers: set[Run] = field(default_factory=set)


class RankMemory:
    """What one rank holds and has mapped.

    Args:
        rank: world rank.
        card: its device.
        pools: its pools.
        before_unmap: called with every run that is about to lose its mapping.

    Attributes:
        held: handles per pool.
        bytes: bytes held.
        mapped: mask of wholly mapped pages, per domain.
    """

    def __init__(
        self, rank: int, card: Card, pools: tuple[PoolModel, ...], before_unmap: Callable[[int, Run], None]
    ) -> None:
        self.rank = rank
        self.card = card
        self.pools = pools
        self.held = [0] * len(pools)
        self.mapped = [0] * (1 + max(pool.domain for pool in pools))
        self.filled: set[Run] = set()
        self.bytes = 0
        self.limit = 0
        """Most bytes that may be held (0: no limit)."""
        self._before_unmap = before_unmap
        self._mapped_runs: set[Run] = set()
        self._extents: dict[Extent, _Held] = {}
        self._reserved: dict[int, list[tuple[Run, Extent]]] = {}
        self._cache: dict[Run, tuple[Extent, ...]] = {}

    # ------------------------------------------------------------------ geometry

    def extents(self, run: Run) -> tuple[Extent, ...]:
        """Extents that back a run on this rank."""
        known = self._cache.get(run)
        if known is None:
            known = self._cache[run] = tuple(
                extent
                for index, pool in enumerate(self.pools)
                if pool.domain == run.domain and pool.page_bytes
                for extent in _cut(index, run.first * pool.page_bytes, run.end * pool.page_bytes, pool.granule)
            )
        return known

    def counted(self, runs: Iterable[Run]) -> tuple[int, ...]:
        """Handles per pool that these runs need, border granules once (S10)."""
        count = [0] * len(self.pools)
        for pool, _, _ in {extent for run in runs for extent in self.extents(run)}:
            count[pool] += 1
        return tuple(count)

    def page_bytes(self, domains: int) -> tuple[int, ...]:
        """Bytes of one page over all pools, per domain."""
        return tuple(sum(pool.page_bytes for pool in self.pools if pool.domain == domain) for domain in range(domains))

    # ------------------------------------------------------------------ reading

    def holds(self, run: Run) -> bool:
        """Whether every handle of the run exists here."""
        return all(run in held.holders if (held := self._extents.get(e)) else False for e in self.extents(run))

    def holds_any(self, run: Run) -> bool:
        """Whether some handle is held for the run."""
        return any(run in held.holders for e in self.extents(run) if (held := self._extents.get(e)) is not None)

    def is_mapped(self, run: Run) -> bool:
        """Whether the run is mapped in every pool; a run without bytes on this stage counts once it was mapped."""
        return run in self._mapped_runs

    def created_by(self, txn: int) -> int:
        """Unmapped handles that exist because of a transaction."""
        return sum(held.txn == txn and not held.mappers for held in self._extents.values())

    # ------------------------------------------------------------------ driver work

    def perform(self, work: Work, fail: CauseKind | None, at: int) -> Cause | None:
        """Do the work; a fault strikes at the extent numbered ``at`` (the last one, if there are fewer)."""
        match work.kind:
            case WorkKind.RESERVE:
                return self._reserve(work.txn, work.runs, fail, at)
            case WorkKind.ABORT:
                return self._abort(work.txn, fail)
            case WorkKind.MAP | WorkKind.RESTORE:
                return self._map(work.runs, fail, at, work.kind.value)
            case WorkKind.UNMAP:
                return self._unmap(work.runs, fail, at)
            case WorkKind.RELEASE:
                return self._release(work.runs, fail, at)

    def _reserve(self, txn: int, runs: tuple[Run, ...], fail: CauseKind | None, at: int) -> Cause | None:
        wanted = {extent for run in runs for extent in self.extents(run)}
        missing = sorted(extent for extent in wanted if extent not in self._extents)
        required = sum(self._bytes(extent) for extent in missing)
        if fail is None and required > self.card.free - self.card.reserve:
            return Cause(CauseKind.EXHAUSTED, Rank(self.rank), "device memory", required, self.card.free)
        if fail is None and required and self.limit and required + self.bytes > self.limit:
            return Cause(CauseKind.LIMIT, Rank(self.rank), "limit", required, self.card.free)
        created: list[Extent] = []
        for number, extent in enumerate(missing):
            if fail is not None and (number >= at or number + 1 == len(missing)):
                for taken in created:
                    self._drop(taken)
                return Cause(fail, Rank(self.rank), f"create refused at extent {number}")
            size = self._bytes(extent)
            self._extents[extent] = _Held(size, txn)
            self.card.used += size
            self.bytes += size
            self.held[extent[0]] += 1
            created.append(extent)
        if fail is not None:
            return Cause(fail, Rank(self.rank), "refused before any create")
        added = self._reserved.setdefault(txn, [])
        for run in runs:
            for extent in self.extents(run):
                if run not in self._extents[extent].holders:
                    self._extents[extent].holders.add(run)
                    added.append((run, extent))
        return None

    def _abort(self, txn: int, fail: CauseKind | None) -> Cause | None:
        if fail is not None:
            return Cause(fail, Rank(self.rank), "release refused while aborting")
        for run, extent in self._reserved.pop(txn, []):
            held = self._extents[extent]
            held.holders.discard(run)
            if not held.holders:
                self._drop(extent)
        return None

    def _map(self, runs: tuple[Run, ...], fail: CauseKind | None, at: int, call: str) -> Cause | None:
        todo = [(run, extent) for run in runs for extent in self.extents(run)]
        for number, (run, extent) in enumerate(todo):
            if fail is not None and (number >= at or number + 1 == len(todo)):
                return Cause(fail, Rank(self.rank), f"{call} failed at extent {number}")
            self._extents[extent].mappers.add(run)
        if fail is not None:
            return Cause(fail, Rank(self.rank), f"{call} failed")
        for run in runs:
            self.filled.add(run)
            self._mapped_runs.add(run)
            self.mapped[run.domain] |= mask(run)
        return None

    def _unmap(self, runs: tuple[Run, ...], fail: CauseKind | None, at: int) -> Cause | None:
        todo = [(run, extent) for run in runs for extent in self.extents(run)]
        for run in runs:
            self._before_unmap(self.rank, run)
        for number, (run, extent) in enumerate(todo):
            if fail is not None and (number >= at or number + 1 == len(todo)):
                return Cause(fail, Rank(self.rank), f"unmap failed at extent {number}")
            self._lose(run)
            if (held := self._extents.get(extent)) is not None:
                held.mappers.discard(run)
        if fail is not None:
            return Cause(fail, Rank(self.rank), "unmap failed")
        for run in runs:
            self._lose(run)
        return None

    def _release(self, runs: tuple[Run, ...], fail: CauseKind | None, at: int) -> Cause | None:
        cause = None
        todo = [(run, extent) for run in runs for extent in self.extents(run)]
        for number, (run, extent) in enumerate(todo):
            held = self._extents.get(extent)
            if held is None or run not in held.holders:
                continue
            if fail is not None and cause is None and (number >= at or number + 1 == len(todo)):
                cause = Cause(fail, Rank(self.rank), f"release refused at extent {number}")
                continue
            held.holders.discard(run)
            if not held.holders:
                self._drop(extent)
        return cause or (Cause(fail, Rank(self.rank), "release refused") if fail is not None else None)

    # ------------------------------------------------------------------ inner

    def _bytes(self, extent: Extent) -> int:
        return extent[2] * self.pools[extent[0]].granule

    def _drop(self, extent: Extent) -> None:
        held = self._extents.pop(extent)
        self.card.used -= held.bytes
        self.bytes -= held.bytes
        self.held[extent[0]] -= 1

    def _lose(self, run: Run) -> None:
        if run in self._mapped_runs:
            self._mapped_runs.discard(run)
            self.filled.discard(run)
            self.mapped[run.domain] &= ~mask(run)


def mask(run: Run) -> int:
    """The pages of a run as bits."""
    return ((1 << run.count) - 1) << run.first


def _cut(pool: int, begin: int, end: int, granule: int) -> list[Extent]:
    first, last = -(-begin // granule), end // granule
    if first > last:
        return [(pool, begin // granule, 1)]
    inner = [(pool, first, last - first)] if last > first else []
    low = [(pool, first - 1, 1)] if begin % granule else []
    high = [(pool, last, 1)] if end % granule else []
    return low + inner + high
