"""The process at the other end of a link: takes commands as JSON, reports events as JSON.

Started by :mod:`tests.links.peer`, either as an interpreter of its own that talks over its standard streams, or
forked from a process that has torch loaded, over a connection.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvcached_dist.coord.core.errors import KVDistError, LinkDown
from kvcached_dist.coord.core.messages import Abort, Beat, Bye, Drained, Map, Mapped, Message
from kvcached_dist.coord.core.types import Epoch, Rank, Txn
from kvcached_dist.coord.links.bounded import StoreConnections
from kvcached_dist.coord.links.codec import FRAME_BYTES
from kvcached_dist.coord.links.gloo import GlooLink
from kvcached_dist.coord.links.pair import connect_pair
from kvcached_dist.coord.links.store import connect_store
from tests.links.blank import make

_out = threading.Lock()
_write: Callable[[str], None] = functools.partial(print, flush=True)
kept: list[Any] = []
"""What must stay alive as long as the process."""


def report(event: str, **facts: Any) -> None:
    with _out:
        _write(json.dumps({"event": event, **facts}))


class Follower:
    """One link of this process: beats, answers Map with Mapped, checks the order of Aborts."""

    def __init__(self, link: GlooLink, beat_s: float) -> None:
        self.link = link
        self.received = 0
        self.expected = 0
        self._beat_s = beat_s
        link.start(self.on_message, self.on_down)
        if beat_s:
            threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        beat = make(Beat, epoch=self.link.epoch)
        while self.link.down is None:
            try:
                self.link.send(beat)
            except LinkDown:
                return
            time.sleep(self._beat_s)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Map):
            self.link.send(Mapped(self.link.epoch, message.txn))
        elif isinstance(message, Abort):
            if message.txn != self.received + 1:
                report("disorder", expected=self.received + 1, got=message.txn)
            self.received += 1
            if self.received == self.expected:
                report("received", count=self.received)
        elif isinstance(message, Bye):
            report("bye")

    def on_down(self, down: LinkDown) -> None:
        report("down", eof=down.eof, reason=down.reason, threads=threading.active_count())

    def stream(self, count: int) -> None:
        for txn in range(1, count + 1):
            while self.link.waiting_frames > 1000:
                time.sleep(0.001)
            self.link.send(Drained(self.link.epoch, Txn(txn), 0))


def open_link(connections: Any, command: dict[str, Any]) -> Follower | None:
    try:
        link = GlooLink.open(
            connections,
            session=command["session"],
            epoch=Epoch(command["epoch"]),
            rank=Rank(command["follower"]),
            leader=Rank(0),
            follower=Rank(command["follower"]),
            lease_s=command["lease_s"],
            connect_s=command["connect_s"],
        )
    except KVDistError as error:
        report("refused", error=type(error).__name__, text=str(error))
        return None
    follower = Follower(link, command["beat_s"])
    report("opened")
    return follower


def busy(seconds: float) -> None:
    """Python work that leaves the interpreter lock only when it must."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def raw(connections: Any, command: dict[str, Any]) -> None:
    """A bare group that posts receives of a given size and reports how each ends."""
    pair = connections.call(lambda own: connect_pair(own, command["prefix"], 1, 10.0), 11.0, what="a pair")
    tensors = [torch.zeros(command["size"], dtype=torch.uint8) for _ in range(command["receives"])]
    works = [pair.recv([tensor], 0, 1) for tensor in tensors]
    report("posted")
    kept.extend((pair, tensors))
    for work in works:
        try:
            work.wait(timedelta(seconds=command["wait_s"]))
            report("raw", ended="received")
        except RuntimeError as error:
            report("raw", ended=str(error).partition("\n")[0])


def forked(connection: Connection, environment: dict[str, str]) -> None:
    """Entry of a forked process."""
    global _write
    _write = connection.send
    os.environ.update(environment)
    main(iter(connection.recv, None))


def main(lines: Iterable[str]) -> None:
    store: Any = None
    connections: Any = None
    follower: Follower | None = None
    for line in lines:
        command = json.loads(line)
        match command["do"]:
            case "connect":
                store = connect_store(command["host"], command["port"], command["serve"], 2, 10.0)
                connections = StoreConnections(store)
                report("connected", port=store.port)
            case "open":
                follower = open_link(connections, command)
            case "expect":
                assert follower is not None
                follower.expected = command["count"]
            case "stream":
                assert follower is not None
                threading.Thread(target=follower.stream, args=(command["count"],), daemon=True).start()
            case "close":
                assert follower is not None
                follower.link.close()
                report("closed", threads=threading.active_count())
            case "busy":
                threading.Thread(target=busy, args=(command["seconds"],), daemon=True).start()
            case "raw":
                threading.Thread(target=raw, args=(connections, command), daemon=True).start()
            case "exit":
                report("exiting")
                return
            case "exit_hard":
                os._exit(3)


assert FRAME_BYTES == 4096
if __name__ == "__main__":
    main(sys.stdin)
