"""The worker thread of a simulated rank: driver work with delays, admission turns and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached_dist.coord.core.effects import Work, WorkKind
from kvcached_dist.coord.core.types import Cause, CauseKind, Rank

from .schedule import CAUSE_OF, Fault

if TYPE_CHECKING:
    from .host import Host


class SimWorker:
    """Implements ``kvcached_dist.agent.Worker`` for one host, and its thread as events."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.armed: dict[WorkKind, list[Fault]] = {kind: [] for kind in WorkKind}
        self.busy: Work | None = None
        self._outcome: Cause | None = None

    # ------------------------------------------------------------------ for the agent

    def perform(self, work: Work) -> Cause | None:
        """The outcome of the work that has just ended."""
        return self._outcome

    def handles(self) -> tuple[int, ...]:
        """Physical handles held now, per pool."""
        return tuple(self.host.memory.held)

    def budget_bytes(self) -> int:
        """Bytes this rank could still create."""
        memory = self.host.memory
        budget = memory.card.free - memory.card.reserve
        return max(0, min(budget, memory.limit - memory.bytes) if memory.limit else budget)

    def held_bytes(self) -> int:
        """Bytes held now."""
        return self.host.memory.bytes

    def set_limit(self, limit_bytes: int) -> None:
        """A logged limit takes effect here."""
        self.host.memory.limit = limit_bytes

    # ------------------------------------------------------------------ events

    def begin(self, work: Work, asked: int, life: int) -> None:
        """Driver work begins; a RESERVE waits for the turn of its card first."""
        host, memory = self.host, self.host.memory
        if life != host.life:
            return
        card, plan = memory.card, host.cluster.plan
        self.busy = work
        if work.kind is WorkKind.RESERVE and card.turn not in (None, host.rank):
            if host.loop.now - asked > plan.growth_deadline:
                host.cluster.struck("admission", host.rank)
                if host.agent.participant.joining:
                    host.cluster.excuses.add((CauseKind.ADMISSION, host.rank))
                self._outcome = Cause(CauseKind.ADMISSION, Rank(host.rank), "the turn did not come")
                host.loop.after(1, host, self._end, work, life)
            else:
                host.loop.after(plan.turn_poll, host, self.begin, work, asked, life)
            return
        if work.kind is WorkKind.RESERVE:
            card.turn = host.rank
        delay = plan.work_delay(host)
        slow = self._due(work, slow=True)
        if slow is not None:
            delay += slow.amount
            host.cluster.struck("slow_work", host.rank)
        if plan.work_is_early:
            self._strike(work)
        host.loop.after(delay, host, self._end, work, life)

    def _strike(self, work: Work) -> None:
        host, memory = self.host, self.host.memory
        if not host.agent.participant.joining:
            host.cluster.oracle.work_begins(host.rank, work)
        fault = self._due(work, slow=False)
        fail, at = (None, 0) if fault is None else (CAUSE_OF[fault.kind], fault.amount)
        if fault is not None:
            host.cluster.struck(fault.kind, host.rank)
        self._outcome = memory.perform(work, fail, at)
        host.loop.note(host.rank, "work", f"{work.kind.value} txn {work.txn}: {self._outcome or 'ok'}", int(work.txn))
        if fail is None and self._outcome is not None and self._outcome.kind is CauseKind.EXHAUSTED:
            host.cluster.struck("no_memory", host.rank)
        if self._outcome is not None and host.agent.participant.joining:
            host.cluster.excuses.add((self._outcome.kind, host.rank))
        card = memory.card
        if work.kind is WorkKind.RESERVE and self._outcome is None and memory.created_by(work.txn):
            within = card.free >= card.reserve and memory.bytes <= (memory.limit or memory.bytes)
            limit = memory.limit
            host.cluster.oracle.require(within, "S14", f"rank {host.rank}: {card}, limit {limit} after a create")

    def _due(self, work: Work, *, slow: bool) -> Fault | None:
        """The fault that strikes this work, if one is armed; a driver can only fail where it has something to do."""
        armed = self.armed[work.kind]
        if not armed or not any(self.host.memory.extents(run) for run in work.runs):
            return None
        for fault in armed:
            if (fault.kind == "slow_work") is slow:
                fault.nth -= 1
                if fault.nth <= 0:
                    armed.remove(fault)
                    return fault
        return None

    def _end(self, work: Work, life: int) -> None:
        host, memory = self.host, self.host.memory
        if life != host.life:
            return
        admitted = memory.card.turn == host.rank
        if not host.cluster.plan.work_is_early and (work.kind is not WorkKind.RESERVE or admitted):
            self._strike(work)
        if work.kind is WorkKind.RESERVE and admitted:
            memory.card.turn = None
        self.busy = None
        host.agent.work.perform(work)
        host.settle()
