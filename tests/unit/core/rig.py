"""A leader alone: one rank, no driver, answers by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcached_dist.coord.core.entries import Mark, PositionKind
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import (
    Beat,
    Drained,
    Mapped,
    Released,
    Reserved,
    TxnMessage,
    Unmapped,
)
from kvcached_dist.coord.core.policy import Policy
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.transaction import TxnStep
from kvcached_dist.coord.core.types import Epoch, Rank, Run, Tick, Txn

ME = Rank(0)
EPOCH = Epoch(1)
PAGE = 100
"""Bytes of a page, in every domain."""

PAGES = 300


@dataclass
class Pages:
    """A free list of one block a page."""

    free: set[int] = field(default_factory=set)
    busy: set[int] = field(default_factory=set)

    def available(self) -> int:
        return len(self.free)

    def publish(self, first: int, count: int) -> None:
        self.free |= set(range(first, first + count))

    def retire(self, first: int, count: int) -> None:
        self.free -= set(range(first, first + count))

    def run_is_free(self, first: int, count: int) -> bool:
        return set(range(first, first + count)) <= self.free

    def take(self, pages: int) -> None:
        """The lowest free pages are in use from now on."""
        taken = sorted(self.free)[:pages]
        self.free -= set(taken)
        self.busy |= set(taken)

    def give(self, pages: int) -> None:
        """The highest pages in use are free from now on."""
        given = sorted(self.busy)[-pages:] if pages else []
        self.busy -= set(given)
        self.free |= set(given)

    def sort(self) -> None:
        """They have no order."""


class Rig:
    """A leader alone, with so many bytes left."""

    def __init__(self, budget: int, domains: int = 1, **policy: Any) -> None:
        self.lists = [Pages() for _ in range(domains)]
        replica = Replica(ME, self.lists, [1] * domains)
        self.peer = Peer((PAGE,) * domains, budget, Tick(0), (0,))
        settings = {"reserved_pages_min": 0, "reserved_pages_max": 0, **policy}
        self.leader = Leader(EPOCH, Policy(**settings), replica, [PAGES] * domains, [self.peer], Tick(0))
        self.now = 0
        self.steps = 0

    @property
    def open_runs(self) -> dict[int, int]:
        """Pages of the open transaction per domain; empty without one."""
        txn = self.leader.commit.txn
        pages: dict[int, int] = {}
        for run in txn.runs if txn is not None else ():
            pages[run.domain] = pages.get(run.domain, 0) + run.count
        return pages

    def step(self, *, idle: bool = False, wanted: Mapping[int, int] | None = None) -> Mark:
        """One engine step: its mark applied, and growth ahead of demand."""
        self.now += 1000
        self.steps += 1
        demand = self.leader.demand
        demand.idle = idle
        for domain in range(len(self.lists)):
            demand.step_blocks[domain] = (wanted or {}).get(domain, 0)
        mark = self.leader.mark(PositionKind.STEP, self.steps, Tick(self.now))
        for entry in mark.entries:
            self.leader.replica.apply(entry)
        demand.background()
        return mark

    def answer(self, kind: type[TxnMessage], **fields: Any) -> None:
        """What this rank says about the open transaction."""
        txn = self.leader.commit.txn
        assert txn is not None
        self.now += 10
        self.leader.on_message(ME, kind(EPOCH, txn.txn, **fields), Tick(self.now))

    def beat(self, free_bytes: int) -> None:
        """What this rank says of its memory."""
        self.now += 10
        self.leader.on_message(ME, Beat(EPOCH, free_bytes, 0, (1,), 0, Txn(0)), Tick(self.now))

    def grow(self, *runs: Run) -> None:
        """Runs are published."""
        self.leader.commit.open_grow(runs, foreground=False)
        self.finish()
        self.step()

    def finish(self) -> None:
        """The open transaction succeeds."""
        while (txn := self.leader.commit.txn) is not None:
            match txn.step:
                case TxnStep.RESERVING:
                    self.answer(Reserved, handles=(1,))
                case TxnStep.MAPPING:
                    self.answer(Mapped)
                case TxnStep.DRAINING:
                    self.answer(Drained, lag_steps=0)
                case TxnStep.UNMAPPING:
                    self.answer(Unmapped)
                case _:
                    self.answer(Released, handles=(1,))
