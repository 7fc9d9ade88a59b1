"""The engine's own free list of request rows, told which rows exist. Rows are known on the host, at the call."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..coord.core.invariants import require
from .book import PageBook
from .gate import stale

if TYPE_CHECKING:
    from .gate import RetireCheck


class RowList:
    """Free list of request rows: a list of Python integers whose tail is handed out first.

    Which rows are free is kept beside the list, a flag for each and a count for each page, as they enter and leave it:
    a row that is freed twice is found at the call, and neither that nor picking runs walks through the list. Where the
    list has another length than what was noticed, somebody changed it without telling, and it is looked at anew.

    Args:
        name: domain.
        blocks: rows, the padding row 0 included.
        blocks_per_page: B.
        ids: largest row.

    Threads: the scheduler thread. Blocks: never.
    """

    def __init__(self, name: str, blocks: int, blocks_per_page: int, ids: int) -> None:
        self.book = PageBook(name, blocks, blocks_per_page, ids)
        self._pool: Any = None
        self._rows_of_page = [self.book.ids_of(page, 1).size for page in range(self.book.pages)]
        self._free = bytearray(ids + 1)
        self._free_of_page = [0] * self.book.pages
        self._counted = 0

    def bind(self, pool: Any) -> None:
        """The engine has built its rows: its list holds published rows only from now on."""
        self._pool = pool
        self.rebuild()

    @property
    def missing(self) -> int:
        """Rows that are not published: free to the engine's accounts, not in its list."""
        return self.book.ids - self.book.count

    def rebuild(self) -> None:
        """After the engine's ``clear``: every published row is free, low ones first."""
        if self._pool is not None:
            self._pool.free_slots = self.book.all_ids()[::-1].tolist()
            self._count()

    def published(self) -> int:
        """Rows that are backed and usable, free or in use."""
        return self.book.count

    def available(self) -> int:
        """Rows that could be handed out now."""
        return self.book.count if self._pool is None else len(self._pool.free_slots)

    def publish(self, first_page: int, count: int) -> None:
        """Add the rows of these pages where they are handed out last."""
        rows = self.book.add(first_page, count).tolist()
        if self._pool is not None:
            self._pool.free_slots[:0] = rows[::-1]
            self._mark(rows, True)

    def retire(self, first_page: int, count: int) -> None:
        """Take the rows of these pages out.

        Raises:
            ValueError: not all of them are free.
        """
        if not self.run_is_free(first_page, count):
            raise ValueError(f"domain {self.book.name}: rows of pages {first_page}+{count} are not entirely free")
        rows = self.book.remove(first_page, count).tolist()
        if self._pool is not None:
            gone = set(rows)
            self._pool.free_slots[:] = [row for row in self._pool.free_slots if row not in gone]
            self._mark(rows, False)

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every row of these pages is published and free."""
        if self._pool is None:
            return True
        self._notice()
        pages = slice(first_page, first_page + count)
        return self._free_of_page[pages] == self._rows_of_page[pages]

    def sort(self) -> None:
        """Low rows are handed out first."""
        if self._pool is not None:
            self._pool.free_slots.sort(reverse=True)

    def ids_crc(self) -> int:
        """Checksum of the free rows in their order."""
        return 0 if self._pool is None else zlib.crc32(np.array(self._pool.free_slots, dtype=np.int64).data)

    def verify(self) -> None:
        """Rows are known on the host: nothing is ever reported later."""

    def admit(self, rows: Sequence[int]) -> Sequence[int]:
        """Rows that the engine is about to put into its list; the same ones.

        Raises:
            InvariantViolation: one of them is not published, is in the list already, or is named twice.
        """
        bad = self.book.first_unpublished(np.array(rows, dtype=np.int64))
        require(bad is None, "S4", stale(self.book.name, bad))
        self._notice()
        again = self._mark(rows, True)
        require(again is None, "S6", f"domain {self.book.name}: the engine freed row {again} twice")
        return rows

    def handed_out(self, rows: Sequence[int]) -> None:
        """The engine has taken these rows from its list."""
        self._mark(rows, False)

    def take_checks(self) -> list[RetireCheck]:
        """Rows are known on the host: there is nothing to confirm."""
        return []

    def _mark(self, rows: Sequence[int], free: bool) -> int | None:
        """These rows have entered the list, or are about to; or have left it. One that was so already, or ``None``."""
        flags, of_page, per_page, step = self._free, self._free_of_page, self.book.blocks_per_page, 1 if free else -1
        again = None
        for row in rows:
            if flags[row] == free:
                again = row
            flags[row] = free
            of_page[row // per_page] += step
        self._counted += step * len(rows)
        return again

    def _notice(self) -> None:
        """Look at the list anew if it has changed where nobody told."""
        if self._counted != len(self._pool.free_slots):
            self._count()

    def _count(self) -> None:
        rows = np.array(self._pool.free_slots, dtype=np.int64)
        flags = np.zeros(self.book.ids + 1, dtype=np.uint8)
        flags[rows] = 1
        self._free = bytearray(flags.tobytes())
        self._free_of_page = np.bincount(rows // self.book.blocks_per_page, minlength=self.book.pages).tolist()
        self._counted = rows.size


__all__ = ["RowList"]
