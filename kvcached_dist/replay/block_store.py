"""Where the scheduler's blocks come from, as it sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .sequence import Blocks


class BlockStore(Protocol):
    """Where blocks come from. The engine's implementation checks stamps before it frees."""

    def alloc(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        """All of the blocks or none; None is an ordinary miss, equal on all ranks."""

    def headroom(self, domain: str) -> int:
        """Blocks that are free or that every rank could still back, as the applied log says."""

    def blocks(self, domain: str) -> int:
        """Blocks that could be handed out if all memory were there."""

    def free(self, domain: str, blocks: Blocks) -> None:
        """Check the stamps, then give the blocks back."""

    def check(self, domain: str, blocks: Blocks) -> None:
        """Check the stamps of blocks that are about to be reused."""

    def request_eviction(self, tokens: int) -> None:
        """Ask the leader to log an EVICT; only the leader's call has an effect."""


__all__ = ["BlockStore"]
