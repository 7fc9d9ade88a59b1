"""One rank's physical machine, message by message, where the simulation seldom goes."""

from __future__ import annotations

import pytest

from kvcached_dist.coord.core.effects import Send, TakeFence, Work, WorkDone, WorkKind
from kvcached_dist.coord.core.errors import InvariantViolation
from kvcached_dist.coord.core.messages import (
    Abort,
    Drained,
    Fail,
    Joined,
    Map,
    MapFailed,
    Mapped,
    Message,
    Query,
    Refused,
    Release,
    Released,
    Reserve,
    Reserved,
    Restore,
    Snapshot,
    SnapshotRun,
    State,
    TxnMessage,
    Unmap,
    Unmapped,
)
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.records import FINISHED_MAX
from kvcached_dist.coord.core.runs import RunState
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Epoch, PageId, Rank, Run, Txn, TxnPhase
from tests.simulation.rules import provokes

EPOCH = Epoch(3)
RUN = Run(DomainId(0), PageId(1), 2)
OTHER = Run(DomainId(0), PageId(4), 1)
BAD = Cause(CauseKind.DRIVER, Rank(1), "no")


class Rig:
    """A participant whose driver does what it is told."""

    def __init__(self) -> None:
        self.machine = Participant(Rank(1), EPOCH, 1)
        self.work: list[Work] = []
        self.fences: list[Txn] = []

    def gets(self, message: TxnMessage) -> list[Message]:
        self.machine.on_message(message)
        return self.effects()

    def effects(self) -> list[Message]:
        sent: list[Message] = []
        for effect in self.machine.take():
            match effect:
                case Send(message=message):
                    sent.append(message)
                case Work():
                    self.work.append(effect)
                case TakeFence(txn=txn):
                    self.fences.append(txn)
                case _:
                    pass
        return sent

    def does(self, cause: Cause | None = None, handles: int = 2) -> list[Message]:
        work = self.work.pop(0)
        self.machine.on_work_done(WorkDone(work.kind, work.txn, cause, (handles,)))
        return self.effects()

    def grown(self, txn: int = 1, run: Run = RUN, *, publish: bool = True) -> None:
        self.gets(Reserve(EPOCH, Txn(txn), (run,)))
        self.does()
        self.gets(Map(EPOCH, Txn(txn)))
        self.does()
        if publish:
            self.machine.publish(Txn(txn), (run,))

    def drained(self, txn: int = 2, run: Run = RUN, *, retained: bool = False) -> None:
        self.machine.retire(Txn(txn), (run,), retained)
        self.effects()
        self.machine.on_fence(Txn(txn), 0)
        self.effects()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def refuses(rule: str) -> pytest.RaisesExc[InvariantViolation]:
    return pytest.raises(InvariantViolation, match=f"^{rule} violated")


def test_a_grow_and_a_reclaim(rig: Rig) -> None:
    assert rig.gets(Reserve(EPOCH, Txn(1), (RUN,))) == []
    assert rig.does() == [Reserved(EPOCH, Txn(1), (2,))]
    assert rig.gets(Map(EPOCH, Txn(1))) == []
    assert rig.does() == [Mapped(EPOCH, Txn(1))]
    rig.machine.publish(Txn(1), (RUN,))
    assert rig.machine.held.runs(RunState.PUBLISHED) == [RUN]
    rig.machine.retire(Txn(2), (RUN,), False)
    assert (rig.effects(), rig.fences) == ([], [Txn(2)])
    rig.machine.on_fence(Txn(2), 3)
    assert rig.effects() == [Drained(EPOCH, Txn(2), 3)]
    rig.gets(Unmap(EPOCH, Txn(2)))
    assert rig.does() == [Unmapped(EPOCH, Txn(2))]
    rig.gets(Release(EPOCH, Txn(2)))
    assert rig.does(handles=0) == [Released(EPOCH, Txn(2), (0,))]
    assert rig.machine.held.runs() == []


