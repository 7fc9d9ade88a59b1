"""One rank of a scenario's world, and the links between ranks: all of them wait until a scenario goes on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_dist.agent import Agent
from kvcached_dist.coord.core.effects import Effect, GroupDown, Note, Work, WorkKind
from kvcached_dist.coord.core.entries import Entry
from kvcached_dist.coord.core.errors import LinkDown
from kvcached_dist.coord.core.messages import Beat, Message
from kvcached_dist.coord.core.types import Cause, CauseKind, Rank, Tick
from kvcached_dist.marks import Marks
from tests.simulation.hardware import RankMemory
from tests.simulation.taps import TappedRouting

from .words import show, show_entry

if TYPE_CHECKING:
    from .world import World


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> Tick:
        return Tick(self.now)


@dataclass(slots=True)
class Wire:
    """One direction of a link, held until a scenario delivers."""

    world: World
    source: int
    target: int
    waiting: deque[Message] = field(default_factory=deque)
    last: Message | None = None
    ended: bool = False

    def send(self, message: Message) -> None:
        if self.ended:
            raise LinkDown(self.target, "the process died", eof=True)
        if not isinstance(message, Beat):
            self.world.say(f"{self.source}>{self.target} {show(message)}")
        self.waiting.append(message)


class SeatRouting(TappedRouting):
    """Says what a rank sends itself, notes, and how it ends."""

    def __init__(self, seat: Seat, agent: Agent) -> None:
        super().__init__(agent, SeatFaults(seat), seat.world.clock)
        self._seat = seat

    def send(self, to: Rank, message: Message) -> None:
        if to == self._seat.rank:
            self._seat.world.say(f"{to}>{to} {show(message)}")
        super().send(to, message)

    def carry_out(self, effect: Effect) -> None:
        seat = self._seat
        if isinstance(effect, Note):
            seat.world.say(f"{seat.rank}: {effect.text}")
        elif isinstance(effect, GroupDown):
            seat.world.say(f"{seat.rank}: GROUP DOWN {effect.cause} (during {effect.phase})")
        super().carry_out(effect)


class SeatMarks(Marks):
    """Says what takes effect."""

    def __init__(self, seat: Seat, agent: Agent) -> None:
        super().__init__(agent.rank, agent.replica, agent.participant, seat, SeatFaults(seat))
        self._seat = seat

    def apply_entry(self, entry: Entry) -> None:
        self._seat.world.say(f"{self._seat.rank}: apply {show_entry(entry)}")
        super().apply_entry(entry)


class Seat:
    """One rank of the world."""

    def __init__(self, world: World, rank: int, memory: RankMemory) -> None:
        self.world = world
        self.rank = rank
        self.memory = memory
        self.done = 0
        """Inputs of the engine that this rank has carried out."""
        self.held = False
        self.silent = False
        self.dead = False
        self.drops: list[str] = []
        self.armed: dict[WorkKind, list[tuple[CauseKind, int]]] = {kind: [] for kind in WorkKind}
        self.batch_runs = False
        self.allocations: dict[int, dict[int, tuple[int, ...]]] = {}
        self.waiting: object | None = None
        self.told = False
        self.steps = 0
        self.outcome: Cause | None = None

    # worker and faults of the agent, and its fence

    def perform(self, work: Work) -> Cause | None:
        return self.outcome

    def handles(self) -> tuple[int, ...]:
        return tuple(self.memory.held)

    def held_bytes(self) -> int:
        return self.memory.bytes

    def budget_bytes(self) -> int:
        memory = self.memory
        budget = memory.card.free - memory.card.reserve
        return max(0, min(budget, memory.limit - memory.bytes) if memory.limit else budget)

    def set_limit(self, limit_bytes: int) -> None:
        self.memory.limit = limit_bytes

    def at(self, point: str) -> None:
        pass

    def drops_message(self, name: str) -> bool:
        if name in self.drops:
            self.drops.remove(name)
            self.world.say(f"{self.rank}: the {name} is lost")
            return True
        return False


class SeatFaults:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def at(self, point: str) -> None:
        """Points are not used."""

    def drops(self, message: str) -> bool:
        """Whether this one is lost."""
        return self._seat.drops_message(message)


class SeatFence:
    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._behind = seat.batch_runs

    def done(self) -> bool:
        """Whether the batch that ran when it was taken has finished."""
        return not (self._behind and self._seat.batch_runs)
