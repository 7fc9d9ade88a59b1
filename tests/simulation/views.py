"""What the oracle remembers: of runs, of transactions, of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvcached_dist.coord.core.types import Run

from .hardware import RankMemory


class Violation(Exception):
    """A rule does not hold in a schedule.

    Args:
        rule: its id.
        detail: what was found.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Page(Enum):
    """State of a run, as the oracle has seen it."""

    OPEN = "open"
    PUBLISHED = "published"
    RETIRING = "retiring"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class TxnView:
    """What was seen of one transaction."""

    runs: tuple[Run, ...]
    grow: bool
    adopted: bool = False
    retained: bool = False
    verdict: str = ""
    sent: set[tuple[str, int]] = field(default_factory=set)
    """(message, rank) that the leader has sent."""
    answered: set[tuple[str, int]] = field(default_factory=set)
    """(answer, rank) that the ranks have given."""


@dataclass(slots=True)
class RankView:
    """What was seen of one rank."""

    memory: RankMemory
    published: list[int]
    """Mask of published pages as this rank has applied them, per domain."""
    live: list[int]
    """Mask of pages with live blocks, per domain."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """Masks that launched batches touch, oldest first; finished ones are removed."""
    launched: int = 0
    finished: int = 0
    log_index: int = 0
    ops: int = 0
    retired_at: dict[int, int] = field(default_factory=dict)
    """Batches launched when a retirement took effect here, by transaction."""
    gone: bool = False
