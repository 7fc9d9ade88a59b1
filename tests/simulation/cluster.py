"""A world in one process: hosts, links, cards, and the faults of one schedule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from kvcached_dist.coord.core import reclaim
from kvcached_dist.coord.core.entries import Publish
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import Message, TxnMessage
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.types import CauseKind, DomainId, Epoch, PageId, Rank, Run

from . import faults, verdict
from .clock import MS, WorldClock
from .hardware import Card, PoolModel, RankMemory
from .host import Host
from .network import SimLink, Wire
from .oracle import Oracle
from .pool import ListPool
from .rejoin import Reform
from .schedule import ARMED, Fault, Plan
from .verdict import Report
from .views import Violation
from .workload import Step, Workload

FIRST_EPOCH = Epoch(3)
"""Not the first one, so that frames of an older epoch exist (S8)."""

EVENTS_MAX = 60_000
"""Events of a schedule; more means that it does not end."""

GRANULE = 64

EXIT_GRACE = 100 * MS
"""Time between the failure of a rank's coordinator and the end of its process."""


class Cluster:
    """One world, driven to the end of its plan by :meth:`run`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = WorldClock()
        self.clock.offset = plan.clock_offset
        self.loop = self.clock.loop
        shape = plan.shape
        self.oracle = Oracle(self.loop, shape.pages, shape.blocks_per_page)
        self.report = Report()
        self.excuses: set[tuple[CauseKind, int]] = set()
        self.hosts: list[Host] = []
        self.wires: list[Wire] = []
        self.faulty = False
        """Faults strike: after start-up, until the liveness phase."""
        self.deadlines: dict[int, int] = {}
        """Rank that died or hangs -> when every survivor must know (L2)."""
        self._pending: list[Fault] = []
        self._phase = ""
        self._rested = -1
        self._revision = 1
        self.diverged = False
        self._paused = 0
        self.leader_slept = 0
        """How long the leader was stopped altogether: so long it could not count the silence of others."""
        self._armed = False
        self.reform: Reform | None = None
        """A change of epoch that is under way."""
        self._build()

    # ------------------------------------------------------------------ construction

    def _build(self) -> None:
        plan, shape = self.plan, self.plan.shape
        random = plan.random
        shared: Card | None = None
        for rank in range(plan.ranks):
            pools = self._pools(rank, random)
            need = sum(
                pages * sum(pool.page_bytes for pool in pools if pool.domain == domain)
                for domain, pages in enumerate(shape.pages)
            )
            capacity = int(need * plan.card_pages) + 64 * GRANULE
            if plan.shared_cards and rank % 2 and shared is not None:
                card = shared
                card.capacity += capacity
            else:
                card = shared = Card(capacity, reserve=random.choice((0, 2 * GRANULE)))
            self.oracle.add_rank(RankMemory(rank, card, pools, self.oracle.before_unmap))
        for rank in range(plan.ranks):
            workload = Workload(shape, plan.seed)
            self.hosts.append(Host(self, rank, rank // plan.tp, self.oracle.ranks[rank].memory, workload))
        for host in self.hosts:
            replica = Replica(Rank(host.rank), self.free_lists(), shape.blocks_per_page)
            leader = self._leader(replica) if host.rank == 0 else None
            participant = Participant(Rank(host.rank), FIRST_EPOCH, len(host.memory.pools))
            host.assemble(FIRST_EPOCH, self.links(host, FIRST_EPOCH), leader, replica, participant)

    def free_lists(self) -> list[ListPool]:
        """New free lists, one per domain."""
        sizes = zip(self.plan.shape.pages, self.plan.shape.blocks_per_page, strict=True)
        return [ListPool(pages, size, ordered=self.plan.ordered) for pages, size in sizes]

    def links(self, host: Host, epoch: Epoch) -> dict[Rank, SimLink]:
        """New links of a rank: to every follower on the leader, to the leader elsewhere."""
        links: dict[Rank, SimLink] = {}
        for peer in self.hosts[1:] if host.rank == 0 else self.hosts[:1]:
            wire = Wire(self.loop, host, peer, self.plan.delay, self.plan.random, epoch)
            self.wires.append(wire)
            links[Rank(peer.rank)] = SimLink(Rank(peer.rank), epoch, wire)
        return links

    def peers(self) -> list[Peer]:
        """What the leader is told of every rank when an epoch begins."""
        return [
            Peer(
                view.memory.page_bytes(len(self.plan.shape.pages)),
                view.memory.card.free - view.memory.card.reserve,
                self.clock(),
                tuple(view.memory.held),
            )
            for view in self.oracle.ranks
        ]

    def _pools(self, rank: int, random: Random) -> tuple[PoolModel, ...]:
        """Pools of a rank: page sizes that granules do not divide; a late stage may lack a family."""
        shape, stage = self.plan.shape, rank // self.plan.tp
        stage_random = Random(self.plan.seed * 31 + stage)
        pools = []
        for domain in range(len(shape.pages)):
            for _ in range(1 + (domain == 0)):
                absent = stage > 0 and stage_random.random() < 0.2
                pools.append(PoolModel(domain, 0 if absent else stage_random.choice((40, 64, 96, 200)), GRANULE))
        return tuple(pools)

    def _leader(self, replica: Replica) -> Leader:
        return Leader(FIRST_EPOCH, self.plan.policy, replica, self.plan.shape.pages, self.peers(), self.clock())

    # ------------------------------------------------------------------ running

    @property
    def leader(self) -> Leader:
        """The machine under test."""
        leader = self.hosts[0].leader
        assert leader is not None
        return leader

    def run(self) -> Report:
        """Drive the schedule to its end.

        Raises:
            Violation: a rule does not hold.
        """
        reclaim.SORT_INTERVAL_STEPS = self.plan.sort_interval
        self._start()
        while not self._over():
            if self.loop.events > EVENTS_MAX:
                raise Violation("L1", f"the schedule does not end within {EVENTS_MAX} events")
            if not self.loop.step() and not all(host.dead or host.ended for host in self.hosts):
                raise Violation("L1", "nothing will ever happen again")
        verdict.finish(self)
        return self.report

    def _start(self) -> None:
        null = tuple(Run(DomainId(domain), PageId(0), 1) for domain in range(len(self.plan.shape.pages)))
        host = self.hosts[0]
        with host.agent.entered():
            self.leader.commit.open_grow(null, foreground=True)
        for index, other in enumerate(self.hosts):
            self.loop.after(index * 7, other, other.beat)
            self.loop.after(1 + index, other, other.schedule)
        self.loop.after(self.plan.tick, host, host.tick)
        host.settle()

    def _over(self) -> bool:
        if self.loop.events & 15 and self.loop.pending:
            return False
        running = [host for host in self.hosts if not host.dead and not host.ended]
        if not running:
            return True
        if all(host.failed_at is not None for host in running):
            return True
        verdict.losses_are_known(self, running)
        return False

    # ------------------------------------------------------------------ news from hosts

    def at_tick(self) -> None:
        """The leader's clock has ticked: random small faults, and the checks that hold at rest."""
        if self.faulty:
            faults.chatter(self)
        leader = self.leader
        if (
            leader.commit.txn is None
            and leader.failure is None
            and leader.commit.last != self._rested
            and not verdict.working(self)
        ):
            self._rested = leader.commit.last
            self.oracle.at_rest([peer.handles for peer in leader.peers])

    def watch(self) -> None:
        """After every event: has the leader entered another phase?"""
        phase = self.phase()
        if phase != self._phase:
            self._phase = phase
            self.hosts[0].unpark()
            self.loop.note(-1, "phase", phase)
            if self.faulty:
                for fault in [fault for fault in self._pending if fault.phase == phase]:
                    fault.nth -= 1
                    if fault.nth <= 0:
                        self._pending.remove(fault)
                        faults.inject(self, fault)

    def phase(self) -> str:
        """Phase of the leader, one of ``PHASES``."""
        leader = self.leader
        if leader.commit.txn is not None:
            return leader.commit.txn.step.value
        return "publishing" if any(isinstance(entry, Publish) for entry in leader.log.due()) else "quiet"

    def struck(self, kind: str, rank: int) -> None:
        """A fault has taken effect."""
        cell = (kind, self.phase())
        self.report.hits[cell] = self.report.hits.get(cell, 0) + 1
        self.loop.note(rank, "fault", f"{kind} in {cell[1]}")
        self.excuses |= faults.excuses(kind, rank)

    def may_step(self, host: Host, op: Step) -> bool:
        """Whether a rank has the input of its next step: a pipeline holds a bounded number of batches."""
        leader_host = self.hosts[0]
        if host is leader_host:
            if op.number == 0:
                return self.leader.commit.txn is None
            if op.calm and self._leftover_work():
                self.loop.after(5 * MS, host, host.unpark)
                return False
            slowest = min((h.step_done for h in self.hosts if not (h.dead or h.ended)), default=op.number)
            return op.number - slowest <= self.plan.window
        if self.loop.now < host.late_until:
            self.loop.at(host.late_until, host, host.unpark)
            return False
        lag = self.plan.lag * host.stage
        return leader_host.step_done >= op.number + lag or leader_host.ended or op.number == 0 or op.calm

    def _leftover_work(self) -> bool:
        """Whether a driver call that a fault made slow still runs for a transaction that is over."""
        current = None if self.leader.commit.txn is None else self.leader.commit.txn.txn
        return any(
            host.worker.busy is not None and host.worker.busy.txn != current for host in self.hosts if not host.dead
        )

    def wake(self) -> None:
        """A rank has ended a step, or has ended: others may go on."""
        for host in self.hosts:
            if host.parked:
                host.unpark()

    def leader_stepped(self, op: Step) -> None:
        """The leader has ended a step: the first one begins the safety phase, the first calm one ends it."""
        if op.number == 1 and not self._armed:
            self.faulty = self._armed = True
            for fault in self.plan.faults:
                copy = replace(fault)
                if fault.kind in ARMED:
                    faults.arm(self, copy)
                else:
                    self._pending.append(copy)
        if op.calm and self.faulty:
            self._calm()

    def _calm(self) -> None:
        self.faulty = False
        self._pending.clear()
        self.leader.policy = replace(self.leader.policy, reserved_pages_min=0, reserved_pages_max=0)
        self.change_limit(0)
        for host in self.hosts:
            host.drops.armed.clear()
            host.drops.states = 0
            host.diverge = False
            for armed in host.worker.armed.values():
                armed.clear()
            host.memory.card.hog = 0
            if host.memory.card.turn == faults.ANY:
                host.memory.card.turn = None
            host.memory.card.capacity = 1 << 40

    def change_limit(self, limit_bytes: int) -> None:
        """A controller orders another limit, with the next revision."""
        leader = self.leader
        with self.hosts[0].agent.entered():
            answer = leader.limits.request(limit_bytes, self._revision)
        self.loop.note(0, "limit", answer, answer.revision)
        self.report.limits[answer.status.value] = self.report.limits.get(answer.status.value, 0) + 1
        self._revision += 1

    def lost(self, host: Host) -> None:
        """A rank has learned that this epoch ends."""
        if self.reform is None and host.rank == 0:
            self.reform = Reform(self)

    def late_message(self, host: Host, source: Rank, message: Message) -> None:
        """A message of a closed link arrives in the next epoch: it changes nothing (S8)."""
        if isinstance(message, TxnMessage) and not host.agent.participant.joining:
            faults.must_not_matter(self, host, source, message, "S8")

    def pause(self, amount: int) -> None:
        """Something stands still for a while; pauses that add up to more than a lease look like a hung leader."""
        self._paused += amount
        if self._paused + self.plan.wait_bound(self.hosts[0]) > self.plan.lease:
            self.excuses.add((CauseKind.RANK_HUNG, 0))

    def evictions(self, op: Step) -> int:
        """Tokens that the leader's engine evicts at this step."""
        return self.plan.random.randint(1, 2) if not op.calm and self.plan.random.random() < self.plan.evict else 0

    def operated(self, rank: int, what: str, ids: object) -> None:
        """An engine operation; after an injected divergence the digest has to notice."""
        if not self.diverged:
            self.oracle.operated(rank, what, ids)

    def host_failed(self, host: Host) -> None:
        """A rank's coordinator has failed: its engine ends, and all others must learn of it."""
        self.excuses.add((CauseKind.RANK_LOST, host.rank))
        self.wake()
        self.loop.after(EXIT_GRACE, None, self._exit, host)

    def _exit(self, host: Host) -> None:
        if not host.dead:
            faults.kill(self, host)

    def host_done(self, host: Host) -> None:
        """A rank's program is over."""
        self.loop.note(host.rank, "done", "")
        self.wake()


__all__ = ["Cluster", "Report"]
