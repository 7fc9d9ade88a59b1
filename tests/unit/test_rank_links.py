"""The links of a rank together: who is spoken to, and how long their end takes."""

from __future__ import annotations

import threading
from typing import Any

from kvcached_dist.coord.core.errors import LinkDown
from kvcached_dist.coord.core.messages import Bye
from kvcached_dist.coord.core.types import Epoch, Rank
from kvcached_dist.rank_links import RankLinks

BYE = Bye(Epoch(1))


class _Link:
    """The end of a link that waits for the ends of all others, or that is down."""

    def __init__(self, peer: int, together: threading.Barrier, *, down: bool = False) -> None:
        self.peer = Rank(peer)
        self.sent: list[object] = []
        self.closed = False
        self._together = together
        self._down = down

    def send(self, message: object) -> None:
        if self._down:
            raise LinkDown(self.peer, "it has ended", eof=True)
        self.sent.append(message)

    def close(self) -> None:
        self._together.wait(10)
        self.closed = True


def links(count: int, down: tuple[int, ...] = ()) -> tuple[RankLinks, list[_Link]]:
    together = threading.Barrier(count)
    made = [_Link(peer, together, down=peer in down) for peer in range(1, count + 1)]
    by_rank: Any = {link.peer: link for link in made}
    return RankLinks(by_rank), made


def test_all_links_end_at_once() -> None:
    rank_links, made = links(5)
    rank_links.close()
    assert all(link.closed for link in made)


def test_a_link_that_is_down_hides_no_message_from_the_others() -> None:
    rank_links, made = links(3, down=(1,))
    rank_links.send_all(BYE)
    rank_links.send(Rank(7), BYE)
    assert [link.sent for link in made] == [[], [BYE], [BYE]]


def test_everybody_has_left_when_nobody_is_left() -> None:
    rank_links, _ = links(2)
    assert not rank_links.all_left
    rank_links.left |= {Rank(1), Rank(2)}
    assert rank_links.all_left
