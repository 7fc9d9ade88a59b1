"""The engine's own free lists of ids, told which ids exist; those of request rows: ``rows.py``.

Allocation and freeing stay with the engine. At a mark a published run is appended to its list and a retired one is
taken out; after the engine's ``clear`` the list is rebuilt from what is published. Until the engine has built the
list (its null page must be backed before that) only the pages are remembered.

Threads: the scheduler thread. Blocks: never. Where a list lives on a device, nothing here waits for it: what has to be
known of the ids arrives later (``census.py``, ``gate.py``).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from ..coord.core.invariants import require
from ..coord.core.reclaim import RUNS_PER_RECLAIM_MAX
from .book import PageBook
from .census import Census, CopyFactory, HostCopy, Ids, Ledger
from .gate import DeviceGate, Leaving, RetireCheck, stale, without


class TokenList:
    """Free list of a token allocator: ids of tokens (page size 1) or of token pages.

    Args:
        name: domain.
        blocks: blocks of the domain, the null block included.
        blocks_per_page: B.
        ids: largest id of the allocator.
        copy: starts a copy of device numbers to the host.
    """

    def __init__(self, name: str, blocks: int, blocks_per_page: int, ids: int, copy: CopyFactory = HostCopy) -> None:
        self.book = PageBook(name, blocks, blocks_per_page, ids)
        self._allocator: Any = None
        # Allocators that sort while they allocate keep what was freed apart until then.
        self._sorts = True
        self._copy = copy
        self._ledger = Ledger()
        self._census: Census | None = None
        self._coming: Census | None = None
        self._leaving: list[Leaving] = []
        self._checks: list[RetireCheck] = []
        self._to_fence: list[RetireCheck] = []
        self._gate: DeviceGate | None = None
        self._moves = 0
        """Checksum of all moves so far: what is known on the host of the order of a list on a device."""

    def bind(self, allocator: Any) -> None:
        """The engine has built its allocator: its list holds published ids only from now on."""
        self._allocator = allocator
        self._sorts = bool(getattr(allocator, "need_sort", True))
        device = allocator.free_pages.device
        if device.type != "cpu" or self._copy is not HostCopy:
            self._gate = DeviceGate(self.book, device, self._copy)
            # The page-locked memory of later copies is made here: making it then could wait for the device.
            # Sizes are kept by powers of two, and two counts can be on their way at once.
            checks = (2 << power for power in range(RUNS_PER_RECLAIM_MAX.bit_length()))
            sizes = (2 * self.book.pages, 2 * self.book.pages, *checks, 1)
            made = [self._copy(torch.zeros(size, dtype=torch.int64, device=device)) for size in sizes]
            del made
        self.rebuild()

    # ------------------------------------------------------------------ for the engine's views

    @property
    def device(self) -> torch.device:
        """Where the engine's list is."""
        device: torch.device = self._allocator.free_pages.device
        return device

    @property
    def missing(self) -> int:
        """Ids of the allocator that are not published: free to the engine's accounts, not in its list."""
        return self.book.ids - self.book.count

    def rebuild(self) -> None:
        """After the engine's ``clear``: every published id is free."""
        if self._allocator is not None:
            self.replace(self.listed(self.book.all_ids()))

    # ------------------------------------------------------------------ all of it at once

    def free_ids(self) -> Ids:
        """All free ids, in the order of the list and of what waits to be merged into it. Blocks: for the device."""
        # Part by part: on a full card there is no memory to put them together first.
        return np.concatenate([part.cpu().numpy() for part in self._parts()]).astype(np.int64, copy=False)

    def beside(self, numbers: Ids) -> torch.Tensor:
        """Numbers on the device of the list, int64, without waiting for it."""
        found = torch.from_numpy(numbers)
        # From page-locked memory: a copy from any other may wait for the stream.
        return found if self.device.type == "cpu" else found.pin_memory().to(self.device, non_blocking=True)

    def listed(self, ids: Ids) -> torch.Tensor:
        """Ids as the allocator keeps them, for :meth:`replace`."""
        return self.beside(ids).to(self._allocator.free_pages.dtype)

    def moved(self, sources: Ids, targets: Ids, free: torch.Tensor) -> None:
        """Ids in use have changed places. Ranks that moved other ids differ in :meth:`ids_crc` from here on.

        Args:
            sources: ids that were left.
            targets: where each of them went.
            free: all free ids, for :meth:`replace`.
        """
        self.replace(free)
        for ids in (sources, targets):
            self._moves = zlib.crc32(np.ascontiguousarray(ids).data, self._moves)

    def replace(self, ids: torch.Tensor) -> None:
        """The list is these ids from now on, in this order; nothing waits to be merged, as this version keeps it.

        Args:
            ids: as :meth:`listed` makes them; all of them are published, and nobody uses them.
        """
        allocator = self._allocator
        allocator.free_pages = ids
        if getattr(allocator, "release_pages", None) is not None:
            allocator.release_pages = allocator.release_pages[:0]
        if getattr(allocator, "staged_pages", None):
            allocator.staged_pages = []
            allocator.num_staged_pages = 0
        # The order is another one: what is known of depths is not.
        self._census = self._coming = None

    # ------------------------------------------------------------------ what enters

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the engine is about to put into its list.

        Args:
            ids: int64, ids of this list.

        Returns:
            What may enter. On a device nobody waits for the answer: an id that is not published is replaced by the
            null block, whose memory always exists, and :meth:`verify` reports it as soon as the device has said so.

        Raises:
            InvariantViolation: on the host, an id is not published.
        """
        if not len(ids):
            return ids
        self._ledger.entered += len(ids)
        if self._gate is not None:
            return self._gate.admit(ids)
        bad = self.book.first_unpublished(ids.numpy())
        require(bad is None, "S4", stale(self.book.name, bad))
        return ids

    # ------------------------------------------------------------------ EngineList

    def published(self) -> int:
        """Ids that are backed and usable, free or in use."""
        return self.book.count

    def available(self) -> int:
        """Ids that an allocation could take now."""
        if self._allocator is None:
            return self.book.count
        if not self._sorts:
            # In every step: the length of a tensor goes through Python, the count of its elements does not.
            return int(self._allocator.free_pages.numel())
        return sum(part.numel() for part in self._parts())

    def publish(self, first_page: int, count: int) -> None:
        """Append the ids of these pages."""
        ids = self.book.add(first_page, count)
        if self._allocator is None or not ids.size:
            return
        free = self._allocator.free_pages
        low, high = int(ids[0]), int(ids[-1]) + 1
        self._allocator.free_pages = torch.cat((free, torch.arange(low, high, dtype=free.dtype, device=free.device)))
        self._ledger.entered += ids.size
        if self._gate is not None:
            self._gate.open(low, high)

    def retire(self, first_page: int, count: int) -> None:
        """Take the ids of these pages out.

        Raises:
            ValueError: not all of them are published and free. On a device that is found when the device has said
                so: until then the fence of the retirement has not passed, so nothing is unmapped.
        """
        ids = self.book.ids_of(first_page, count)
        if self._allocator is None or not ids.size:
            self.book.remove(first_page, count)
            return
        if any(map(len, self._parts()[1:])):
            self.sort()
        leaving = Leaving(self.book.name, first_page, count, ids.size)
        low, high = int(ids[0]), int(ids[-1]) + 1
        rest, leaving.found = without(self._allocator.free_pages, low, high)
        if self._gate is None:
            if why := leaving.wrong(*leaving.found.tolist()):
                raise ValueError(why)
        else:
            self._leaving.append(leaving)
            self._gate.shut(low, high)
        self.book.remove(first_page, count)
        self._allocator.free_pages = rest
        self._ledger.retired += ids.size
        for census in (self._census, self._coming):
            if census is not None:
                census.forget(slice(first_page, first_page + count))

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every usable id of these pages is known to be published and free. Never waits for a device.

        Raises:
            InvariantViolation: the engine has freed an id twice.
        """
        if self._allocator is None:
            return True
        parts = self._parts()
        self._look(parts)
        census = self._census
        if census is None or (self._sorts and not census.is_of(parts)):
            # A list that the engine sorts gives from anywhere.
            return False
        pages = slice(first_page, first_page + count)
        return census.is_free(pages, self.book.ids_of(first_page, count).size, self.available())

    def sort(self) -> None:
        """Low ids first."""
        if self._allocator is not None:
            self.replace(torch.sort(torch.cat(self._parts()))[0])

    def ids_crc(self) -> int:
        """Checksum of the free ids in their order, and of moves; on a device of moves alone."""
        crc = self._moves
        if self._allocator is None:
            return crc
        for part in self._parts():
            if part.device.type != "cpu":
                return self._moves
            crc = zlib.crc32(part.contiguous().numpy().data, crc) if len(part) else crc
        return crc

    def verify(self) -> None:
        """Look at what the device has reported since the last mark. Never waits for it.

        Raises:
            InvariantViolation: an id that is not published was freed, or a retired run was not entirely free.
        """
        if self._gate is None:
            return
        bad = self._gate.reported()
        require(bad is None, "S4", stale(self.book.name, bad))
        self._ask()
        while self._checks and self._checks[0].arrived():
            why = self._checks.pop(0).failed()
            require(not why, "S6", why)

    def take_checks(self) -> list[RetireCheck]:
        """Retirements since the last call that the device has still to confirm, for the fence behind them."""
        self._ask()
        taken, self._to_fence = self._to_fence, []
        return taken

    # ------------------------------------------------------------------ inner

    def _ask(self) -> None:
        """Let the device report on all runs that have left since the last time, in one copy."""
        if self._leaving:
            check = RetireCheck(self._leaving, self._copy)
            self._leaving = []
            self._checks.append(check)
            self._to_fence.append(check)

    def _look(self, parts: list[torch.Tensor]) -> None:
        """Read the census that has arrived; take a new one if the list has changed and none is on its way."""
        self._land()
        if self._coming is None and (self._census is None or not self._census.is_of(parts)):
            book = self.book
            self._coming = Census(parts, book.pages, book.blocks_per_page, self._ledger, self._copy)
            self._land()

    def _land(self) -> None:
        if self._coming is None or not self._coming.arrived():
            return
        self._census, self._coming = self._coming, None
        repeated = self._census.repeated
        require(not repeated, "S6", f"domain {self.book.name}: {repeated} ids are in the free list twice")

    def _parts(self) -> list[torch.Tensor]:
        """Everything that is free, in the order in which the engine merges it."""
        allocator = self._allocator
        parts = [allocator.free_pages]
        if not self._sorts:
            return parts
        released = getattr(allocator, "release_pages", None)
        if released is not None:
            parts.append(released)
        return [*parts, *getattr(allocator, "staged_pages", ())]


__all__ = ["TokenList"]
