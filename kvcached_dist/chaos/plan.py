"""The faults of a run, from a seed.

Every kind of fault has cells: a role and a phase, a driver call, a message. A plan goes round the kinds and takes
the next cell of each, the cells of a kind in shuffled order, so that a short plan has every kind and a long one
every cell; then it begins anew with other numbers. Kinds that need no restart stand between those that do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import cycle
from typing import Final

from ..fault_specs import DRIVER_CALLS, POINTS, FaultSpec

LEADER = 0

DROPPED: Final = ("RESERVED", "MAPPED", "DRAINED", "UNMAPPED", "RELEASED")

DELAY_S_MAX = 0.5
"""Faults begin at most this long after their turn has come, so that they meet the workload anywhere."""


class Effect(Enum):
    """What must come of a fault."""

    SURVIVES = "survives"
    """Nobody is lost; a miss or a pause at most."""
    REJOINS = "rejoins"
    """A follower is lost; the epoch ends and the next one begins with the restarted rank."""
    RESTARTS = "restarts"
    """The coordinator fails on every survivor; the world is started again under a new session."""


class Means(Enum):
    """Who makes a fault happen."""

    INJECTOR = "injector"
    """The rank itself, at a step of the protocol."""
    SIGNAL = "signal"
    """A signal from outside, at a moment that nobody chose."""
    STORE = "store"
    """Something happens to the store server (and then perhaps to a rank)."""


class Kind(Enum):
    """Kinds of faults, as the report names them."""

    KILL_FOLLOWER = "kill follower"
    KILL_LEADER = "kill leader"
    SIGKILL_FOLLOWER = "SIGKILL follower"
    SIGKILL_LEADER = "SIGKILL leader"
    STOP_SHORT = "stop < lease"
    STOP_LONG_FOLLOWER = "stop > lease, follower"
    STOP_LONG_LEADER = "stop > lease, leader"
    SIGSTOP_SHORT = "SIGSTOP < lease"
    SIGSTOP_LONG = "SIGSTOP > lease"
    REFUSE_CREATE = "refuse create"
    REFUSE_MAP = "refuse map"
    REFUSE_ACCESS = "refuse access"
    REFUSE_FILL = "refuse fill"
    REFUSE_UNMAP = "refuse unmap"
    REFUSE_RELEASE = "refuse release"
    DROP_RESERVED = "drop RESERVED"
    DROP_MAPPED = "drop MAPPED"
    DROP_DRAINED = "drop DRAINED"
    DROP_UNMAPPED = "drop UNMAPPED"
    DROP_RELEASED = "drop RELEASED"
    SLOW_DRIVER = "slow driver"
    SLOW_ANSWER = "slow answer"
    STORE_KILLED = "store killed"
    STORE_STOPPED = "store stopped"
    STORE_KILLED_RANK_LOST = "store killed, rank lost"
    STORE_STOPPED_RANK_LOST = "store stopped, rank lost"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan.

    Attributes:
        number: position in the plan, from 0.
        kind: what happens.
        effect: what must come of it.
        means: who makes it happen.
        rank: the victim; the lost rank where a store fault is followed by one, -1 where there is no victim.
        spec: the injected fault as text; empty where the injector is not the means.
        stop_s: how long the victim stands still; 0 for none.
        wakes: a victim that stood still for longer than the lease wakes up again before it is replaced (and must
            then find itself fenced); otherwise it is killed while it stands still.
        delay_s: pause before it begins.
    """

    number: int
    kind: Kind
    effect: Effect
    means: Means
    rank: int
    spec: str = ""
    stop_s: float = 0.0
    wakes: bool = False
    delay_s: float = 0.0

    def __str__(self) -> str:
        what = f": {self.spec}" if self.spec else "" if self.rank < 0 else f": rank={self.rank}"
        if self.stop_s and "seconds=" not in what:
            what += f",seconds={self.stop_s:g}"
        wakes = ", wakes up" if self.wakes else ""
        return f"{self.number} {self.kind.value}{what}{wakes}, after {self.delay_s:.2f} s"


