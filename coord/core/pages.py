"""The leader's table of one domain: which pages exist for whom, and which to grow next."""

from __future__ import annotations

from enum import IntEnum

from .invariants import require
from .types import DomainId, PageId, Run


class PageState(IntEnum):
    """State of a page as the leader knows it; the values are the bytes of the table."""

    ABSENT = 0
    OPEN = 1
    """In the open grow transaction."""
    RETAINED = 2
    """Held by some rank after a failed MAP, never published."""
    PUBLISHED = 3
    RETIRING = 4
    QUARANTINED = 5


_EDGES: dict[PageState, frozenset[PageState]] = {
    PageState.ABSENT: frozenset({PageState.OPEN}),
    PageState.OPEN: frozenset({PageState.ABSENT, PageState.RETAINED, PageState.PUBLISHED}),
    PageState.RETAINED: frozenset({PageState.OPEN, PageState.QUARANTINED, PageState.RETIRING}),
    PageState.PUBLISHED: frozenset({PageState.RETIRING}),
    PageState.RETIRING: frozenset({PageState.PUBLISHED, PageState.RETAINED, PageState.ABSENT}),
    PageState.QUARANTINED: frozenset(),
}


class PageTable:
    """Pages of one domain.

    Args:
        domain: index of the domain.
        pages: logical capacity in pages, page 0 (null block) included.
    """

    def __init__(self, domain: DomainId, pages: int) -> None:
        self.domain = domain
        self.pages = pages
        self._states = bytearray(pages)
        self._runs: dict[int, Run] = {}
        self._count = [0] * len(PageState)
        self._count[PageState.ABSENT] = pages
        self._hint = 0
        """No ABSENT page lies below."""

    def count(self, state: PageState) -> int:
        """Pages in ``state``."""
        return self._count[state]

    def state(self, page: int) -> PageState:
        """State of one page."""
        return PageState(self._states[page])

    def runs(self, state: PageState) -> list[Run]:
        """Known runs in ``state``, in id order."""
        return [run for _, run in sorted(self._runs.items()) if self._states[run.first] == state]

    def pick(self, pages: int, largest_run: int) -> list[Run]:
        """Lowest absent pages as runs.

        Args:
            pages: pages wanted.
            largest_run: pages of one run at most.

        Returns:
            Runs of ``pages`` pages together, fewer if the domain has no more. Nothing is reserved.
        """
        picked: list[Run] = []
        at = self._hint
        while pages > 0:
            at = self._states.find(b"\0", at)
            if at < 0:
                break
            if not picked:
                self._hint = at
            end = at + 1
            limit = min(at + pages, at + largest_run, self.pages)
            while end < limit and self._states[end] == PageState.ABSENT:
                end += 1
            picked.append(Run(self.domain, PageId(at), end - at))
            pages -= end - at
            at = end
        return picked

    def become(self, run: Run, state: PageState) -> None:
        """Move all pages of a run; the only writer. A run keeps its identity while it is not ABSENT."""
        old = PageState(self._states[run.first])
        same = self._states[run.first : run.end].count(old) == run.count
        known = old is PageState.ABSENT or self._runs.get(run.first) == run
        if not (run.end <= self.pages and same and known and state in _EDGES[old]):
            why = f"(same={same}, known={known})"
            require(False, "S6", f"domain {self.domain}: {run} from {old.name} to {state.name} {why}")
        self._states[run.first : run.end] = bytes([state]) * run.count
        self._count[old] -= run.count
        self._count[state] += run.count
        if state is PageState.ABSENT:
            del self._runs[run.first]
            self._hint = min(self._hint, run.first)
        else:
            self._runs[run.first] = run
