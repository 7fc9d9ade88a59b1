"""Cached prefixes lie together when the engine has nothing to do, so that the memory between them can go back.

A run goes back only when all its ids are free. What a load leaves in the prefix cache lies all over the runs that the
load has grown, so a few tokens keep them all. At idle nothing but the cache names ids: what it keeps is copied into as
few and as short runs as it fills, its nodes are told, and the runs that it leaves go the usual way.

Every rank does this at the mark of an eviction of no tokens, with what is equal on all ranks there: which ids the
cache holds, which are published, and in which runs. So all ranks move the same ids to the same places, and nothing has
to be agreed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import engine, specs
from .book import PageBook
from .census import Ids

if TYPE_CHECKING:
    from .lists import TokenList
    from .rows import RowList

_log = logging.getLogger("kvcached_dist.sglang")

CHUNK_BYTES = 8 << 20
"""Rows that are copied at once, in bytes: few launches for a large cache."""

SMALL_CHUNK_BYTES = 1 << 19
"""The same where the card is full: torch's allocator keeps segments of 2 MiB for what is below 1 MiB."""

LOOK_AGAIN_S = 1.0
"""Until rank 0 looks again at an idle engine in which something held ids that is no cached prefix."""

LEAST_SHARE = 16
"""What is moved must free at least one in so many of the ids that the cache holds."""

_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


@dataclass(frozen=True, slots=True)
class Move:
    """Ids that change places.

    Attributes:
        sources: ids that are left, ascending.
        targets: where each of them goes, ascending; none of them was in use.
        free: all free ids afterwards, in the order in which they are given.
    """

    sources: Ids
    targets: Ids
    free: Ids


