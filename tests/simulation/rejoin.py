"""A change of epoch in the simulated world: survivors and the restarted rank meet again (``Coordinator.rejoin``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached_dist.coord.core import epoch as epoch_change
from kvcached_dist.coord.core.messages import Snapshot
from kvcached_dist.coord.core.participant import Participant
from kvcached_dist.coord.core.replica import Replica
from kvcached_dist.coord.core.types import Epoch, Rank

from . import faults
from .clock import MS
from .hardware import RankMemory
from .workload import Workload

if TYPE_CHECKING:
    from .cluster import Cluster
    from .host import Host

POLL = 5 * MS


class Reform:
    """One change of epoch: begins when the leader has lost a follower.

    The rank that was lost is ended for good and restarted with empty memory; the survivors finish their driver work
    and what runs on their devices, then all of them process the leader's snapshot.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        lost = cluster.hosts[0].agent.lost
        assert lost is not None
        self.restarted = int(lost.rank)
        self.epoch = Epoch(cluster.hosts[0].agent.epoch + 1)
        self.snapshot: Snapshot | None = None
        cluster.loop.note(-1, "reform", f"epoch {self.epoch}: {lost}")
        cluster.loop.after(POLL, None, self._gather)

    def _survivors(self) -> list[Host]:
        return [host for host in self.cluster.hosts if host.rank != self.restarted]

    def _given_up(self) -> bool:
        """Another rank has gone meanwhile: this world does not come together any more."""
        survivors = self._survivors()
        if all(not host.dead and not host.ended and host.agent.failure is None for host in survivors):
            return False
        for host in survivors:
            host.ended = True
        return True

    def _gather(self) -> None:
        cluster = self.cluster
        now = cluster.loop.now
        ready = all(
            host.agent.lost is not None
            and host.worker.busy is None
            and not host.agent.work.queue
            and not host.view.batches
            and host.stopped_until <= now
            for host in self._survivors()
        )
        if self._given_up():
            return
        if not ready:
            cluster.loop.after(POLL, None, self._gather)
            return
        self._rebuild()

    def _rebuild(self) -> None:
        cluster, plan = self.cluster, self.cluster.plan
        leader, shape = cluster.leader, cluster.plan.shape
        lost = cluster.hosts[self.restarted]
        if not lost.dead:
            faults.kill(cluster, lost)
        cluster.deadlines.clear()
        cluster.diverged = False
        blocks = tuple(shape.blocks(domain) for domain in range(len(shape.pages)))
        self.snapshot = snapshot = epoch_change.snapshot(leader, self.epoch, blocks, leader.replica.next_index)
        cluster.oracle.resolved(snapshot)
        for wire in cluster.wires:
            wire.ended = True
        cluster.wires.clear()
        steps = max(4, shape.steps - cluster.hosts[0].step_done)
        calm = not cluster.faulty and cluster.hosts[0].step_done > shape.steps
        for host in cluster.hosts:
            memory, participant = host.memory, host.agent.participant
            if host is lost:
                memory.card.used -= memory.bytes
                memory = RankMemory(host.rank, memory.card, memory.pools, cluster.oracle.before_unmap)
                memory.limit = snapshot.limit_bytes
                participant = Participant(Rank(host.rank), self.epoch, len(memory.pools))
                host.stopped_until = host.resumed_at = 0
                host.worker.busy = None
                host.view.batches.clear()
                host.view.launched = host.view.finished = 0
            again = Workload(replace(shape, steps=1 if calm else steps), plan.seed + self.epoch)
            again.quarantined_pages = [
                sum(run.count for run in snapshot.quarantined if run.domain == domain)
                for domain in range(len(shape.pages))
            ]
            host.restart(again, memory)
            replica = Replica.from_snapshot(Rank(host.rank), cluster.free_lists(), shape.blocks_per_page, snapshot)
            leader_here = leader if host.rank == 0 else None
            host.assemble(self.epoch, cluster.links(host, self.epoch), leader_here, replica, participant)
            # Only when everybody has joined does rank 0 have a leader again.
            host.agent.routing.leader = None
            with host.agent.entered():
                participant.on_snapshot(snapshot)
            host.settle()
        cluster.loop.after(20, lost, lost.beat)
        cluster.loop.after(POLL, None, self._wait_joined)

    def _wait_joined(self) -> None:
        cluster = self.cluster
        if any(host.dead or host.agent.failure is not None for host in cluster.hosts):
            for host in cluster.hosts:
                host.ended = True
            return
        if any(host.agent.participant.joining or host.stopped_until > cluster.loop.now for host in cluster.hosts):
            cluster.loop.after(POLL, None, self._wait_joined)
            return
        assert self.snapshot is not None
        first = cluster.hosts[0]
        for host in cluster.hosts:
            cluster.oracle.joined(host.rank, self.snapshot, restarted=host.rank == self.restarted)
            host.heard = dict.fromkeys(host.links, cluster.loop.now)
        cluster.leader.begin_epoch(self.epoch, first.replica, cluster.peers(), cluster.clock())
        first.agent.routing.leader = first.leader
        cluster.reform = None
        cluster.report.epochs += 1
        for host in cluster.hosts:
            cluster.loop.after(1 + host.rank, host, host.schedule)
