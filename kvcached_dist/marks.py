"""The leader's marks on one rank: received from its link, put in force where the engine gets to their position."""

from __future__ import annotations

from collections import deque

from .agent_ports import Faults, Worker
from .coord.core.entries import Entry, Limit, Mark, PositionKind, Publish, Retire, Unretire
from .coord.core.errors import Divergence, InvariantViolation
from .coord.core.participant import Participant
from .coord.core.replica import Replica
from .coord.core.types import Rank

MARKS_MAX = 65536
"""Marks a follower may hold that its engine has not reached; more means the engine has stopped stepping."""


class Marks:
    """Marks that wait for the engine, and what a mark does on this rank.

    Args:
        rank: this rank.
        replica: its logical state.
        participant: its physical state.
        worker: told of limits.
        faults: points that entries pass.

    Threads: under the agent's lock; :meth:`apply` in the scheduler's thread.
    """

    def __init__(self, rank: Rank, replica: Replica, participant: Participant, worker: Worker, faults: Faults) -> None:
        self.waiting: deque[Mark] = deque()
        self.step_done = 0
        """The newest step whose mark is in force here."""
        self._newest_step = 0
        self._rank = rank
        self._replica = replica
        self._participant = participant
        self._worker = worker
        self._faults = faults

    def receive(self, mark: Mark) -> None:
        """The leader has sent a mark.

        Raises:
            InvariantViolation: the engine of this rank has not stepped for very long (L1).
        """
        if len(self.waiting) >= MARKS_MAX:
            raise InvariantViolation("L1", f"rank {self._rank} holds {MARKS_MAX} marks it has not reached")
        self.waiting.append(mark)
        if mark.kind is PositionKind.STEP:
            self._newest_step = mark.position

    def take(self, kind: PositionKind, position: int) -> Mark:
        """The oldest mark that waits, which must belong to this position.

        Raises:
            Divergence: it belongs elsewhere.
        """
        mark = self.waiting.popleft()
        if (mark.kind, mark.position) != (kind, position):
            raise Divergence(
                f"rank {self._rank} is at {kind.name.lower()} {position}, the leader's next mark belongs to"
                f" {mark.kind.name.lower()} {mark.position}: the ranks do not run the same operations"
            )
        return mark

    @property
    def lag_steps(self) -> int:
        """Steps that this rank is behind the leader, as far as marks tell."""
        return max(0, self._newest_step - self.step_done - 1)

    def apply(self, mark: Mark) -> None:
        """Put the entries of a mark in force.

        Raises:
            Divergence: this rank has done something else than the leader before it.
            InvariantViolation: an entry contradicts what this rank holds.
        """
        if mark.kind is PositionKind.STEP:
            self.step_done = mark.position
        self._replica.check(mark)
        for entry in mark.entries:
            self.apply_entry(entry)

    def apply_entry(self, entry: Entry) -> None:
        """Put one entry in force."""
        match entry:
            case Publish(txn=txn, runs=runs):
                self._participant.publish(txn, runs)
                self._replica.apply(entry)
                self._faults.at("publish")
            case Retire(txn=txn, runs=runs, retained=retained):
                self._replica.apply(entry)
                self._participant.retire(txn, runs, retained)
                self._faults.at("retire")
            case Unretire(txn=txn):
                self._participant.unretire(txn)
                self._replica.apply(entry)
            case Limit(limit_bytes=limit_bytes):
                self._replica.apply(entry)
                self._worker.set_limit(limit_bytes)
            case _:
                self._replica.apply(entry)


__all__ = ["MARKS_MAX", "Marks"]
