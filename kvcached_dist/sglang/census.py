"""What is known of a free list that lives on a device, without ever waiting for the device.

A census is taken by the device behind the work that was launched before it, and read when it has arrived, at a later
point of the engine's loop. Meanwhile the engine hands ids out and takes ids back. Its lists give from the head only:
so a run all of whose ids were free, and lay deeper than everything handed out since, is still entirely free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]

NEVER = 1 << 62
"""Place of an id that is in no list."""


class Copy(Protocol):
    """Numbers of a device on their way to the host."""

    def arrived(self) -> bool:
        """Whether they can be read. Does not block."""

    def numbers(self) -> Ids:
        """The numbers, once they have arrived."""


CopyFactory = Callable[[torch.Tensor], Copy]
"""Starts a copy behind the work launched so far on the current stream."""


class HostCopy:
    """A copy into page-locked memory and an event behind it; on the host the numbers themselves.

    Args:
        numbers: int64, on any device.

    Threads: make it in the thread that launches the work; ask from any thread.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.device.type == "cpu":
            return
        self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._host.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(numbers.device))

    def arrived(self) -> bool:
        """Whether the copy is done."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> Ids:
        """The numbers."""
        return self._host.numpy()


class Ledger:
    """How many ids went into and out of a list, as far as the host knows without asking the device.

    Attributes:
        entered: ids published or freed.
        retired: ids taken out by this library.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.retired = 0


class Census:
    """One look at a free list.

    Args:
        parts: the list, in the order in which the engine gives from it.
        pages: pages of the domain.
        blocks_per_page: B.
        ledger: counts of the list.
        copy: starts a copy to the host.

    Attributes:
        repeated: how often an id was in the list more than once; known once it has arrived.

    Threads: the scheduler thread.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], pages: int, blocks_per_page: int, ledger: Ledger, copy: CopyFactory
    ) -> None:
        self.parts = list(parts)
        self.repeated = 0
        self._ledger = ledger
        self._entered, self._retired = ledger.entered, ledger.retired
        self._length = sum(len(part) for part in parts)
        self._gone: list[slice] = []
        self._free: Ids | None = None
        self._depth: Ids
        ids = torch.cat(self.parts)
        # Fixed shapes only: counting with a result as long as the largest id would make the host wait for it.
        place = ids.new_full((pages * blocks_per_page,), NEVER)
        place.scatter_reduce_(0, ids, torch.arange(len(ids), device=ids.device), "amin")
        by_page = place.view(pages, blocks_per_page)
        self._copy = copy(torch.stack(((by_page < NEVER).sum(1), by_page.amin(1))))

    def is_of(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether the list is still the one that was looked at: the engine replaces its tensors, it writes to none."""
        return len(parts) == len(self.parts) and all(map(is_, parts, self.parts))

    def arrived(self) -> bool:
        """Whether it can be read. Does not block."""
        if self._free is None and self._copy.arrived():
            free, self._depth = self._copy.numbers()
            self._free = free.copy()
            self.repeated = self._length - int(free.sum())
            for pages in self._gone:
                self._free[pages] = 0
        return self._free is not None

    def forget(self, pages: slice) -> None:
        """These pages have been retired; should they come back, this census knows nothing of them."""
        if self._free is None:
            self._gone.append(pages)
        else:
            self._free[pages] = 0

    def is_free(self, pages: slice, usable: int, length: int) -> bool:
        """Whether these pages are entirely free now.

        Args:
            pages: the pages.
            usable: usable ids of them.
            length: ids in the list now.
        """
        if self._free is None or int(self._free[pages].sum()) != usable:
            return False
        retired = self._ledger.retired - self._retired
        taken = self._length + (self._ledger.entered - self._entered) - retired - length
        if taken < 0:
            return False
        # What was retired from above them has moved them up.
        return int(self._depth[pages].min()) >= taken + retired or taken == 0


__all__ = ["NEVER", "Census", "Copy", "CopyFactory", "HostCopy", "Ids", "Ledger"]
