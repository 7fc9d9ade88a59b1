"""What the ranks could still back: their budgets against what is held, and the numbers that the log tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .entries import Entry, Growable
from .pages import PageState
from .types import DomainId

if TYPE_CHECKING:
    from .leader import Leader


class Memory:
    """Memory of all ranks, as far as the leader knows it, in pages of each domain.

    Args:
        leader: whose ranks.

    Threads: as the leader.
    """

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._backable: list[int | None] = [None] * len(leader.tables)
        """Per domain, until a budget changes: asked for several times in every step."""
        self._logged = [-1] * len(leader.tables)

    def budgets_changed(self) -> None:
        """A rank's budget is another one."""
        self._backable = [None] * len(self._backable)

    def changed(self) -> list[Entry]:
        """GROWABLE entries for domains whose growable blocks have changed (rule M6).

        Falls are always logged. Rises that only follow the free memory of a card are damped: a neighbour moves it
        all the time.
        """
        entries: list[Entry] = []
        for domain in map(DomainId, range(len(self._leader.tables))):
            blocks = self.growable(domain) * self._leader.replica.blocks_per_page[domain]
            logged = self._logged[domain]
            absent = self._leader.tables[domain].count(PageState.ABSENT)
            follows_memory = self.affordable(domain) < absent
            slack = max(1, logged // 16) if follows_memory and logged > 0 else 1
            if blocks < logged or blocks - logged >= slack:
                self._logged[domain] = blocks
                entries.append(Growable(domain, blocks))
        return entries

    def growable(self, domain: DomainId) -> int:
        """Pages that every rank could back beyond the published ones; 0 while a refusal is the known answer.

        Pages of the open grow count until the mark that publishes them.
        """
        leader = self._leader
        if not leader.active:
            return 0
        opened = leader.tables[domain].count(PageState.OPEN)
        if leader.backoff.active(leader.now):
            return opened
        retained = leader.tables[domain].count(PageState.RETAINED)
        return self.affordable(domain) + opened + retained

    def affordable(self, domain: DomainId) -> int:
        """Pages that the domain does not have yet and the memory of every rank could back."""
        return min(self._leader.tables[domain].count(PageState.ABSENT), self.backable(domain))

    def backable(self, domain: DomainId) -> int:
        """Pages that the memory of every rank could back beside what is held, however many the domain still has."""
        pages = self._backable[domain]
        if pages is None:
            leader = self._leader
            pages = leader.tables[domain].pages
            for peer in leader.peers:
                if peer.page_bytes[domain] > 0:
                    pages = min(pages, max(0, peer.budget_bytes) // peer.page_bytes[domain])
            self._backable[domain] = pages
        return pages

    def fitting(self, pages: Mapping[DomainId, int]) -> dict[DomainId, int]:
        """As much of these pages as every rank could back together, each domain with the same share of its own.

        Domains share the memory of a rank, and each of them alone counts with all of it: where they are short at the
        same time, they get a part each and not nothing. Pages of an open grow and retained ones are held already.
        """
        tables = self._leader.tables
        held = {
            domain: tables[domain].count(PageState.OPEN) + tables[domain].count(PageState.RETAINED) for domain in pages
        }
        new = {domain: max(0, count - held[domain]) for domain, count in pages.items()}
        if self.fits(new):
            return dict(pages)
        share = 1.0
        for peer in self._leader.peers:
            if size := sum(count * peer.page_bytes[domain] for domain, count in new.items()):
                share = min(share, max(0, peer.budget_bytes) / size)
        part = {
            domain: min(int(count * share), tables[domain].count(PageState.ABSENT)) for domain, count in new.items()
        }
        for domain, count in sorted(new.items()):
            # A share may be less than a page.
            one = {**part, domain: 1}
            if count > 0 and part[domain] == 0 and self.fits(one):
                part = one
        together = {domain: min(count, held[domain]) + part[domain] for domain, count in pages.items()}
        return {domain: count for domain, count in together.items() if count > 0}

    def fits(self, pages: Mapping[DomainId, int]) -> bool:
        """Whether every rank could back all of these pages together."""
        leader = self._leader
        for domain, count in pages.items():
            if count > leader.tables[domain].count(PageState.ABSENT):
                return False
        return all(
            sum(count * peer.page_bytes[domain] for domain, count in pages.items()) <= peer.budget_bytes
            for peer in leader.peers
        )


__all__ = ["Memory"]
