"""What one eviction of the prefix cache frees enters the free lists together.

The engine's tree gives back one node after the other. On a device each of them costs the look at its ids (``gate.py``)
and a concatenation with the list, some ten nodes in every prefill step of an engine that is full. Nothing is allocated
before the eviction ends, so the ids of all its nodes are kept until then, looked at once and concatenated once. They
enter in the order in which they would have entered one node after the other.

Meanwhile the engine asks after every node whether what is available suffices by now; what is kept counts there. Kept
are the tensors as they came, without a copy: the tree's values belong to nodes that are gone, all others are made for
the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .runtime import LIST_ATTRIBUTE, Runtime


@dataclass(slots=True)
class Kept:
    """What waits to enter one free list.

    Attributes:
        original: the engine's function that puts ids into it.
        allocator: whose list it is.
        parts: ids, in the order in which they are to enter.
        ids: how many they are.
    """

    original: Any
    allocator: Any
    parts: list[torch.Tensor] = field(default_factory=list)
    ids: int = 0


class Evictions:
    """Hooks on the engine's prefix cache, and what its frees go through.

    Args:
        runtime: what is elastic in this process.

    Threads: the scheduler thread.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._depth = 0
        self._kept: dict[object, Kept] = {}

    def evict(self, original: Any, cache: Any, *args: Any, **others: Any) -> Any:
        """An eviction: what its nodes held enters when it ends, also where it fails.

        An eviction inside another one lets in what either of them has kept so far: whoever began it may allocate next.
        Who passes an answer of its own to whether it suffices (a keyword that is not ``None``) gets node by node:
        what is kept does not count in it.

        Raises:
            GroupFailed: an id is not published, and that is known at once (on the host).
        """
        if not self._runtime.elastic or any(value is not None for value in others.values()):
            return original(cache, *args, **others)
        self._depth += 1
        try:
            return original(cache, *args, **others)
        finally:
            self._depth -= 1
            self._let_in()

    def available(self, size: int, _cache: Any, component: Any) -> int | None:
        """What the cache believes to be available, in tokens, and what is kept beside it."""
        if not self._kept:
            return None
        kept = self._kept.get(self._runtime.lists.get(component.name.lower()))
        return None if kept is None else size + kept.ids * int(kept.allocator.page_size)

    def free(self, original: Any, allocator: Any, ids: Sequence[torch.Tensor], *, in_front: bool = False) -> None:
        """Ids are freed: now, or when the eviction ends that frees them.

        Args:
            original: the engine's function, for an allocator and tensors of ids.
            allocator: the engine's allocator, ours or not.
            ids: as it keeps them.
            in_front: the function puts them in front of the list and not behind it.
        """
        known = getattr(allocator, LIST_ATTRIBUTE, None)
        if known is None or not self._depth:
            original(allocator, *(self._runtime.admit(allocator, part) for part in ids))
            return
        kept = self._kept.get(known)
        if kept is None:
            kept = self._kept[known] = Kept(original, allocator)
        place = 0 if in_front else len(kept.parts)
        kept.parts[place:place] = ids
        kept.ids += sum(part.numel() for part in ids)

    def _let_in(self) -> None:
        kept, self._kept = self._kept, {}
        for free in kept.values():
            ids = torch.cat(free.parts) if len(free.parts) > 1 else free.parts[0]
            free.original(free.allocator, self._runtime.admit(free.allocator, ids))


__all__ = ["Evictions", "Kept"]
