"""Which pages of a domain are published, and so which ids the engine may have; shared by all kinds of lists."""

from __future__ import annotations

import numpy as np

from ..coord.core.invariants import require
from .census import Ids


class PageBook:
    """Which pages of a domain are published.

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
        self._begins = np.zeros_like(self._published)
        # By id, the first one above the largest included: what the engine frees is looked up here.
        self._usable = np.zeros(ids + 2, dtype=np.bool_)
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
        self._begins[first_page] = True
        ids = self.ids_of(first_page, count)
        self._usable[ids] = True
        self._count += ids.size
        return ids

    def remove(self, first_page: int, count: int) -> Ids:
        """These pages exist no more; their ids."""
        pages = self._published[first_page : first_page + count]
        require(bool(pages.all()), "S6", f"domain {self.name}: pages {first_page}+{count} are not published")
        pages[:] = False
        self._begins[first_page : first_page + count] = False
        # Where only a part of a run went, its end is a run by itself.
        self._begins[first_page + count : first_page + count + 1] |= self._published[
            first_page + count : first_page + count + 1
        ]
        ids = self.ids_of(first_page, count)
        self._usable[ids] = False
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

    def runs(self) -> tuple[Ids, Ids]:
        """First page and length in pages of each published run, ascending: what came together goes together."""
        firsts = np.flatnonzero(self._begins)
        of_run = np.searchsorted(firsts, np.flatnonzero(self._published), side="right") - 1
        return firsts, np.bincount(of_run, minlength=len(firsts))

    def all_ids(self) -> Ids:
        """All published ids, ascending."""
        return np.flatnonzero(self._usable).astype(np.int64)

    def are_all(self, ids: Ids) -> bool:
        """Whether these are all published ids, once each."""
        if not ids.size or ids.min() < 0 or ids.max() >= self._usable.size:
            return not ids.size and not self._count
        return bool((np.bincount(ids, minlength=self._usable.size) == self._usable).all())

    def first_unpublished(self, ids: Ids) -> int | None:
        """One of these ids that is not published or not an id at all; ``None``: all are published."""
        # What is no id falls on the null block or on the one above the largest, and neither is usable.
        known = self._usable.take(ids, mode="clip")
        return None if known.all() else int(ids[~known][0])


__all__ = ["PageBook"]
