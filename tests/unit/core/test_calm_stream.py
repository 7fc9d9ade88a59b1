"""Steps without a decision, as an engine with an ordered stream has them.

Pages of several blocks, steps that wait for growth, batches that could not be mapped, unmaps that fail, epochs that
end: whatever happens, a leader that skips steps does what one that decides in each of them does.
"""

from __future__ import annotations

import contextlib
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist import stream
from kvcached_dist.coord.core.demand import Foreground
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import (
    Beat,
    Bye,
    Drained,
    MapFailed,
    Mapped,
    MarkMessage,
    Refused,
    Released,
    Reserved,
    Restored,
    UnmapFailed,
    Unmapped,
)
from kvcached_dist.coord.core.pages import PageState
from kvcached_dist.coord.core.policy import Policy
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.transaction import TxnStep
from kvcached_dist.coord.core.types import Cause, CauseKind, Epoch, Rank, Tick, Txn
from kvcached_dist.stream import StreamCoordinator
from tests.unit.core.rig import ME, Pages

SEEDS = 40
STEPS = 600
PAGE_TABLE = 120
PER_PAGE = (1, 4, 16)
"""Blocks of a page, of each domain."""
PAGE_BYTES = (100, 300, 100)
BUDGET = 30_000
WINDOW = 50_000
DIGEST = 10_000
FAILED = Cause(CauseKind.DRIVER, ME, "failed")
SHORT = Cause(CauseKind.EXHAUSTED, ME, "refused", 10, 5, 0)


class Blocks(Pages):
    """A free list of several blocks a page; the null block is in none."""

    def __init__(self, per_page: int) -> None:
        super().__init__()
        self._per_page = per_page

    def publish(self, first: int, count: int) -> None:
        super().publish(first * self._per_page, count * self._per_page)

    def retire(self, first: int, count: int) -> None:
        super().retire(first * self._per_page, count * self._per_page)

    def run_is_free(self, first: int, count: int) -> bool:
        return super().run_is_free(first * self._per_page, count * self._per_page)


class Side(StreamCoordinator):
    """Rank 0 of a world of its own: the coordinator's decisions, no agent, no driver.

    Args:
        calm: whether steps may go without a decision.
    """

    def __init__(self, calm: bool) -> None:
        policy = Policy(
            run_pages_max=16, run_share=4, reserved_pages_min=2, reserved_pages_max=4, reclaim_interval_steps=8,
            demand_window=WINDOW, backoff_min=5_000, backoff_max=30_000, rejoin=True,
        )  # fmt: skip
        self.now = 0
        self.may_skip = calm
        self.skipped = 0
        self.outcome = "finish"
        self.config = SimpleNamespace(growth_deadline_s=1.0)  # type: ignore[assignment]
        self.domains = {str(index): SimpleNamespace(index=index) for index in range(len(PER_PAGE))}  # type: ignore[misc]
        self.misses = self._position = 0
        self._next_digest = Tick(0)
        self._agent = SimpleNamespace(  # type: ignore[assignment]
            lock=threading.Lock(), entered=contextlib.nullcontext, raise_if_failed=lambda: None
        )
        self._encoder = SimpleNamespace(encode=self._encoded)  # type: ignore[assignment]
        tables = [PAGE_TABLE] * len(PER_PAGE)
        self.lists = [Blocks(per_page) for per_page in PER_PAGE]
        self._replica = Replica(ME, self.lists, PER_PAGE)
        self.leader = self._leader = Leader(Epoch(1), policy, self._replica, tables, [self._peer()], Tick(0))
        self._watch()

    @staticmethod
    def _peer() -> Peer:
        return Peer(PAGE_BYTES, BUDGET, Tick(0), (0,))

    @staticmethod
    def _encoded(message: MarkMessage) -> list[Any]:
        return [message.mark.entries]

    def _record_lists(self) -> None:
        """There is no digest."""

    def _watch(self) -> None:
        """Count what the calm of this epoch skips, and let it skip nothing where it must not."""
        calm = self.leader.calm
        lasts = calm.lasts

        def watched(now: Tick) -> bool:
            skips = self.may_skip and lasts(now)
            self.skipped += skips
            return skips

        calm.lasts = watched  # type: ignore[method-assign]

    def _await_verdict(self, waiting: Foreground, until: float = 0.0) -> None:
        """What this rank says about a growth that a step waits for, and of whatever is in its way."""
        for _ in range(20):
            if waiting.verdict is not None:
                return
            self.event(self.outcome, 0)
            self.event("finish", 0)

    # ------------------------------------------------------------------ one step

    def step(self, wanted: list[int], running: list[int], coming: list[int], *, idle: bool) -> Any:
        """Decide and apply; the entries of the mark, ``None`` without one."""
        # As an engine does: where nothing waits, a short look first.
        if not idle and not any(coming) and self.goes_on(wanted):
            return None
        names = [str(index) for index in range(len(PER_PAGE))]
        frames: tuple[Any, ...] = self.decide(
            dict(zip(names, wanted, strict=True)), idle=idle, running=dict(zip(names, running, strict=True)),
            coming=dict(zip(names, coming, strict=True)),
        )  # fmt: skip
        if not frames:
            return None
        for entry in frames[0]:
            self.leader.replica.apply(entry)
        self.leader.demand.background()
        return frames[0]

    # ------------------------------------------------------------------ what does not come from the scheduler

    def event(self, kind: str, number: int) -> None:
        """Something happens, where it can."""
        leader, txn = self.leader, self.leader.commit.txn
        step = None if txn is None else txn.step
        match kind:
            case "finish":
                while leader.active and leader.commit.txn is not None:
                    self.answer()
            case "answer" if txn is not None:
                self.answer()
            case "refuse" if step is TxnStep.RESERVING:
                self.say(Refused, cause=SHORT)
            case "refuse" if step is TxnStep.MAPPING:
                self.say(MapFailed, cause=FAILED)
            case "refuse" if step is TxnStep.UNMAPPING:
                self.say(UnmapFailed, cause=FAILED)
            case "beat":
                leader.on_message(ME, self.beat(number), Tick(self.now))
            case "tick":
                leader.tick(Tick(self.now))
            case "evict":
                leader.evict(number)
            case "limit":
                leader.limits.request(number, leader.limits.newest.revision + 1)
            case "lost":
                self.rejoin()
            case "bye":
                leader.on_message(ME, Bye(leader.epoch), Tick(self.now))

    def beat(self, free_bytes: int) -> Beat:
        return Beat(self.leader.epoch, free_bytes, BUDGET - free_bytes, (1,), 0, Txn(0))

    def say(self, kind: Any, **fields: Any) -> None:
        txn = self.leader.commit.txn
        assert txn is not None
        self.leader.on_message(ME, kind(self.leader.epoch, txn.txn, **fields), Tick(self.now))

    def answer(self) -> None:
        """The open transaction goes on by a step."""
        txn = self.leader.commit.txn
        assert txn is not None
        match txn.step:
            case TxnStep.RESERVING:
                self.say(Reserved, handles=(1,))
            case TxnStep.MAPPING:
                self.say(Mapped)
            case TxnStep.DRAINING:
                self.say(Drained, lag_steps=0)
            case TxnStep.UNMAPPING:
                self.say(Unmapped)
            case TxnStep.RESTORING:
                self.say(Restored)
            case _:
                self.say(Released, handles=(1,))

    def rejoin(self) -> None:
        """The epoch ends; in the next one every published run is free."""
        leader = self.leader
        leader.lose(Cause(CauseKind.RANK_LOST, Rank(1), "lost"))
        self.lists = [Blocks(per_page) for per_page in PER_PAGE]
        self._replica = Replica(ME, self.lists, PER_PAGE)
        self._replica.limit = leader.limits.newest
        for table in leader.tables:
            for run in table.runs(PageState.PUBLISHED):
                self.lists[run.domain].publish(run.first, run.count)
        leader.begin_epoch(Epoch(leader.epoch + 1), self._replica, [self._peer()], Tick(self.now))
        self._watch()

    def state(self) -> tuple[Any, ...]:
        """What a decision leaves behind, to others and in the lists."""
        leader, txn = self.leader, self.leader.commit.txn
        return (
            None if txn is None else (txn.txn, txn.step, txn.runs, txn.foreground),
            [sorted(blocks.free) for blocks in self.lists],
            [table.count(state) for table in leader.tables for state in PageState],
            [leader.demand.short_blocks(table.domain) for table in leader.tables],
            leader.limits.overage_bytes(),
            self.misses,
        )


