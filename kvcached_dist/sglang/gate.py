"""What a device checks by itself, and reports later: ids that enter a free list, and runs that leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .census import Copy, CopyFactory

if TYPE_CHECKING:
    from .book import PageBook

NONE_BAD = -1
"""Report of a device that has seen no bad id."""

UNSEEN_MAX = 64
"""Groups of ids that wait to be looked at, at most: they are looked at together at the next mark."""


def stale(domain: str, bad: int | None) -> str:
    """What is wrong with an id that entered a list, in words."""
    return f"domain {domain}: the engine freed id {bad}, which is not published"


class DeviceGate:
    """Checks the ids that the engine frees, on their device.

    Every request that ends comes through here, in the engine's own loop, where each operation on a device costs the
    host about ten microseconds. So a call makes two: what may enter is looked up in a table that maps every published
    id to itself and every other one to the null block. Page ids that the engine keeps as int32 take a third one: they
    go back as they came. What was wrong is worked out for all calls together, at marks.

    Args:
        book: which pages are published.
        device: where the list lives.
        copy: starts a copy to the host.

    Threads: the scheduler thread.
    """

    def __init__(self, book: PageBook, device: torch.device, copy: CopyFactory) -> None:
        self._top = book.ids + 1
        """Stands for every id that the allocator does not have; never published."""
        self._copy = copy
        self._enters = torch.zeros(self._top + 1, dtype=torch.int64, device=device)
        ids = torch.from_numpy(book.all_ids()).to(device)
        self._enters[ids] = ids
        self._worst = torch.full((1,), NONE_BAD, dtype=torch.int64, device=device)
        self._unseen: list[torch.Tensor] = []
        self._report: Copy | None = None
        self._unreported = False

    def open(self, low: int, high: int) -> None:
        """Ids from ``low`` up to, not including, ``high`` are published."""
        self._look()
        self._enters[low:high] = torch.arange(low, high, device=self._enters.device)

    def shut(self, low: int, high: int) -> None:
        """These ids are published no more."""
        self._look()
        self._enters[low:high].fill_(0)

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids, int32 or int64 as they came; the null block for each that is not published. See :meth:`reported`."""
        # Not the engine's own tensor from here on: that may be a view of a table whose rows are used again.
        known = ids.clamp(0, self._top)
        self._unseen.append(known)
        if len(self._unseen) >= UNSEEN_MAX:
            self._look()
        return self._enters.index_select(0, known).to(ids.dtype)

    def reported(self) -> int | None:
        """The largest bad id that the device has reported so far. Does not block.

        Ids that the allocator does not have are reported as the first of them, ids below the null block as the null
        block. What was admitted since the last call is looked at from here on.
        """
        self._look()
        if self._report is None or not self._report.arrived():
            return None
        worst = int(self._report.numbers()[0])
        self._report = self._copy(self._worst) if self._unreported else None
        self._unreported = False
        return worst if worst != NONE_BAD else None

    def _look(self) -> None:
        """Let the device look at what was admitted, while it is known as it was then which ids are published."""
        if not self._unseen:
            return
        ids = torch.cat(self._unseen) if len(self._unseen) > 1 else self._unseen[0]
        self._unseen = []
        good = (self._enters.index_select(0, ids) == ids) & (ids > 0)
        self._worst = torch.maximum(self._worst, torch.where(good, NONE_BAD, ids).amax())
        if self._report is None:
            self._report = self._copy(self._worst)
        else:
            self._unreported = True


@dataclass(slots=True)
class Leaving:
    """A run that leaves a list.

    Attributes:
        domain: its name.
        first_page: first page of the run.
        pages: pages of it.
        usable: usable ids of it.
        found: on the device of the list: ids of the run that were in the list, and how many different ones.
    """

    domain: str
    first_page: int
    pages: int
    usable: int
    found: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))

    def wrong(self, found: int, different: int) -> str:
        """What is wrong with these numbers; empty: the run was entirely free."""
        if found == different == self.usable:
            return ""
        return (
            f"domain {self.domain}: pages {self.first_page}+{self.pages} are not entirely free: {found} ids,"
            f" {different} different ones, of {self.usable} were in the list"
        )


class RetireCheck:
    """Whether runs that have left a list were entirely free there, as their device says.

    Args:
        runs: the runs.
        copy: starts a copy to the host.

    Threads: make it in the scheduler thread; ask from any.
    """

    def __init__(self, runs: Sequence[Leaving], copy: CopyFactory) -> None:
        self._runs = tuple(runs)
        self._found = copy(torch.stack([run.found for run in runs]))

    def arrived(self) -> bool:
        """Whether the device has said it. Does not block."""
        return self._found.arrived()

    def failed(self) -> str:
        """What was wrong, once it has arrived; empty: nothing."""
        numbers = self._found.numbers().tolist()
        return "; ".join(filter(None, (run.wrong(*row) for run, row in zip(self._runs, numbers, strict=True))))

    def confirmed(self) -> bool:
        """Whether the device has said that all were entirely free. Does not block."""
        return self.arrived() and not self.failed()


def without(ids: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A list without a run whose ids are all in it, once each; shapes are known beforehand, so nobody waits.

    Args:
        ids: int64, the list.
        low: first id of the run.
        high: behind its last one.

    Returns:
        The rest in the same order, as long as it is if all of the run is in the list; and what really was there: the
        number of ids of the run, and of different ones.
    """
    count = high - low
    length = max(0, len(ids) - count)
    place = ids - low
    inside = (place >= 0) & (place < count)
    # One place more, for what leaves and for whatever is too much should the run not be entirely free.
    kept = torch.where(inside, length, torch.cumsum(~inside, 0) - 1).clamp_(max=length)
    rest = ids.new_zeros(length + 1).scatter_(0, kept, ids)[:length]
    seen = ids.new_zeros(count + 1).scatter_(0, torch.where(inside, place, count), 1)
    return rest, torch.stack((inside.sum(), seen[:count].sum()))


__all__ = ["DeviceGate", "Leaving", "RetireCheck", "stale", "without"]
