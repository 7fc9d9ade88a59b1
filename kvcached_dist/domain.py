"""One id space as an engine uses it: allocate, free, ask what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .coord.core.types import DomainId

if TYPE_CHECKING:
    from ._native import BlockPool
    from .coordinator import Coordinator

NULL_BLOCK = 0
"""Block 0 of every domain: padding and dummy writes of captured graphs go there. Never handed out."""


class Domain:
    """Blocks of one domain. Made by :class:`Coordinator`.

    Threads: the engine's scheduler thread only.
    """

    def __init__(self, coordinator: Coordinator, name: str, index: int, pool: BlockPool, blocks: int) -> None:
        self.name = name
        self.index = index
        self.id = DomainId(index)
        self.blocks = blocks
        self.pool = pool
        self._coordinator = coordinator

    @property
    def available(self) -> int:
        """Blocks published and free."""
        return self.pool.available()

    @property
    def published(self) -> int:
        """Blocks that are backed and usable, the null block included."""
        return self.pool.published()

    @property
    def growable(self) -> int:
        """Blocks that every rank could still back, as the applied log says. No driver query."""
        return self._coordinator.growable(self.index)

    def alloc(self, blocks: int) -> torch.Tensor | None:
        """Allocate blocks; the same ids on every rank.

        Args:
            blocks: how many.

        Returns:
            ``int64`` ids of shape ``[blocks]`` on the CPU, or ``None`` if memory is short on some rank (nothing is
            taken then).

        Raises:
            ValueError: a negative number.
            GroupFailed: the coordinator has failed.

        Blocks: not while enough is published; otherwise for one growth, bounded by its deadline.
        """
        return self._coordinator.alloc_in(self, blocks)

    def free(self, ids: torch.Tensor | npt.NDArray[np.int64]) -> None:
        """Give blocks back; they stay backed until the leader reclaims them.

        Args:
            ids: ``int64`` ids of shape ``[n]``, each allocated and not freed since.

        Raises:
            ValueError: an id that is out of range, not allocated or named twice; nothing is freed.
            GroupFailed: the coordinator has failed.
        """
        self._coordinator.free_in(self, ids)
