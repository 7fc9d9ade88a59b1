"""How much of the prefix cache has to go: at idle down to its budget, while busy only as far as memory is short.

Cached prefixes are used memory. An engine that serves may fill with them what nobody else wants, as it does natively; a
budget that held all the time would evict in nearly every step what the next prompt could have used. But memory that
only keeps prefixes goes back when the engine has nothing to do, and when little of the card is left: then so much goes
that an eighth of the capacity is free or could be grown. Who else uses the card is not known, so this holds as well for
an engine that fills it alone; without a limit (a budget below 0) nothing is evicted for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import specs

if TYPE_CHECKING:
    from ..config import Config
    from ..stream import StreamCoordinator
    from .lists import TokenList
    from .rows import RowList

STEP_SHARE = 64
"""While busy, evictions are logged in parts of at least one in so many of the cached tokens: an entry is a message."""


class CacheBudget:
    """Decides on rank 0; every rank evicts at the mark.

    Args:
        config: settings.

    Threads: the scheduler thread.
    """

    def __init__(self, config: Config) -> None:
        self._tokens = config.max_cached_tokens

    def surplus(
        self, coordinator: StreamCoordinator, tree_cache: Any, known: TokenList | RowList, *, idle: bool
    ) -> int:
        """Tokens to evict now.

        Args:
            coordinator: of this process.
            tree_cache: the engine's prefix cache.
            known: free list of full attention.
            idle: the engine has nothing to do.
        """
        if not idle and coordinator.calm:
            return 0  # nearly every step: memory is not short, and no rank holds more than the limit
        cached = int(tree_cache.evictable_size())
        within = self._tokens < 0 or cached <= self._tokens
        over = coordinator.overage_bytes
        if not cached or (within and not over):
            return 0
        domain = coordinator.stage.domain(specs.FULL)
        block_tokens = max(1, domain.block_tokens)
        surplus = 0
        if not within:
            surplus = cached - self._tokens
            if not idle:
                surplus = min(surplus, coordinator.short_blocks(specs.FULL) * block_tokens)
                surplus = 0 if surplus * STEP_SHARE < cached else surplus
        if over and not known.available():
            page_tokens = domain.blocks_per_page * block_tokens
            above = -(-over * page_tokens // max(1, coordinator.stage.page_bytes(specs.FULL)))
            surplus = max(surplus, min(cached, above))
        return surplus


__all__ = ["CacheBudget"]
