"""Waits of the replay's launchers that a stopped process or a dead store would make endless."""

from __future__ import annotations

import multiprocessing as mp
import os
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.coord.links.bounded import StoreConnections
from kvcached_dist.replay import launcher, torchrun
from kvcached_dist.replay.outcome import RankOutcome
from kvcached_dist.replay.rank_main import Seat


def test_a_rank_that_stops_in_the_middle_of_a_message_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "READ_S", 0.02)
    ours, theirs = mp.Pipe(duplex=False)
    os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first bytes of a thousand")
    child: Any = SimpleNamespace(
        rank=1, pipe=ours, piped=True, outcome=None, process=SimpleNamespace(is_alive=lambda: True)
    )
    launcher._read(child, None)
    assert not child.piped
    assert child.outcome is None
    theirs.close()


def test_a_message_that_comes_whole_is_taken() -> None:
    ours, theirs = mp.Pipe(duplex=False)
    theirs.send(("news", "half way"))
    child: Any = SimpleNamespace(
        rank=0, pipe=ours, piped=True, outcome=None, process=SimpleNamespace(is_alive=lambda: True)
    )
    news: list[Any] = []
    launcher._read(child, news.append)
    assert (child.piped, news) == (True, ["half way"])
    ours.close()
    theirs.close()


class _Store:
    """A store that keeps everything, or answers nothing."""

    def __init__(self, hangs: bool = False) -> None:
        self.kept: dict[str, bytes] = {}
        self.go_on = threading.Event()
        if not hangs:
            self.go_on.set()

    def clone(self) -> _Store:
        return self

    def set(self, key: str, value: str) -> None:
        self.go_on.wait(10)
        self.kept[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.go_on.wait(10)
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key]


OUTCOME: Any = SimpleNamespace(to_json=lambda: "{}")


def test_an_outcome_is_not_handed_in_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torchrun._log, "warning", lambda text, *values: said.append(text % values))
    store = _Store(hangs=True)
    torchrun._hand_in(StoreConnections(store), Seat(1, "run", 1), OUTCOME, 0.02)
    assert store.kept == {}
    store.go_on.set()
    assert [line.split(" error=")[0] for line in said] == ["event=outcome_not_handed_in rank=1"]


def test_rank_0_takes_the_outcomes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankOutcome, "from_json", lambda text: text)
    store = _Store()
    connections = StoreConnections(store)
    torchrun._hand_in(connections, Seat(2, "run", 2), OUTCOME, 5)
    assert torchrun._gather(connections, Seat(0, "run", 0), 3, OUTCOME, 0.02) == [OUTCOME, "{}"]
    torchrun._hand_in(connections, Seat(1, "run", 1), OUTCOME, 5)
    assert len(torchrun._gather(connections, Seat(0, "run", 0), 3, OUTCOME, 5)) == 3
