"""The logical side of one rank: free lists driven by operations and by the applied log.

Equal operations and equal marks give equal free lists on all ranks; the digest shows it (S5).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol
from zlib import crc32

from .entries import (
    Entry,
    Evict,
    Grant,
    Growable,
    Limit,
    Mark,
    Publish,
    Quarantine,
    Reclaimed,
    Retire,
    Sort,
    Unretire,
)
from .errors import Divergence, InvariantViolation
from .invariants import require
from .messages import Snapshot
from .types import Cause, DomainId, Rank, Run, Txn

OP_RING_MAX = 4096
"""Operation records kept for the report of a divergence."""

_pack_op = struct.Struct("<BBQQI").pack


class OpKind(IntEnum):
    """Kinds of engine operations that enter the digest."""

    ALLOC = 1
    FREE = 2
    MISS = 3
    LISTS = 4
    """The engine's own free list of a domain as it stands at a mark (engines that allocate by themselves)."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One engine operation, as the digest sees it."""

    op: int
    kind: OpKind
    domain: DomainId
    blocks: int
    available: int
    ids_crc: int
    digest: int


class FreeList(Protocol):
    """Blocks of a domain that are published and free. Pages are the unit of ``publish`` and ``retire``."""

    def available(self) -> int:
        """Blocks that an allocation could take now."""

    def publish(self, first_page: int, count: int) -> None:
        """Add the blocks of these pages, all free."""

    def retire(self, first_page: int, count: int) -> None:
        """Remove the blocks of these pages; ``ValueError`` unless all are published and free."""

    def run_is_free(self, first_page: int, count: int) -> bool:
        """Whether every block of these pages is known to be published and free; asked where runs are picked."""

    def sort(self) -> None:
        """Put the list in id order (low ids first)."""


