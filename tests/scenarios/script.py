"""Scenario files: reads them, carries them out, and writes down what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcached_dist.coord.core.effects import WorkKind
from kvcached_dist.coord.core.messages import Bye
from kvcached_dist.coord.core.pages import PageState
from kvcached_dist.coord.core.types import CauseKind

from .world import World

FOLDER = Path(__file__).resolve().parent

RULE = "----"


@dataclass(slots=True)
class Block:
    """An input and the trace that it is to leave."""

    line: str
    expected: list[str]


@dataclass(slots=True)
class Scenario:
    """One file.

    Attributes:
        path: where it lies.
        comment: its first lines, which say what it shows.
        blocks: inputs in order.
    """

    path: Path
    comment: list[str]
    blocks: list[Block]

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Parse a file.

        Raises:
            ValueError: it has no comment that says its point.
        """
        comment: list[str] = []
        blocks: list[Block] = []
        in_trace = False
        for line in path.read_text().splitlines():
            if line.startswith("#"):
                (comment if not blocks else blocks[-1].expected).append(line)
            elif line == RULE:
                in_trace = True
            elif not line:
                in_trace = False
            elif in_trace:
                blocks[-1].expected.append(line)
            else:
                blocks.append(Block(line, []))
        if not comment or not blocks:
            raise ValueError(f"{path.name}: the first line is a comment that says what the scenario shows")
        return cls(path, comment, blocks)

    def play(self) -> list[list[str]]:
        """Carry out the inputs; returns one trace for each."""
        player = Player()
        traces = []
        for block in self.blocks:
            try:
                traces.append(player.play(block.line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path.name}, input '{block.line}': {error}") from error
        return traces

    def text(self, traces: list[list[str]]) -> str:
        """The file with these traces."""
        parts = ["\n".join(self.comment)]
        for block, trace in zip(self.blocks, traces, strict=True):
            parts.append("\n".join([block.line, RULE, *trace]) if trace else block.line)
        return "\n\n".join(parts) + "\n"

    def difference(self) -> str | None:
        """Where what happens differs from what is written, or ``None``."""
        for block, trace in zip(self.blocks, self.play(), strict=True):
            if trace != block.expected:
                for number in range(max(len(trace), len(block.expected))):
                    wanted = block.expected[number] if number < len(block.expected) else "(nothing)"
                    got = trace[number] if number < len(trace) else "(nothing)"
                    if wanted != got:
                        return (
                            f"{self.path.name}, input '{block.line}', line {number + 1}: {got!r} instead of {wanted!r}"
                        )
        return None


class Player:
    """Carries out the inputs of one scenario."""

    def __init__(self) -> None:
        self._world: World | None = None

    @property
    def world(self) -> World:
        """The world; the first input makes it."""
        if self._world is None:
            raise ValueError("the first input of a scenario is 'world'")
        return self._world

    def play(self, line: str) -> list[str]:
        """One input; returns its trace."""
        name, *words = line.split()
        if name == "world":
            self._world = World(**dict(word.split("=", 1) for word in words))
            return []
        handler = _INPUTS.get(name)
        if handler is None:
            raise ValueError(f"unknown input '{name}'; known are {', '.join(sorted(_INPUTS))}")
        handler(self, *words)
        trace, self.world.trace = self.world.trace, []
        return trace

    # ------------------------------------------------------------------ inputs

    def alloc(self, *words: str) -> None:
        """``alloc 4`` or ``alloc 4 2``: blocks per domain."""
        self.world.engine("alloc", {domain: int(count) for domain, count in enumerate(words) if int(count)})

    def free(self, number: str) -> None:
        """``free 2``: the second allocation of the scenario (the null block is the first)."""
        self.world.engine("free", {int(number): 0})

    def step(self, count: str = "1") -> None:
        """An engine step ends."""
        for _ in range(int(count)):
            self.world.engine("step", {})

    def run(self) -> None:
        """Everything is delivered and worked until nothing is left."""
        self.world.run()

    def deliver(self, way: str, count: str = "1") -> None:
        """``deliver 0>1``: the next message arrives."""
        source, target = way.split(">")
        for _ in range(int(count)):
            if not self.world.wires[int(source), int(target)].waiting:
                raise ValueError("nothing is under way there")
            self.world.deliver(int(source), int(target))

    def work(self, rank: str) -> None:
        """The next driver work of a rank."""
        if not self.world.work(int(rank)):
            raise ValueError(f"rank {rank} has no driver work")

    def fail(self, rank: str, kind: str, what: str = "driver", at: str = "0") -> None:
        """``fail 1 map``: the next such work of that rank fails; ``fail 1 reserve exhausted``."""
        self.world.seats[int(rank)].armed[WorkKind(kind)].append((CauseKind[what.upper()], int(at)))

    def drop(self, rank: str, message: str, count: str = "1") -> None:
        """``drop 1 MAPPED``: the next such answer of that rank is lost."""
        self.world.seats[int(rank)].drops += [message] * int(count)

    def again(self, way: str) -> None:
        """The last message of a direction arrives once more."""
        source, target = way.split(">")
        self.world.again(int(source), int(target))

    def old(self, way: str) -> None:
        """The last message of a direction arrives once more, as if from the epoch before."""
        source, target = way.split(">")
        self.world.again(int(source), int(target), epoch=1)

    def time(self, ms: str) -> None:
        """Time passes, with beats and ticks every 50 ms."""
        self.world.pass_time(int(ms))

    def jump(self, ms: str) -> None:
        """Time passes while the leader does not run."""
        self.world.clock.now += int(ms) * 1_000
        with self.world.leader_agent.entered():
            self.world.leader.tick(self.world.clock())
        self.world.progress()

    def hold(self, rank: str) -> None:
        """The engine of a rank gets no further: a late pipeline stage."""
        self.world.seats[int(rank)].held = True

    def go(self, rank: str) -> None:
        """It goes on."""
        self.world.seats[int(rank)].held = False
        self.world.progress()

    def silence(self, rank: str) -> None:
        """A process is stopped."""
        self.world.seats[int(rank)].silent = True

    def wake(self, rank: str) -> None:
        """It runs again."""
        self.world.seats[int(rank)].silent = False
        self.world.progress()

    def batch(self, rank: str, what: str) -> None:
        """``batch 1 starts``, ``batch 1 ends``: work on the device of that rank."""
        self.world.seats[int(rank)].batch_runs = what == "starts"

    def kill(self, rank: str) -> None:
        """A process ends."""
        self.world.kill(int(rank))

    def bye(self, rank: str) -> None:
        """A rank closes its coordinator."""
        for link in self.world.seats[int(rank)].agent.links.by_rank.values():  # type: ignore[attr-defined]
            link.send(Bye(link.world.leader.epoch))

    def idle(self, what: str) -> None:
        """``idle on``: nothing runs."""
        self.world.leader.demand.idle = what == "on"

    def demand(self, *words: str) -> None:
        """Blocks that one step can take, per domain."""
        self.world.leader.demand.step_blocks[:] = [int(word) for word in words]

    def evict(self, tokens: str) -> None:
        """The leader's engine wants to evict."""
        with self.world.leader_agent.entered():
            self.world.leader.evict(int(tokens))

    def limit(self, pages: str, revision: str) -> None:
        """``limit 4 1``: four pages per rank, revision 1."""
        with self.world.leader_agent.entered():
            answer = self.world.leader.limits.request(int(pages) * 64, int(revision))
        self.world.say(f"answer: {answer.status.value} revision={answer.revision} overage={answer.overage_bytes // 64}")

    def hog(self, rank: str, pages: str) -> None:
        """A neighbour takes memory of that rank's card."""
        self.world.seats[int(rank)].memory.card.hog = int(pages) * 64

    def diverge(self, rank: str) -> None:
        """That rank runs an operation that no other rank runs."""
        seat = self.world.seats[int(rank)]
        seat.agent.replica.record(1, 0, 1)  # type: ignore[attr-defined]

    def show(self) -> None:
        """What every rank holds and what the leader knows."""
        world = self.world
        for table in world.leader.tables:
            states = " ".join(
                f"{run}={state.name.lower()}" for state in PageState if state for run in table.runs(state)
            )
            health, cause = world.leader.health[table.domain], world.leader.first_cause[table.domain]
            growable = world.leader.replica.growable(table.domain)
            tail = "" if cause is None else f" ({cause})"
            world.say(f"domain {table.domain}: {states}; growable={growable} {health.value}{tail}")
        for seat in world.seats:
            mapped = " ".join(f"{bits:b}" for bits in seat.memory.mapped)
            free = [seat.agent.replica.available(domain) for domain in range(len(world.pages))]  # type: ignore[attr-defined]
            failure = seat.agent.failure  # type: ignore[attr-defined]
            tail = "" if failure is None else f" failed: {failure.cause}"
            world.say(f"rank {seat.rank}: free={free} handles={seat.memory.held} mapped={mapped}{tail}")
        counters = world.leader.counters
        world.say(f"messages={counters.messages} queries={counters.queries} known_misses={counters.known_misses}")


_INPUTS: dict[str, Callable[..., None]] = {
    name: getattr(Player, name)
    for name in (
        "alloc", "free", "step", "run", "deliver", "work", "fail", "drop", "again", "old", "time", "jump", "hold",
        "go", "silence", "wake", "batch", "kill", "bye", "idle", "demand", "evict", "limit", "hog", "diverge", "show",
    )
}  # fmt: skip
"""Inputs by name."""


def scenarios() -> list[Path]:
    """All files, sorted."""
    return sorted(FOLDER.glob("*.txt"))
