"""``scripts/sim``: the command line of the simulation."""

from __future__ import annotations

import argparse
import os
import sys
import time

from . import mutation, runner
from .runner import (
    EVENTS_MEDIAN_MIN,
    FULL_TABLE_FROM,
    Failure,
    Summary,
    Variant,
    attempt,
    run_many,
    shrink,
    table,
)

PROGRESS_S = 15.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/sim", description="Simulate the protocol; exit 0: no violation.")
    parser.add_argument("--schedules", type=int, default=2_000, help="random schedules, after the directed ones")
    parser.add_argument("--seed", type=int, default=1, help="start seed")
    parser.add_argument("--hours", type=float, help="run for so long instead of a number of schedules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one random schedule again, with its trace")
    parser.add_argument("--directed", type=int, metavar="N", help="run one directed schedule again, with its trace")
    parser.add_argument("--without", default="", help="numbers of planned faults to leave out of a replay")
    parser.add_argument("--quiet", default="", help="kinds of small random faults to leave out of a replay")
    parser.add_argument("--steps", type=int, default=0, help="engine steps of a replay")
    parser.add_argument("--lines", type=int, default=80, help="lines of trace that a replay prints")
    parser.add_argument("--first", action="store_true", help="end at the first violation, without reducing it")
    parser.add_argument(
        "--mutants", action="store_true", help="break the core in known ways; every break must be found"
    )
    parser.add_argument("--only", default="", help="with --mutants: names that contain this")
    return parser


def _replay(arguments: argparse.Namespace) -> int:
    is_directed = arguments.directed is not None
    variant = Variant(
        arguments.directed if is_directed else arguments.replay,
        is_directed,
        tuple(int(number) for number in arguments.without.split(",") if number),
        tuple(kind for kind in arguments.quiet.split(",") if kind),
        arguments.steps,
    )
    plan, outcome = attempt(variant, lines=arguments.lines)
    print(plan.describe())
    for number, fault in enumerate(plan.faults):
        print(f"  fault {number}: {fault}")
    print(f"  chatter: {plan.chatter}\n  policy: {plan.policy}")
    if isinstance(outcome, Failure):
        print("\n".join(outcome.lines))
        print(f"VIOLATION {outcome.text}")
        return 1
    print(f"no violation; events={outcome.events} digest={outcome.digest:08x} calm={outcome.calm} {outcome.failure}")
    return 0


def _describe(failure: Failure) -> None:
    smallest = shrink(failure)
    print(f"\nVIOLATION {failure.text}")
    print(f"  again:    {failure.variant.command()}")
    print(f"  smallest: {smallest.variant.command()}")
    print("  " + "\n  ".join(smallest.lines))


def _conclude(summary: Summary, schedules: int | None, seconds: float) -> int:
    median, empty = summary.median_events(), summary.empty_cells()
    print(table(summary.hits))
    print(f"ranks: {dict(sorted(summary.ranks.items()))}")
    print(f"checks: {dict(sorted(summary.checks.items()))}")
    print(f"transactions: {dict(sorted(summary.verdicts.items()))}; limits: {dict(sorted(summary.limits.items()))}")
    print(f"coordinators that failed as the faults demand: {dict(sorted(summary.ends.items()))}")
    print(
        f"schedules={summary.schedules} through_liveness={summary.calm} rejoins={summary.epochs}"
        f" engine_steps={summary.steps}"
        f" events={sum(summary.events)} events_median={median} seconds={seconds:.1f}"
        f" violations={len(summary.failures)} empty_cells={len(empty)}"
    )
    for failure in summary.failures[:2]:
        _describe(failure)
    if summary.failures:
        return 1
    if median < EVENTS_MEDIAN_MIN:
        print(f"FAILED: {median} events at the median, {EVENTS_MEDIAN_MIN} are wanted")
        return 1
    if empty and (schedules is None or schedules >= FULL_TABLE_FROM):
        print(f"FAILED: nothing has hit {', '.join(empty)}")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    if parsed.mutants:
        return mutation.run_all(parsed.only, parsed.jobs)
    if parsed.replay is not None or parsed.directed is not None:
        return _replay(parsed)
    begun = time.monotonic()
    until = None if parsed.hours is None else begun + parsed.hours * 3600
    last, told = begun, 0

    def progress(summary: Summary) -> None:
        nonlocal last, told
        for failure in summary.failures[told:]:
            print(f"violation, {failure.variant.command()}: {failure.text[:200]}", file=sys.stderr)
        told = len(summary.failures)
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            rate = summary.schedules / (last - begun)
            print(f"{summary.schedules} schedules, {rate:.0f}/s, {len(summary.failures)} violations", file=sys.stderr)

    if parsed.first:
        runner.FAILURES_MAX = 1
    summary = run_many(parsed.seed, parsed.schedules, until=until, jobs=parsed.jobs, on_progress=progress)
    if parsed.first and summary.failures:
        print(f"VIOLATION {summary.failures[0].text}\n  again: {summary.failures[0].variant.command()}")
        return 1
    return _conclude(summary, None if until is not None else parsed.schedules, time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
