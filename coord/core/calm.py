"""The fast path of a decision: steps in which there is nothing to decide, found without deciding.

An engine decodes hundreds of steps between two growths, and a whole decision costs it as much in each of them as in the
one that grows. After a decision that had nothing to say, the next one depends on inputs of the leader, which end the
calm, on the time, and on three numbers per domain: what the step may take (W), what is free, and what the last step
took. Growth wants more when any of them passes a bound, and the bounds are known. A step within them only leaves its
numbers behind, and the next whole decision counts it as if it had been decided too: nothing is decided differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .types import DomainId, Tick

if TYPE_CHECKING:
    from .leader import Leader
    from .replica import FreeList

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Bounds:
    """Within what a decision finds nothing to do in a domain.

    Attributes:
        wanted: most blocks that the step may take.
        free: least free blocks.
        taken: most blocks that the last step took.
    """

    wanted: int
    free: int
    taken: int


ANY = Bounds(UNBOUNDED, 0, UNBOUNDED)
"""Nothing could be grown, whatever is wanted."""


@dataclass(slots=True)
class Numbers:
    """What the steps of a calm leave behind, of one domain.

    Attributes:
        domain: which one.
        free_list: its free blocks.
        most_wanted, least_free, most_taken: its :class:`Bounds`, here because all that a step looks at lies together.
        have: free blocks in the present step.
        wanted: most blocks that a step was about to take.
        least: least free blocks.
        taken: most blocks that a step took.
    """

    domain: DomainId
    free_list: FreeList
    most_wanted: int
    least_free: int
    most_taken: int
    have: int = 0
    wanted: int = 0
    least: int = UNBOUNDED
    taken: int = 0


class Calm:
    """Whether the next step needs a decision.

    Args:
        leader: whose decisions.

    Threads: as the leader.
    """

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._numbers: list[Numbers] = []
        self._until = Tick(0)
        self._last = Tick(0)
        self._left = 0
        """Steps that need no decision, at most."""
        self._steps = 0

    @property
    def holds(self) -> bool:
        """Whether the last step needed none, or found nothing, and nothing has come since; memory is not short then."""
        return self._left > 0

    def begins(self, until: Tick) -> None:
        """A decision had nothing to say, and growth ahead of demand nothing to do.

        Args:
            until: when the next decision is due in any case.
        """
        leader = self._leader
        demand, reclaim = leader.demand, leader.reclaim
        self.ends()
        if not leader.active or leader.commit.txn is not None or leader.log.due() or demand.idle:
            return
        if leader.commit.retained or leader.backoff.active(leader.now) or reclaim.pressed() or leader.quiescent():
            return
        numbers = []
        for index, free_list in enumerate(leader.replica.free_lists):
            bounds = demand.bounds(DomainId(index))
            if bounds is None:
                return
            numbers.append(Numbers(DomainId(index), free_list, bounds.wanted, bounds.free, bounds.taken))
        self._numbers = numbers
        self._until = min(until, demand.windows_end())
        self._left = reclaim.steps_to_look()

    def lasts(self, now: Tick) -> bool:
        """Whether the step that begins needs no decision; its W is in ``demand.step_blocks`` already."""
        if self._left <= 0 or now >= self._until:
            return False
        demand = self._leader.demand
        blocks, left = demand.step_blocks, demand.left
        # The engine's own work has emptied the processor's caches before every step: little is touched here.
        for item in self._numbers:
            domain = item.domain
            item.have = have = item.free_list.available()
            if blocks[domain] > item.most_wanted or have < item.least_free or left[domain] - have > item.most_taken:
                return False
        for item in self._numbers:
            have, wanted, taken = item.have, blocks[item.domain], left[item.domain] - item.have
            left[item.domain] = have
            if wanted > item.wanted:
                item.wanted = wanted
            if taken > item.taken:
                item.taken = taken
            if have < item.least:
                item.least = have
        self._left -= 1
        self._steps += 1
        self._last = now
        return True

    def ends(self) -> None:
        """Something has happened, or a decision is made: what the steps since the last one left behind counts now."""
        self._left = 0
        if not self._steps:
            return
        self._leader.reclaim.skipped(self._steps)
        self._steps = 0
        for item in self._numbers:
            self._leader.demand.skipped(item, self._last)


__all__ = ["ANY", "Bounds", "Calm", "Numbers"]
