"""What must hold after a fault, as pure functions over what the ranks reported. Each returns violations in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from .plan import Effect, Fault
from .rank import Entered, Left, Work
from .workload import Backlog

KILLED_BOUND_S: Final = 1.0
"""A killed rank is known to every survivor within this time (L2)."""

HUNG_BOUND_S: Final = 1.0
"""A rank that stands still is known within a lease and this time (L2)."""

CLOSE_BOUND_S: Final = 15.0
"""Closing waits for others' goodbyes, running driver work and links, a few seconds each (L1)."""

_ERRORS: Final = {Effect.REJOINS: "RankLost", Effect.RESTARTS: "GroupFailed"}


def detection_bound_s(fault: Fault, lease_s: float) -> float:
    """Longest time from a fault to each survivor's error."""
    return lease_s + HUNG_BOUND_S if fault.stop_s else KILLED_BOUND_S


def check_detection(fault: Fault, at: float, works: Mapping[int, Work], lease_s: float, lag_s: float) -> list[str]:
    """Every survivor has got the error in time, the right class of error, and it names the right rank (L2).

    Args:
        fault: what was done.
        at: wall clock of the fault.
        works: by survivor.
        lease_s: lease of the ranks.
        lag_s: how long a process of the host waited for a core meanwhile, or the killed one took to end; that is
            not the survivors' time.
    """
    bound_s = detection_bound_s(fault, lease_s) + lag_s
    error = "RankLost" if fault.rank != 0 else _ERRORS[Effect.RESTARTS]
    cause = "RANK_HUNG" if fault.stop_s else "RANK_LOST"
    found = []
    for rank, work in sorted(works.items()):
        problem = work.problem
        if problem is None:
            found.append(f"L2: rank {rank} ended its work without an error after {fault}")
            continue
        if (problem.kind, problem.cause_kind, problem.cause_rank) != (error, cause, fault.rank):
            found.append(
                f"first cause: rank {rank} got {problem.kind} ({problem.text}), expected {error} with"
                f" {cause} of rank {fault.rank}"
            )
        if (seconds := problem.at - at) > bound_s:
            found.append(f"L2: rank {rank} knew after {seconds:.2f} s, bound {bound_s:.3g} s")
    causes = {(work.problem.cause_kind, work.problem.cause_rank) for work in works.values() if work.problem}
    if len(causes) > 1:
        found.append(f"first cause: the survivors name different ones: {sorted(causes)}")
    return found


def check_work(work: Work, call_bound_s: float) -> list[str]:
    """A rank's bytes were right (S4, S13), nothing leaked (S10), and no call took longer than its bound (L1)."""
    found = []
    if work.corrupt:
        found.append(f"S4: rank {work.rank}: {work.corrupt} corrupt blocks: {'; '.join(work.corrupt_texts)}")
    if work.leaked_bytes > 0:
        found.append(f"S10: rank {work.rank} held {work.leaked_bytes} bytes above its null pages at rest")
    if work.slowest.seconds > call_bound_s:
        found.append(
            f"L1: rank {work.rank}: {work.slowest.call} took {work.slowest.seconds:.2f} s, bound {call_bound_s:.2f} s"
        )
    return found


def check_digests(works: Iterable[Work]) -> list[str]:
    """Ranks that have ended the same wave of the same epoch had done the same operations with the same ids (S5)."""
    seen: dict[tuple[int, int], tuple[int, int, int]] = {}
    found = []
    for work in works:
        for rest in work.rests:
            key, state = (work.epoch, rest.wave), (rest.step, rest.digest)
            first = seen.setdefault(key, (work.rank, *state))
            if first[1:] != state:
                found.append(
                    f"S5: at the end of wave {rest.wave} of epoch {work.epoch} rank {first[0]} was at step {first[1]}"
                    f" with digest {first[2]:08x}, rank {work.rank} at step {state[0]} with {state[1]:08x}"
                )
    return found


def check_entered(entered: Sequence[Entered], epoch: int) -> list[str]:
    """All ranks have entered the same epoch with the same published pages (S3, S8)."""
    found = [
        f"rank {item.rank} did not enter epoch {epoch}: {item.problem.kind}: {item.problem.text}"
        for item in entered
        if item.problem is not None
    ]
    well = [item for item in entered if item.problem is None]
    found += [
        f"S8: rank {item.rank} is in epoch {item.epoch}, expected {epoch}" for item in well if item.epoch != epoch
    ]
    if len({item.pages for item in well}) > 1:
        pages = ", ".join(f"rank {item.rank}: {item.pages:08x}" for item in well)
        found.append(f"S3: the published pages differ at the begin of epoch {epoch} ({pages})")
    return found


def check_left(left: Left) -> list[str]:
    """A closed rank has given everything back, in bounded time."""
    found = []
    if left.problem is not None:
        found.append(f"rank {left.rank} did not close: {left.problem.kind}: {left.problem.text}")
    if left.leaked_bytes or left.reservations:
        found.append(f"S10: rank {left.rank} closed and left {left.leaked_bytes} bytes, {left.reservations} ranges")
    if left.seconds > CLOSE_BOUND_S:
        found.append(f"L1: closing rank {left.rank} took {left.seconds:.1f} s, bound {CLOSE_BOUND_S:g} s")
    return found


def surviving_backlog(works: Iterable[Work], before: Backlog) -> Backlog:
    """What goes on after an epoch: the front end lives with rank 0; without it, whoever has seen most answers.

    Args:
        works: of the survivors.
        before: backlog at the begin of the epoch, for an epoch that nobody survived.
    """
    ordered = sorted(works, key=lambda work: (work.rank != 0, -work.backlog.answered))
    return ordered[0].backlog if ordered else before


__all__ = [
    "CLOSE_BOUND_S", "HUNG_BOUND_S", "KILLED_BOUND_S", "check_detection", "check_digests", "check_entered",
    "check_left", "check_work", "detection_bound_s", "surviving_backlog",
]  # fmt: skip
