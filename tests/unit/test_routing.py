"""A rule that breaks ends the coordinator on every rank, also where carrying out the end breaks another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn, cast

from kvcached_dist.coord.core.effects import Effect, GroupDown, Send
from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.coord.core.messages import Bye, Fail, Message
from kvcached_dist.coord.core.types import Cause, Epoch, Rank
from kvcached_dist.ending import Ending
from kvcached_dist.routing import Routing


class Leader:
    """One whose first message breaks a rule, with something still to be sent."""

    def __init__(self) -> None:
        self.failure: GroupDown | None = None
        self._out: list[Effect] = []

    def phase(self) -> str:
        return "growing"

    def fail(self, cause: Cause, phase: str) -> None:
        if self.failure is None:
            self.failure = GroupDown(cause, phase)
            self._out.append(self.failure)

    def take(self) -> list[Effect]:
        taken, self._out = self._out, []
        return taken

    def breaks(self) -> NoReturn:
        self._out.append(Send(Rank(0), Bye(Epoch(1))))
        raise InvariantViolation("S1", "the first")


def test_a_rule_that_breaks_again_while_the_end_is_carried_out(monkeypatch: Any) -> None:
    told: list[Message] = []
    ending, leader = Ending(Rank(0), Epoch(1), str), Leader()
    participant = SimpleNamespace(take=list, newest_txn=0)
    routing = Routing(
        Rank(0), Epoch(1), cast(Any, participant), cast(Any, None), cast(Any, SimpleNamespace(send_all=told.append)),
        ending, put_work=lambda _: None, take_fence=lambda _: None, faults=None, now=lambda: cast(Any, 0),
    )  # fmt: skip
    routing.leader = cast(Any, leader)

    def breaks_too(*_: object) -> NoReturn:
        raise InvariantViolation("S2", "the second")

    monkeypatch.setattr(routing, "send", breaks_too)
    routing.handle(leader.breaks)
    assert ending.is_down
    assert ending.failure is not None
    assert "the first" in str(ending.failure)
    assert isinstance(told[0], Fail)
    assert "the first" in str(told[0].cause)
