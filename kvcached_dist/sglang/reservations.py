"""Pools that the engine builds for itself in a process whose other pools are elastic.

They take memory that elastic pools cannot have, for as long as they live, and no driver query says so beforehand: on a
card the free memory shrinks by them once, on the host backend never. So each is registered with its exact bytes,
subtracted from what elastic pools may use, and shown in the snapshot.

Nothing is assumed about their classes. Whatever hangs on the pool objects that the engine made counts, if it is a
tensor on the pools' device that holds state (floating-point numbers, or bytes; index tables, pointers and masks are
integers and booleans) and its storage is not one of our reservations. A storage counts once, under the first name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_log = logging.getLogger("kvcached_dist.sglang")

ROOTS = ("token_to_kv_pool", "req_to_token_pool", "unified_memory_pool")
"""Pools of the engine among what it calls its initialised pools."""

DEPTH = 8
"""Objects between a root and its tensors; the deepest known are four."""

STATE_INTEGERS = (torch.uint8, torch.int8)


class Reservations:
    """What the engine keeps itself on this rank's device.

    Args:
        register: accounts for a pool by name and bytes; 0 clears its entry.
        device: type of the pools' device: ``cpu`` or ``cuda``.
        ours: addresses at which the storages of this library begin.
        rank: of this process, for the log.
        why: they are not elastic, for the log.

    Threads: the thread that builds pools.
    """

    def __init__(
        self,
        register: Callable[[str, int], None],
        device: str,
        ours: frozenset[int],
        *,
        rank: int,
        why: str = "stays with the engine",
    ) -> None:
        self._register = register
        self._device = device
        self._ours = ours
        self._rank = rank
        self._why = why
        self._built: list[tuple[str, Any]] = []
        self._registered: dict[str, int] = {}

    @property
    def bytes(self) -> Mapping[str, int]:
        """Registered bytes per pool."""
        return dict(self._registered)

    def add(self, pools: Any, prefix: str = "") -> None:
        """The engine has built pools.

        Args:
            pools: what its ``_init_pools`` returned.
            prefix: in front of their names: ``draft.``.
        """
        self._built.append((prefix, pools))
        self.scan()

    def scan(self) -> None:
        """Register what is there now; a pool that was taken over or is gone loses its entry."""
        found: Counter[str] = Counter()
        seen: set[int] = set(self._ours)
        for prefix, pools in self._built:
            for root in ROOTS:
                for name, tensor in _tensors(getattr(pools, root, None), root):
                    storage = tensor.untyped_storage()
                    if self._counts(tensor) and storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        found[prefix + name] += storage.nbytes()
        for name in self._registered.keys() - found.keys():
            self._register(name, 0)
        for name, size in found.items():
            if self._registered.get(name) != size:
                self._register(name, size)
                _log.info("event=pool rank=%d name=%s elastic=no bytes=%d why=%r", self._rank, name, size, self._why)
        self._registered = dict(found)

    def _counts(self, tensor: torch.Tensor) -> bool:
        holds_state = tensor.is_floating_point() or tensor.dtype in STATE_INTEGERS
        return holds_state and tensor.device.type == self._device and tensor.untyped_storage().nbytes() > 0


def _tensors(root: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that hangs on an object of the engine, with the path of attributes to it."""
    visited: set[int] = set()
    waiting = [(name, root, 0)]
    while waiting:
        path, item, depth = waiting.pop(0)
        if isinstance(item, torch.Tensor):
            yield path, item
            continue
        if id(item) in visited or depth > DEPTH:
            continue
        visited.add(id(item))
        if isinstance(item, list | tuple | set | frozenset):
            # Layers are one pool: the path says whose they are, not which.
            waiting += [(path, part, depth + 1) for part in item]
        elif isinstance(item, dict):
            waiting += [(path, part, depth + 1) for part in item.values()]
        elif _belongs_to_engine(item):
            waiting += [(f"{path}.{key}", part, depth + 1) for key, part in _attributes(item)]


def _belongs_to_engine(item: object) -> bool:
    return type(item).__module__.startswith("sglang.") and not isinstance(item, torch.nn.Module)


def _attributes(item: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(item, "__dict__", {}).items()
    for owner in type(item).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, slot) and slot not in ("__dict__", "__weakref__"):
                yield slot, getattr(item, slot)
