"""A world that is driven by hand: nothing is delivered, worked or timed unless a scenario says so."""

from __future__ import annotations

import dataclasses

from kvcached_dist.agent import Agent, Timing
from kvcached_dist.coord.core.entries import Evict, Grant, PositionKind
from kvcached_dist.coord.core.errors import GroupFailed, LinkDown
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.ledger import Peer
from kvcached_dist.coord.core.messages import Beat
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.policy import Policy
from kvcached_dist.coord.core.replica import OpKind, Replica
from kvcached_dist.coord.core.types import DomainId, Epoch, PageId, Rank, Run, Tick
from tests.simulation.hardware import Card, PoolModel, RankMemory
from tests.simulation.pool import ListPool

from .seat import Clock, Seat, SeatFaults, SeatFence, SeatMarks, SeatRouting, Wire
from .words import EPOCH, show, show_ids

MS = 1_000
GRANULE = 64
TICK_MS = 50

ROUNDS_MAX = 500
"""Rounds of ``run``; more means that it does not come to rest."""


class World:
    """Ranks, links and cards, and the trace.

    Args: see ``docs/simulation.md``, input ``world``.
    """

    def __init__(self, **options: str) -> None:
        get = options.get
        ranks = int(get("ranks", "2"))
        self.pages = [int(count) for count in get("pages", "8").split(",")]
        self.sizes = [int(count) for count in get("blocks", "1").split(",")] * len(self.pages)
        self.sizes = self.sizes[: len(self.pages)]
        card_pages = [float(count) for count in get("card", "100").split(",")]
        shared = get("shared", "no") == "yes"
        self.clock = Clock()
        self.trace: list[str] = []
        self.inputs: list[tuple[str, dict[int, int], int]] = []
        self.allocated = 0
        self.seats: list[Seat] = []
        self.wires: dict[tuple[int, int], Wire] = {}
        self.policy = Policy(
            growth_deadline=300 * MS,
            query_interval=100 * MS,
            lease=1000 * MS,
            drain_deadline=int(get("drain", "500")) * MS,
            map_retries=int(get("retries", "2")),
            run_pages_max=int(get("run", "8")),
            run_share=int(get("share", "0")),
            demand_window=int(get("window", "0")) * MS,
            reserved_pages_min=int(get("reserved", "0")),
            reserved_pages_max=int(get("reserved_max", get("reserved", "0"))),
            reclaim_interval_steps=int(get("interval", "1000")),
            backoff_min=50 * MS,
            backoff_max=200 * MS,
        )
        pools = tuple(PoolModel(domain, GRANULE, GRANULE) for domain in range(len(self.pages)))
        card = Card(0, reserve=0)
        for rank in range(ranks):
            if not (shared and rank):
                card = Card(0, reserve=int(get("reserve", "0")) * GRANULE)
                card.capacity = int(card_pages[min(rank, len(card_pages) - 1)] * GRANULE) + card.reserve
            memory = RankMemory(rank, card, pools, lambda rank, run: None)
            self.seats.append(Seat(self, rank, memory))
        for seat in self.seats:
            self._assemble(seat)
        self._begin()

    def _assemble(self, seat: Seat) -> None:
        links = {}
        for peer in range(1, len(self.seats)) if seat.rank == 0 else (0,):
            links[Rank(peer)] = self.wires[seat.rank, peer] = Wire(self, seat.rank, peer)
        lists = [ListPool(pages, size, ordered=True) for pages, size in zip(self.pages, self.sizes, strict=True)]
        replica = Replica(Rank(seat.rank), lists, self.sizes)
        seat.agent = Agent(  # type: ignore[attr-defined]
            rank=Rank(seat.rank),
            epoch=EPOCH,
            replica=replica,
            participant=Participant(Rank(seat.rank), EPOCH, len(seat.memory.pools)),
            describe=lambda rank: f"rank {rank}",
            links=links,  # type: ignore[arg-type]
            worker=seat,
            timing=Timing(0.05, 1.0),
            faults=SeatFaults(seat),
            make_fence=lambda: SeatFence(seat),
            now=self.clock,
        )
        seat.agent.marks = SeatMarks(seat, seat.agent)  # type: ignore[attr-defined]
        seat.agent.routing = SeatRouting(seat, seat.agent)  # type: ignore[attr-defined]
        seat.pools = lists  # type: ignore[attr-defined]
        if seat.rank == 0:
            peers = [
                Peer(s.memory.page_bytes(len(self.pages)), s.budget_bytes(), Tick(0), (0,) * len(s.memory.pools))
                for s in self.seats
            ]
            seat.agent.routing.leader = Leader(EPOCH, self.policy, replica, self.pages, peers, Tick(0))  # type: ignore[attr-defined]

    def _begin(self) -> None:
        null = tuple(Run(DomainId(domain), PageId(0), 1) for domain in range(len(self.pages)))
        with self.leader_agent.entered():
            self.leader.commit.open_grow(null, foreground=True)
        self.run()
        self.engine("step", {})
        self.engine("alloc", dict.fromkeys(range(len(self.pages)), 1))
        self.run()
        self.trace.clear()

    # ------------------------------------------------------------------ reading

    @property
    def leader_agent(self) -> Agent:
        return self.seats[0].agent  # type: ignore[attr-defined, no-any-return]

    @property
    def leader(self) -> Leader:
        leader = self.leader_agent.routing.leader
        assert leader is not None
        return leader

    def say(self, line: str) -> None:
        self.trace.append(line)

    # ------------------------------------------------------------------ inputs

    def engine(self, what: str, values: dict[int, int]) -> None:
        """An input of the engine, the same on every rank; each carries it out when it can."""
        if what == "alloc":
            self.allocated += 1
        self.inputs.append((what, values, self.allocated))
        self.progress()

    def progress(self) -> None:
        """Every rank goes as far as it can."""
        for seat in self.seats:
            while not (seat.held or seat.dead or seat.silent) and seat.done < len(self.inputs):
                what, values, number = self.inputs[seat.done]
                try:
                    seat.agent.raise_if_failed()  # type: ignore[attr-defined]
                    ended = (
                        self._alloc(seat, values, number)
                        if what == "alloc"
                        else (self._free(seat, values) if what == "free" else self._step(seat))
                    )
                except GroupFailed as failure:
                    self.say(f"{seat.rank}: {what} raises GroupFailed: {failure.cause}")
                    ended = True
                if not ended:
                    break
                seat.done += 1

    def deliver(self, source: int, target: int) -> None:
        """The next message of a direction arrives."""
        wire = self.wires[source, target]
        wire.last = wire.waiting.popleft()
        if not self.seats[target].dead:
            self.seats[target].agent.on_message(Rank(source), wire.last)  # type: ignore[attr-defined]
        self.progress()

    def again(self, source: int, target: int, *, epoch: int = 0) -> None:
        """The last message of a direction arrives once more, with another epoch if asked."""
        message = self.wires[source, target].last
        assert message is not None
        if epoch:
            message = dataclasses.replace(message, epoch=Epoch(message.epoch - epoch))
        self.say(f"({source}>{target} {show(message)} arrives again)")
        self.seats[target].agent.on_message(Rank(source), message)  # type: ignore[attr-defined]
        self.progress()

    def work(self, rank: int) -> bool:
        """The next driver work of a rank is done; whether there was any."""
        seat = self.seats[rank]
        agent: Agent = seat.agent  # type: ignore[attr-defined]
        if not agent.work.queue or seat.silent or seat.dead:
            return False
        work = agent.work.queue.popleft()
        cause, at = seat.armed[work.kind].pop(0) if seat.armed[work.kind] else (None, 0)
        seat.outcome = seat.memory.perform(work, cause, at)
        runs = " ".join(map(str, work.runs))
        self.say(f"{rank}: work {work.kind.value} txn={work.txn} {runs}: {seat.outcome or 'ok'}")
        agent.work.perform(work)
        self.progress()
        return True

    def fences(self) -> bool:
        """Report fences that have passed; whether any had."""
        passed = False
        for seat in self.seats:
            agent: Agent = seat.agent  # type: ignore[attr-defined]
            if not (seat.silent or seat.dead) and any(item.fence.done() for item in agent.fences.waiting):
                agent.fences.poll()
                passed = True
        return passed

    def run(self) -> None:
        """Deliver, work and report until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            moved = False
            for (source, target), wire in self.wires.items():
                while wire.waiting and not self.seats[target].silent and not wire.ended:
                    self.deliver(source, target)
                    moved = True
            for seat in self.seats:
                moved |= self.work(seat.rank)
            moved |= self.fences()
            if not moved:
                return
        raise RuntimeError("the world does not come to rest")

    def pass_time(self, ms: int) -> None:
        """Beats and ticks of the leader, every 50 ms; messages other than beats stay where they are."""
        end = self.clock.now + ms * MS
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + TICK_MS * MS)
            for seat in self.seats:
                if not (seat.silent or seat.dead):
                    agent = seat.agent  # type: ignore[attr-defined]
                    agent.work.measure()
                    agent.beat()
            for (_, target), wire in self.wires.items():
                while wire.waiting and isinstance(wire.waiting[0], Beat) and not self.seats[target].silent:
                    self.deliver(wire.source, target)
            if not self.seats[0].silent and not self.seats[0].dead:
                with self.leader_agent.entered():
                    self.leader.tick(self.clock())
            self.progress()

    def kill(self, rank: int) -> None:
        """The process of a rank ends; its links do too."""
        self.seats[rank].dead = True
        for (source, target), wire in self.wires.items():
            if rank in (source, target):
                wire.ended = True
                wire.waiting.clear()
                if source == rank:
                    self.seats[target].agent.on_link_down(  # type: ignore[attr-defined]
                        Rank(rank), LinkDown(rank, "connection ended by the peer", eof=True)
                    )
        self.progress()

    # ------------------------------------------------------------------ the engine of one rank

    def _alloc(self, seat: Seat, needs: dict[int, int], number: int) -> bool:
        agent: Agent = seat.agent  # type: ignore[attr-defined]
        replica, wanted = agent.replica, {DomainId(domain): count for domain, count in needs.items()}
        hit = all(count <= replica.available(domain) for domain, count in wanted.items())
        if not hit:
            may = seat.waiting is not None or all(replica.may_grow_to(d, count) for d, count in wanted.items())
            verdict = self._meet(seat, wanted) if may else False
            if verdict is None:
                if not seat.told:
                    self.say(f"{seat.rank}: alloc waits")
                    seat.told = True
                return False
            hit = verdict
        seat.told = False
        if hit:
            taken = {int(domain): seat.pools[domain].alloc(count) for domain, count in wanted.items()}  # type: ignore[attr-defined]
            for domain, ids in taken.items():
                replica.record(OpKind.ALLOC, DomainId(domain), len(ids), sum(ids))
            seat.allocations[number] = taken
            self.say(f"{seat.rank}: alloc #{number} -> {show_ids(taken)}")
        else:
            for domain, count in wanted.items():
                replica.record(OpKind.MISS, domain, count)
            self.say(f"{seat.rank}: alloc #{number} -> None")
        replica.end_op()
        return True

    def _meet(self, seat: Seat, needs: dict[DomainId, int]) -> bool | None:
        agent: Agent = seat.agent  # type: ignore[attr-defined]
        leader, op = agent.routing.leader, agent.replica.op_index
        if leader is None:
            if not agent.marks.waiting:
                return None
            with agent.entered():
                mark = agent.next_mark(PositionKind.OP, op)
                agent.apply(mark)
        else:
            if seat.waiting is None:
                with agent.entered():
                    leader.now = self.clock()
                    seat.waiting = leader.demand.wait_for(needs)
            agent.raise_if_failed()
            verdict: bool | None = seat.waiting.verdict  # type: ignore[attr-defined]
            if verdict is None:
                return None
            seat.waiting = None
            with agent.entered():
                mark = leader.mark(PositionKind.OP, op, self.clock(), grant=verdict)
                leader.demand.foreground = None
                agent.broadcast(mark)
                agent.apply(mark)
        return any(isinstance(entry, Grant) and entry.hit for entry in mark.entries)

    def _free(self, seat: Seat, numbers: dict[int, int]) -> bool:
        for number in numbers:
            for domain, ids in seat.allocations.pop(number).items():
                seat.pools[domain].free(ids)  # type: ignore[attr-defined]
                seat.agent.replica.record(OpKind.FREE, DomainId(domain), len(ids), sum(ids))  # type: ignore[attr-defined]
        seat.agent.replica.end_op()  # type: ignore[attr-defined]
        return True

    def _step(self, seat: Seat) -> bool:
        agent: Agent = seat.agent  # type: ignore[attr-defined]
        number = seat.steps
        if agent.routing.leader is None:
            if not agent.marks.waiting:
                return False
            with agent.entered():
                mark = agent.next_mark(PositionKind.STEP, number)
                agent.apply(mark)
        else:
            with agent.entered():
                mark = agent.routing.leader.mark(PositionKind.STEP, number, self.clock())
                agent.broadcast(mark)
                agent.apply(mark)
                agent.routing.leader.demand.background()
        seat.steps += 1
        evicted = sum(entry.tokens for entry in mark.entries if isinstance(entry, Evict))
        if evicted:
            self.say(f"{seat.rank}: the engine evicts {evicted} tokens")
        return True
