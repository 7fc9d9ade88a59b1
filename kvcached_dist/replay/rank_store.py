"""The scheduler's blocks on a real coordinator: allocate, verify, free, and write stamps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..coord.core.entries import Publish
from .outcome import Event
from .sequence import Blocks
from .stamps import Stamps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..coord.core.entries import Entry
    from ..coordinator import Coordinator


class CoordinatedStore:
    """A :class:`~.block_store.BlockStore` on the coordinator of this rank. Scheduler thread only.

    Args:
        coordinator: of this rank, started.

    Attributes:
        waited_s: time spent in the coordinator since it was last reset to 0.
        grown: grows that took effect inside operations since the last :meth:`take_events`.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        stage = coordinator.stage
        self.waited_s = 0.0
        self._coordinator = coordinator
        self._per_page = [domain.blocks_per_page for domain in stage.domains]
        self._names = [domain.name for domain in stage.domains]
        self._grown: list[str] = []
        views = {
            pool.name: [coordinator.backing.tensor(pool.name, bank) for bank in range(pool.banks)]
            for pool in stage.pools
            if pool.layers
        }
        self.stamps = Stamps(stage, views, {name: domain.blocks for name, domain in coordinator.domains.items()})
        for domain in stage.domains:
            # Page 0 was published by the start; block 0 is the null block and never handed out.
            self.stamps.published(domain.name, 0, domain.blocks_per_page)

    def alloc(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        """Allocate in all domains or none; see :meth:`Coordinator.alloc`."""
        start = time.perf_counter()
        granted = self._coordinator.alloc(need)
        self.waited_s += time.perf_counter() - start
        self.note(self._coordinator.take_granted())
        if granted is None:
            return None
        return {name: ids.tolist() for name, ids in granted.items()}

    def headroom(self, domain: str) -> int:
        """Blocks free or growable."""
        space = self._coordinator.domains[domain]
        return space.available + space.growable

    def blocks(self, domain: str) -> int:
        """Blocks but for the null block."""
        return self._coordinator.domains[domain].blocks - 1

    def free(self, domain: str, blocks: Blocks) -> None:
        """Check the stamps, then free."""
        self.stamps.verify(domain, blocks, "free")
        self._coordinator.free({domain: torch.tensor(blocks.ids, dtype=torch.int64)})

    def check(self, domain: str, blocks: Blocks) -> None:
        """Check the stamps of a reused prefix."""
        self.stamps.verify(domain, blocks, "prefix hit")

    def request_eviction(self, tokens: int) -> None:
        """Ask for an EVICT entry."""
        self._coordinator.evict(tokens)

    def note(self, entries: Iterable[Entry]) -> None:
        """Learn which blocks hold their fill pattern from now on."""
        for entry in entries:
            if isinstance(entry, Publish):
                for run in entry.runs:
                    per_page = self._per_page[run.domain]
                    self.stamps.published(self._names[run.domain], run.first * per_page, run.count * per_page)
                self._grown.append(self.runs_text(entry.runs))

    def runs_text(self, runs: Iterable[object]) -> str:
        """Runs for people: ``full:[4,8)``."""
        parts = []
        for run in runs:
            domain, _, pages = str(run).partition(":")
            parts.append(f"{self._names[int(domain)]}:{pages}")
        return " ".join(parts)

    def take_events(self, now_us: int) -> list[Event]:
        """Growths since the last call, as events at ``now_us``."""
        events = [Event(now_us, "grow", text) for text in self._grown]
        self._grown.clear()
        return events


__all__ = ["CoordinatedStore"]
