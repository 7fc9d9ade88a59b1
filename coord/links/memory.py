"""A link inside one process, for tests of what stands on links: real threads, real codec, no sockets.

It keeps the rules of :class:`~.link.Link`, and adds what a test needs: :meth:`MemoryLink.die` is the death
of the process at this end, :class:`Hooks` lose or delay messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import LinkDown
from ..core.messages import Bye, Message
from ..core.types import Epoch, Rank
from .codec import Decoder, Encoder
from .link import OUTBOX_FRAMES_MAX, OnDown, OnMessage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Faults of the messages that one end sends. Called in the sending thread, in sending order.

    Attributes:
        drop: true for a message that is to be lost before it gets a sequence number.
        delay_s: seconds that a message is under way, 0 for none; later ones queue up behind it.
    """

    drop: Callable[[Message], bool] | None = None
    delay_s: Callable[[Message], float] | None = None


class MemoryLink:
    """One end of a pair made by :func:`memory_pair`; implements :class:`~.link.Link`.

    Args:
        session: id of the run.
        epoch: epoch of the link.
        peer: world rank of the other end.
        lease_s: longest silence of the peer, in seconds.
        hooks: faults of what this end sends.
    """

    def __init__(self, session: int, epoch: Epoch, peer: Rank, lease_s: float, hooks: Hooks | None) -> None:
        self.peer = peer
        self.epoch = epoch
        self._lease_s = lease_s
        self._hooks = hooks or Hooks()
        self._encoder = Encoder(session, epoch)
        self._decoder = Decoder(session, epoch)
        self._other: MemoryLink = self
        # One lock for the state and one for the inbox: a sender holds its own state and the peer's inbox.
        self._lock = threading.Lock()
        self._inbox: deque[tuple[float, bytes]] = deque()
        self._arrived = threading.Condition()
        self._down: LinkDown | None = None
        self._fenced = False
        self._orderly = False
        self._bye_sent = False
        self._eof: str | None = None
        self._reader: threading.Thread | None = None

    @property
    def down(self) -> LinkDown | None:
        """Why the link ended; ``None`` while it works."""
        return self._down

    @property
    def waiting_frames(self) -> int:
        """Frames that wait now because the peer takes none."""
        return len(self._other._inbox)

    def start(self, on_message: OnMessage, on_down: OnDown) -> None:
        """Begin to receive; see :meth:`Link.start`."""
        with self._lock:
            if self._reader is not None:
                raise RuntimeError(f"link to rank {self.peer} was started before")
            if self._down is not None:
                raise LinkDown(self.peer, self._down.reason, eof=self._down.eof)
            self._reader = threading.Thread(
                target=self._run, args=(on_message, on_down), name=f"memory-link-{self.peer}", daemon=True
            )
        self._reader.start()

    def send(self, message: Message) -> None:
        """Encode a message and put it into the inbox of the other end; see :meth:`Link.send`."""
        with self._lock:
            if self._down is not None:
                raise LinkDown(self.peer, self._down.reason, eof=self._down.eof)
            if message.epoch < self.epoch:
                return
            if self._hooks.drop is not None and self._hooks.drop(message):
                return
            delay_s = self._hooks.delay_s(message) if self._hooks.delay_s is not None else 0.0
            frames = self._encoder.encode(message, self._decoder.received)
            self._bye_sent = self._bye_sent or isinstance(message, Bye)
            waiting = self._other._take_in(frames, delay_s)
        if waiting > OUTBOX_FRAMES_MAX:
            full = f"outbox is full: {waiting} frames wait, rank {self.peer} takes none"
            raise self._end(LinkDown(self.peer, full, eof=False))

    def kill(self, reason: str) -> None:
        """Fence the peer; see :meth:`Link.kill`."""
        self._fenced = True
        self._end(LinkDown(self.peer, reason, eof=False))

    def close(self, timeout_s: float = 1.0) -> None:
        """End the link in order; see :meth:`Link.close`."""
        if self._down is None and not self._bye_sent:
            try:
                self.send(Bye(self.epoch))
            except LinkDown as down:
                _log.debug("event=bye_not_sent peer=%d reason=%s", self.peer, down.reason)
        self._fenced = True
        self._end(LinkDown(self.peer, "closed by this rank", eof=False), orderly=True)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout_s)

    def die(self) -> None:
        """The process at this end is gone: the peer sees its end at once, nobody is told here."""
        self._fenced = True
        self._end(LinkDown(self.peer, "this process died", eof=False), orderly=True)

    def _take_in(self, frames: list[bytes], delay_s: float) -> int:
        """Append frames to this end's inbox; returns how many wait there."""
        due = time.monotonic() + delay_s
        with self._arrived:
            self._inbox.extend((due, frame) for frame in frames)
            self._arrived.notify_all()
            return len(self._inbox)

    def _end(self, down: LinkDown, *, orderly: bool = False) -> LinkDown:
        with self._lock:
            if self._down is None:
                self._down = down
                self._orderly = orderly
            first = self._down
        for end, eof in ((self, None), (self._other, "connection ended by the peer")):
            with end._arrived:
                end._eof = end._eof or eof
                end._arrived.notify_all()
        return first

    def _run(self, on_message: OnMessage, on_down: OnDown) -> None:
        down, said_bye = self._receive(on_message)
        down = self._end(down)
        if not (self._orderly or said_bye):
            on_down(down)

    def _receive(self, on_message: OnMessage) -> tuple[LinkDown, bool]:
        """Deliver until something ends the link; also tells whether the peer said ``Bye``."""
        said_bye = False
        while True:
            frame = self._next()
            if isinstance(frame, LinkDown):
                return frame, said_bye
            message = self._decoder.feed(frame)
            if self._decoder.broken is not None:
                return LinkDown(self.peer, self._decoder.broken, eof=False), said_bye
            if message is None:
                continue
            said_bye = said_bye or isinstance(message, Bye)
            try:
                on_message(message)
            except Exception:
                _log.exception("event=handler_failed peer=%d message=%s", self.peer, type(message).__name__)
                name = type(message).__name__
                return LinkDown(self.peer, f"handling {name} failed on this rank", eof=False), said_bye

    def _next(self) -> bytes | LinkDown:
        """The next frame that is due, or why there will be none."""
        lease_end = time.monotonic() + self._lease_s
        with self._arrived:
            while True:
                now = time.monotonic()
                if self._down is not None and (self._fenced or not self._inbox):
                    return self._down
                if self._inbox and self._inbox[0][0] <= now:
                    return self._inbox.popleft()[1]
                if self._eof is not None and not self._inbox:
                    return LinkDown(self.peer, self._eof, eof=True)
                if now >= lease_end:
                    return LinkDown(self.peer, f"silent for a lease of {self._lease_s:g} s", eof=False)
                due = self._inbox[0][0] if self._inbox else lease_end
                self._arrived.wait(min(due, lease_end) - now)


def memory_pair(
    leader: Rank,
    follower: Rank,
    *,
    session: int = 1,
    epoch: Epoch = Epoch(1),  # noqa: B008 - a NewType of an int, not a mutable value
    lease_s: float = 1.0,
    leader_hooks: Hooks | None = None,
    follower_hooks: Hooks | None = None,
) -> tuple[MemoryLink, MemoryLink]:
    """Two connected ends.

    Args:
        leader: world rank of the first end.
        follower: world rank of the second end.
        session: id of the run.
        epoch: epoch of the link.
        lease_s: longest silence, in seconds.
        leader_hooks: faults of what the leader sends.
        follower_hooks: faults of what the follower sends.

    Returns:
        The leader's end and the follower's end.
    """
    at_leader = MemoryLink(session, epoch, follower, lease_s, leader_hooks)
    at_follower = MemoryLink(session, epoch, leader, lease_s, follower_hooks)
    at_leader._other, at_follower._other = at_follower, at_leader
    return at_leader, at_follower


__all__ = ["Hooks", "MemoryLink", "memory_pair"]
