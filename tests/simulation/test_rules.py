"""Each rule is broken once, from outside, and the simulation has to notice which one it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcached_dist.coord.core.effects import Work, WorkKind
from kvcached_dist.coord.core.entries import Growable, Mark, PositionKind, Publish, Retire
from kvcached_dist.coord.core.messages import Abort, Map, Mapped, Reserve, Unmap
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.types import DomainId, Epoch, PageId, Rank, Run, Txn

from .clock import Loop
from .cluster import Cluster
from .hardware import Card, PoolModel, RankMemory
from .network import Wire
from .oracle import Oracle
from .rules import provokes
from .schedule import Plan, directed
from .views import Violation

EPOCH = Epoch(3)
RUN = Run(DomainId(0), PageId(1), 2)


@pytest.fixture
def oracle() -> Oracle:
    oracle = Oracle(Loop(), (8,), (1,))
    for rank in range(2):
        pools = (PoolModel(0, 64, 64),)
        oracle.add_rank(RankMemory(rank, Card(1 << 20, 0), pools, oracle.before_unmap))
    return oracle


def reserve(oracle: Oracle, txn: int = 1, run: Run = RUN, *, held: bool = True) -> None:
    for rank, view in enumerate(oracle.ranks):
        oracle.leader_sends(rank, Reserve(EPOCH, Txn(txn), (run,)))
        if held:
            assert view.memory.perform(Work(WorkKind.RESERVE, Txn(txn), (run,)), None, 0) is None


def map_on(oracle: Oracle, *ranks: int, txn: int = 1, run: Run = RUN) -> None:
    for rank in range(len(oracle.ranks)):
        oracle.leader_sends(rank, Map(EPOCH, Txn(txn)))
    for rank in ranks:
        oracle.ranks[rank].memory.perform(Work(WorkKind.MAP, Txn(txn), (run,)), None, 0)
        oracle.rank_answers(rank, Mapped(EPOCH, Txn(txn)))


def mark(oracle: Oracle, *entries: object) -> None:
    oracle.marked(Mark(EPOCH, PositionKind.STEP, 1, len(oracle.log), entries, 0, 0), [0])  # type: ignore[arg-type]


def broken(rule: str) -> pytest.RaisesExc[Violation]:
    return pytest.raises(Violation, match=f"^{rule}: ")


@provokes("S1")
def test_two_verdicts(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    with broken("S1"):
        oracle.leader_sends(0, Abort(EPOCH, Txn(1)))


@provokes("S2")
def test_publish_before_everybody_has_mapped(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0)
    with broken("S2"):
        mark(oracle, Publish(Txn(1), (RUN,)))


@provokes("S3")
def test_unmap_of_a_published_page(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    mark(oracle, Publish(Txn(1), (RUN,)))
    oracle.applying(1, oracle.log[0])
    with broken("S3"):
        oracle.ranks[0].memory.perform(Work(WorkKind.UNMAP, Txn(2), (RUN,)), None, 0)


@provokes("S4")
def test_a_batch_over_an_unmapped_page(oracle: Oracle) -> None:
    oracle.ranks[1].live[0] = 0b100
    with broken("S4"):
        oracle.launch(1)


@provokes("S4")
def test_unmap_before_everybody_has_drained(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    mark(oracle, Publish(Txn(1), (RUN,)), Retire(Txn(2), (RUN,)))
    with broken("S4"):
        oracle.leader_sends(0, Unmap(EPOCH, Txn(2)))


@provokes("S5")
def test_other_ids_on_another_rank(oracle: Oracle) -> None:
    oracle.operated(0, "alloc", (1, 2))
    with broken("S5"):
        oracle.operated(1, "alloc", (2, 1))


@provokes("S6")
def test_a_page_in_two_transactions(oracle: Oracle) -> None:
    reserve(oracle)
    with broken("S6"):
        reserve(oracle, txn=2, run=Run(DomainId(0), PageId(2), 1))


@provokes("S6")
def test_growable_counts_a_retiring_page(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    mark(oracle, Publish(Txn(1), (RUN,)), Growable(DomainId(0), 6), Retire(Txn(2), (RUN,)))
    with broken("S6"):
        mark(oracle, Growable(DomainId(0), 8))


@provokes("S7")
def test_map_without_handles_everywhere(oracle: Oracle) -> None:
    reserve(oracle, held=False)
    with broken("S7"):
        oracle.leader_sends(0, Map(EPOCH, Txn(1)))


@provokes("S11")
def test_work_between_yes_and_publish(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    with broken("S11"):
        oracle.work_begins(1, Work(WorkKind.MAP, Txn(1), (RUN,)))


@provokes("S12")
def test_an_entry_out_of_order(oracle: Oracle) -> None:
    mark(oracle, Growable(DomainId(0), 3), Growable(DomainId(0), 4))
    with broken("S12"):
        oracle.applying(1, oracle.log[1])


@provokes("S13")
def test_publish_without_the_fill_pattern(oracle: Oracle) -> None:
    reserve(oracle)
    map_on(oracle, 0, 1)
    oracle.ranks[1].memory.filled.clear()
    with broken("S13"):
        mark(oracle, Publish(Txn(1), (RUN,)))


# ---------------------------------------------------------------------- whole worlds with something taken out


def plan(name: str) -> Plan:
    return next(plan for plan in directed() if plan.directed == name)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


@pytest.mark.slow
@provokes("S8")
def test_a_participant_without_epochs(patched: pytest.MonkeyPatch) -> None:
    original = Participant.on_message
    patched.setattr(Participant, "on_message", lambda self, m: original(self, replace(m, epoch=self.epoch)))
    with broken("S8"):
        for phase in ("reserving", "mapping", "publishing", "quiet", "unmapping"):
            Cluster(plan(f"old_epoch@{phase}")).run()


@pytest.mark.slow
@provokes("S9")
def test_a_participant_that_maps_twice(patched: pytest.MonkeyPatch) -> None:
    original = Participant._on_map

    def on_map(self: Participant, message: Map) -> None:
        self._known(message).issued.clear()
        original(self, message)

    patched.setitem(__import__("kvcached_dist.coord.core.participant", fromlist=["_"])._HANDLERS, Map, on_map)
    with broken("S9"):
        for number in range(len(directed())):
            if "duplicate" in (candidate := directed()[number]).directed:
                Cluster(candidate).run()


@pytest.mark.slow
@provokes("S10", "L3")
@pytest.mark.parametrize("rule", ["L3"])
def test_an_abort_that_gives_nothing_back(patched: pytest.MonkeyPatch, rule: str) -> None:
    patched.setattr(RankMemory, "_abort", lambda self, txn, fail: None)
    with pytest.raises(Violation, match=r"^(L3|S10|S6): "):
        Cluster(plan("create_driver@reserving")).run()


@pytest.mark.slow
@provokes("S14")
def test_a_create_below_the_reserve(patched: pytest.MonkeyPatch) -> None:
    def reserve_anyway(self: RankMemory, *arguments: object) -> object:
        self.card.hog, hog, self.card.capacity = 0, self.card.hog, self.card.capacity + (1 << 30)
        outcome = original(self, *arguments)  # type: ignore[arg-type]
        self.card.hog, self.card.capacity = hog, self.card.capacity - (1 << 30)
        return outcome

    original = RankMemory._reserve
    patched.setattr(RankMemory, "_reserve", reserve_anyway)
    with broken("S14"):
        Cluster(plan("no_memory@reserving")).run()


@pytest.mark.slow
@provokes("L1")
def test_a_call_beyond_its_bound(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Plan, "wait_bound", lambda self, host: 0)
    with broken("L1"):
        Cluster(plan("slow_work@reserving")).run()


@pytest.mark.slow
@provokes("L2")
def test_a_death_that_nobody_is_told_of(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Wire, "end", lambda self, reason, *, eof: None)
    with broken("L2"):
        Cluster(plan("kill@mapping")).run()


@provokes("L4")
def test_a_dead_link_delays_no_other() -> None:
    from tests.scenarios.world import World

    world = World(ranks="3")
    world.wires[0, 1].waiting.clear()
    world.engine("alloc", {0: 2})
    stuck = len(world.wires[0, 1].waiting)
    world.deliver(0, 2)
    assert world.work(2)
    assert stuck == len(world.wires[0, 1].waiting) == 1, "rank 1 has taken nothing"
    assert world.wires[2, 0].waiting, "and rank 2 has answered all the same"
    world.kill(1)
    world.deliver(2, 0)
    world.deliver(0, 2)
    assert world.seats[2].agent.failure is not None  # type: ignore[attr-defined]


@pytest.mark.slow
@provokes("L5")
def test_a_miss_with_memory_everywhere(patched: pytest.MonkeyPatch) -> None:
    def calm(self: Cluster) -> None:
        original(self)
        self.hosts[1].memory.card.capacity = self.hosts[1].memory.card.used

    original = Cluster._calm
    patched.setattr(Cluster, "_calm", calm)
    with broken("L5"):
        Cluster(plan("late_stage@quiet")).run()


@pytest.mark.slow
def test_ranks_that_are_well_raise_nothing() -> None:
    assert Cluster(plan("late_stage@quiet")).run().calm
    assert Rank(0) == 0
