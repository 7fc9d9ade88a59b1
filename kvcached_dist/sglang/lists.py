"""The engine's own free lists, told which ids exist.

Allocation and freeing stay with the engine. At a mark a published run is appended to its list and a retired one is
taken out; after the engine's ``clear`` the list is rebuilt from what is published. Until the engine has built the
list (its null page must be backed before that) only the pages are remembered.

Threads: the scheduler thread. Blocks: :meth:`TokenList.run_is_free` and :meth:`TokenList.retire` read a device-side
list and wait for the device; they run at idle and under pressure only.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..coord.core.invariants import require

Ids = npt.NDArray[np.int64]


class PageBook:
    """Which pages of a domain are published; shared by all kinds of lists.

    Args:
        name: domain, for errors.
        blocks: blocks of the domain, the null block included.
        blocks_per_page: B.
        ids: largest id that the engine may hand out; blocks above it are padding of the last page.
    """

    def __init__(self, name: str, blocks: int, blocks_per_page: int, ids: int) -> None:
        self.name = name
        self.blocks_per_page = blocks_per_page
        self.ids = ids
        self._published = np.zeros(blocks // blocks_per_page, dtype=np.bool_)
        self._count = 0

    def ids_of(self, first_page: int, count: int) -> Ids:
        """Usable ids of these pages, ascending; never the null block."""
        per_page = self.blocks_per_page
        return np.arange(max(1, first_page * per_page), min((first_page + count) * per_page, self.ids + 1))

    def add(self, first_page: int, count: int) -> Ids:
        """These pages exist from now on; their ids."""
        pages = self._published[first_page : first_page + count]
        require(not pages.any(), "S6", f"domain {self.name}: pages {first_page}+{count} are published already")
        pages[:] = True
        ids = self.ids_of(first_page, count)
        self._count += ids.size
        return ids

    def remove(self, first_page: int, count: int) -> Ids:
        """These pages exist no more; their ids."""
        pages = self._published[first_page : first_page + count]
        require(bool(pages.all()), "S6", f"domain {self.name}: pages {first_page}+{count} are not published")
        pages[:] = False
        ids = self.ids_of(first_page, count)
        self._count -= ids.size
        return ids

    @property
    def pages(self) -> int:
        """Pages of the domain."""
        return len(self._published)

    @property
    def count(self) -> int:
        """Published ids."""
        return self._count

    def all_ids(self) -> Ids:
        """All published ids, ascending."""
        usable = np.repeat(self._published, self.blocks_per_page)[: self.ids + 1].copy()
        usable[:1] = False
        return np.flatnonzero(usable).astype(np.int64)


class TokenList:
    """Free list of a token allocator: ids of tokens (page size 1) or of token pages.

    Args:
        name: domain.
        blocks: blocks of the domain, the null block included.
        blocks_per_page: B.
        ids: largest id of the allocator.
    """

    def __init__(self, name: str, blocks: int, blocks_per_page: int, ids: int) -> None:
        self.book = PageBook(name, blocks, blocks_per_page, ids)
        self._allocator: Any = None
        self._free_per_page: Ids = np.empty(0, dtype=np.int64)
        self._counted: list[torch.Tensor] = []

    def bind(self, allocator: Any) -> None:
        """The engine has built its allocator: its list holds published ids only from now on."""
        self._allocator = allocator
        self.rebuild()

    # ------------------------------------------------------------------ for the engine's views

    @property
    def missing(self) -> int:
        """Ids of the allocator that are not published: free to the engine's accounts, not in its list."""
        return self.book.ids - self.book.count

    def rebuild(self) -> None:
        """After the engine's ``clear``: every published id is free."""
        self._set_free(torch.from_numpy(self.book.all_ids()))

    # ------------------------------------------------------------------ EngineList

    def published(self) -> int:
        """Ids that are backed and usable, free or in use."""
        return self.book.count

    def available(self) -> int:
        """Ids that an allocation could take now."""
        if self._allocator is None:
            return self.book.count
        return sum(len(part) for part in self._parts())

    def publish(self, first_page: int, count: int) -> None:
        """Append the ids of these pages."""
        ids = self.book.add(first_page, count)
        if self._allocator is not None:
            free = self._allocator.free_pages
            self._allocator.free_pages = torch.cat((free, torch.from_numpy(ids).to(free)))

    def retire(self, first_page: int, count: int) -> None:
        """Take the ids of these pages out; an error unless all of them are free."""
        require(self.run_is_free(first_page, count), "S6", f"pages {first_page}+{count} are not entirely free")
        ids = self.book.remove(first_page, count)
        if self._allocator is None or not ids.size:
            return
        low, high = int(ids[0]), int(ids[-1])
        counts = self._counts()
        self._filter(lambda part: part[(part < low) | (part > high)])
        # Several runs leave at one mark: what is known of the other pages stays true.
        counts[first_page : first_page + count] = 0
        self._counted = self._parts()

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every usable id of these pages is published and free."""
        ids = self.book.ids_of(first_page, count)
        if self._allocator is None:
            return True
        return int(self._counts()[first_page : first_page + count].sum()) == ids.size

    def sort(self) -> None:
        """Low ids first."""
        if self._allocator is not None:
            self._set_free(torch.sort(torch.cat(self._parts()))[0])

    def ids_crc(self) -> int:
        """Checksum of the free ids in their order; 0 on a device."""
        if self._allocator is None:
            return 0
        crc = 0
        for part in self._parts():
            if part.device.type != "cpu":
                return 0
            crc = zlib.crc32(part.contiguous().numpy().data, crc) if len(part) else crc
        return crc

    # ------------------------------------------------------------------ inner

    def _parts(self) -> list[torch.Tensor]:
        """Everything that is free, in the order in which the engine merges it."""
        allocator = self._allocator
        parts = [allocator.free_pages]
        released = getattr(allocator, "release_pages", None)
        if released is not None:
            parts.append(released)
        return [*parts, *getattr(allocator, "staged_pages", ())]

    def _set_free(self, ids: torch.Tensor) -> None:
        allocator = self._allocator
        if allocator is None:
            return
        free = allocator.free_pages
        allocator.free_pages = ids.to(device=free.device, dtype=free.dtype)
        self._filter_waiting(lambda part: part[:0])

    def _filter(self, keep: Any) -> None:
        self._allocator.free_pages = keep(self._allocator.free_pages)
        self._filter_waiting(keep)

    def _filter_waiting(self, keep: Any) -> None:
        """Ids that wait to be merged (``need_sort`` allocators), whichever way this version keeps them."""
        allocator = self._allocator
        if getattr(allocator, "release_pages", None) is not None:
            allocator.release_pages = keep(allocator.release_pages)
        if getattr(allocator, "staged_pages", None):
            staged = [keep(part) for part in allocator.staged_pages]
            allocator.staged_pages = [part for part in staged if len(part)]
            allocator.num_staged_pages = sum(len(part) for part in allocator.staged_pages)

    def _counts(self) -> Ids:
        """Free ids per page.

        The engine replaces its tensors and never writes into them, so the same objects mean the same list.
        """
        parts = self._parts()
        known = self._counted
        if len(parts) != len(known) or any(part is not old for part, old in zip(parts, known, strict=True)):
            ids = torch.cat(parts).cpu().numpy()
            pages = self.book.pages
            self._free_per_page = np.bincount(ids // self.book.blocks_per_page, minlength=pages).astype(np.int64)
            self._counted = parts
        return self._free_per_page


class RowList:
    """Free list of request rows: a list of Python integers whose tail is handed out first.

    Args:
        name: domain.
        blocks: rows, the padding row 0 included.
        blocks_per_page: B.
        ids: largest row.
    """

    def __init__(self, name: str, blocks: int, blocks_per_page: int, ids: int) -> None:
        self.book = PageBook(name, blocks, blocks_per_page, ids)
        self._pool: Any = None

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

    def published(self) -> int:
        """Rows that are backed and usable, free or in use."""
        return self.book.count

    def available(self) -> int:
        """Rows that could be handed out now."""
        return self.book.count if self._pool is None else len(self._pool.free_slots)

    def publish(self, first_page: int, count: int) -> None:
        """Add the rows of these pages where they are handed out last."""
        rows = self.book.add(first_page, count)
        if self._pool is not None:
            self._pool.free_slots[:0] = rows[::-1].tolist()

    def retire(self, first_page: int, count: int) -> None:
        """Take the rows of these pages out; an error unless all of them are free."""
        require(self.run_is_free(first_page, count), "S6", f"rows of pages {first_page}+{count} are not entirely free")
        gone = set(self.book.remove(first_page, count).tolist())
        if self._pool is not None:
            self._pool.free_slots[:] = [row for row in self._pool.free_slots if row not in gone]

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every row of these pages is published and free."""
        return self._pool is None or set(self.book.ids_of(first_page, count).tolist()) <= set(self._pool.free_slots)

    def sort(self) -> None:
        """Low rows are handed out first."""
        if self._pool is not None:
            self._pool.free_slots.sort(reverse=True)

    def ids_crc(self) -> int:
        """Checksum of the free rows in their order."""
        return 0 if self._pool is None else zlib.crc32(np.array(self._pool.free_slots, dtype=np.int64).data)


__all__ = ["PageBook", "RowList", "TokenList"]
