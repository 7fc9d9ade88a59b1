"""What a link between the leader and one follower offers, whatever carries it.

A link is FIFO in both directions and belongs to one epoch. It ends once and never comes back; the next
epoch gets a new one. How it ends:

=============================  ==========================================================
what happens                   what the owner sees
=============================  ==========================================================
the peer's process dies        ``on_down`` with ``eof=True``, within tens of milliseconds
nothing arrives for a lease    ``on_down`` with ``eof=False``; the peer finds it ended too
:meth:`Link.kill` here         ``on_down`` with the reason given, ``eof=False``
the peer killed it             ``on_down`` with ``eof=True``
``Bye`` arrived, or            the end is orderly: no ``on_down``; a later ``send`` raises
:meth:`Link.close` here        :class:`LinkDown`
=============================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from ..core.errors import LinkDown
from ..core.messages import Message
from ..core.types import Epoch, Rank

OUTBOX_FRAMES_MAX: Final = 4096
"""Frames that may wait while the peer takes none. One more ends the link: a FIFO may not lose a frame,
and a sender may not block."""

OnMessage = Callable[[Message], None]
"""Called in the reader thread of the link with every message, in order. It must not block for long: while
it runs nothing else is read, and an exception ends the link."""

OnDown = Callable[[LinkDown], None]
"""Called in the reader thread, after the last message, at most once."""


class Link(Protocol):
    """One end of a link. All methods may be called from any thread."""

    @property
    def peer(self) -> Rank:
        """World rank at the other end."""
        ...

    @property
    def epoch(self) -> Epoch:
        """Epoch that every message of this link carries."""
        ...

    @property
    def down(self) -> LinkDown | None:
        """Why the link ended, the first cause; ``None`` while it works."""
        ...

    @property
    def waiting_frames(self) -> int:
        """Frames that wait now because the peer takes none; a sender of many slows down by it."""
        ...

    def start(self, on_message: OnMessage, on_down: OnDown) -> None:
        """Begin to receive; once.

        Blocks: never; the callbacks run in the reader thread, maybe before this returns.
        """
        ...

    def send(self, message: Message) -> None:
        """Queue a message and hand it to the transport at once if that needs no waiting.

        A message of an older epoch is dropped: it must change nothing (S8).

        Raises:
            LinkDown: the link has ended, or ends now because the outbox is full.
            ValueError: the message cannot be sent (a newer epoch, too long); the link goes on.

        Blocks: never on the peer.
        """
        ...

    def kill(self, reason: str) -> None:
        """Fence the peer: end the link now, without flushing. Idempotent; the first reason stays.

        Blocks: milliseconds. Threads that are blocked in the transport wake up.
        """
        ...

    def close(self, timeout_s: float = 1.0) -> None:
        """End the link in order: say ``Bye`` unless that was said, let the peer take what was sent.

        After a kill or a failure it only waits for the threads of the link. Idempotent, never raises for
        a peer that is gone. Called from the reader thread it ends the link without waiting.

        Args:
            timeout_s: longest time for the peer to take what was sent, and again for the threads to end.

        Blocks: at most twice ``timeout_s``.
        """
        ...


__all__ = ["OUTBOX_FRAMES_MAX", "Link", "OnDown", "OnMessage"]
