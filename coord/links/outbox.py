"""Frames on their way to the peer: in the hands of gloo, or waiting for a send slot.

A slot is free again once the peer has acknowledged its frame (every frame carries an acknowledgement), because then
waiting for the Work returns at once. Frames leave in the order in which they came: none is posted past one that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final

from .link import OUTBOX_FRAMES_MAX
from .pair import Pair, Slots, Work

SENDS_POSTED: Final = 16
"""Frames handed to gloo at once; more wait in the outbox."""


class Outbox:
    """The sending half of a link.

    Args:
        group: process group of two ranks.
        peer: rank of the other end inside the group.
        tag: of the frames.
        lease: bound of a wait for a send that the peer has acknowledged, which is over already.
        acknowledged: how many frames the peer has received.

    Threads: under the link's lock; how many frames wait may be read without it.
    """

    def __init__(self, group: Pair, peer: int, tag: int, lease: timedelta, acknowledged: Callable[[], int]) -> None:
        self._group: Pair | None = group
        self._peer = peer
        self._tag = tag
        self._lease = lease
        self._acknowledged = acknowledged
        self._slots = Slots(SENDS_POSTED)
        self._waiting: deque[bytes] = deque()
        self._posted = 0

    @property
    def waiting(self) -> int:
        """Frames that wait for a slot."""
        return len(self._waiting)

    def put(self, frames: Iterable[bytes]) -> bool:
        """Post frames, or let them wait behind those that do.

        Returns:
            False when too many wait now: the link must end.

        Raises:
            RuntimeError: gloo's; the group is closed.
        """
        for frame in frames:
            if not self._waiting and self._has_slot():
                self._post(frame)
            else:
                self._waiting.append(frame)
        return len(self._waiting) <= OUTBOX_FRAMES_MAX

    def post_waiting(self) -> tuple[int, Work] | None:
        """Post those that wait while slots are free.

        Returns:
            The slot to wait for and its Work; ``None`` when no frame waits.

        Raises:
            RuntimeError: gloo's; the group is closed.
        """
        while self._waiting:
            if not self._has_slot():
                slot = self._posted % SENDS_POSTED
                work = self._slots.works[slot]
                assert work is not None
                return slot, work
            self._post(self._waiting.popleft())
        return None

    def sent(self, slot: int) -> None:
        """The Work of a slot has been waited for."""
        self._slots.works[slot] = None

    def release(self) -> None:
        """Collect every Work and let the group go; it must be closed. Blocks: as :meth:`Slots.drain`."""
        self._slots.drain()
        self._waiting.clear()
        self._group = None

    def _has_slot(self) -> bool:
        """The next send slot is unused, or the peer has received what it carried."""
        unused = self._slots.works[self._posted % SENDS_POSTED] is None
        return unused or self._posted - self._acknowledged() < SENDS_POSTED

    def _post(self, frame: bytes) -> None:
        """Hand one frame to gloo. Needs a slot."""
        slots, slot = self._slots, self._posted % SENDS_POSTED
        work = slots.works[slot]
        if work is not None:
            work.wait(self._lease)  # acknowledged, hence complete: returns at once
        slots.views[slot][: len(frame)] = frame
        assert self._group is not None
        slots.works[slot] = self._group.send(slots.tensors[slot], self._peer, self._tag)
        self._posted += 1


__all__ = ["SENDS_POSTED", "Outbox"]