@dataclass(frozen=True, slots=True)
class _Context:
    """What the numbers of a fault depend on."""

    world_size: int
    lease_s: float
    growth_deadline_s: float
    random: random.Random

    def any_rank(self) -> int:
        return self.random.randrange(self.world_size)

    def follower(self) -> int:
        return self.random.randrange(1, self.world_size)


_TURNS: Final[tuple[tuple[Kind, ...], ...]] = (
    # One line a turn: kinds that cost a process are spread over the plan, so that spare processes are ready again.
    (Kind.KILL_FOLLOWER, Kind.REFUSE_CREATE, Kind.DROP_RESERVED),
    (Kind.KILL_LEADER, Kind.REFUSE_MAP, Kind.SLOW_DRIVER, Kind.STOP_SHORT),
    (Kind.KILL_FOLLOWER, Kind.DROP_MAPPED, Kind.REFUSE_UNMAP),
    (Kind.SIGKILL_FOLLOWER, Kind.REFUSE_ACCESS, Kind.STORE_STOPPED, Kind.SIGSTOP_SHORT),
    (Kind.STOP_LONG_FOLLOWER, Kind.REFUSE_RELEASE, Kind.DROP_UNMAPPED),
    (Kind.KILL_FOLLOWER, Kind.SLOW_ANSWER, Kind.REFUSE_FILL),
    (Kind.SIGKILL_LEADER, Kind.DROP_DRAINED, Kind.STORE_KILLED),
    (Kind.STORE_STOPPED_RANK_LOST, Kind.REFUSE_CREATE, Kind.DROP_RELEASED),
    (Kind.STOP_LONG_LEADER, Kind.REFUSE_MAP, Kind.STOP_SHORT),
    (Kind.KILL_LEADER, Kind.REFUSE_UNMAP, Kind.SLOW_DRIVER),
    (Kind.STORE_KILLED_RANK_LOST, Kind.SLOW_ANSWER, Kind.REFUSE_FILL),
    (Kind.SIGSTOP_LONG, Kind.REFUSE_RELEASE, Kind.SLOW_DRIVER),
)

_STOPS: Final[dict[Kind, Effect]] = {
    Kind.STOP_SHORT: Effect.SURVIVES,
    Kind.SIGSTOP_SHORT: Effect.SURVIVES,
    Kind.STOP_LONG_FOLLOWER: Effect.REJOINS,
    Kind.SIGSTOP_LONG: Effect.REJOINS,
    Kind.STOP_LONG_LEADER: Effect.RESTARTS,
}


def make_plan(faults: int, seed: int, world_size: int, lease_s: float, growth_deadline_s: float) -> tuple[Fault, ...]:
    """Choose the faults of a run.

    Args:
        faults: how many.
        seed: equal seeds and options give equal plans.
        world_size: ranks, at least 2.
        lease_s: lease of the ranks.
        growth_deadline_s: growth deadline of the ranks.

    Returns:
        The plan. Every kind is in it from about 40 faults on.
    """
    chooser = random.Random(f"chaos plan {seed}")
    context = _Context(world_size, lease_s, growth_deadline_s, chooser)
    cells = {kind: _shuffled(list(_cells(kind)), chooser) for kind in Kind}
    # A short plan keeps the variety: a kind comes a second time only when all have come once.
    turns = [kind for turn in _TURNS for kind in turn]
    first = list(dict.fromkeys(turns))
    again = cycle(turns)
    plan: list[Fault] = []
    for number in range(faults):
        kind = first[number] if number < len(first) else next(again)
        fault = _fault(kind, next(cells[kind]), context)
        plan.append(replace(fault, number=number, delay_s=round(chooser.uniform(0, DELAY_S_MAX), 3)))
    return tuple(plan)


def _shuffled(cells: list[str], chooser: random.Random) -> Iterator[str]:
    """The cells over and over, in a new order each time round."""
    while True:
        chooser.shuffle(cells)
        yield from cells


