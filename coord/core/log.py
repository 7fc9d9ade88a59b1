"""The tail of the leader's log: entries that the next mark will carry, in order."""

from __future__ import annotations

from collections.abc import Sequence

from .entries import Entry, Evict, PositionKind, Publish, Unretire
from .types import DomainId, Run, Txn


class Log:
    """Entries that are decided and that no mark has carried yet."""

    def __init__(self) -> None:
        self._due: list[Entry] = []
        self._unretired: dict[Txn, tuple[Run, ...]] = {}

    def append(self, entry: Entry) -> None:
        """Decide an entry."""
        self._due.append(entry)

    def unretire(self, txn: Txn, published: tuple[Run, ...]) -> None:
        """Decide that a retirement is taken back.

        Args:
            txn: the retirement.
            published: its runs, where they were published before it.
        """
        self._due.append(Unretire(txn))
        self._unretired[txn] = published

    def due(self) -> Sequence[Entry]:
        """Entries that the next mark will carry."""
        return self._due

    def due_pages(self, domain: DomainId) -> int:
        """Pages that the next mark will publish in a domain."""
        pages = 0
        for entry in self._due:
            if isinstance(entry, Publish):
                pages += sum(run.count for run in entry.runs if run.domain == domain)
            elif isinstance(entry, Unretire):
                pages += sum(run.count for run in self._unretired[entry.txn] if run.domain == domain)
        return pages

    def take(self, kind: PositionKind) -> list[Entry]:
        """What a mark of this kind carries; it is due no longer."""
        # Evictions change the engine's own state, so they wait for the end of a step.
        later: list[Entry] = [e for e in self._due if isinstance(e, Evict) and kind is PositionKind.OP]
        entries = [entry for entry in self._due if entry not in later]
        self._due = later
        self._unretired.clear()
        return entries

    def drop(self) -> list[Entry]:
        """The epoch has ended: what no mark has carried any more."""
        due, self._due = self._due, []
        self._unretired.clear()
        return due


__all__ = ["Log"]
