"""What one step of the replay runs, and what it adds up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .sequence import Blocks, Sequence

_CHECKSUM_MASK = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Item:
    """One request's part of a batch."""

    sequence: Sequence
    attempt: int
    tokens: int
    yields: bool
    """The part ends with an output token (every decode, the last prefill chunk)."""


@dataclass(slots=True)
class Batch:
    """What one step runs.

    Attributes:
        items: requests and how many tokens of each.
        prefill_tokens: tokens that count as prefill.
        writes: per domain the new blocks with the stamps to write.
        checksum: digest over the items; equal on all ranks or they have diverged.
        short: requests that could not get their blocks in this step, and what they needed.
    """

    step: int
    items: list[Item] = field(default_factory=list)
    prefill_tokens: int = 0
    writes: dict[str, Blocks] = field(default_factory=dict)
    checksum: int = 0
    short: list[tuple[Sequence, dict[str, int]]] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Append one item."""
        sequence = item.sequence
        self.items.append(item)
        for value in (sequence.request.index, item.attempt, sequence.computed, item.tokens):
            self.checksum = (self.checksum * 1_000_003 + value + 1) & _CHECKSUM_MASK

    def write(self, written: Mapping[str, Blocks]) -> None:
        """Note new blocks."""
        for name, blocks in written.items():
            self.writes.setdefault(name, Blocks()).extend(blocks.ids, blocks.stamps)


@dataclass(slots=True)
class Totals:
    """Counters of the run; equal on all ranks."""

    completed: int = 0
    retracted: int = 0
    misses: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    evicted_tokens: int = 0


__all__ = ["Batch", "Item", "Totals"]
