"""Steps without a decision: a leader that skips them does everything that one which decides in every step does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvcached_dist.coord.core.calm import Bounds, Calm
from kvcached_dist.coord.core.demand import Demand
from kvcached_dist.coord.core.entries import Entry, PositionKind
from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.messages import Refused
from kvcached_dist.coord.core.reclaim import Reclaim
from kvcached_dist.coord.core.transaction import TxnStep
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Tick
from tests.unit.core.rig import ME, PAGE, PAGES, Rig

SEEDS = 40
STEPS = 600
DOMAINS = 2
BUDGET = 250 * PAGE
WINDOW = 50_000
DIGEST = 1_000_000


class Side(Rig):
    """One of two leaders that see the same things.

    Args:
        calm: whether steps may go without a decision.
    """

    def __init__(self, calm: bool) -> None:
        super().__init__(
            BUDGET, DOMAINS, run_pages_max=16, run_share=4, reserved_pages_min=2, reserved_pages_max=4,
            reclaim_interval_steps=8, demand_window=WINDOW,
        )  # fmt: skip
        self.calm = calm
        self.skipped = 0
        self._digest = 0

    def decide(self, wanted: list[int], *, idle: bool) -> list[Entry]:
        """As an engine with a stream of its own has it: no mark where there is nothing to say."""
        leader, demand = self.leader, self.leader.demand
        demand.step_blocks[:] = wanted
        if self.calm and not idle and leader.calm.lasts(Tick(self.now)):
            self.skipped += 1
            return []
        demand.idle = idle
        entries = leader.close_log(PositionKind.STEP, Tick(self.now))
        if entries or self.now >= self._digest:
            self._digest = self.now + DIGEST
            leader.seal(PositionKind.STEP, self.steps, entries)
            for entry in entries:
                leader.replica.apply(entry)
            demand.background()
        else:
            demand.background()
            leader.calm.begins(Tick(self._digest))
        return entries

    def event(self, kind: str, number: int) -> None:
        """Something that does not come from the scheduler."""
        txn = self.leader.commit.txn
        match kind:
            case "finish" if txn is not None:
                self.finish()
            case "refuse" if txn is not None and txn.step is TxnStep.RESERVING:
                self.answer(Refused, cause=Cause(CauseKind.EXHAUSTED, ME, "refused", 10, 5, 0))
            case "beat":
                self.beat(number * PAGE)
            case "tick":
                self.leader.tick(Tick(self.now))
            case "evict":
                self.leader.evict(number)
            case "limit":
                self.leader.limits.request(number * PAGE, self.steps)

    def state(self) -> tuple[Any, ...]:
        """What a decision leaves behind."""
        txn, demand = self.leader.commit.txn, self.leader.demand
        return (
            None if txn is None else (txn.txn, txn.step, txn.runs, txn.foreground),
            [sorted(pages.free) for pages in self.lists],
            [demand.recent_pages(DomainId(domain)) for domain in range(DOMAINS)] if not self.leader.calm.holds else [],
            self.leader.take(),
        )


def together(seed: int) -> int:
    """Both see one random life; how many steps went without a decision."""
    choose = random.Random(seed)
    plain, calm = Side(calm=False), Side(calm=True)
    both = (plain, calm)
    busy = 0
    for number in range(STEPS):
        pause = choose.choice((500, 500, 500, 3000, 60_000 if choose.random() < 0.05 else 1000))
        idle = choose.random() < 0.02
        burst = choose.random() < 0.06
        wanted = [choose.randint(8, 30) if burst else choose.randint(0, 2) for _ in range(DOMAINS)]
        kind = choose.choice(("refuse", "beat", "tick", "evict", "limit"))
        happens = choose.random() < 0.05
        finishes = choose.random() < 0.5
        amount = 0 if kind == "limit" and choose.random() < 0.7 else choose.randint(80, BUDGET // PAGE)
        shares = [choose.random() for _ in range(2 * DOMAINS)]
        for side in both:
            side.steps = number + 1
            side.now += pause
            if happens:
                side.event(kind, amount)
            if finishes:
                side.event("finish", 0)
        assert plain.decide(wanted, idle=idle) == calm.decide(wanted, idle=idle), f"step {number}"
        assert plain.state()[:2] == calm.state()[:2], f"step {number}"
        for side in both:
            for domain, pages in enumerate(side.lists):
                most = wanted[domain]
                pages.take(min(len(pages.free), round(shares[domain] * most)))
                if shares[DOMAINS + domain] > 0.97:
                    pages.give(len(pages.busy) // 2)
        busy = max(busy, sum(len(pages.busy) for pages in calm.lists))
    assert busy
    return calm.skipped


def test_nothing_is_decided_differently() -> None:
    skipped = [together(seed) for seed in range(SEEDS)]
    # Else the comparison would say nothing.
    assert sum(skipped) > SEEDS * STEPS // 10


def no_floor(found: Bounds) -> Bounds:
    return Bounds(found.wanted, 0, found.taken)


def any_demand(found: Bounds) -> Bounds:
    return Bounds(1 << 62, found.free, found.taken)


def any_take(found: Bounds) -> Bounds:
    return Bounds(found.wanted, found.free, 1 << 62)


@pytest.mark.parametrize("loosened", [no_floor, any_demand, any_take])
def test_each_bound_is_needed(monkeypatch: pytest.MonkeyPatch, loosened: Callable[[Bounds], Bounds]) -> None:
    bounds = Demand.bounds

    def looser(self: Demand, domain: DomainId) -> Bounds | None:
        found = bounds(self, domain)
        return None if found is None else loosened(found)

    monkeypatch.setattr(Demand, "bounds", looser)
    assert differs()


def keep(self: Calm) -> None:
    """Inputs do not end it."""


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Calm, "ends", keep),
        (Reclaim, "skipped", lambda *_: None),
        (Reclaim, "steps_to_look", lambda _: 1 << 30),
        (Demand, "skipped", lambda *_: None),
        (Demand, "windows_end", lambda _: Tick(1 << 60)),
    ],
)
def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert differs()


def differs() -> bool:
    """Whether some life shows a difference."""
    for seed in range(SEEDS):
        try:
            together(seed)
        except (AssertionError, InvariantViolation):
            return True
    return False


def test_memory_that_is_short_is_asked_for_in_every_step() -> None:
    side = Side(calm=True)
    side.beat(PAGES // 8 * PAGE - PAGE)
    for _ in range(20):
        side.now += 1000
        side.decide([0, 0], idle=False)
    assert side.skipped == 0
    assert not side.leader.calm.holds


def test_a_leader_that_has_failed_is_asked() -> None:
    side = Side(calm=True)
    while not side.skipped:
        side.now += 1000
        side.decide([0, 0], idle=False)
        side.event("finish", 0)
    leader: Leader = side.leader
    leader.fail(Cause(CauseKind.DRIVER, ME, "broken"), "test")
    assert not leader.calm.lasts(Tick(side.now))
