"""How faults strike, and which failures of the coordinator they excuse."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached_dist.coord.core.messages import Beat, Bye, Message, Release, ReleaseFailed, TxnMessage
from kvcached_dist.coord.core.types import CauseKind, Epoch, Rank, TxnPhase

from .clock import MS, SECOND
from .schedule import WORK_OF, Fault

if TYPE_CHECKING:
    from .cluster import Cluster
    from .host import Host

ANY = -1


def excuses(kind: str, rank: int) -> set[tuple[CauseKind, int]]:
    """Failures (kind, rank) that a fault may end in; :data:`ANY` stands for every rank."""
    match kind:
        case "kill" | "kill_leader" | "rejoin":
            return {(CauseKind.RANK_LOST, rank)}
        case "stop_long":
            return {(CauseKind.RANK_HUNG, rank), (CauseKind.RANK_HUNG, 0), (CauseKind.RANK_LOST, 0)}
        case "stop_leader_long":
            return {(CauseKind.RANK_HUNG, ANY), (CauseKind.RANK_LOST, ANY)}
        case "link_lost":
            return {(CauseKind.RANK_HUNG, rank), (CauseKind.RANK_HUNG, 0), (CauseKind.RANK_LOST, ANY)}
        case "bye":
            return {(CauseKind.CLOSED, rank)}
        case "diverge":
            return {(CauseKind.DIVERGENCE, ANY)}
        case "restore_fail" | "release_fail":
            return {(CauseKind.DRIVER, ANY)}
        case "drop_state" | "half_clog":
            return {(CauseKind.UNKNOWN_OUTCOME, rank)}
        case _:
            return set()


def arm(cluster: Cluster, fault: Fault) -> None:
    """Let a fault wait for its driver work or its answer."""
    host = cluster.hosts[fault.rank]
    if fault.kind in ("drop_answer", "drop_state"):
        host.drops.armed.append(fault)
    else:
        host.worker.armed[WORK_OF[fault.phase]].append(fault)


def inject(cluster: Cluster, fault: Fault) -> None:
    """A fault strikes now."""
    host = cluster.hosts[fault.rank]
    if host.dead or host.ended or cluster.leader.failure is not None:
        return
    loop, plan = cluster.loop, cluster.plan
    if host.stopped_until > loop.now and fault.kind in ("duplicate", "old_epoch", "bye"):
        return
    if fault.rank == 0 and fault.kind in (
        "clog",
        "half_clog",
        "link_lost",
        "late_stage",
        "bye",
        "kill",
        "rejoin",
        "stop_long",
    ):
        return
    match fault.kind:
        case "duplicate":
            if not duplicate(cluster, host):
                return
        case "old_epoch":
            if not old_epoch(cluster, host):
                return
        case "kill" | "kill_leader" | "rejoin":
            kill(cluster, host)
        case "stop" | "stop_leader" | "stop_long" | "stop_leader_long":
            stop(cluster, host, fault.amount)
            cluster.pause(fault.amount)
        case "clog" | "half_clog":
            cluster.pause(fault.amount)
            for wire in cluster.wires:
                if wire.target is host or (wire.source is host and fault.kind == "clog"):
                    wire.clog(loop.now + fault.amount)
        case "swizzle":
            cluster.pause(fault.amount)
            for wire in plan.random.sample(cluster.wires, (len(cluster.wires) + 1) // 2):
                wire.clog(loop.now + plan.random.randint(MS, max(2 * MS, fault.amount // 2)))
        case "link_lost":
            for wire in cluster.wires:
                if host in (wire.source, wire.target):
                    wire.silent = True
            cluster.deadlines[host.rank] = loop.now + plan.lease + SECOND
        case "late_stage":
            host.late_until = loop.now + fault.amount
        case "bye":
            for link in host.links.values():
                link.send(Bye(host.agent.epoch))
            host.ended = True
            cluster.wake()
        case "diverge":
            host.diverge = True
        case "no_memory":
            card = host.memory.card
            card.hog = max(0, card.free - card.reserve)
            loop.after(fault.amount, None, _spare, card)
            return
        case "admission":
            card = host.memory.card
            if card.turn is None:
                card.turn = ANY
                loop.after(fault.amount, None, _free_turn, card)
            return
        case _:
            raise ValueError(f"fault kind {fault.kind} cannot be injected")
    cluster.struck(fault.kind, fault.rank)


def _spare(card: object) -> None:
    card.hog = 0  # type: ignore[attr-defined]


def _free_turn(card: object) -> None:
    if card.turn == ANY:  # type: ignore[attr-defined]
        card.turn = None  # type: ignore[attr-defined]


def kill(cluster: Cluster, host: Host) -> None:
    """The process of a rank ends at once; what it has sent is still under way, then its links end."""
    host.dead = True
    host.view.gone = True
    cluster.wake()
    for wire in cluster.wires:
        if wire.source is host:
            wire.end("the process died", eof=True)
    card = host.memory.card
    if card.turn == host.rank:
        card.turn = None
    cluster.deadlines[host.rank] = cluster.loop.now + SECOND


def stop(cluster: Cluster, host: Host, duration: int) -> None:
    """The process of a rank does not run for a while; everything for it waits."""
    until = cluster.loop.now + duration
    host.stopped_until = max(host.stopped_until, until)
    host.resumed_at = host.stopped_until
    cluster.leader_slept += duration * (host.rank == 0)
    if duration > cluster.plan.lease:
        cluster.deadlines[host.rank] = cluster.loop.now + cluster.plan.lease + SECOND


def chatter(cluster: Cluster) -> None:
    """Small faults that may strike at every tick."""
    plan = cluster.plan
    for kind, probability in plan.chatter.items():
        if probability and plan.random.random() < probability:
            host = plan.random.choice(cluster.hosts)
            if kind == "limit":
                pages = sum(plan.shape.pages)
                cluster.change_limit(plan.random.choice((0, pages * 40, pages * 120, pages * 300)))
                continue
            amount = plan.random.randint(MS, 60 * MS)
            inject(cluster, Fault(kind, cluster.phase(), host.rank, 1, amount))


# ---------------------------------------------------------------------- messages that must change nothing


def duplicate(cluster: Cluster, host: Host) -> bool:
    """Deliver a message once more that this host has had: nothing changes, the answer is the same (S9)."""
    known = [item for item in host.received if isinstance(item[1], TxnMessage)]
    if not known:
        return False
    source, message = cluster.plan.random.choice(known)
    if cluster.hosts[source].stopped_until > cluster.loop.now:
        return False
    if isinstance(message, Release) and host.agent.participant.phase(message.txn) is TxnPhase.RELEASE_FAILED:
        return False  # RELEASE is retried under the same number: there a copy is a request
    if isinstance(message, ReleaseFailed):
        return False  # each refused try sends one, and nothing in it says which try
    must_not_matter(cluster, host, source, message, "S9")
    return True


def old_epoch(cluster: Cluster, host: Host) -> bool:
    """Deliver a message of the epoch before (S8)."""
    known = [item for item in host.received if isinstance(item[1], TxnMessage | Beat)]
    if not known:
        return False
    source, message = cluster.plan.random.choice(known)
    message = replace(message, epoch=Epoch(message.epoch - 1))
    if isinstance(message, TxnMessage):
        message = replace(message, txn=cluster.leader.commit.last)
    must_not_matter(cluster, host, source, message, "S8")
    return True


def must_not_matter(cluster: Cluster, host: Host, source: Rank, message: Message, rule: str) -> None:
    """Deliver a message and compare everything before and after."""
    before = fingerprint(host)
    heard = [peer.heard for peer in host.leader.peers] if host.leader is not None else []
    cluster.oracle.repeating = True
    host.agent.on_message(source, message)
    cluster.oracle.repeating = False
    # A copy says nothing about whether its sender lives now.
    for peer, when in zip(host.leader.peers if host.leader is not None else (), heard, strict=True):
        peer.heard = when
    after = fingerprint(host)
    failure = host.agent.failure
    detail = f"{message} from rank {source} changed rank {host.rank} from {before} to {after} ({failure})"
    cluster.oracle.require(before == after, rule, detail)


def fingerprint(host: Host) -> str:
    """Everything of a rank that a message may change, except who was heard when."""
    participant, leader = host.agent.participant, host.leader
    records = {txn: (record.phase, tuple(record.queued)) for txn, record in participant._records.items()}
    parts: list[object] = [
        participant.held._runs,
        records,
        participant.handles,
        len(host.agent.marks.waiting),
        host.agent.failure,
    ]
    if leader is not None:
        txn = leader.commit.txn
        parts += [
            None if txn is None else (txn.txn, txn.step, sorted(txn.waiting), txn.late, txn.releases),
            leader.log.due(),
            leader.commit.retained,
            leader.commit.closed,
            leader.failure,
            [(peer.handles, peer.left) for peer in leader.peers],
            [table._states for table in leader.tables],
        ]
    return repr(parts)
