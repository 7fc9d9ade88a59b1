"""What the leader remembers: of each rank, of finished transactions, and in counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from .transaction import Verdict
from .types import Cause, Rank, Tick, Txn

LEADER = Rank(0)

CLOSED_MAX = 1 << 16
"""Finished transactions kept for statistics."""


@dataclass(frozen=True, slots=True)
class Closed:
    """One finished transaction, for statistics.

    Attributes:
        txn: its number.
        verdict: how it ended.
        grow: it took memory (else it gave memory back).
        foreground: an operation waited for it.
        started: when it was opened.
        ended: when it was decided.
        lag_steps: largest lag that a rank reported with DRAINED.
        cause: first refusal or failure.
    """

    txn: Txn
    verdict: Verdict
    grow: bool
    foreground: bool
    started: Tick
    ended: Tick
    lag_steps: int
    cause: Cause | None


@dataclass(slots=True)
class Peer:
    """What the leader knows of one rank.

    Attributes:
        page_bytes: physical bytes of a page on that rank, per domain.
        budget_bytes: bytes it could still create, from its beats, less what was reserved since.
        heard: when its last message came.
        handles: handles it should hold when nothing is open (S10).
        held_bytes: physical bytes it holds, from its beats.
        left: it said goodbye.
    """

    page_bytes: tuple[int, ...]
    budget_bytes: int
    heard: Tick
    handles: tuple[int, ...]
    held_bytes: int = 0
    left: bool = False


@dataclass(slots=True)
class Counters:
    """Cumulative counts; never reset.

    Attributes:
        stale_answers: late, duplicate or foreign messages that changed nothing.
        queries: queries sent about missing answers.
        known_misses: operations answered without a message because the answer was known.
        refusals: grows refused or given up.
        messages: messages sent.
        foreground_grows: published grows that an operation waited for.
        reclaimed_runs: runs given back.
        closed: finished transactions by verdict.
    """

    stale_answers: int = 0
    queries: int = 0
    known_misses: int = 0
    refusals: int = 0
    messages: int = 0
    foreground_grows: int = 0
    reclaimed_runs: int = 0
    closed: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
