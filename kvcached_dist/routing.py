"""Between one rank's protocol core and the world: what arrives goes into the core, what the core asks for is done.

::

    links, clock, driver work, fences  ->  Leader (rank 0), Participant, Marks
    Leader, Participant                ->  messages, driver work, fences, the end

Nothing here waits or makes a driver call; the threads and the lock are the agent's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .agent_ports import Faults
from .coord.core.effects import Effect, EpochDown, GroupDown, Note, Send, TakeFence, Work
from .coord.core.errors import Divergence, InvariantViolation, LinkDown
from .coord.core.leader import Leader
from .coord.core.messages import ANSWERS, Beat, Bye, Fail, MarkMessage, Message, Reform, State, TxnMessage
from .coord.core.participant import Participant
from .coord.core.types import Cause, CauseKind, Epoch, Rank, Tick, Txn
from .ending import Ending
from .marks import Marks
from .rank_links import RankLinks


class Routing:
    """What goes in and out of the protocol core on one rank.

    Args:
        rank: this rank.
        epoch: epoch of the links.
        participant: physical state.
        marks: take the leader's marks.
        links: carry messages to other ranks; what this rank sends itself does not leave it.
        ending: keeps the first cause.
        put_work: queues driver work.
        take_fence: records a fence for a retirement.
        faults: injected faults that lose answers; ``None``: nothing is lost.
        now: the time, in ticks.

    Threads: under the agent's lock.
    """

    def __init__(
        self,
        rank: Rank,
        epoch: Epoch,
        participant: Participant,
        marks: Marks,
        links: RankLinks,
        ending: Ending,
        *,
        put_work: Callable[[Work], None],
        take_fence: Callable[[Txn], None],
        faults: Faults | None,
        now: Callable[[], Tick],
    ) -> None:
        self.leader: Leader | None = None
        """The leader's machine; rank 0 gets it when every rank has joined the epoch."""
        self._rank = rank
        self._epoch = epoch
        self._participant = participant
        self._marks = marks
        self._links = links
        self._ending = ending
        self._put_work = put_work
        self._take_fence = take_fence
        self._faults = faults
        self._now = now

    # ------------------------------------------------------------------ in

    def handle(self, event: Callable[[], None]) -> None:
        """Let the core see an event and carry out what it asks for. A rule found violated ends the coordinator."""
        self._guarded(event)
        self.settle()

    def settle(self) -> None:
        """Carry out what the core asks for. A rule found violated ends the coordinator."""
        self._guarded(self._carry_out_all)

    def deliver(self, peer: Rank, message: Message) -> None:
        """A message has arrived."""
        if isinstance(message, Bye):
            self._links.left.add(peer)
        if self.leader is not None:
            self.leader.on_message(peer, message, self._now())
        elif isinstance(message, MarkMessage):
            self._marks.receive(message.mark)
        elif isinstance(message, Fail):
            self._ending.fail(message.cause, "the leader reported a failure")
        elif isinstance(message, Reform):
            self._ending.lose(message.cause)
        elif isinstance(message, TxnMessage):
            self._participant.on_message(message)

    def link_down(self, peer: Rank, down: LinkDown) -> None:
        """A link has ended."""
        if self.leader is not None:
            self.leader.on_link_down(peer, down.reason, eof=down.eof, now=self._now())
        elif peer not in self._links.left and self._ending.lost is None:
            kind = CauseKind.RANK_LOST if down.eof else CauseKind.RANK_HUNG
            self._ending.fail(Cause(kind, peer, down.reason), self._own_phase())
        self._links.left.add(peer)

    def tick(self) -> None:
        """The leader looks at the clock; other ranks have no deadlines."""
        if self.leader is not None:
            self.leader.tick(self._now())

    def beat(self, budget_bytes: int, held_bytes: int) -> None:
        """This rank lives, and what it holds: for the others, and for the leader on rank 0 itself.

        Args:
            budget_bytes: bytes that it could still create.
            held_bytes: bytes that it holds.
        """
        participant = self._participant
        beat = Beat(
            self._epoch,
            budget_bytes,
            held_bytes,
            participant.handles,
            self._marks.step_done,
            participant.quiet_txn(),
        )
        if self.leader is not None:
            self.leader.on_message(self._rank, beat, self._now())
        self._links.send_all(beat)

    # ------------------------------------------------------------------ out

    def _carry_out_all(self) -> None:
        """Until the core asks for nothing more."""
        while True:
            effects = self._participant.take()
            if self.leader is not None:
                effects += self.leader.take()
            if not effects:
                return
            for effect in effects:
                self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        """Do one thing that the core has asked for."""
        match effect:
            case Send(to=to, message=message):
                self.send(to, message)
            case Work():
                self._put_work(effect)
            case TakeFence(txn=txn):
                self._take_fence(txn)
            case Note(text=text):
                self._ending.note(text)
            case GroupDown(cause=cause, phase=phase):
                self._ending.fail(cause, phase)
            case EpochDown(cause=cause):
                self._ending.lose(cause)

    def send(self, to: Rank, message: Message) -> None:
        """Send a message of the core, to this rank itself too."""
        if to == self._rank:
            if isinstance(message, TxnMessage) and _for_participant(message):
                self._participant.on_message(message)
            elif self.leader is not None and not self._loses(message):
                self.leader.on_message(self._rank, message, self._now())
            elif isinstance(message, Fail):
                self._ending.fail(message.cause, "joining an epoch")
            return
        if isinstance(message, Fail) and self.leader is None:
            self._ending.fail(message.cause, "joining an epoch")
        if self.leader is None and self._loses(message):
            return
        self._links.send(to, message)

    def _loses(self, message: Message) -> bool:
        return self._faults is not None and self._faults.drops(_wire_name(message))

    # ------------------------------------------------------------------ the end

    def broken(self, error: InvariantViolation | Divergence) -> None:
        """A rule of the protocol was found violated here: the coordinator fails, and every rank learns the cause."""
        kind = CauseKind.DIVERGENCE if isinstance(error, Divergence) else CauseKind.INVARIANT
        cause = Cause(kind, self._rank, str(error))
        if self.leader is not None:
            self.leader.fail(cause, self.leader.phase())
            down = self.leader.failure  # an earlier one, perhaps
            assert down is not None
        else:
            down = GroupDown(cause, self._own_phase())
        # Not by what the core asks for: that may have been carried out when this rule broke, and break it again.
        self._ending.fail(down.cause, down.phase)
        self._links.send_all(Fail(self._epoch, down.cause))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (InvariantViolation, Divergence) as error:
            self.broken(error)

    def _own_phase(self) -> str:
        newest = self._participant.newest_txn
        return f"txn {newest} {self._participant.phase(newest).name.lower()}" if newest else "no transaction"


def _for_participant(message: Message) -> bool:
    return isinstance(message, TxnMessage) and not isinstance(message, (*ANSWERS, State))


def _wire_name(message: Message) -> str:
    """``MapFailed`` -> ``MAP_FAILED``, as fault specs name messages."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).upper()


__all__ = ["Routing"]
