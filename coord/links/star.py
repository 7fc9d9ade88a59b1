"""All links of the leader at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ..core.errors import KVDistError, LinkDown, WaitTimeout
from ..core.types import Epoch, Rank
from .bounded import StoreConnections
from .gloo import GlooLink


def open_star(
    connections: StoreConnections,
    *,
    session: int,
    epoch: Epoch,
    leader: Rank,
    followers: Collection[Rank],
    lease_s: float,
    connect_s: float,
    on_open: Callable[[GlooLink], None] | None = None,
) -> dict[Rank, GlooLink]:
    """Open the leader's link to every follower, all at the same time; called on the leader.

    Each follower calls :meth:`GlooLink.open` for its own end.

    Args:
        connections: to the bootstrap store.
        session: id of the run.
        epoch: epoch of the links.
        leader: world rank of the leader.
        followers: world ranks of the followers.
        lease_s: longest silence of a peer, in seconds.
        connect_s: deadline for all followers together, in seconds.
        on_open: gets each link as soon as it is there, in a thread of its own, while others are still waited for.

    Returns:
        The links by follower, none of them started by this function.

    Raises:
        WaitTimeout: names every follower that did not arrive.
        LinkDown: a connection broke while it was made.

        In both cases the links already made are closed.

    Blocks: at most ``connect_s`` and a grace of half a second.
    """
    links: dict[Rank, GlooLink] = {}
    failures: dict[Rank, Exception] = {}

    def open_one(follower: Rank) -> None:
        try:
            links[follower] = GlooLink.open(
                connections,
                session=session,
                epoch=epoch,
                rank=leader,
                leader=leader,
                follower=follower,
                lease_s=lease_s,
                connect_s=connect_s,
            )
            if on_open is not None:
                on_open(links[follower])
        except Exception as error:  # reported by the caller's thread below
            failures[follower] = error

    threads = [
        threading.Thread(target=open_one, args=(follower,), name=f"kvcached-open-{follower}", daemon=True)
        for follower in followers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not failures:
        return links
    for link in links.values():
        link.kill("another follower did not arrive")
        link.close()
    raise _combined(failures, epoch, connect_s)


def _combined(failures: dict[Rank, Exception], epoch: Epoch, connect_s: float) -> Exception:
    """One error for all followers; a broken connection says more than a rank that is late."""
    for error in failures.values():
        if not isinstance(error, WaitTimeout):
            return error if isinstance(error, KVDistError) else LinkDown(min(failures), str(error), eof=True)
    ranks = ", ".join(str(rank) for rank in sorted(failures))
    details = "; ".join(str(failures[rank]) for rank in sorted(failures))
    return WaitTimeout(f"rank(s) {ranks}", f"their ends of the links of epoch {epoch} ({details})", connect_s)


__all__ = ["open_star"]
