"""The links of one rank to the others: on rank 0 to every follower, elsewhere to the leader."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping

from .coord.core.errors import LinkDown
from .coord.core.messages import Message
from .coord.core.types import Rank
from .coord.links.link import Link


class RankLinks:
    """Sends to the others, and remembers who has left.

    Args:
        links: by the rank at the other end; empty for a world of one.

    Threads: under the agent's lock, except :meth:`close`.
    """

    def __init__(self, links: Mapping[Rank, Link]) -> None:
        self.by_rank = dict(links)
        self.left: set[Rank] = set()
        """Ranks that said goodbye or whose link has ended."""

    def send(self, to: Rank, message: Message) -> None:
        """Send to one rank; nothing where there is no link to it."""
        link = self.by_rank.get(to)
        if link is not None:
            # A link that is down reports itself through on_link_down; sending on it meanwhile is no second cause.
            with contextlib.suppress(LinkDown):
                link.send(message)

    def send_all(self, message: Message) -> None:
        """Send to every rank that has a link."""
        for rank in self.by_rank:
            self.send(rank, message)

    @property
    def all_left(self) -> bool:
        """Whether nobody is left to talk to."""
        return self.left >= set(self.by_rank)

    def close(self) -> None:
        """End all links in order. Blocks: as long as the slowest of them, at most two seconds."""
        close_links(self.by_rank.values())


def close_links(links: Iterable[Link]) -> None:
    """End links in order, all at once: a peer that takes nothing holds up no other.

    Blocks: as long as the slowest of them; see :meth:`Link.close`.
    """
    closing: list[threading.Thread] = []
    here: list[Link] = []
    for link in links:
        thread = threading.Thread(target=link.close, name=f"kvcached-close-{link.peer}", daemon=True)
        try:
            thread.start()
            closing.append(thread)
        except RuntimeError:  # an interpreter that ends starts no threads
            here.append(link)
    for link in here:
        link.close()
    for thread in closing:
        thread.join()


__all__ = ["RankLinks", "close_links"]
