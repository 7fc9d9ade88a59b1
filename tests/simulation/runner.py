"""Runs schedules: the directed ones first, then random ones; sums up what was reached and reduces what failed."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .cluster import Cluster, Report
from .schedule import CELLS, PHASES, Plan, directed, draw
from .views import Violation

SEED_STRIDE = 10_000_000
"""Schedules that one start seed has room for."""

CHUNK = 20
"""Schedules that a process takes at a time."""

FULL_TABLE_FROM = 2_000
"""A run of so many schedules must reach every cell of the table of hits."""

EVENTS_MEDIAN_MIN = 200

FAILURES_MAX = 5
"""Failing schedules after which a run ends."""

SHRINK_RUNS_MAX = 60


@dataclass(frozen=True, slots=True)
class Variant:
    """Which part of a schedule is run.

    Attributes:
        seed: of a random schedule; number of a directed one where ``is_directed``.
        is_directed: a schedule of the table of hits.
        without: numbers of planned faults that are left out.
        quiet: kinds of random small faults that are left out.
        steps: engine steps of the safety phase, 0 for as many as were drawn.
    """

    seed: int
    is_directed: bool = False
    without: tuple[int, ...] = ()
    quiet: tuple[str, ...] = ()
    steps: int = 0

    def plan(self) -> Plan:
        """The schedule."""
        plan = directed()[self.seed] if self.is_directed else draw(self.seed)
        plan.faults = [fault for number, fault in enumerate(plan.faults) if number not in self.without]
        for kind in self.quiet:
            plan.chatter.pop(kind, None)
        if self.steps:
            plan.shape = replace(plan.shape, steps=self.steps)
        return plan

    def command(self) -> str:
        """The command that runs exactly this."""
        words = ["scripts/sim", "--directed" if self.is_directed else "--replay", str(self.seed)]
        if self.without:
            words += ["--without", ",".join(map(str, self.without))]
        if self.quiet:
            words += ["--quiet", ",".join(self.quiet)]
        if self.steps:
            words += ["--steps", str(self.steps)]
        return " ".join(words)


@dataclass(slots=True)
class Failure:
    """A schedule in which a rule does not hold.

    Attributes: variant, rule, text (what was found), lines (end of the trace).
    """

    variant: Variant
    rule: str
    text: str
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    """Sums over schedules."""

    schedules: int = 0
    calm: int = 0
    epochs: int = 0
    steps: int = 0
    events: list[int] = field(default_factory=list)
    ranks: Counter[int] = field(default_factory=Counter)
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, plan: Plan, report: Report) -> None:
        """One schedule without a violation."""
        self.schedules += 1
        self.calm += report.calm
        self.epochs += report.epochs
        self.steps += report.steps
        self.events.append(report.events)
        self.ranks[plan.ranks] += 1
        self.hits.update(report.hits)
        self.checks.update(report.checks)
        self.verdicts.update(report.verdicts)
        self.limits.update(report.limits)
        self.ends.update([report.cause_kind] if report.cause_kind else [])

    def merge(self, other: Summary) -> None:
        """Add the sums of another process."""
        self.schedules += other.schedules
        self.calm += other.calm
        self.epochs += other.epochs
        self.steps += other.steps
        self.events += other.events
        for name in ("ranks", "hits", "checks", "verdicts", "limits", "ends"):
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures

    def empty_cells(self) -> list[str]:
        """Cells of the table that nothing has hit."""
        return [f"{kind}@{phase}" for kind, phases in CELLS.items() for phase in phases if not self.hits[kind, phase]]

    def median_events(self) -> int:
        """Events of a schedule at the median."""
        return sorted(self.events)[len(self.events) // 2] if self.events else 0


def attempt(variant: Variant, *, lines: int = 0) -> tuple[Plan, Report | Failure]:
    """Run one schedule."""
    plan = variant.plan()
    cluster = Cluster(plan)
    try:
        return plan, cluster.run()
    except Violation as violation:
        rule, text = violation.rule, str(violation)
    except Exception as error:  # the code under test must not raise anything else
        rule, text = "crash", f"{type(error).__name__}: {error}"
    return plan, Failure(variant, rule, text, cluster.loop.lines(lines))


def run_chunk(variants: Sequence[Variant]) -> Summary:
    """Run some schedules in this process."""
    logging.disable(logging.CRITICAL)
    summary = Summary()
    for variant in variants:
        plan, outcome = attempt(variant)
        if isinstance(outcome, Failure):
            summary.schedules += 1
            summary.failures.append(outcome)
        else:
            summary.add(plan, outcome)
    return summary


def chunks(seed: int, schedules: int, until: float | None) -> Iterator[list[Variant]]:
    """The directed schedules, then random ones: ``schedules`` of them, or until a point in time."""
    first = [Variant(number, is_directed=True) for number in range(len(directed()))]
    for begin in range(0, len(first), CHUNK):
        yield first[begin : begin + CHUNK]
    at = 0
    while (at < schedules) if until is None else (time.monotonic() < until):
        count = CHUNK if until is not None else min(CHUNK, schedules - at)
        yield [Variant(seed * SEED_STRIDE + at + number) for number in range(count)]
        at += count


def run_many(
    seed: int,
    schedules: int,
    *,
    until: float | None = None,
    jobs: int = 1,
    on_progress: Callable[[Summary], None] | None = None,
) -> Summary:
    """Run the directed schedules and then random ones; ends early after :data:`FAILURES_MAX` failures."""
    summary = Summary()
    work = chunks(seed, schedules, until)
    if jobs == 1:
        for part in map(run_chunk, work):
            summary.merge(part)
            if len(summary.failures) >= FAILURES_MAX:
                break
        return summary
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap_unordered(run_chunk, work):
            summary.merge(part)
            if on_progress is not None:
                on_progress(summary)
            if len(summary.failures) >= FAILURES_MAX:
                pool.terminate()
                break
    return summary


def shrink(failure: Failure) -> Failure:
    """Leave out whatever the same violation does not need; returns the smallest form, with its trace."""
    logging.disable(logging.CRITICAL)
    best = failure.variant
    plan = best.plan()
    candidates: list[Callable[[Variant], Variant]] = [
        *(lambda v, k=kind: replace(v, quiet=(*v.quiet, k)) for kind in list(plan.chatter)),
        *(lambda v, n=number: replace(v, without=(*v.without, n)) for number in range(len(plan.faults))),
        *(lambda v, s=steps: replace(v, steps=s) for steps in (4, 8, 16, 32)),
    ]
    for change in candidates[:SHRINK_RUNS_MAX]:
        smaller = change(best)
        if smaller.steps and best.steps:
            continue
        _, outcome = attempt(smaller)
        if isinstance(outcome, Failure) and outcome.rule == failure.rule:
            best = smaller
    _, outcome = attempt(best, lines=60)
    return outcome if isinstance(outcome, Failure) else failure


def table(hits: Counter[tuple[str, str]]) -> str:
    """Hits per fault kind and protocol phase; ``.`` where the fault cannot strike."""
    rows = [f"{'fault':18}" + "".join(f"{phase:>12}" for phase in PHASES)]
    for kind, phases in CELLS.items():
        cells = (f"{hits[kind, phase] if phase in phases else '.':>12}" for phase in PHASES)
        rows.append(f"{kind:18}" + "".join(cells))
    return "\n".join(rows)