KINDS = (*["refuse"] * 4, *["answer"] * 4, "beat", "tick", "evict", "limit", "lost")


def together(seed: int, patch: pytest.MonkeyPatch) -> tuple[int, set[str]]:
    """Both see one random life; steps that went without a decision, and what has happened in it."""
    choose = random.Random(seed)
    plain, calm = both = Side(calm=False), Side(calm=True)
    seen: set[str] = set()
    for number in range(STEPS):
        pause = choose.choice((500, 500, 500, 3000, 60_000 if choose.random() < 0.05 else 1000))
        idle = choose.random() < 0.02
        burst = choose.random() < 0.06
        wanted = [choose.randint(2, 8) * per if burst else choose.randint(0, per + 1) for per in PER_PAGE]
        running = [min(blocks, choose.randint(0, 2)) for blocks in wanted]
        coming = [blocks * choose.randint(1, 4) if burst else 0 for blocks in wanted]
        kind = "bye" if number > STEPS - 20 and choose.random() < 0.1 else choose.choice(KINDS)
        happens, finishes = choose.random() < 0.15, choose.random() < 0.2
        amount = choose.randint(0, BUDGET)
        amount = 0 if kind == "limit" and choose.random() < 0.7 else amount
        outcome = choose.choice(("finish", "finish", "refuse"))
        shares = [choose.random() for _ in range(2 * len(PER_PAGE))]
        said = []
        for side in both:
            side.now += pause
            side.outcome = outcome
            patch.setattr(stream, "ticks", lambda side=side: Tick(side.now))
            if happens:
                side.event(kind, amount)
            if finishes:
                side.event("finish", 0)
            said.append(side.step(wanted, running, coming, idle=idle))
            if side.leader.commit.retained:
                seen.add("retained")
            if side.leader.reclaim.paused():
                seen.add("paused")
        assert said[0] == said[1], f"step {number}"
        assert plain.state() == calm.state(), f"step {number}"
        seen |= {"digest"} if said[0] == () else set()
        seen |= {"waited"} if calm.leader.counters.foreground_grows else set()
        seen |= {"rejoined"} if calm.leader.epoch > 1 else set()
        for side in both:
            for domain, blocks in enumerate(side.lists):
                blocks.take(min(len(blocks.free), round(shares[domain] * wanted[domain])))
                if shares[len(PER_PAGE) + domain] > 0.97:
                    blocks.give(len(blocks.busy) // 2)
    return calm.skipped, seen


def test_nothing_is_decided_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "DIGEST_INTERVAL", DIGEST)
    lives = [together(seed, monkeypatch) for seed in range(SEEDS)]
    # Else the comparison would say nothing.
    assert sum(skipped for skipped, _ in lives) > SEEDS * STEPS // 20
    assert set.union(*(seen for _, seen in lives)) == {"digest", "retained", "paused", "waited", "rejoined"}
