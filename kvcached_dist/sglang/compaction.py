"""Cached prefixes lie together when the engine has nothing to do, so that the memory between them can go back.

A run goes back only when all its ids are free. What a load leaves in the prefix cache lies all over the runs that the
load has grown, so a few tokens keep them all. At idle nothing but the cache names ids: what it keeps is copied into as
few and as short runs as it fills (``placement.py``), its nodes are told, and the runs that it leaves go the usual way.
Ids of full attention and of a sliding window move each in their own domain, with everything that lies in their blocks;
which window id belongs to a full one is written anew.

Every rank does this at the mark of an eviction of no tokens, with what is equal on all ranks there: which ids the
cache holds, which are published, and in which runs. So all ranks move the same ids to the same places, and nothing has
to be agreed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import engine, specs
from .census import Ids
from .movable import parts_of, unsupported
from .placement import Move, plan

if TYPE_CHECKING:
    from .lists import TokenList
    from .rows import RowList

_log = logging.getLogger("kvcached_dist.sglang")

CHUNK_BYTES = 8 << 20
"""Blocks that are copied at once, in bytes: few launches for a large cache."""

SMALL_CHUNK_BYTES = 1 << 19
"""The same where the card is full: torch's allocator keeps segments of 2 MiB for what is below 1 MiB."""

LOOK_AGAIN_S = 1.0
"""Until rank 0 looks again at an idle engine in which something held ids that is no cached prefix."""

