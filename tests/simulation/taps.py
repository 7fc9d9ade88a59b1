"""Where the agent of a simulated rank is listened to, or loses something: sends, entries, answers, fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcached_dist.agent import Agent, Faults
from kvcached_dist.coord.core.entries import Entry, Mark
from kvcached_dist.coord.core.messages import Message
from kvcached_dist.coord.core.types import Rank, Tick
from kvcached_dist.marks import Marks
from kvcached_dist.routing import Routing

from .schedule import ANSWERS_OF, Fault

if TYPE_CHECKING:
    from .host import Host


class SimAgent(Agent):
    """The agent of a host; every mark that it sends passes the oracle first."""

    host: Host

    def broadcast(self, mark: Mark) -> None:
        """Send a mark to every follower."""
        self.host.marks(mark)
        super().broadcast(mark)


class TappedRouting(Routing):
    """The routing of an agent, to be listened to: takes the place of the one that the agent has made."""

    def __init__(self, agent: Agent, faults: Faults, now: Callable[[], Tick]) -> None:
        super().__init__(
            agent.rank,
            agent.epoch,
            agent.participant,
            agent.marks,
            agent.links,
            agent.ending,
            put_work=agent.work.put,
            take_fence=agent.take_fence,
            faults=faults,
            now=now,
        )


class SimRouting(TappedRouting):
    """The routing of a host; every other message that it sends passes the oracle first."""

    def __init__(self, host: Host, agent: Agent) -> None:
        super().__init__(agent, host.drops, host.cluster.clock)
        self._host = host

    def send(self, to: Rank, message: Message) -> None:
        """Send a message of the core, to this rank itself too."""
        self._host.sends(to, message)
        super().send(to, message)


class SimMarks(Marks):
    """The marks of a host; every entry passes the oracle before it takes effect."""

    def __init__(self, host: Host, agent: Agent) -> None:
        super().__init__(agent.rank, agent.replica, agent.participant, host.worker, host.drops)
        self._host = host

    def apply_entry(self, entry: Entry) -> None:
        """Put one entry in force."""
        self._host.applies(entry)
        super().apply_entry(entry)


class Drops:
    """Answers that are lost on their way (``kvcached_dist.agent.Faults``)."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.armed: list[Fault] = []
        self.states = 0
        """Replies to queries that are to be lost."""

    def at(self, point: str) -> None:
        """Points are not used: faults are placed by the phase of the transaction."""

    def drops(self, message: str) -> bool:
        """Whether this one is lost."""
        if message == "STATE":
            if self.states > 0:
                self.states -= 1
                self._host.cluster.struck("drop_state", self._host.rank)
                return True
            return False
        for fault in self.armed:
            if message in ANSWERS_OF[fault.phase]:
                fault.nth -= 1
                if fault.nth <= 0:
                    self.armed.remove(fault)
                    self._host.cluster.struck("drop_answer", self._host.rank)
                    self.states = fault.amount if fault.kind == "drop_state" else 0
                    return True
        return False


class BatchFence:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._behind = host.view.launched

    def done(self) -> bool:
        """Whether all batches launched before have finished."""
        return self._host.view.finished >= self._behind