class Replica:
    """Log applier of one rank.

    Args:
        rank: this rank.
        free_lists: one per domain.
        blocks_per_page: blocks of one page, per domain.

    Threads: not thread-safe; used in the scheduler thread under the agent's lock.
    """

    def __init__(self, rank: Rank, free_lists: Sequence[FreeList], blocks_per_page: Sequence[int]) -> None:
        self.rank = rank
        self.free_lists = list(free_lists)
        self.blocks_per_page = tuple(blocks_per_page)
        self.next_index = 0
        self.op_index = 0
        self.digest = 0
        self.limit = Limit(0, 0)
        self._growable = [0] * len(self.free_lists)
        self._retiring = [0] * len(self.free_lists)
        self._retired: dict[Txn, Retire] = {}
        self._quarantined: set[Run] = set()
        self._degraded: dict[DomainId, Cause] = {}
        # Plain tuples of the fields of OpRecord: this is the path of every alloc and free.
        self._ring: deque[tuple[int, OpKind, DomainId, int, int, int, int]] = deque(maxlen=OP_RING_MAX)
        self._last_equal_op = 0

    @classmethod
    def from_snapshot(
        cls, rank: Rank, free_lists: Sequence[FreeList], blocks_per_page: Sequence[int], snapshot: Snapshot
    ) -> Replica:
        """Logical state at the beginning of an epoch: published runs all free, no operation done."""
        replica = cls(rank, free_lists, blocks_per_page)
        for item in snapshot.runs:
            if item.published:
                replica.free_lists[item.run.domain].publish(item.run.first, item.run.count)
        replica.next_index = snapshot.next_index
        replica.limit = Limit(snapshot.limit_revision, snapshot.limit_bytes)
        replica._quarantined.update(snapshot.quarantined)
        return replica

    # ------------------------------------------------------------------ operations

    def available(self, domain: DomainId) -> int:
        """Blocks published and free."""
        return self.free_lists[domain].available()

    def growable(self, domain: DomainId) -> int:
        """Blocks that every rank could still back, as the applied log says."""
        return self._growable[domain]

    def may_grow_to(self, domain: DomainId, blocks: int) -> bool:
        """Whether an allocation of ``blocks`` might be met. ``False`` is a miss that every rank knows alone.

        Blocks in a retirement count: the leader may cancel it.
        """
        return blocks <= self.available(domain) + self._growable[domain] + self._retiring[domain]

    def record(self, kind: OpKind, domain: DomainId, blocks: int, ids_crc: int = 0) -> None:
        """Enter one part of an engine operation into the digest."""
        available = self.free_lists[domain].available()
        self.digest = digest = crc32(_pack_op(kind, domain, blocks, available, ids_crc), self.digest)
        self._ring.append((self.op_index, kind, domain, blocks, available, ids_crc, digest))

    def end_op(self) -> None:
        """One engine operation is complete (it may have had parts in several domains)."""
        self.op_index += 1

    def ring(self) -> list[OpRecord]:
        """The last operations, oldest first."""
        return [OpRecord(*item) for item in self._ring]

    @property
    def quarantined(self) -> frozenset[Run]:
        """Runs that the log has quarantined."""
        return frozenset(self._quarantined)

    def degraded_by(self, domain: DomainId) -> Cause | None:
        """First cause of a quarantine in this domain; unknown (``None``) for one of an earlier epoch."""
        return self._degraded.get(domain)

    # ------------------------------------------------------------------ the log

    def check(self, mark: Mark) -> None:
        """Whether this rank stands where the leader stood when it made the mark.

        Raises:
            Divergence: the operations since the last equal mark differ.
            InvariantViolation: entries are missing or repeated (S12).
        """
        if (mark.op_index, mark.digest) != (self.op_index, self.digest):
            raise Divergence(
                f"rank {self.rank}: at {mark.kind.name.lower()} {mark.position} the leader had done {mark.op_index}"
                f" operations (digest {mark.digest:08x}), this rank {self.op_index} ({self.digest:08x}); they were"
                f" equal up to operation {self._last_equal_op}. The engine's ranks do not run the same operations."
            )
        require(
            mark.first_index == self.next_index,
            "S12",
            f"rank {self.rank}: mark starts at log index {mark.first_index}, expected {self.next_index}",
        )
        self._last_equal_op = self.op_index

    def apply(self, entry: Entry) -> None:
        """Apply the logical effect of the next entry. The caller tells the participant the physical one."""
        self.next_index += 1
        match entry:
            case Publish(txn=txn, runs=runs):
                self._forget_retired(txn)
                for run in runs:
                    self.free_lists[run.domain].publish(run.first, run.count)
            case Retire(txn=txn, runs=runs, retained=retained):
                self._retired[txn] = entry
                if not retained:
                    self._remove(txn, runs)
            case Unretire(txn=txn):
                retired = self._retired.pop(txn, None)
                require(retired is not None, "S12", f"rank {self.rank}: UNRETIRE of txn={txn}, which is not retired")
                assert retired is not None
                for run in () if retired.retained else retired.runs:
                    self.free_lists[run.domain].publish(run.first, run.count)
                    self._retiring[run.domain] -= run.count * self.blocks_per_page[run.domain]
            case Reclaimed(txn=txn):
                self._forget_retired(txn)
            case Growable(domain=domain, blocks=blocks):
                self._growable[domain] = blocks
            case Sort(domain=domain):
                self.free_lists[domain].sort()
            case Limit():
                self.limit = entry
            case Quarantine(runs=runs, cause=cause):
                self._quarantined.update(runs)
                for run in runs:
                    self._degraded.setdefault(run.domain, cause)
            case Grant() | Evict():
                pass

    def _forget_retired(self, txn: Txn) -> None:
        """The retirement has ended, released or restored: its blocks stop counting as reachable."""
        retired = self._retired.pop(txn, None)
        if retired is None or retired.retained:
            return
        for run in retired.runs:
            self._retiring[run.domain] -= run.count * self.blocks_per_page[run.domain]

    def _remove(self, txn: Txn, runs: tuple[Run, ...]) -> None:
        for run in runs:
            free_list = self.free_lists[run.domain]
            try:
                free_list.retire(run.first, run.count)
            except ValueError as error:
                what = f"rank {self.rank}: RETIRE txn={txn} of {run}, which is not entirely free here ({error})"
                raise InvariantViolation("S6", what) from error
            self._retiring[run.domain] += run.count * self.blocks_per_page[run.domain]