def test_a_refusal_leaves_nothing(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    assert rig.does(BAD, handles=0) == [Refused(EPOCH, Txn(1), BAD)]
    assert rig.machine.held.runs() == []
    assert rig.gets(Abort(EPOCH, Txn(1))) == []
    assert rig.work == []


def test_an_abort_frees_the_runs_for_the_next_reserve_at_once(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    rig.gets(Abort(EPOCH, Txn(1)))
    rig.gets(Reserve(EPOCH, Txn(2), (RUN,)))
    assert [(work.kind, work.txn) for work in rig.work] == [
        (WorkKind.RESERVE, 1),
        (WorkKind.ABORT, 1),
        (WorkKind.RESERVE, 2),
    ]
    assert rig.does() == rig.does() == []
    assert rig.does() == [Reserved(EPOCH, Txn(2), (2,))]
    assert rig.machine.held.runs(RunState.RESERVED) == [RUN]


def test_an_abort_of_something_never_seen_is_remembered(rig: Rig) -> None:
    rig.gets(Abort(EPOCH, Txn(9)))
    assert rig.machine.phase(Txn(9)) is TxnPhase.ABORTED
    assert rig.gets(Query(EPOCH, Txn(9), 1)) == [State(EPOCH, Txn(9), 1, TxnPhase.ABORTED, None, (0,))]


def test_a_failed_map_is_adopted_by_the_identical_retry_only(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN, OTHER)))
    rig.does()
    rig.gets(Map(EPOCH, Txn(1)))
    assert rig.does(BAD) == [MapFailed(EPOCH, Txn(1), BAD)]
    assert rig.machine.held.runs(RunState.PARTIAL) == [RUN, OTHER]
    with refuses("S6"):
        rig.gets(Reserve(EPOCH, Txn(2), (Run(DomainId(0), PageId(1), 1),)))


def test_an_aborted_retry_leaves_the_runs_retained(rig: Rig) -> None:
    rig.grown(publish=False)
    rig.gets(Reserve(EPOCH, Txn(2), (RUN,)))
    rig.does()
    rig.gets(Abort(EPOCH, Txn(2)))
    rig.does()
    assert rig.machine.held.runs(RunState.MAPPED) == [RUN]


@provokes("S1")
def test_an_abort_after_map_is_refused(rig: Rig) -> None:
    rig.grown(publish=False)
    with refuses("S1"):
        rig.gets(Abort(EPOCH, Txn(1)))


