"""What one rank holds for each run.

::

    ABSENT --reserve--> RESERVED --map--> MAPPED --publish--> PUBLISHED --retire--> RETIRED
      ^ ^                  |  |             ^  |retire(retained) ^    |unretire        |unmap
      | +------abort-------+  +-map failed->PARTIAL              +----+                v
      +------------------------------release--------------------------------------- UNMAPPED
                                                          RETIRED/UNMAPPED --restore--> MAPPED

MAPPED and PARTIAL runs that were not published are *retained*: only a retry of the identical runs may
adopt them, or a logged retirement may give them back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum

from .invariants import require
from .types import DomainId, PageId, Rank, Run


class RunState(Enum):
    """What this rank holds for a run. ABSENT runs have no record."""

    RESERVED = "reserved"
    MAPPED = "mapped"
    PARTIAL = "partial"
    PUBLISHED = "published"
    RETIRED = "retired"
    UNMAPPED = "unmapped"
    STUCK = "stuck"
    """The driver refused to release it; the handle stays in the count."""


_EDGES: dict[RunState | None, frozenset[RunState | None]] = {
    None: frozenset({RunState.RESERVED}),
    RunState.RESERVED: frozenset({None, RunState.MAPPED, RunState.PARTIAL}),
    RunState.MAPPED: frozenset({RunState.MAPPED, RunState.PARTIAL, RunState.PUBLISHED, RunState.RETIRED}),
    RunState.PARTIAL: frozenset({RunState.MAPPED, RunState.PARTIAL, RunState.RETIRED}),
    RunState.PUBLISHED: frozenset({RunState.RETIRED}),
    RunState.RETIRED: frozenset({RunState.PUBLISHED, RunState.MAPPED, RunState.PARTIAL, RunState.UNMAPPED}),
    RunState.UNMAPPED: frozenset({None, RunState.MAPPED, RunState.PARTIAL, RunState.UNMAPPED, RunState.STUCK}),
    RunState.STUCK: frozenset({None, RunState.STUCK}),
}
"""The transition table; ``None`` is ABSENT. :meth:`RunTable.become` refuses every edge that is not here."""

RETAINED = (RunState.MAPPED, RunState.PARTIAL)


class RunTable:
    """Runs of one rank that hold memory there.

    Args:
        rank: the rank, for errors.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._runs: dict[Run, RunState] = {}
        self._order: dict[DomainId, list[Run]] = {}
        """The keys of ``_runs`` per domain, by first page."""

    def state(self, run: Run) -> RunState | None:
        """State of a run; ``None`` is ABSENT."""
        return self._runs.get(run)

    def runs(self, *states: RunState) -> list[Run]:
        """Runs in one of ``states`` (all runs that hold memory, without arguments), in id order."""
        return sorted(run for run, state in self._runs.items() if not states or state in states)

    def overlaps(self, run: Run) -> bool:
        """Whether a page of the run holds memory here."""
        # Held runs are disjoint: only the last one that begins before this run's end can reach into it.
        held = self._order.get(run.domain, [])
        at = bisect_left(held, PageId(run.end), key=_first) - 1
        return at >= 0 and held[at].end > run.first

    def become(self, runs: tuple[Run, ...], state: RunState | None) -> None:
        """Move runs; the only writer of their states. Refuses an edge that is not in the table (S6)."""
        for run in runs:
            old = self._runs.get(run)
            if state not in _EDGES[old]:
                require(False, "S6", f"rank {self._rank}: {run} from {old} to {state}")
            if state is None:
                if self._runs.pop(run, None) is not None:
                    held = self._order[run.domain]
                    held.pop(bisect_left(held, run.first, key=_first))
                continue
            if old is None:
                insort(self._order.setdefault(run.domain, []), run, key=_first)
            self._runs[run] = state


def _first(run: Run) -> PageId:
    return run.first


__all__ = ["RETAINED", "RunState", "RunTable"]
