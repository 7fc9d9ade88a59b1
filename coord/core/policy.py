"""How much to grow, when to give back, how long to back off. Pure functions of counts; the leader decides with them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .types import Tick


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the leader's decisions; times in ticks (microseconds), sizes in pages of a domain.

    Attributes:
        growth_deadline: a grow that has not been answered by then is queried or given up.
        query_interval: between the first and the second query, and after it.
        lease: silence that ends a rank.
        drain_deadline: a retirement that has not drained by then is cancelled.
        map_retries: identical retries after a failed MAP before the runs are quarantined.
        run_pages_min: pages of a run when demand is new.
        run_pages_max: pages of a run under sustained demand.
        run_share: where demand outlasts such runs, a run may be one part in so many of what is held; 0: never.
        reserved_pages_min: published free pages below which the leader grows in the background.
        reserved_pages_max: published free pages above which it gives back while busy.
        reclaim_interval_steps: engine steps between two reclaims while busy.
        demand_window: how long the largest demand of a step and the least free memory are remembered while busy; 0: not
            at all.
        backoff_min: first pause after a refusal.
        backoff_max: longest pause.
        rejoin: a lost follower ends the epoch, not the coordinator.
        seed: of the jitter that keeps two engines from refusing each other in step.
    """

    growth_deadline: int = 2_000_000
    query_interval: int = 1_000_000
    lease: int = 30_000_000
    drain_deadline: int = 10_000_000
    map_retries: int = 2
    run_pages_min: int = 1
    run_pages_max: int = 256
    run_share: int = 0
    reserved_pages_min: int = 5
    reserved_pages_max: int = 10
    reclaim_interval_steps: int = 16
    demand_window: int = 2_000_000
    backoff_min: int = 50_000
    backoff_max: int = 2_000_000
    rejoin: bool = False
    seed: int = 0

    @property
    def look_interval(self) -> int:
        """Longest time between two looks at the clock, in ticks.

        A deadline is seen late by at most a quarter of it, and a gap of this length is far from looking like a process
        that was stopped (a quarter of the lease).
        """
        return min(self.growth_deadline, self.query_interval, self.drain_deadline, self.lease // 2) // 4


RUN_DOUBLING = 2
"""A domain that grows again without having given anything back takes runs this much longer."""

SUSTAINED_GROWTHS = 4
"""So many growths of the longest ordinary run, with nothing given back between, and runs follow what is held."""


class RunLength:
    """Run length of one domain: doubles under sustained demand, starts again after a reclaim or a refusal.

    Small runs come back sooner (a run is given back whole); long runs cost fewer transactions and driver calls per
    byte. A domain that has grown for long without giving anything back takes runs in proportion to what it holds, so
    that the number of growths follows the logarithm of the size and not the size.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._longest = 0
        """Growths in a row with runs of the ordinary length or more."""
        self.pages = policy.run_pages_min

    def grew(self, pages: int, held: int) -> None:
        """A grow of this domain was published.

        Args:
            pages: pages that it brought: where a step needs many at once, the next run need not begin small.
            held: pages of the domain that are published now.
        """
        policy = self._policy
        self._longest += max(self.pages, pages) >= policy.run_pages_max
        self.pages = max(self.pages, min(max(self.pages * RUN_DOUBLING, pages), policy.run_pages_max))
        if policy.run_share and self._longest >= SUSTAINED_GROWTHS:
            self.pages = max(self.pages, held // policy.run_share)

    def relaxed(self) -> None:
        """Demand went away, or memory is short."""
        self._longest = 0
        self.pages = self._policy.run_pages_min


class RecentPeak:
    """Largest demand of one step in the last one to two windows.

    The demand of a step jumps whenever prompts arrive. Growth that follows every jump, and a reclaim after it, would
    put driver calls on the critical path of each prompt; what was needed a moment ago is kept ready instead.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._ends = Tick(0)
        self._current = 0
        self._previous = 0

    def note(self, blocks: int, now: Tick) -> None:
        """The demand of a step."""
        if now >= self._ends:
            fresh = now < self._ends + self._window
            self._previous = self._current if fresh else 0
            self._current = 0
            self._ends = Tick(now + self._window)
        self._current = max(self._current, blocks)

    @property
    def ends(self) -> Tick:
        """When the present window ends."""
        return self._ends

    def forget(self) -> None:
        """Demand is over."""
        self._current = self._previous = 0

    @property
    def blocks(self) -> int:
        """The largest demand noted."""
        return max(self._current, self._previous) if self._window else 0


class RecentLow:
    """Least of a number in the last one to two windows: what was there all the time.

    Free memory jumps as prompts come and go. What the next prompt takes again is not worth a reclaim and a growth; what
    nobody has touched for a while is.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._ends = Tick(0)
        self._current = 0
        self._previous = 0

    def note(self, number: int, now: Tick) -> None:
        """The number at one step."""
        if now >= self._ends:
            # However long ago: where nobody took a step nothing changed.
            self._previous = self._current
            self._current = number
            self._ends = Tick(now + self._window)
        self._current = min(self._current, number)

    @property
    def ends(self) -> Tick:
        """When the present window ends."""
        return self._ends

    def least(self, number: int) -> int:
        """The least lately, the present number included; without a window just that. 0 until a window has passed."""
        return min(number, self._current, self._previous) if self._window else number


class Backoff:
    """Seeded exponential pause after refusals. Answers stay known (a miss) until it is over."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._random = random.Random(policy.seed)
        self._pause = 0
        self.until = Tick(0)

    def active(self, now: Tick) -> bool:
        """Whether asking again would only repeat the last refusal."""
        return now < self.until

    def refused(self, now: Tick) -> None:
        """A grow was refused or timed out."""
        self._pause = min(max(self._pause * 2, self._policy.backoff_min), self._policy.backoff_max)
        self.until = Tick(now + self._pause + self._random.randrange(self._pause // 2 + 1))

    def lifted(self, now: Tick) -> None:
        """What was refused may fit now. The next refusal pauses for longer all the same."""
        self.until = min(self.until, now)

    def succeeded(self) -> None:
        """A grow was published."""
        self._pause = 0
        self.until = Tick(0)


def growth_target(free: int, low: int, run_pages: int, absent: int) -> int:
    """Pages to grow in the background.

    Args:
        free: published free pages.
        low: watermark.
        run_pages: current run length.
        absent: pages that could still be grown.

    Returns:
        0 when ``free`` has reached the watermark or nothing is left.
    """
    if free >= low or absent <= 0:
        return 0
    return min(max(low - free, run_pages), absent)


def may_retire(free: int, run_pages: int, low: int, high: int, *, idle: bool) -> bool:
    """Whether a free run may go: never below the growth watermark, while busy not below the upper one either.

    Args:
        free: published free pages, the run included.
        run_pages: pages of the run.
        low: growth watermark; the floor at idle.
        high: upper watermark; the floor while busy.
        idle: nothing runs.
    """
    return free - run_pages >= (low if idle else max(high, low + 1))
