"""One rank of the simulated world: the real agent without its threads, a worker, a device and an engine.

The agent's threads are events here: the link readers are :meth:`Host.receive`, the worker is
:class:`SimWorker`, the clock is :meth:`Host.beat` and :meth:`Host.tick`, the scheduler is :meth:`Host.schedule`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcached_dist.agent import Timing
from kvcached_dist.coord.core.entries import Entry, Grant, Mark, PositionKind, Quarantine
from kvcached_dist.coord.core.errors import GroupFailed, LinkDown, RankLost
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.core.messages import ANSWERS, Message, State
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.replica import OpKind, Replica
from kvcached_dist.coord.core.types import DomainId, Epoch, Rank

from .hardware import RankMemory
from .pool import ListPool
from .taps import BatchFence, Drops, SimAgent, SimMarks, SimRouting
from .worker import SimWorker
from .workload import Alloc, Free, Hint, Ids, Op, Program, Step, Workload

if TYPE_CHECKING:
    from kvcached_dist.coord.core.demand import Foreground

    from .cluster import Cluster
    from .network import SimLink

LEADER = Rank(0)

BLOCKED = object()
"""Result of an operation that has to wait."""


class Host:
    """A rank.

    Args:
        cluster: the world.
        rank: world rank.
        stage: pipeline stage.
        memory: its memory.
        workload: its copy of the engine's program.
        links: its ends of the links.
        leader: on rank 0, makes the leader's machine over this rank's replica.
    """

    def __init__(self, cluster: Cluster, rank: int, stage: int, memory: RankMemory, workload: Workload) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.rank = rank
        self.stage = stage
        self.memory = memory
        self.view = cluster.oracle.ranks[rank]
        self.dead = False
        self.stopped_until = 0
        self.received: deque[tuple[Rank, Message]] = deque(maxlen=24)
        self.heard: dict[Rank, int] = {}
        self.resumed_at = 0
        self.late_until = 0
        self.life = 0
        """Processes of this rank that have ended; what an earlier one began is forgotten."""
        self.device_free_at = 0
        self.diverge = False
        self.failed_at: int | None = None
        self.worker = SimWorker(self)
        self.drops = Drops(self)
        self._blocked_op = 0
        self._begin(workload)

    def _begin(self, workload: Workload) -> None:
        """The engine starts: nothing is allocated."""
        self.workload = workload
        self.program: Program = workload.program()
        self.op: Op = next(self.program)
        self.step_done = 0
        self.ended = False
        self.parked = False
        """The next step waits for other ranks; :meth:`unpark` goes on."""
        self._waiting: Foreground | None = None
        self._blocked_since: int | None = None
        self._next_step_at = 0
        self._live = [[0] * pages for pages in workload.shape.pages]

    def restart(self, workload: Workload, memory: RankMemory) -> None:
        """The engine starts again in a new epoch; ``memory`` is another one where the process was restarted."""
        self.received.clear()
        self.failed_at = None
        self.dead = self.view.gone = False
        self.life += self.memory is not memory
        self._blocked_op += 1
        self.memory = self.view.memory = memory
        self._begin(workload)

    def assemble(
        self,
        epoch: Epoch,
        links: Mapping[Rank, SimLink],
        leader: Leader | None,
        replica: Replica,
        participant: Participant,
    ) -> None:
        """Make the agent of an epoch."""
        self.links = dict(links)
        self.agent = SimAgent(
            rank=Rank(self.rank),
            epoch=epoch,
            replica=replica,
            participant=participant,
            describe=lambda peer: f"rank {peer} (stage {self.cluster.hosts[peer].stage})",
            links=links,  # type: ignore[arg-type]
            worker=self.worker,
            timing=Timing(self.cluster.plan.beat / 1e6, self.cluster.plan.lease / 1e6),
            faults=self.drops,
            make_fence=lambda: BatchFence(self),
            now=self.cluster.clock,
        )
        self.agent.host = self
        self.agent.marks = SimMarks(self, self.agent)
        self.agent.routing = SimRouting(self, self.agent)
        self.agent.routing.leader = leader
        self.leader = leader
        self.replica = replica
        self.workload.within_reach = self._within_reach
        self.pools: list[ListPool] = list(replica.free_lists)  # type: ignore[arg-type]
        self.heard = dict.fromkeys(links, self.loop.now)

    # ------------------------------------------------------------------ taps

    def sends(self, to: Rank, message: Message) -> None:
        """The agent sends a message."""
        name = type(message).__name__
        self.loop.note(self.rank, "send", f"to {to}: {message}", zlib.crc32(name.encode()) ^ int(to))
        if isinstance(message, (*ANSWERS, State)):
            self.cluster.oracle.rank_answers(self.rank, message)
        elif self.leader is not None:
            self.cluster.oracle.leader_sends(to, message)

    def applies(self, entry: Entry) -> None:
        """An entry takes effect here."""
        self.loop.note(self.rank, "apply", entry, self.view.log_index)
        self.cluster.oracle.applying(self.rank, entry)

    def marks(self, mark: Mark) -> None:
        """The leader broadcasts a mark."""
        self.cluster.oracle.marked(mark, self.view.live)

    # ------------------------------------------------------------------ events

    def receive(self, source: Rank, message: Message) -> None:
        """A message arrives."""
        if message.epoch != self.agent.epoch:
            self.cluster.late_message(self, source, message)
            return
        self.heard[source] = self.loop.now
        self.received.append((source, message))
        self.agent.on_message(source, message)
        self.settle()

    def link_down(self, peer: Rank, reason: str, eof: bool, epoch: Epoch) -> None:
        """A link has ended."""
        if epoch != self.agent.epoch or self.ended:
            return
        link = self.links[peer]
        if link.down is not None:
            return
        link.down = LinkDown(peer, reason, eof=eof)
        self.loop.note(self.rank, "link down", f"to {peer}: {reason}", int(eof))
        link.out.end("the other end found the link ended", eof=True)
        self.agent.on_link_down(peer, link.down)
        self.settle()

    def beat(self) -> None:
        """The clock: a beat, and silence for a whole lease."""
        if self.ended:
            return
        self.loop.after(self.cluster.plan.beat, self, self.beat)
        if self.agent.lost is not None:
            return
        self.agent.work.measure()
        self.agent.beat()
        for peer, heard in self.heard.items():
            if peer in self.agent.links.left:
                continue
            if self.loop.now - max(heard, self.resumed_at) > self.cluster.plan.lease and self.links[peer].down is None:
                self.link_down(peer, "silent for a lease", False, self.agent.epoch)
        self.settle()

    def tick(self) -> None:
        """The leader's clock."""
        if self.ended or self.leader is None:
            return
        self.loop.after(self.cluster.plan.tick, self, self.tick)
        if self.cluster.reform is not None:
            return
        with self.agent.entered():
            self.leader.tick(self.cluster.clock())
        self.cluster.at_tick()
        self.settle()

    def settle(self) -> None:
        """After every event: start driver work, report fences, let the scheduler go on if it can."""
        agent = self.agent
        if agent.fences.waiting:
            agent.fences.poll()
        if self.worker.busy is None and agent.work.queue:
            self.worker.begin(agent.work.queue.popleft(), self.loop.now, self.life)
        if agent.failure is not None and self.failed_at is None:
            self.failed_at = self.loop.now
            self.loop.note(self.rank, "failed", agent.failure.cause, int(agent.failure.cause.kind))
            self.cluster.host_failed(self)
        if agent.lost is not None:
            self.cluster.lost(self)
        elif self._blocked_since is not None:
            self.schedule()
        self.cluster.watch()

    # ------------------------------------------------------------------ the scheduler thread

    def schedule(self) -> None:
        """Run the engine until it has to wait or a step has ended."""
        if self.cluster.reform is not None or (self._blocked_since is None and self.loop.now < self._next_step_at):
            return
        try:
            while not self.ended and self.agent.failure is None and self.agent.lost is None:
                op = self.op
                if isinstance(op, Step) and self._blocked_since is None and not self.cluster.may_step(self, op):
                    self.parked = True
                    return
                result = self._execute(op)
                if result is BLOCKED:
                    self._block()
                    return
                self._unblock()
                self.op = self.program.send(result)  # type: ignore[arg-type]
                if isinstance(op, Step):
                    self._next_step_at = self.loop.now + self.cluster.plan.step_time(self, op.calm)
                    self.loop.at(self._next_step_at, self, self.schedule)
                    return
        except (GroupFailed, RankLost):
            self._unblock()
            self.settle()
        except StopIteration:
            self.ended = True
            self.cluster.host_done(self)

    def unpark(self) -> None:
        """Another rank has come further."""
        if self.parked:
            self.parked = False
            self.loop.after(self.cluster.plan.step_min // 4, self, self.schedule)

    def _block(self) -> None:
        if self._blocked_since is None:
            self._blocked_since = self.loop.now
            self._blocked_op += 1
            if self.leader is None:
                self.loop.after(self.cluster.plan.lease + 1, self, self._overdue, self._blocked_op)

    def _unblock(self) -> None:
        if self._blocked_since is not None:
            waited = self.loop.now - max(self._blocked_since, self.resumed_at)
            bound = self.cluster.plan.wait_bound(self)
            self._blocked_since = None
            self.cluster.oracle.require(waited <= bound, "L1", f"rank {self.rank} waited {waited} us for {self.op}")

    def _overdue(self, number: int) -> None:
        """A follower has waited for a lease, counted from when it was last stopped."""
        if self._blocked_since is None or number != self._blocked_op:
            return
        since = max(self._blocked_since, self.resumed_at)
        if self.loop.now - since <= self.cluster.plan.lease:
            self.loop.at(since + self.cluster.plan.lease + 1, self, self._overdue, number)
            return
        position = self.op.number if isinstance(self.op, Step) else self.replica.op_index
        kind = PositionKind.STEP if isinstance(self.op, Step) else PositionKind.OP
        try:
            with self.agent.entered():
                self.agent.next_mark(kind, position, wait_s=0.0)
        except (GroupFailed, RankLost):
            self.settle()

    def _execute(self, op: Op) -> object:
        match op:
            case Alloc(needs=needs):
                return self._alloc(needs)
            case Free(ids=ids):
                self._free(ids)
            case Hint(step_blocks=blocks, idle=idle):
                self._hint(blocks, idle)
            case Step():
                return self._step(op)
        return None

    def _alloc(self, needs: Mapping[int, int]) -> object:
        replica = self.replica
        wanted = {DomainId(domain): count for domain, count in needs.items()}
        if any(count > replica.available(domain) for domain, count in wanted.items()):
            verdict = self._meet(wanted)
            if verdict is BLOCKED:
                return BLOCKED
            if not verdict:
                for domain, count in wanted.items():
                    replica.record(OpKind.MISS, domain, count)
                replica.end_op()
                self.cluster.operated(self.rank, "miss", tuple(needs.items()))
                return None
        if self.diverge and max(wanted.values()) > 1:
            self.diverge = False
            self.cluster.diverged = True
            wanted = {domain: max(1, count - 1) for domain, count in wanted.items()}
        taken: Ids = {}
        for domain, count in wanted.items():
            ids = self.pools[domain].alloc(count)
            replica.record(OpKind.ALLOC, domain, count, zlib.crc32(repr(ids).encode()))
            self._use(domain, ids, 1)
            taken[domain] = ids
        replica.end_op()
        self.cluster.operated(self.rank, "alloc", tuple(taken.items()))
        return taken

    def _meet(self, needs: Mapping[DomainId, int]) -> object:
        """More is needed than is free; as ``Coordinator._meet``."""
        agent, replica = self.agent, self.replica
        if self._waiting is None and not all(replica.may_grow_to(d, count) for d, count in needs.items()):
            return False
        if self.leader is None:
            if not agent.marks.waiting:
                return BLOCKED
            with agent.entered():
                mark = agent.next_mark(PositionKind.OP, replica.op_index)
                agent.apply(mark)
        else:
            if self._waiting is None:
                with agent.entered():
                    self.leader.now = self.cluster.clock()
                    self._waiting = self.leader.demand.wait_for(needs)
            if self._waiting.verdict is None:
                return BLOCKED
            hit, self._waiting = self._waiting.verdict, None
            with agent.entered():
                mark = self.leader.mark(PositionKind.OP, replica.op_index, self.cluster.clock(), grant=hit)
                self.leader.demand.foreground = None
                agent.broadcast(mark)
                agent.apply(mark)
        self._seen(mark.entries)
        return any(isinstance(entry, Grant) and entry.hit for entry in mark.entries)

    def _free(self, ids: Ids) -> None:
        for domain, blocks in ids.items():
            self.pools[domain].free(blocks)
            self.replica.record(OpKind.FREE, DomainId(domain), len(blocks), zlib.crc32(repr(blocks).encode()))
            self._use(domain, blocks, -1)
        self.replica.end_op()
        self.cluster.operated(self.rank, "free", tuple(ids.items()))

    def _within_reach(self, needs: dict[int, int]) -> bool:
        """What the log says; while a limit is in force not everything can be had."""
        replica = self.replica
        return replica.limit.limit_bytes > 0 or all(
            replica.may_grow_to(DomainId(domain), blocks) for domain, blocks in needs.items()
        )

    def _hint(self, blocks: tuple[int, ...], idle: bool) -> None:
        if self.leader is not None:
            self.leader.demand.step_blocks[:] = blocks
            self.leader.demand.idle = idle

    def _step(self, op: Step) -> object:
        agent = self.agent
        if self._blocked_since is None and op.number > 0:
            self._launch()
        if self.leader is None:
            if not agent.marks.waiting:
                return BLOCKED
            with agent.entered():
                mark = agent.next_mark(PositionKind.STEP, op.number)
                agent.apply(mark)
        else:
            tokens = self.cluster.evictions(op)
            if tokens:
                with agent.entered():
                    self.leader.evict(tokens)
            with agent.entered():
                mark = self.leader.mark(PositionKind.STEP, op.number, self.cluster.clock())
                agent.broadcast(mark)
                agent.apply(mark)
                self.leader.demand.background()
            self.cluster.leader_stepped(op)
        self.step_done = op.number
        self.cluster.wake()
        self.workload.settled = mark.settled
        self._seen(mark.entries)
        return mark.entries

    def _seen(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if isinstance(entry, Quarantine):
                for run in entry.runs:
                    self.workload.quarantined_pages[run.domain] += run.count

    def _use(self, domain: int, blocks: tuple[int, ...], by: int) -> None:
        size = self.workload.shape.blocks_per_page[domain]
        live = self._live[domain]
        for block in blocks:
            page = block // size
            live[page] += by
            if live[page] == 0:
                self.view.live[domain] &= ~(1 << page)
            else:
                self.view.live[domain] |= 1 << page

    def _launch(self) -> None:
        self.cluster.oracle.launch(self.rank)
        self.loop.at(self.cluster.plan.batch_end(self), self, self._batch_done, self.life)

    def _batch_done(self, life: int) -> None:
        if life != self.life:
            return
        self.cluster.oracle.finish(self.rank)
        self.settle()


__all__ = ["Host"]