def plan(book: PageBook, used: Ids) -> Move | None:
    """Where ids in use should lie so that the fewest stay published.

    Runs are filled whole, long ones first where they fit, and the rest goes into the shortest run that is left: what
    stays published beyond the ids in use is then at most the free part of that run. Runs that hold something already
    are filled first where that keeps about as little, because less moves.

    Args:
        book: what is published, and in which runs.
        used: ids in use, each once, in any order.

    Returns:
        The same for equal arguments, on every rank; ``None``: it would not free enough. ``None`` also for what this
        has made, unless new runs were published or ids freed.
    """
    used = np.sort(used)
    firsts, counts = book.runs()
    sizes = np.array([book.ids_of(int(first), int(count)).size for first, count in zip(firsts, counts, strict=True)])
    held = np.bincount(_run_of(firsts, used, book), minlength=len(firsts))
    worth = -(-used.size // LEAST_SHARE)
    least = _filled(firsts, sizes, held, used.size, held_first=False)
    chosen = _filled(firsts, sizes, held, used.size, held_first=True)
    if sizes[chosen].sum() >= sizes[least].sum() + worth:
        chosen = least
    kept = np.zeros(len(firsts), dtype=np.bool_)
    kept[chosen] = True
    gain = int(sizes[(held > 0) & ~kept].sum() - sizes[(held == 0) & kept & (firsts > 0)].sum())
    if gain < max(1, worth):
        return None
    filled = np.concatenate([book.ids_of(int(firsts[run]), int(counts[run])) for run in chosen])[: used.size]
    filled.sort()
    rest = np.setdiff1d(book.all_ids(), filled, assume_unique=True)
    # What the next request takes should not lie in runs that are about to go.
    stays = kept[_run_of(firsts, rest, book)]
    return Move(
        np.setdiff1d(used, filled, assume_unique=True),
        np.setdiff1d(filled, used, assume_unique=True),
        np.concatenate((rest[stays], rest[~stays])),
    )


def _filled(firsts: Ids, sizes: Ids, held: Ids, used: int, *, held_first: bool) -> list[int]:
    """Runs that so many ids fill, in this order, the last one perhaps in part; of equal ones those that hold most."""
    # The run of the null block never goes, so it is filled in any case.
    order = sorted(
        range(len(firsts)),
        key=lambda run: (firsts[run] > 0, held_first and not held[run], -sizes[run], -held[run], firsts[run]),
    )
    chosen: list[int] = []
    for run in order:
        if used and (sizes[run] <= used or not firsts[run]):
            chosen.append(run)
            used -= min(used, int(sizes[run]))
    if not used:
        return chosen
    left = set(order) - set(chosen)
    return [*chosen, min(left, key=lambda run: (sizes[run], -held[run], firsts[run]))]


def _run_of(firsts: Ids, ids: Ids, book: PageBook) -> Ids:
    return np.searchsorted(firsts, ids // book.blocks_per_page, side="right") - 1


class Compaction:
    """Moves what the engine's prefix cache keeps.

    Args:
        lists: the engine's free lists, by domain.
        scheduler: the engine's, with its prefix cache.
        stages: pipeline stages.
        wanted: the setting; equal on all ranks.

    Attributes:
        unsupported: why nothing is ever moved in this engine; empty: it can be.

    Threads: the scheduler thread.
    """

    def __init__(
        self, lists: Mapping[str, TokenList | RowList], scheduler: Any, stages: int, *, wanted: bool = True
    ) -> None:
        self._scheduler = scheduler
        self._known: Any = lists[specs.FULL]
        self._next_look = 0.0
        try:
            self.unsupported = _unsupported(lists, scheduler, stages) if wanted else "KVCACHED_DIST_COMPACTION is off"
            if not self.unsupported:
                self._look_at_all()
        except (AttributeError, ImportError) as error:
            self.unsupported = f"this version of the engine is laid out differently ({error})"
        if self.unsupported:
            why = f"cached prefixes stay where they are: {self.unsupported}"
            _log.info("event=compaction rank=%d possible=no why=%r", engine.world_rank(), why)

    def due(self, *, idle: bool) -> bool:
        """On rank 0: whether moving is worth a mark.

        Asked in every step. An idle engine is looked at once; while something that may go is in the way, once a second.

        Args:
            idle: the engine has nothing to do.

        Blocks: at that look, for the device, which has nothing to do either.
        """
        if not idle or self.unsupported:
            self._next_look = 0.0
            return False
        now = time.monotonic()
        if now < self._next_look:
            return False
        try:
            used = self._used()
        except torch.cuda.OutOfMemoryError:
            used = None  # on a full card it can wait: nothing depends on it
        self._next_look = now + LOOK_AGAIN_S if used is None else math.inf
        return used is not None and plan(self._known.book, used // self._page_size) is not None

    def run(self) -> int:
        """Move what the cache keeps, where that frees memory. On every rank, at the same mark.

        The rows are copied first, behind everything on the caller's current stream; the cache and the free list
        change when all copies are launched, and a failure before that changes neither. A retirement of the runs that
        are left records its fence on the same stream later, so nothing is unmapped before it was copied.

        Returns:
            Tokens that were moved; 0 where something runs or waits, ids are held by anything but the cache, or too
            little would become free.

        Raises:
            RuntimeError: torch's: the device failed or has no memory for a chunk. Other ranks may have moved: the group
                has to end.

        Blocks: for the device, which has nothing to do.
        """
        if self.unsupported:
            return 0
        # Sessions time out by each rank's own clock, which the engine asks once a second. Rank 0 has seen none in the
        # way, so what has timed out goes now on every rank, or some would move and some not.
        self._scheduler.session_controller.maybe_reap(time.monotonic(), interval=-1.0)
        used = self._used()
        if used is None:
            return 0
        size, known = self._page_size, self._known
        blocks = used // size
        move = plan(known.book, blocks)
        if move is None:
            return 0
        places = np.arange(known.book.ids + 1)
        places[move.sources] = move.targets
        holders = self._holders()
        first = holders[0].value
        free = known.listed(move.free)
        values = known.beside(_tokens(places[blocks], size)).to(first.dtype)
        # Views of one tensor: the tree copies what it splits, and never writes into what a node holds.
        parts = values.split_with_sizes([len(holder.value) for holder in holders])
        self._copy(known.beside(_tokens(move.sources, size)), known.beside(_tokens(move.targets, size)))
        for holder, part in zip(holders, parts, strict=True):
            holder.value = part
        known.moved(move.sources, move.targets, free)
        moved = int(move.sources.size) * size
        _log.info("event=compacted rank=%d tokens=%d of=%d", engine.world_rank(), moved, int(used.size) * size)
        return moved

    # ------------------------------------------------------------------ inner

    @property
    def _page_size(self) -> int:
        return int(self._scheduler.page_size)

    def _look_at_all(self) -> None:
        """Everything that is asked of the engine later: a version without one of them must not find out then.

        Raises:
            AttributeError: names what is missing.
        """
        scheduler, cache = self._scheduler, self._scheduler.tree_cache
        allocator = cache.token_to_kv_pool_allocator
        on_a_card = allocator.free_pages.device.type != "cpu"
        _ = (
            scheduler.page_size, scheduler.is_fully_idle, scheduler.session_controller.maybe_reap,
            cache.protected_size, cache.evictable_size, allocator.free_group, _buffers(allocator.get_kvcache()),
            scheduler.forward_stream if on_a_card else None, self._holders(),
        )  # fmt: skip

    def _holders(self) -> list[Any]:
        """What of the cache's nodes has ids, each with an attribute ``value``."""
        cache = self._scheduler.tree_cache
        (component,) = cache.tree_components
        found: list[Any] = []
        nodes = list(cache.tree_core.root_node.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            data = node.component_data[component]
            if data.value is not None:
                found.append(data)
        return found

    def _used(self) -> Ids | None:
        """Blocks that the cache holds, as first tokens, in the order of its nodes; ``None``: nothing may move now."""
        scheduler, cache = self._scheduler, self._scheduler.tree_cache
        pending = cache.token_to_kv_pool_allocator.free_group is not None
        if not scheduler.is_fully_idle() or pending or cache.protected_size():
            return None
        known, size = self._known, self._page_size
        # Whoever else holds ids (a session, an engine's own use) would be left behind: all others must be free. The
        # counts tell nearly always, for nothing; a large tree takes a tenth of a second, and an open session is asked
        # about once a second.
        if int(cache.evictable_size()) // size + known.available() != known.book.count:
            return None
        holders = self._holders()
        if not holders or any(len(holder.value) % size for holder in holders):
            return None
        tokens = torch.cat([holder.value for holder in holders]).cpu().numpy().reshape(-1, size)
        first = tokens[:, 0].copy()
        whole = np.array_equal(tokens, first[:, None] + np.arange(size)) and not (first % size).any()
        return first if whole and known.book.are_all(np.concatenate((first // size, known.free_ids()))) else None

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the rows of tokens in all buffers, behind what the engine's forward stream has written there."""
        if sources.is_cuda:
            torch.cuda.current_stream().wait_stream(self._scheduler.forward_stream)
        pool = self._scheduler.tree_cache.token_to_kv_pool_allocator.get_kvcache()
        for buffer in _buffers(pool):
            try:
                _copy_rows(buffer, sources, targets, CHUNK_BYTES)
            except torch.cuda.OutOfMemoryError:
                # No target is a source, so what was copied may be copied again.
                _copy_rows(buffer, sources, targets, SMALL_CHUNK_BYTES)


def _copy_rows(buffer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, chunk_bytes: int) -> None:
    rows = max(1, chunk_bytes // max(1, buffer[0].numel() * buffer.element_size()))
    for left, entered in zip(torch.split(sources, rows), torch.split(targets, rows), strict=True):
        buffer.index_copy_(0, entered, buffer.index_select(0, left))


def _tokens(blocks: Ids, size: int) -> Ids:
    """Tokens of blocks, in order."""
    return (blocks[:, None] * size + np.arange(size)).reshape(-1)


def _buffers(pool: Any) -> list[torch.Tensor]:
    """Every buffer of a pool with a row for each token."""
    if type(pool).__name__ == "MLATokenToKVPool":
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def _unsupported(lists: Mapping[str, TokenList | RowList], scheduler: Any, stages: int) -> str:
    if stages > 1 or set(lists) != {specs.FULL}:
        return "pipeline stages" if stages > 1 else "pools besides those of full attention"
    cache = scheduler.tree_cache
    if type(cache).__name__ != "UnifiedRadixCache" or type(cache.tree_core).__name__ != "UnifiedTreeCore":
        over = f" over a {type(cache.tree_core).__name__}" if hasattr(cache, "tree_core") else ""
        return f"the prefix cache is a {type(cache).__name__}{over}"
    allocator = cache.token_to_kv_pool_allocator
    pool, features = allocator.get_kvcache(), engine.context("exec").features
    found = {
        "the prefix cache is off": bool(cache.disable),
        "nodes of more than full attention": [kind.name for kind in cache.tree_components] != ["FULL"],
        "a host or external cache": cache.cache_controller is not None or cache.linker is not None,
        f"a {type(allocator).__name__}": type(allocator).__name__ not in _ALLOCATORS,
        f"a {type(pool).__name__}": type(pool).__name__ not in ("MHATokenToKVPool", "MLATokenToKVPool"),
        "speculative decoding": engine.context("spec").speculative_algorithm is not None,
        # They keep something of their own beside each token's place.
        "routed experts or indexer choices that are returned": bool(
            getattr(features, "enable_return_routed_experts", False)
            or getattr(features, "enable_return_indexer_topk", False)
        ),
        "the KV canary": getattr(scheduler.tp_worker.model_runner, "canary_manager", None) is not None,
    }
    return ", ".join(what for what, so in found.items() if so)


__all__ = ["Compaction", "Move", "plan"]
