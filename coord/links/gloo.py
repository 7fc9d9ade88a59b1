"""A link over a gloo process group of two ranks: the leader is rank 0 of it, the follower rank 1.

Habits of gloo that shape this file, besides those in ``pair``:

- A timed-out wait closes the whole group. Here a group is one link, so the timeout of a receive is the
  lease: it fences exactly the silent peer, and tells it.
- A received message larger than its buffer ends the process; every frame has ``FRAME_BYTES``.
- A completed send only says that the kernel has the bytes.

Threads. ``send`` hands frames to gloo in the calling thread while send slots are free: posting never
waits, and under a busy interpreter a hop to another thread costs a switch interval. Only without a free
slot do frames queue up (``outbox``), and the writer thread waits for the oldest send. The reader thread
waits for the receives in turn, delivers, and posts them again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Final

from ..core.errors import LinkDown, WaitTimeout
from ..core.messages import Bye, Message
from ..core.types import Epoch, Rank
from .bounded import GRACE_S, StoreConnections, StoreLost, join_at_exit
from .codec import Decoder, Encoder
from .link import OnDown, OnMessage
from .outbox import Outbox
from .pair import TAG_TO_FOLLOWER, TAG_TO_LEADER, Pair, Slots, Work, connect_pair, first_line, poison

RECEIVES_POSTED: Final = 16
"""Receives posted ahead. A sender whose frame meets a posted receive needs no round trip to send it."""

_EXIT_JOIN_S: Final = 2.0
_FIRST_CAUSE_S: Final = 0.1

_log = logging.getLogger(__name__)
_live: weakref.WeakSet[GlooLink] = weakref.WeakSet()


class GlooLink:
    """One end of a link; implements :class:`~.link.Link`.

    Use :meth:`open`. Both ends must use the same lease.

    Args:
        group: process group of two ranks, used by this link alone.
        session: id of the run.
        epoch: epoch of the link.
        peer: world rank of the other end.
        is_leader: this end is the leader's.
        lease_s: longest silence of the peer, in seconds. The owner must send something (a beat) several
            times per lease.
    """

    def __init__(self, group: Pair, *, session: int, epoch: Epoch, peer: Rank, is_leader: bool, lease_s: float) -> None:
        self._peer = peer
        self._epoch = epoch
        self._group: Pair | None = group
        self._group_peer = 1 if is_leader else 0
        self._receive_tag = TAG_TO_LEADER if is_leader else TAG_TO_FOLLOWER
        self._lease_s = lease_s
        self._lease = timedelta(seconds=lease_s)
        self._encoder = Encoder(session, epoch)
        self._decoder = Decoder(session, epoch)
        decoder, tag = self._decoder, TAG_TO_FOLLOWER if is_leader else TAG_TO_LEADER
        self._outbox = Outbox(group, self._group_peer, tag, self._lease, lambda: decoder.acknowledged)
        self._receives = Slots(RECEIVES_POSTED)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._down: LinkDown | None = None
        self._orderly = False
        self._fenced = False
        self._bye_sent = False
        self._bye_received = False
        self._closing = False
        self._poisoned = False
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None
        _live.add(self)

    @classmethod
    def open(
        cls,
        connections: StoreConnections,
        *,
        session: int,
        epoch: Epoch,
        rank: Rank,
        leader: Rank,
        follower: Rank,
        lease_s: float,
        connect_s: float,
    ) -> GlooLink:
        """Connect the two ends. Collective over the leader and this follower.

        Args:
            connections: to the bootstrap store, needed until this returns.
            session: id of the run.
            epoch: epoch of the link. A pair of ranks may try each epoch once: the addresses of a failed
                attempt stay in the store.
            rank: world rank of this process, the leader or the follower.
            leader: world rank of the leader.
            follower: world rank of the follower.
            lease_s: longest silence of the peer, in seconds.
            connect_s: deadline for the peer to arrive, in seconds.

        Raises:
            WaitTimeout: the peer did not arrive or the store did not answer; names the peer and the key.
            LinkDown: the connection broke while it was made.

        Blocks: at most ``connect_s`` and a grace of half a second.
        """
        if rank not in (leader, follower):
            raise ValueError(f"rank {rank} is at neither end of the link {leader} - {follower}")
        is_leader = rank == leader
        peer = follower if is_leader else leader
        prefix = f"{session:016x}/{epoch}/{follower}"
        what = f"its end of the link of epoch {epoch} (store key prefix {prefix}, {connections.name})"

        def connect(store: Any) -> Pair:
            return connect_pair(store, prefix, 0 if is_leader else 1, connect_s)

        started = time.monotonic()
        try:
            group = connections.call(connect, connect_s + GRACE_S, who=f"rank {peer}", what=what)
        except (RuntimeError, StoreLost) as error:
            # gloo and the store report a missing peer as their own errors with the deadline in the text.
            if time.monotonic() - started >= connect_s or _is_timeout(error):
                raise WaitTimeout(f"rank {peer}", f"{what} ({first_line(error)})", connect_s) from error
            raise LinkDown(peer, f"connecting failed: {first_line(error)}", eof=True) from error
        return cls(group, session=session, epoch=epoch, peer=peer, is_leader=is_leader, lease_s=lease_s)

    @property
    def peer(self) -> Rank:
        """World rank at the other end."""
        return self._peer

    @property
    def epoch(self) -> Epoch:
        """Epoch of the link."""
        return self._epoch

    @property
    def down(self) -> LinkDown | None:
        """Why the link ended; ``None`` while it works."""
        return self._down

    @property
    def waiting_frames(self) -> int:
        """Frames that wait now because the peer takes none."""
        return self._outbox.waiting

    def start(self, on_message: OnMessage, on_down: OnDown) -> None:
        """Begin to receive; see :meth:`Link.start`."""
        with self._lock:
            if self._reader is not None:
                raise RuntimeError(f"link to rank {self._peer} was started before")
            if self._down is not None:
                raise _again(self._down)
            name = f"kvcached-link-{self._peer}-epoch-{self._epoch}"
            self._writer = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
            self._reader = threading.Thread(
                target=self._run, args=(on_message, on_down), name=f"{name}-reader", daemon=True
            )
        for thread in (self._writer, self._reader):
            join_at_exit(thread)
            thread.start()

    def send(self, message: Message) -> None:
        """Queue a message and hand it to gloo at once if a slot is free; see :meth:`Link.send`."""
        try:
            with self._lock:
                if self._down is not None:
                    raise _again(self._down)
                if message.epoch < self._epoch:
                    return
                frames = self._encoder.encode(message, self._decoder.received)
                self._bye_sent = self._bye_sent or isinstance(message, Bye)
                if self._queue(frames):
                    return
                full = f"outbox is full: {self._outbox.waiting} frames wait, rank {self._peer} takes none"
        except RuntimeError as error:
            raise _again(self._end(self._explain(error, "takes no frame"))) from error
        raise _again(self._end(LinkDown(self._peer, full, eof=False)))

    def kill(self, reason: str) -> None:
        """Fence the peer; see :meth:`Link.kill`."""
        self._fenced = True
        self._end(LinkDown(self._peer, reason, eof=False))

    def close(self, timeout_s: float = 1.0) -> None:
        """End the link in order; see :meth:`Link.close`."""
        deadline = time.monotonic() + timeout_s
        reader = self._reader
        if self._down is None and reader is not None and not self._bye_sent:
            try:
                self.send(Bye(self._epoch))
            except LinkDown as down:
                _log.debug("event=bye_not_sent peer=%d reason=%s", self._peer, down.reason)
        inside = threading.current_thread() is reader
        with self._changed:
            self._closing = True
            while reader is not None and not inside and not self._is_flushed():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            self._fenced = True
        self._end(LinkDown(self._peer, "closed by this rank", eof=False), orderly=True)
        if not inside:
            self._join(timeout_s)

    # What follows holds the lock where it says so.

    def _is_flushed(self) -> bool:
        """Lock held: the peer has everything, or will take nothing more."""
        taken = not self._outbox.waiting and self._decoder.acknowledged >= self._encoder.sequence
        return self._down is not None or self._bye_received or taken

    def _queue(self, frames: list[bytes]) -> bool:
        """Lock held: send frames, or leave them to the writer.

        Returns:
            False when the outbox is full now: the link must end.
        """
        fits = self._outbox.put(frames)
        if self._outbox.waiting:
            self._changed.notify_all()
        return fits

    def _end(self, down: LinkDown, *, orderly: bool = False) -> LinkDown:
        """End the link; the first cause stays.

        Returns:
            The first cause.
        """
        with self._changed:
            if self._down is None:
                self._down = down
                self._orderly = orderly
            first = self._down
            group = None if self._poisoned else self._group
            self._poisoned = True
            self._changed.notify_all()
        if group is not None:
            poison(group, self._group_peer)
        return first

    def _explain(self, error: RuntimeError, silence: str = "silent") -> LinkDown:
        """Translate what gloo says. A peer that killed the link and one that died look the same."""
        if "pair closure" in str(error):
            # Another thread of this link timed out and knows what it waited for; let it say so first.
            with self._changed:
                self._changed.wait_for(lambda: self._down is not None, _FIRST_CAUSE_S)
                if self._down is not None:
                    return self._down
        if _is_timeout(error):
            return LinkDown(self._peer, f"{silence} for a lease of {self._lease_s:g} s", eof=False)
        return LinkDown(self._peer, f"connection ended: {first_line(error)}", eof=True)

    def _run(self, on_message: OnMessage, on_down: OnDown) -> None:
        """Reader thread: receive until the link ends, clean up, report."""
        try:
            down = self._receive(on_message)
        except RuntimeError as error:
            down = self._explain(error)
        down = self._end(down)
        if self._writer is not None:
            self._writer.join(_EXIT_JOIN_S)
        self._release()
        if not (self._orderly or self._bye_received):
            on_down(down)

    def _receive(self, on_message: OnMessage) -> LinkDown:
        """Deliver until something ends the link; ``RuntimeError`` from gloo included."""
        group, slots, decoder = self._group, self._receives, self._decoder
        assert group is not None
        for slot in range(RECEIVES_POSTED):
            slots.works[slot] = group.recv(slots.tensors[slot], self._group_peer, self._receive_tag)
        broken: RuntimeError | None = None
        slot = 0
        while True:
            work = slots.works[slot]
            if work is None:  # could not be posted again; frames that had arrived before are delivered
                raise broken or RuntimeError("connection closed")
            work.wait(self._lease)
            slots.works[slot] = None
            message = decoder.feed(slots.views[slot])
            if self._fenced and self._down is not None:
                return self._down
            if message is not None and not self._deliver(message, on_message):
                return LinkDown(self._peer, f"handling {type(message).__name__} failed on this rank", eof=False)
            if decoder.broken is not None:
                return LinkDown(self._peer, decoder.broken, eof=False)
            if self._closing:
                with self._changed:
                    self._changed.notify_all()
            if broken is None:
                try:
                    slots.works[slot] = group.recv(slots.tensors[slot], self._group_peer, self._receive_tag)
                except RuntimeError as error:
                    broken = error
            slot = (slot + 1) % RECEIVES_POSTED

    def _deliver(self, message: Message, on_message: OnMessage) -> bool:
        if isinstance(message, Bye):
            # Acknowledged at once: the peer waits for it before it closes, and a socket closed with
            # unread data may take the Bye with it.
            with self._changed:
                self._bye_received = True
                self._changed.notify_all()
                if self._down is None:
                    self._acknowledge()
        try:
            on_message(message)
        except Exception:
            _log.exception("event=handler_failed peer=%d message=%s", self._peer, type(message).__name__)
            return False
        return True

    def _acknowledge(self) -> None:
        """Lock held: tell the peer what has arrived, if it is still there."""
        try:
            self._queue([self._encoder.acknowledge(self._decoder.received)])
        except RuntimeError as error:
            _log.debug("event=not_acknowledged peer=%d error=%s", self._peer, first_line(error))

    def _write(self) -> None:
        """Writer thread: empty the outbox while slots are missing."""
        try:
            while (oldest := self._oldest_send()) is not None:
                slot, work = oldest
                work.wait(self._lease)
                with self._lock:
                    self._outbox.sent(slot)
        except RuntimeError as error:
            self._end(self._explain(error, "takes no frame"))

    def _oldest_send(self) -> tuple[int, Work] | None:
        """The send to wait for, once a frame waits for its slot; ``None`` when the link has ended."""
        with self._changed:
            while self._down is None:
                if (oldest := self._outbox.post_waiting()) is not None:
                    return oldest
                self._changed.wait()
            return None

    def _release(self) -> None:
        """Reader thread, or no threads: collect every Work, let the group go."""
        self._receives.drain()
        with self._lock:
            self._outbox.release()
            self._group = None

    def _join(self, timeout_s: float) -> None:
        """Wait for the threads; a link that was never started is released here."""
        reader = self._reader
        if reader is None:
            self._release()
        elif reader is not threading.current_thread():
            reader.join(timeout_s)


def _is_timeout(error: Exception) -> bool:
    """Gloo has one exception type for everything; the contract tests pin the words."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _again(down: LinkDown) -> LinkDown:
    """The same error as a new object: one that is raised over and over collects tracebacks."""
    return LinkDown(down.peer, down.reason, eof=down.eof)


def _end_all() -> None:
    """At interpreter exit: no thread may be inside gloo when the interpreter goes away.

    A daemon thread that returns from C++ into a finalising interpreter is ended by unwinding through
    frames that must not throw, which ends the process with an abort.
    """
    deadline = time.monotonic() + _EXIT_JOIN_S
    links = list(_live)
    for link in links:
        link._fenced = True
        link._end(LinkDown(link.peer, "interpreter exit", eof=False), orderly=True)
    for link in links:
        link._join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)

__all__ = ["RECEIVES_POSTED", "GlooLink"]
