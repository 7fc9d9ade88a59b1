"""Entries of the leader's log and the marks that carry them.

An entry never takes effect when it arrives. It takes effect where the engine's ordered stream says
so: at the mark that carries it. ``position`` of a mark is either the end of engine step ``s`` or the
engine's ``k``-th operation, where a rank ran short and waits for the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .types import Cause, DomainId, Epoch, Run, Txn


@dataclass(frozen=True, slots=True)
class Publish:
    """The runs become usable. Every rank has answered ``MAPPED`` for ``txn``."""

    txn: Txn
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """Verdict for a shortage at operation ``op``: go on (``hit``) or an ordinary miss.

    Published runs that make it a hit stand as ``Publish`` entries before it in the same mark.
    """

    op: int
    hit: bool


@dataclass(frozen=True, slots=True)
class Retire:
    """These runs, entirely free at this point, leave the free lists.

    Attributes:
        txn: the reclaim transaction.
        runs: exact runs.
        retained: the runs were mapped but never published, so no free list holds them.
    """

    txn: Txn
    runs: tuple[Run, ...]
    retained: bool = False


@dataclass(frozen=True, slots=True)
class Unretire:
    """The retirement ``txn`` is cancelled before any UNMAP was sent; its runs return."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The retirement ``txn`` is complete: every rank has released its memory; it cannot be cancelled any more."""

    txn: Txn


@dataclass(frozen=True, slots=True)
class Sort:
    """Free lists of the domain are put in id order on all ranks."""

    domain: DomainId


@dataclass(frozen=True, slots=True)
class Evict:
    """Every rank evicts the same ``tokens`` least recently used tokens from its prefix cache.

    0 tokens: nothing is evicted, and each may move together what it keeps.
    """

    tokens: int


@dataclass(frozen=True, slots=True)
class Growable:
    """How many more blocks of a domain every rank could back (the minimum over ranks)."""

    domain: DomainId
    blocks: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A physical limit per rank in bytes (0: none), with the controller's revision."""

    revision: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The runs could not be mapped after bounded retries and will not be used again."""

    runs: tuple[Run, ...]
    cause: Cause


Entry = Publish | Grant | Retire | Unretire | Reclaimed | Sort | Evict | Growable | Limit | Quarantine


class PositionKind(IntEnum):
    """Where a mark takes effect."""

    STEP = 1
    OP = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything up to ``first_index + len(entries)`` is in force from this point of the stream.

    Attributes:
        epoch: epoch in which the leader broadcast it (informative: rule M1, epochs fence links only).
        kind: whether ``position`` counts engine steps or engine operations.
        position: step number or operation index.
        first_index: log index of the first entry.
        entries: log entries in order.
        op_index: operations that the leader had done here.
        digest: rolling digest over these operations (op kinds, counts, list lengths).
        settled: the leader has no open transaction and wants to reclaim nothing.
    """

    epoch: Epoch
    kind: PositionKind
    position: int
    first_index: int
    entries: tuple[Entry, ...]
    op_index: int
    digest: int
    settled: bool = False


__all__ = [
    "Entry",
    "Evict",
    "Grant",
    "Growable",
    "Limit",
    "Mark",
    "PositionKind",
    "Publish",
    "Quarantine",
    "Reclaimed",
    "Retire",
    "Sort",
    "Unretire",
]
