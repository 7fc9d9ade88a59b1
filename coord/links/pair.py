"""Process groups of two ranks: construction, frame buffers, and the way to end one.

Habits of gloo that are dealt with here and in ``gloo`` (``tests/links/test_gloo_contract.py`` pins them):

- ``abort`` and ``shutdown`` wake nobody. A receive that times out at once does: it closes every
  connection of its group (:func:`poison`).
- With lazy initialisation a peer that exits before the first use hangs the passive side.
- A Work that is dropped before ``wait`` loses its message or stalls the pair (:class:`Slots` keeps it).
"""

from __future__ import annotations

import logging
import os
import re
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from .codec import FRAME_BYTES

TAG_TO_FOLLOWER: Final = 1
TAG_TO_LEADER: Final = 2
TAG_KILL: Final = 3
"""Tag on which nothing is ever sent."""

KILL_WAIT: Final = timedelta(milliseconds=1)
DRAIN_WAIT: Final = timedelta(milliseconds=20)

_log = logging.getLogger(__name__)


class Work(Protocol):
    """A posted send or receive."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until it is done; ``RuntimeError`` when its group was closed or the time is over."""
        ...


class Pair(Protocol):
    """The calls of a process group of two ranks that a link makes."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Post a send; does not wait."""
        ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work:
        """Post a receive; does not wait."""
        ...


def _device() -> Any:
    """A device that connects at construction, whatever ``TORCH_GLOO_LAZY_INIT`` says."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
    return ProcessGroupGloo.create_default_device(lazy_init=False)


def connect_pair(store: Any, prefix: str, rank: int, timeout_s: float) -> Pair:
    """Build the group; collective over its two ranks.

    Args:
        store: connection to the store, used by this group alone.
        prefix: prefix of the group's keys, used for one attempt only.
        rank: 0 or 1.
        timeout_s: deadline for the other rank, in seconds.

    Raises:
        RuntimeError: whatever gloo or the store says.

    Blocks: ``timeout_s``, unless the server of the store hangs: bound it from outside.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device()]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # they serve collectives; point-to-point calls use the device's own thread
    return cast(Pair, ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options))


def poison(pair: Pair, peer: int) -> None:
    """End a group: every wait of every thread on it raises, at both ends.

    Args:
        pair: the group.
        peer: rank of the other end inside the group.

    Blocks: a few milliseconds.
    """
    scratch = [torch.zeros(FRAME_BYTES, dtype=torch.uint8)]
    try:
        pair.recv(scratch, peer, TAG_KILL).wait(KILL_WAIT)
    except RuntimeError as error:  # the timeout is the point
        _log.debug("event=group_closed error=%s", first_line(error))


class Slots:
    """Fixed buffers for frames with the Work that uses each of them."""

    def __init__(self, count: int) -> None:
        buffers = [bytearray(FRAME_BYTES) for _ in range(count)]
        self.views = [memoryview(buffer) for buffer in buffers]
        self.tensors = [[torch.frombuffer(buffer, dtype=torch.uint8)] for buffer in buffers]
        self.works: list[Work | None] = [None] * count

    def drain(self) -> None:
        """Wait for what is left; the group is closed, so each wait ends at once."""
        for index, work in enumerate(self.works):
            if work is not None:
                try:
                    work.wait(DRAIN_WAIT)
                except RuntimeError as error:
                    _log.debug("event=drained slot=%d error=%s", index, error)
                self.works[index] = None


def first_line(error: BaseException) -> str:
    """The part of a gloo error that says what happened, without its source line and its advice."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". This is typically")[0][:300]


__all__ = [
    "TAG_KILL",
    "TAG_TO_FOLLOWER",
    "TAG_TO_LEADER",
    "Pair",
    "Slots",
    "Work",
    "connect_pair",
    "first_line",
    "poison",
]