def _cells(kind: Kind) -> tuple[str, ...]:
    """Phases, calls or roles that a kind is to be tried at."""
    match kind:
        case Kind.KILL_FOLLOWER | Kind.KILL_LEADER | Kind.STOP_SHORT | Kind.SLOW_ANSWER:
            return POINTS
        case Kind.STOP_LONG_FOLLOWER | Kind.STOP_LONG_LEADER:
            return POINTS
        case Kind.SLOW_DRIVER:
            return DRIVER_CALLS
        case _:
            return ("",)


def _fault(kind: Kind, cell: str, context: _Context) -> Fault:
    match kind:
        case Kind.KILL_FOLLOWER:
            spec = FaultSpec(context.follower(), "kill", context.random.randint(1, 3), at=cell)
            return Fault(0, kind, Effect.REJOINS, Means.INJECTOR, spec.rank, str(spec))
        case Kind.KILL_LEADER:
            spec = FaultSpec(LEADER, "kill", context.random.randint(1, 3), at=cell)
            return Fault(0, kind, Effect.RESTARTS, Means.INJECTOR, LEADER, str(spec))
        case Kind.SIGKILL_FOLLOWER:
            return Fault(0, kind, Effect.REJOINS, Means.SIGNAL, context.follower())
        case Kind.SIGKILL_LEADER:
            return Fault(0, kind, Effect.RESTARTS, Means.SIGNAL, LEADER)
        case Kind.STORE_KILLED | Kind.STORE_STOPPED:
            return Fault(0, kind, Effect.SURVIVES, Means.STORE, -1)
        case Kind.STORE_KILLED_RANK_LOST:
            return Fault(0, kind, Effect.RESTARTS, Means.STORE, context.follower())
        case Kind.STORE_STOPPED_RANK_LOST:
            return Fault(0, kind, Effect.REJOINS, Means.STORE, context.follower())
        case _ if kind in _STOPS:
            return _stop(kind, cell, context)
        case Kind.SLOW_ANSWER:
            ms = 1000 * context.growth_deadline_s * context.random.choice((0.5, 1.3))
            spec = FaultSpec(context.any_rank(), "slow", context.random.randint(1, 3), at=cell, ms=round(ms))
        case Kind.SLOW_DRIVER:
            ms, count = context.random.randint(20, 200), context.random.randint(1, 4)
            nth = context.random.randint(1, 20)
            spec = FaultSpec(context.any_rank(), "slow", nth, count, call=cell, ms=ms)
        case _ if kind.value.startswith("drop "):
            message = kind.value.removeprefix("drop ")
            spec = FaultSpec(context.any_rank(), "drop", context.random.randint(1, 3), message=message)
        case _:
            call = kind.value.removeprefix("refuse ")
            # Two in a row hit a mapping and its first retry; a third one would quarantine the run.
            spec = FaultSpec(context.any_rank(), call, context.random.randint(1, 25), context.random.randint(1, 2))
    return Fault(0, kind, Effect.SURVIVES, Means.INJECTOR, spec.rank, str(spec))


def _stop(kind: Kind, cell: str, context: _Context) -> Fault:
    effect = _STOPS[kind]
    if effect is Effect.SURVIVES:
        share, rank = context.random.uniform(0.2, 0.5), context.any_rank()
    else:
        share, rank = context.random.uniform(1.4, 1.8), LEADER if effect is Effect.RESTARTS else context.follower()
    seconds = round(share * context.lease_s, 2)
    wakes = effect is not Effect.SURVIVES and context.random.random() < 0.5
    if kind in (Kind.SIGSTOP_SHORT, Kind.SIGSTOP_LONG):
        return Fault(0, kind, effect, Means.SIGNAL, rank, stop_s=seconds, wakes=wakes)
    spec = FaultSpec(rank, "hang", context.random.randint(1, 3), at=cell, seconds=seconds)
    return Fault(0, kind, effect, Means.INJECTOR, rank, str(spec), stop_s=seconds, wakes=wakes)


__all__ = ["DROPPED", "Effect", "Fault", "Kind", "Means", "make_plan"]
