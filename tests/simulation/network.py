"""FIFO links between the leader and each follower: delay, clogging, silence, the end of a process."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from kvcached_dist.coord.core.errors import LinkDown
from kvcached_dist.coord.core.messages import Message
from kvcached_dist.coord.core.types import Epoch, Rank

if TYPE_CHECKING:
    from .clock import Loop
    from .host import Host


class Wire:
    """One direction of a link. Nothing overtakes.

    Args:
        loop: virtual time.
        source: sending host.
        target: receiving host.
        delay: shortest and longest time that a message is under way.
        random: of the delays.
        epoch: epoch of the link.
    """

    def __init__(
        self, loop: Loop, source: Host, target: Host, delay: tuple[int, int], random: Random, epoch: Epoch
    ) -> None:
        self.loop = loop
        self.epoch = epoch
        self.source = source
        self.target = target
        self.silent = False
        """Everything sent is lost, and neither end is told: the link is lost."""
        self.ended = False
        self.sent: list[Message] = []
        """The last messages, for duplicates and for frames of an old epoch."""
        self._low, self._spread = delay[0], max(0, delay[1] - delay[0])
        self._random = random.random
        self._free_at = 0
        self.arrives_last = 0

    def clog(self, until: int) -> None:
        """Nothing that is sent from now on arrives before ``until``."""
        self._free_at = max(self._free_at, until)

    def _arrival(self) -> int:
        at = max(self.loop.now + self._low + int(self._random() * self._spread), self._free_at, self.arrives_last)
        self.arrives_last = at
        return at

    def send(self, message: Message) -> None:
        """Put a message on the wire."""
        if self.ended or self.silent or self.target.dead:
            return
        if len(self.sent) >= 64:
            del self.sent[:32]
        self.sent.append(message)
        self.loop.at(self._arrival(), self.target, self.target.receive, Rank(self.source.rank), message)

    def end(self, reason: str, *, eof: bool) -> None:
        """The receiver learns, after what is under way, that there will be no more."""
        if not self.ended:
            self.ended = True
            self.loop.at(
                self._arrival(), self.target, self.target.link_down, Rank(self.source.rank), reason, eof, self.epoch
            )


class SimLink:
    """An agent's end of a link: the part of ``coord.links.link.Link`` that an agent uses.

    Args:
        peer: world rank at the other end.
        epoch: epoch of the link.
        out: wire to the peer.
    """

    def __init__(self, peer: Rank, epoch: Epoch, out: Wire) -> None:
        self.peer = peer
        self.epoch = epoch
        self.out = out
        self.down: LinkDown | None = None

    def send(self, message: Message) -> None:
        """Send, or raise what ended the link."""
        if self.down is not None:
            raise LinkDown(self.peer, self.down.reason, eof=self.down.eof)
        self.out.send(message)

    def start(self, on_message: Callable[[Message], None], on_down: Callable[[LinkDown], None]) -> None:
        """Hosts deliver to their agents themselves."""
        raise NotImplementedError("the simulation delivers messages itself")

    def close(self, timeout_s: float = 1.0) -> None:
        """An orderly end."""
        self.down = self.down or LinkDown(self.peer, "closed by this rank", eof=False)