_WIDE = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True, slots=True)
class Held:
    """Ids of one domain that the cache holds.

    Attributes:
        known: free list of the domain.
        nodes: what of the cache's nodes has them, each with an attribute ``value``: tokens.
        blocks: blocks of these values, in their order.
        full_node: which of the nodes with ids of full attention each of them is.
    """

    known: TokenList
    nodes: list[Any]
    blocks: Ids
    full_node: Sequence[int]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a move is going to change, by domain.

    Attributes:
        held: what the cache holds.
        moves: where it goes.
        values: the nodes' tokens afterwards.
        free: the free lists afterwards.
        window: full and window ids of the engine's table afterwards; ``None``: it has none.
    """

    held: Mapping[str, Held]
    moves: Mapping[str, Move]
    values: Mapping[str, list[torch.Tensor]]
    free: Mapping[str, torch.Tensor]
    window: tuple[torch.Tensor, torch.Tensor] | None


class Compaction:
    """Moves what the engine's prefix cache keeps.

    Args:
        lists: the engine's free lists, by domain.
        scheduler: the engine's, with its prefix cache.
        lanes: by domain, everything that its ids index: uint8 ``[blocks, block_bytes]`` each.
        stages: pipeline stages.
        drafts_too: the lanes have the pools of a draft model as well.
        wanted: the setting; equal on all ranks.

    Attributes:
        unsupported: why nothing is ever moved in this engine; empty: it can be.

    Threads: the scheduler thread.
    """

    def __init__(
        self,
        lists: Mapping[str, TokenList | RowList],
        scheduler: Any,
        lanes: Mapping[str, Sequence[torch.Tensor]],
        stages: int,
        *,
        drafts_too: bool = False,
        wanted: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._lists: dict[str, Any] = {name: known for name, known in lists.items() if name != specs.ROWS}
        self._lanes = {name: [_wide(lane) for lane in lanes.get(name, ())] for name in self._lists}
        self._next_look = 0.0
        try:
            self.unsupported = (
                unsupported(lists, scheduler, stages, drafts_too=drafts_too)
                if wanted
                else "KVCACHED_DIST_COMPACTION is off"
            )
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
            held = self._held()
        except torch.cuda.OutOfMemoryError:
            held = None  # on a full card it can wait: nothing depends on it
        self._next_look = now + LOOK_AGAIN_S if held is None else math.inf
        return held is not None and bool(_plans(held))

    def run(self) -> int:
        """Move what the cache keeps, where that frees memory. On every rank, at the same mark.

        The rows are copied first, behind everything on the caller's current stream; the cache and the free lists
        change when all copies are launched, and a failure before that changes neither. A retirement of the runs that
        are left records its fence on the same stream later, so nothing is unmapped before it was copied.

        Returns:
            Tokens that were moved, in all domains; 0 where something runs or waits, ids are held by anything but the
            cache, or too little would become free.

        Raises:
            RuntimeError: torch's: the device failed or has no memory for a chunk. Other ranks may have moved: the group
                has to end.

        Blocks: for the device, which has nothing to do.
        """
        if self.unsupported:
            return 0
        # Sessions time out by each rank's own clock, which the engine asks once a second. Rank 0 has seen none in the
        # way, so what has timed out here as well goes now. A rank whose clock is later than that still has the session,
        # moves nothing and is found out: several ranks serve no sessions with timeouts.
        self._scheduler.session_controller.maybe_reap(time.monotonic(), interval=-1.0)
        try:
            changes = self._changes()
        except torch.cuda.OutOfMemoryError:
            # A full card, of which torch's allocator may keep a part in other sizes. Other ranks may have moved.
            torch.cuda.empty_cache()
            changes = self._changes()
        if changes is None:
            return 0
        held, moves = changes.held, changes.moves
        for name, move in moves.items():
            known = held[name].known
            self._copy(self._lanes[name], known.beside(move.sources), known.beside(move.targets))
        for name, move in moves.items():
            for node, value in zip(held[name].nodes, changes.values[name], strict=True):
                node.value = value
            held[name].known.moved(move.sources, move.targets, changes.free[name])
        if changes.window is not None:
            self._map_window(*changes.window)
        moved = self._page_size * sum(move.sources.size for move in moves.values())
        of = self._page_size * sum(part.blocks.size for part in held.values())
        _log.info("event=compacted rank=%d tokens=%d of=%d", engine.world_rank(), moved, of)
        return moved

    # ------------------------------------------------------------------ what is held

    @property
    def _page_size(self) -> int:
        return int(self._scheduler.page_size)

    @property
    def _allocator(self) -> Any:
        return self._scheduler.tree_cache.token_to_kv_pool_allocator

    def _look_at_all(self) -> None:
        """Everything that is asked of the engine later: a version without one of them must not find out then.

        Raises:
            AttributeError: names what is missing.
        """
        scheduler, cache = self._scheduler, self._scheduler.tree_cache
        on_a_card = any(known.device.type != "cpu" for known in self._lists.values())
        _ = (
            scheduler.page_size, scheduler.is_fully_idle, scheduler.session_controller.maybe_reap,
            cache.protected_size, cache.evictable_size, [part.free_group for part in parts_of(self._allocator)],
            scheduler.forward_stream if on_a_card else None, self._nodes(),
        )  # fmt: skip
        if specs.SWA in self._lists:
            _ = self._allocator.full_to_swa_index_mapping

    def _nodes(self) -> list[tuple[Any, Any]]:
        """What of the cache's nodes has ids, each with an attribute ``value``: of full attention, and of the window.

        ``None`` is there for a window that a node has no ids of, and in a cache without windows.
        """
        cache = self._scheduler.tree_cache
        full, *more = cache.tree_components
        found: list[tuple[Any, Any]] = []
        nodes = list(cache.tree_core.root_node.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            data = node.component_data
            if data[full].value is not None:
                found.append((data[full], data[more[0]] if more and data[more[0]].value is not None else None))
        return found

    def _held(self) -> dict[str, Held] | None:
        """What the cache holds in each domain; ``None``: nothing, or nothing may move now."""
        scheduler, cache = self._scheduler, self._scheduler.tree_cache
        if not scheduler.is_fully_idle() or any(part.free_group is not None for part in parts_of(self._allocator)):
            return None
        if cache.protected_size():
            return None
        # Whoever else holds ids (a session, an engine's own use) would be left behind: all others must be free. The
        # counts tell nearly always, for nothing; a large tree takes a tenth of a second, and an open session is asked
        # about once a second.
        known = self._lists[specs.FULL]
        if int(cache.evictable_size()) // self._page_size + known.available() != known.book.count:
            return None
        nodes = self._nodes()
        if not nodes or any(len(full.value) != len(window.value) for full, window in nodes if window is not None):
            return None
        windows = [number for number, (_, window) in enumerate(nodes) if window is not None]
        of: dict[str, tuple[list[Any], Sequence[int]]] = {specs.FULL: ([full for full, _ in nodes], range(len(nodes)))}
        if specs.SWA in self._lists:
            of[specs.SWA] = [nodes[number][1] for number in windows], windows
            if not self._is_mapped([nodes[number] for number in windows]):
                return None
        held = {}
        for name, (mine, full) in of.items():
            blocks = self._blocks(mine, self._lists[name])
            if blocks is None:
                return None
            held[name] = Held(self._lists[name], mine, blocks, full)
        return held

    def _blocks(self, nodes: Sequence[Any], known: TokenList) -> Ids | None:
        """Blocks of these nodes in their order; ``None``: with what is free they are not all that is published."""
        size = self._page_size
        if any(len(node.value) % size for node in nodes):
            return None
        tokens = _together([node.value for node in nodes], known.device).cpu().numpy().reshape(-1, size)
        first = tokens[:, 0].astype(np.int64)
        whole = np.array_equal(tokens, first[:, None] + np.arange(size)) and not (first % size).any()
        blocks = first // size
        return blocks if whole and known.book.are_all(np.concatenate((blocks, known.free_ids()))) else None

    def _is_mapped(self, nodes: Sequence[tuple[Any, Any]]) -> bool:
        """Whether the engine's table of window ids has those of these nodes and no others."""
        table = self._allocator.full_to_swa_index_mapping[:-1]
        full = _together([full.value for full, _ in nodes], table.device)
        window = _together([window.value for _, window in nodes], table.device)
        return int(table.count_nonzero()) == len(window) and bool((table[full] == window).all())

    # ------------------------------------------------------------------ what changes

    def _changes(self) -> Changes | None:
        """All that a move needs, and nothing changed yet; ``None``: nothing moves."""
        held = self._held()
        moves = {} if held is None else _plans(held)
        if held is None or not moves:
            return None
        values = {name: self._values(of, moves.get(name)) for name, of in held.items()}
        free = {name: held[name].known.listed(move.free) for name, move in moves.items()}
        return Changes(held, moves, values, free, self._window(held, values) if specs.SWA in held else None)

    def _values(self, held: Held, move: Move | None) -> list[torch.Tensor]:
        """The nodes' tokens after a move.

        Views of one tensor: the tree copies what it splits, and never writes into what a node holds.
        """
        if move is None or not held.nodes:
            return [node.value for node in held.nodes]
        places = np.arange(held.known.book.ids + 1)
        places[move.sources] = move.targets
        size = self._page_size
        tokens = (places[held.blocks][:, None] * size + np.arange(size)).reshape(-1)
        values = held.known.beside(tokens).to(held.nodes[0].value.dtype)
        return list(values.split_with_sizes([len(node.value) for node in held.nodes]))

    def _window(
        self, held: Mapping[str, Held], values: Mapping[str, list[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Full and window ids after the moves, as :meth:`_map_window` takes them."""
        table = self._allocator.full_to_swa_index_mapping
        full = _together([values[specs.FULL][number] for number in held[specs.SWA].full_node], table.device)
        return full.to(torch.int64), _together(values[specs.SWA], table.device).to(table.dtype)

    def _copy(self, lanes: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks in all lanes, behind what the engine's forward stream has written there."""
        if sources.is_cuda:
            torch.cuda.current_stream().wait_stream(self._scheduler.forward_stream)
        for lane in lanes:
            try:
                _copy_blocks(lane, sources, targets, CHUNK_BYTES)
            except torch.cuda.OutOfMemoryError:
                # No target is a source, so what was copied may be copied again.
                _copy_blocks(lane, sources, targets, SMALL_CHUNK_BYTES)

    def _map_window(self, full: torch.Tensor, window: torch.Tensor) -> None:
        """The engine's table names these window ids for these full ones, and none for all others.

        In place: pools and captured graphs keep the tensor. Its last entry is that of no token.
        """
        table = self._allocator.full_to_swa_index_mapping
        table[:-1].zero_()
        table.index_copy_(0, full, window)


def _plans(held: Mapping[str, Held]) -> dict[str, Move]:
    moves = {name: plan(of.known.book, of.blocks) for name, of in held.items()}
    return {name: move for name, move in moves.items() if move is not None}


def _together(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(list(values)) if values else torch.empty(0, dtype=torch.int64, device=device)


def _wide(lane: torch.Tensor) -> torch.Tensor:
    """The same blocks in the widest elements that fit: fewer of them to copy."""
    for dtype in _WIDE:
        fits = (lane.shape[1], lane.stride(0), lane.storage_offset(), lane.data_ptr())
        if not any(number % dtype.itemsize for number in fits):
            return lane.view(dtype)
    return lane


def _copy_blocks(lane: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, chunk_bytes: int) -> None:
    blocks = max(1, chunk_bytes // max(1, lane.shape[1] * lane.element_size()))
    for left, entered in zip(torch.split(sources, blocks), torch.split(targets, blocks), strict=True):
        lane.index_copy_(0, entered, lane.index_select(0, left))


__all__ = ["Compaction"]
