"""What the leader gives back: runs that are entirely free, at idle, above the watermark and under a lowered limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .entries import Entry, Sort
from .pages import PageState
from .policy import may_retire
from .types import DomainId, Run, Tick

if TYPE_CHECKING:
    from .leader import Leader

RUNS_PER_RECLAIM_MAX = 64
"""Runs of one reclaim; bounds frames and the work of one agent turn."""

SORT_INTERVAL_STEPS = 256
"""Steps between two SORT entries of a domain: reordering is cheap, but not free on a device."""


class Reclaim:
    """Picks runs to retire, in the very call that broadcasts them (rule M5)."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._steps = 0
        self._next_look = leader.policy.reclaim_interval_steps
        self._sorted_at = [0] * len(leader.tables)
        self._not_before = Tick(0)

    def pick(self) -> list[Entry]:
        """RETIRE of runs that are entirely free at this very point, SORT where only their scatter is in the way."""
        leader = self._leader
        self._steps += 1
        if leader.commit.txn is not None or not leader.active or leader.quiescent() or self.paused():
            # A look that falls due meanwhile is made afterwards.
            return []
        idle = leader.demand.idle
        if idle and leader.commit.retained:
            batch = leader.commit.retained[0]
            return [leader.commit.open_reclaim(batch.runs, batch)]
        pressed = idle or self.pressed()
        if not pressed and self._steps < self._next_look:
            return []
        self._next_look = self._steps + leader.policy.reclaim_interval_steps
        runs, scattered = self._free_runs(pressed)
        if runs:
            leader.demand.relaxed(runs)
            return [leader.commit.open_reclaim(tuple(runs))]
        return [] if idle else self._sort(scattered)

    def pressed(self) -> bool:
        """Whether some rank holds more than the limit: whatever is free has to go, and is looked for in every step."""
        return self._leader.limits.overage_bytes() > 0

    def steps_to_look(self) -> int:
        """Steps until the one that looks what may go; while nothing presses."""
        return max(0, self._next_look - self._steps - 1)

    def skipped(self, steps: int) -> None:
        """So many steps passed without a decision; none of them was to look."""
        self._steps += steps

    def failed(self) -> None:
        """An unmap failed and was restored: do not try again at once."""
        self._not_before = Tick(self._leader.now + self._leader.policy.backoff_max)

    def paused(self) -> bool:
        """Whether a failed unmap is too recent to try again."""
        return self._leader.now < self._not_before

    def exchange_pages(self, domain: DomainId) -> int:
        """At idle: pages to grow so that a free run longer than the surplus can go, and just the reserve stays.

        Grown before the long run is retired: the published free pages never fall below the watermark.
        """
        leader = self._leader
        low = leader.demand.low_pages(domain)
        free = leader.demand.free_pages(domain)
        if free <= low or self.paused() or leader.commit.txn is not None:
            return 0
        free_list = leader.replica.free_lists[domain]
        for run in leader.tables[domain].runs(PageState.PUBLISHED):
            if run.first > 0 and free - run.count < low and free_list.run_is_free(run.first, run.count):
                return low - (free - run.count)
        return 0

    def _free_runs(self, pressed: bool) -> tuple[list[Run], list[DomainId]]:
        """Runs that may go, and domains with much free memory but no free run."""
        leader = self._leader
        chosen: list[Run] = []
        scattered: list[DomainId] = []
        for table in leader.tables:
            domain = table.domain
            demand = leader.demand
            low = demand.low_pages(domain)
            # Not the growth watermark alone: where memory is short that is lower than what the next prompt will take.
            high = max(leader.policy.reserved_pages_max, low, demand.recent_pages(domain))
            # Under pressure what is free goes; while busy only what nobody has needed for a while.
            free = demand.free_pages(domain, due=False) if pressed else demand.returnable_pages(domain)
            if not may_retire(free, 1, low, high, idle=pressed):
                continue  # the usual case at idle, in every step
            before = len(chosen)
            free_list = leader.replica.free_lists[domain]
            # High runs first, so that low ids stay; at idle long ones first, so that a small reserve is what stays.
            order = sorted(table.runs(PageState.PUBLISHED), key=lambda run: (run.count * pressed, run.first))
            for run in reversed(order):
                if len(chosen) >= RUNS_PER_RECLAIM_MAX or not may_retire(free, 1, low, high, idle=pressed):
                    break
                fits = run.first > 0 and may_retire(free, run.count, low, high, idle=pressed)
                if fits and free_list.run_is_free(run.first, run.count):
                    chosen.append(run)
                    free -= run.count
            if len(chosen) == before and free >= 2 * max(high, 1):
                scattered.append(domain)
        return chosen, scattered

    def _sort(self, domains: list[DomainId]) -> list[Entry]:
        entries: list[Entry] = []
        for domain in domains:
            if self._steps - self._sorted_at[domain] >= SORT_INTERVAL_STEPS:
                self._sorted_at[domain] = self._steps
                entries.append(Sort(domain))
        return entries
