"""The leader's record of the one open transaction.

::

    grow     RESERVING --all RESERVED--> MAPPING --all answered--> CLOSED (published at the next mark | retained)
                 `--REFUSED | deadline--> CLOSED (aborted)
    reclaim  DRAINING --all DRAINED--> UNMAPPING --all UNMAPPED--> RELEASING --all RELEASED--> CLOSED (reclaimed)
                 `--cancelled--> CLOSED        `--a failure--> RESTORING --all RESTORED--> CLOSED (published again)

A change of epoch closes the open transaction from any step (:mod:`.epoch`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .invariants import require
from .types import Cause, Rank, Run, Tick, Txn

QUERIES_MAX = 2
"""Read-only queries about one missing answer."""


class TxnStep(Enum):
    """Where the open transaction stands."""

    RESERVING = "reserving"
    MAPPING = "mapping"
    DRAINING = "draining"
    UNMAPPING = "unmapping"
    RESTORING = "restoring"
    RELEASING = "releasing"
    CLOSED = "closed"


_EDGES: dict[TxnStep, frozenset[TxnStep]] = {
    TxnStep.RESERVING: frozenset({TxnStep.MAPPING, TxnStep.CLOSED}),
    TxnStep.MAPPING: frozenset({TxnStep.CLOSED}),
    TxnStep.DRAINING: frozenset({TxnStep.UNMAPPING, TxnStep.CLOSED}),
    TxnStep.UNMAPPING: frozenset({TxnStep.RELEASING, TxnStep.RESTORING, TxnStep.CLOSED}),
    TxnStep.RESTORING: frozenset({TxnStep.CLOSED}),
    TxnStep.RELEASING: frozenset({TxnStep.CLOSED}),
    TxnStep.CLOSED: frozenset(),
}


class Verdict(Enum):
    """How a transaction ended."""

    PUBLISHED = "published"
    ABORTED = "aborted"
    RETAINED = "retained"
    RECLAIMED = "reclaimed"
    CANCELLED = "cancelled"
    RESTORED = "restored"


@dataclass(slots=True)
class Pending:
    """What the leader knows of one rank's missing answer."""

    due: Tick
    """When to ask (or ask again)."""
    queries: int = 0
    number: int = 0
    """Number of the last query: a reply to an earlier one, of this step or another, says nothing any more."""
    queried_at: int = 0
    lives: bool = False
    """It was heard after the last query; its reply may be right behind (a rank that was stopped beats first)."""


@dataclass(slots=True)
class Transaction:
    """One grow or reclaim. ``waiting`` holds the ranks whose answer to the current step is missing.

    Attributes:
        txn: its number.
        step: where it stands; written by :meth:`enter` only.
        runs: the runs, all or nothing.
        started: when it was opened.
        foreground: an operation waits for it.
        retained: of a reclaim of runs that were never published, the batch that they were.
        late: a rank has said that its MAP (or UNMAP, RELEASE) is still running after the deadline; callers
            do not wait for it any longer.
        adopted: a grow over retained runs: an abort leaves them retained (rule M3).
        tries: earlier failed MAPs of the identical runs.
        cause: first refusal or failure.
        handles: handles held per rank and pool, from the RESERVED answers.
        lag_steps: largest lag reported with DRAINED.
        releases: RELEASE messages repeated after a failed one.
        asked: queries sent about it, which numbers them.
    """

    txn: Txn
    step: TxnStep
    runs: tuple[Run, ...]
    started: Tick
    foreground: bool = False
    retained: Retained | None = None
    late: bool = False
    adopted: bool = False
    tries: int = 0
    cause: Cause | None = None
    waiting: dict[Rank, Pending] = field(default_factory=dict)
    handles: dict[Rank, tuple[int, ...]] = field(default_factory=dict)
    lag_steps: int = 0
    releases: int = 0
    asked: int = 0

    @property
    def grows(self) -> bool:
        """Whether it takes memory."""
        return self.step in (TxnStep.RESERVING, TxnStep.MAPPING)

    def enter(self, step: TxnStep, ranks: range, due: Tick) -> None:
        """Move on and wait for an answer of every rank until ``due``."""
        require(step in _EDGES[self.step], "S1", f"txn={self.txn} from {self.step.name} to {step.name}")
        self.step = step
        self.waiting = {} if step is TxnStep.CLOSED else {Rank(rank): Pending(due) for rank in ranks}


@dataclass(slots=True)
class Retained:
    """Runs of a failed MAP. Only a retry of exactly these runs may adopt them.

    Attributes:
        runs: the runs, in the order of the failed transaction.
        tries: failed MAPs so far.
        cause: the last failure.
    """

    runs: tuple[Run, ...]
    tries: int
    cause: Cause

    def pages(self) -> dict[int, int]:
        """Pages per domain."""
        pages: dict[int, int] = {}
        for run in self.runs:
            pages[run.domain] = pages.get(run.domain, 0) + run.count
        return pages
