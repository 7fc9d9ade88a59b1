"""What the engine does: the same program on every rank, a function of its own earlier results.

A program is a generator. It yields operations and is sent their results; equal results give equal operations, so
that ranks which agree so far go on agreeing (S5), and a rank that does not is seen at its next operation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from kvcached_dist.coord.core.entries import Entry, Evict

Ids = dict[int, tuple[int, ...]]
"""Block ids per domain."""


@dataclass(frozen=True, slots=True)
class Alloc:
    """Blocks per domain, all or nothing; the result is the ids or ``None``."""

    needs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Free:
    """Give an allocation back."""

    ids: Ids


@dataclass(frozen=True, slots=True)
class Hint:
    """Blocks that one step can take, per domain, and whether the engine is idle."""

    step_blocks: tuple[int, ...]
    idle: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Launch a batch over all live blocks and end the engine step; the result is the entries of its mark."""

    number: int
    calm: bool = False
    """The liveness phase: faults are over."""


Op = Alloc | Free | Hint | Step
Result = Ids | None | Sequence[Entry]
Program = Generator[Op, Result, None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and probabilities of a workload.

    Attributes:
        pages: logical capacity per domain, in pages.
        blocks_per_page: blocks of a page, per domain.
        steps: engine steps of the safety phase.
        ops: operations of one step, on average.
        grab: largest allocation, as a share of a domain.
        both: probability that an allocation needs all domains.
        retry: probability that a miss is followed by an eviction and one more try.
        hold: allocations that are kept on average.
        busy_steps: length of a busy spell; idle spells are half as long.
        hint: blocks of one step that the engine announces, as a share of a domain.
    """

    pages: tuple[int, ...]
    blocks_per_page: tuple[int, ...]
    steps: int
    ops: float
    grab: float
    both: float
    retry: float
    hold: int
    busy_steps: int
    hint: float

    def blocks(self, domain: int) -> int:
        """Blocks of a domain, null block included."""
        return self.pages[domain] * self.blocks_per_page[domain]


CALM_STEPS_MIN = 7
"""Engine steps before everything is asked for in the liveness phase: longer than a beat, so that budgets are news."""

SETTLE_STEPS_MAX = 150
"""Engine steps within which everything must have come to rest once faults are over."""


class Workload:
    """One rank's copy of the program; it draws from its own copy of the same random numbers."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = Random(seed)
        self.live: list[Ids] = []
        self.misses = 0
        self.null: Result = None
        self.settled = False
        """Set by the host after every step, from the mark."""
        self.within_reach: Callable[[dict[int, int]], bool] = lambda needs: True
        """Set by the host: whether the applied log says that these blocks could be had; equal on all ranks."""
        self.calm_misses: list[str] = []
        self.quarantined_pages = [0] * len(shape.pages)

    def program(self) -> Program:
        """Everything this rank does: a random part, then a calm one that must succeed."""
        shape = self.shape
        yield Step(0)
        self.null = yield Alloc(dict.fromkeys(range(len(shape.pages)), 1))
        step = 0
        while step < shape.steps:
            idle = shape.busy_steps > 0 and step % (shape.busy_steps + shape.busy_steps // 2) >= shape.busy_steps
            yield Hint(tuple(0 if idle else int(shape.hint * shape.blocks(d)) for d in range(len(shape.pages))), idle)
            if idle:
                yield from self._shrink()
            else:
                for _ in range(int(shape.ops) + (self.random.random() < shape.ops % 1)):
                    yield from self._operate()
            step += 1
            entries = yield Step(step)
            yield from self._after_step(entries)
        yield from self._calm(step)

    # ------------------------------------------------------------------ the random part

    def _operate(self) -> Program:
        random = self.random
        if self.live and random.random() < len(self.live) / (2 * self.shape.hold):
            yield from self._free(random.randrange(len(self.live)))
            return
        needs = self._needs()
        got = yield Alloc(needs)
        while got is None:
            self.misses += 1
            if not self.live or random.random() >= self.shape.retry:
                return
            yield from self._free(0)
            got = yield Alloc(needs)
        self._keep(got)

    def _needs(self) -> dict[int, int]:
        random, shape = self.random, self.shape
        domains = range(len(shape.pages))
        if len(domains) > 1 and random.random() >= shape.both:
            domains = range(at := random.randrange(len(domains)), at + 1)
        return {domain: 1 + int(random.random() * shape.grab * shape.blocks(domain)) for domain in domains}

    def _shrink(self) -> Program:
        while self.live and self.random.random() < 0.7:
            yield from self._free(0)

    def _after_step(self, entries: Result) -> Program:
        for entry in entries or ():
            if isinstance(entry, Evict):
                for _ in range(min(entry.tokens, len(self.live))):
                    yield from self._free(0)

    def _free(self, at: int) -> Program:
        yield Free(self.live.pop(at))

    def _keep(self, got: Result) -> None:
        if not isinstance(got, dict):
            raise TypeError(f"an allocation returned {got!r}")
        self.live.append(got)

    # ------------------------------------------------------------------ the calm part (liveness)

    def _calm(self, step: int) -> Program:
        while self.live:
            yield from self._free(0)
        step = yield from self._settle(step, idle=True)
        # Only now does every rank take steps, and beat, for sure.
        step = yield from self._settle(step, idle=True, least=CALM_STEPS_MIN)
        whole = self._whole()
        got = yield Alloc(whole)
        if got is None:
            self.calm_misses.append(f"{whole} blocks, all that can be had, are a miss")
        else:
            self._keep(got)
        step = yield from self._settle(step, idle=False)
        while self.live:
            yield from self._free(0)
        yield from self._settle(step, idle=True)

    def _whole(self) -> dict[int, int]:
        """Everything that can be had: all blocks but the null block and those of quarantined pages."""
        sizes = zip(self.shape.pages, self.quarantined_pages, self.shape.blocks_per_page, strict=True)
        return {domain: (pages - bad) * size - 1 for domain, (pages, bad, size) in enumerate(sizes)}

    def _settle(self, step: int, *, idle: bool, least: int = 2) -> Generator[Op, Result, int]:
        yield Hint((0,) * len(self.shape.pages), idle)
        self.settled = False
        begun = step
        while not self.settled or step - begun < least or not (self.live or self.within_reach(self._whole())):
            if step - begun >= SETTLE_STEPS_MAX:
                self.calm_misses.append(f"not at rest {SETTLE_STEPS_MAX} steps after the last fault (idle={idle})")
                break
            step += 1
            yield Step(step, calm=True)
        return step