@provokes("S1")
def test_a_map_of_an_aborted_transaction_is_refused(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    rig.does()
    rig.gets(Abort(EPOCH, Txn(1)))
    with refuses("S1"):
        rig.gets(Map(EPOCH, Txn(1)))


@provokes("S2")
def test_publish_without_mapped_is_refused(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    rig.does()
    with refuses("S2"):
        rig.machine.publish(Txn(1), (RUN,))
    with refuses("S2"):
        rig.machine.publish(Txn(7), (RUN,))


@provokes("S4")
def test_unmap_is_refused_before_this_rank_has_drained(rig: Rig) -> None:
    rig.grown()
    rig.machine.retire(Txn(2), (RUN,), False)
    with refuses("S4"):
        rig.gets(Unmap(EPOCH, Txn(2)))


@provokes("S4")
def test_unmap_is_refused_after_the_retirement_was_cancelled(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    rig.machine.unretire(Txn(2))
    assert rig.machine.held.runs(RunState.PUBLISHED) == [RUN]
    with refuses("S4"):
        rig.gets(Unmap(EPOCH, Txn(2)))


@provokes("S4")
def test_release_is_refused_before_the_unmap(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    with refuses("S4"):
        rig.gets(Release(EPOCH, Txn(2)))


@provokes("S4")
def test_unretire_after_unmap_is_refused(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    rig.gets(Unmap(EPOCH, Txn(2)))
    with refuses("S4"):
        rig.machine.unretire(Txn(2))


def test_the_fence_of_a_cancelled_retirement_says_nothing(rig: Rig) -> None:
    rig.grown()
    rig.machine.retire(Txn(2), (RUN,), False)
    rig.machine.unretire(Txn(2))
    rig.effects()
    rig.machine.on_fence(Txn(2), 0)
    assert rig.effects() == []


def test_a_reserve_over_cancelled_retained_runs_overtakes_the_unretire(rig: Rig) -> None:
    rig.grown(publish=False)
    rig.drained(retained=True)
    rig.gets(Reserve(EPOCH, Txn(3), (RUN,)))
    assert rig.does() == [Reserved(EPOCH, Txn(3), (2,))]
    rig.machine.unretire(Txn(2))
    rig.gets(Map(EPOCH, Txn(3)))
    assert rig.does() == [Mapped(EPOCH, Txn(3))]


def test_a_restarted_rank_holds_nothing_for_retained_runs_and_retires_them_all_the_same(rig: Rig) -> None:
    rig.drained(retained=True)
    assert rig.gets(Unmap(EPOCH, Txn(2))) == []
    assert rig.work[0].runs == ()
    assert rig.does(handles=0) == [Unmapped(EPOCH, Txn(2))]
    rig.gets(Release(EPOCH, Txn(2)))
    assert rig.does(handles=0) == [Released(EPOCH, Txn(2), (0,))]
    assert rig.machine.held.runs() == []


@provokes("S6")
def test_reserve_over_a_published_run_is_refused(rig: Rig) -> None:
    rig.grown()
    with refuses("S6"):
        rig.gets(Reserve(EPOCH, Txn(2), (RUN,)))


@provokes("S6")
def test_retire_of_what_is_not_published_is_refused(rig: Rig) -> None:
    rig.grown(publish=False)
    with refuses("S6"):
        rig.machine.retire(Txn(2), (RUN,), False)


@provokes("S6")
def test_work_that_ends_out_of_order_is_refused(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    with refuses("S6"):
        rig.machine.on_work_done(WorkDone(WorkKind.MAP, Txn(1), None, (0,)))


@provokes("S9")
def test_an_answer_is_not_for_a_participant(rig: Rig) -> None:
    with refuses("S9"):
        rig.gets(Mapped(EPOCH, Txn(1)))


@provokes("S8")
@pytest.mark.parametrize("epoch", [2, 4])
def test_another_epoch_changes_nothing(rig: Rig, epoch: int) -> None:
    rig.grown()
    for message in (Reserve(Epoch(epoch), Txn(5), (OTHER,)), Abort(Epoch(epoch), Txn(1)), Unmap(Epoch(epoch), Txn(1))):
        assert rig.gets(message) == []
    assert (rig.machine.held.runs(), rig.work, rig.machine.stale_messages) == ([RUN], [], 3)
    assert rig.machine.newest_txn == 1


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (Reserve(EPOCH, Txn(1), (RUN,)), Mapped(EPOCH, Txn(1))),
        (Map(EPOCH, Txn(1)), Mapped(EPOCH, Txn(1))),
        (Unmap(EPOCH, Txn(2)), Released(EPOCH, Txn(2), (0,))),
        (Release(EPOCH, Txn(2)), Released(EPOCH, Txn(2), (0,))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repeated_message_changes_nothing_however_late(rig: Rig, message: TxnMessage, answer: Message) -> None:
    rig.grown()
    rig.drained()
    rig.gets(Unmap(EPOCH, Txn(2)))
    rig.does()
    rig.gets(Release(EPOCH, Txn(2)))
    rig.does(handles=0)
    assert rig.gets(message) == [answer]
    assert (rig.work, rig.machine.held.runs()) == ([], [])


def test_a_repeated_message_is_silent_while_the_work_runs(rig: Rig) -> None:
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    assert rig.gets(Reserve(EPOCH, Txn(1), (RUN,))) == []
    assert len(rig.work) == 1
    assert rig.gets(Query(EPOCH, Txn(1), 2)) == [State(EPOCH, Txn(1), 2, TxnPhase.RUNNING, None, (0,))]


def test_restore_waits_behind_an_unmap_that_runs(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    rig.gets(Unmap(EPOCH, Txn(2)))
    rig.gets(Restore(EPOCH, Txn(2)))
    assert rig.does() == [], "UNMAPPED would come too late"
    assert len(rig.does()) == 1
    rig.machine.publish(Txn(2), (RUN,))
    assert rig.machine.held.runs(RunState.PUBLISHED) == [RUN]


def test_a_refused_release_keeps_the_run_and_may_be_repeated(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    rig.gets(Unmap(EPOCH, Txn(2)))
    rig.does()
    rig.gets(Release(EPOCH, Txn(2)))
    rig.does(BAD, handles=1)
    assert rig.machine.held.runs(RunState.STUCK) == [RUN]
    rig.gets(Release(EPOCH, Txn(2)))
    assert rig.does(handles=0) == [Released(EPOCH, Txn(2), (0,))]


def test_a_beat_is_quiet_only_when_nothing_is_open_here(rig: Rig) -> None:
    assert rig.machine.quiet_txn() == 0
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    assert rig.machine.quiet_txn() == 0, "work is queued"
    rig.does()
    assert rig.machine.quiet_txn() == 0, "a reservation waits for its verdict"
    rig.gets(Abort(EPOCH, Txn(1)))
    rig.does(handles=0)
    assert rig.machine.quiet_txn() == 1


def test_finished_transactions_are_forgotten_oldest_first(rig: Rig) -> None:
    for txn in range(1, FINISHED_MAX + 3):
        rig.gets(Abort(EPOCH, Txn(txn)))
    assert rig.machine.phase(Txn(2)) is TxnPhase.UNKNOWN
    assert rig.machine.phase(Txn(3)) is TxnPhase.ABORTED


def published_again() -> Snapshot:
    return Snapshot(Epoch(4), (8,), (SnapshotRun(RUN, True),), (), 7, 0, 0)


@pytest.mark.parametrize("answer", [None, BAD], ids=["unmapped", "unmap failed"])
def test_a_run_that_is_unmapped_here_and_published_by_the_snapshot_is_mapped_before_joined(
    rig: Rig, answer: Cause | None
) -> None:
    """A reclaim that another rank could not finish: the leader's snapshot publishes its run again (rule M2)."""
    rig.grown()
    rig.drained()
    rig.gets(Unmap(EPOCH, Txn(2)))
    rig.does(answer)
    rig.machine.on_snapshot(published_again())
    assert rig.effects() == []
    assert [(work.kind, work.runs) for work in rig.work] == [(WorkKind.RESTORE, (RUN,))]
    assert rig.does() == [Joined(Epoch(4), (2,))]
    assert rig.machine.held.runs(RunState.PUBLISHED) == [RUN]


def test_a_retirement_that_had_only_drained_is_taken_back_without_driver_work(rig: Rig) -> None:
    rig.grown()
    rig.drained()
    rig.machine.on_snapshot(published_again())
    assert (rig.effects(), rig.work) == ([Joined(Epoch(4), (2,))], [])
    assert rig.machine.held.runs(RunState.PUBLISHED) == [RUN]


def test_an_abort_that_cannot_give_back_is_told(rig: Rig) -> None:
    """A handle that stays would make this rank's count differ from the leader's for ever (S10)."""
    rig.gets(Reserve(EPOCH, Txn(1), (RUN,)))
    rig.does()
    rig.gets(Abort(EPOCH, Txn(1)))
    assert rig.does(BAD) == [Fail(EPOCH, BAD)]
