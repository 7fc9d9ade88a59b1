"""What every rank does all the time: waves of requests that allocate, stamp, verify and free blocks.

A request is a pure function of the seed and its number. It needs blocks of every domain at once, writes a stamp
into each of them in every pool and layer of the stage, takes a further block now and then, and checks every stamp
before it frees them: only then is it answered. A wave ends with everything given back; all ranks check that they
hold the null pages and nothing else. When all have, the leader logs the begin of the next wave, which they then
begin at the same step. Logged evictions serve as these words of the leader.

Which requests wait is the same on every rank and outlives an epoch: the supervisor hands a :class:`Backlog` from
one to the next, in which requests whose blocks were lost wait again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from ..coord.core.entries import Entry, Evict, Publish, Reclaimed
from ..coord.core.types import DomainId, PageId, Run
from ..errors import KVDistError
from ..replay import identity
from ..replay.sequence import Blocks
from ..replay.stamps import Stamps
from .board import RestBoard

if TYPE_CHECKING:
    from ..coordinator import Coordinator

LEADER = 0

WAVE_REQUESTS: Final = 24
"""Requests of a wave."""

ADMITTED_PER_STEP: Final = 2

LIFETIME_STEPS: Final = (4, 18)
"""Shortest and longest life of a request."""

GROWS_EVERY_STEPS: Final = 5
"""A running request takes one more block this often, as decoding does."""

STOP_TOKENS: Final = 1
NEXT_WAVE_TOKENS: Final = 2
"""The leader logs an eviction of so many tokens to end the work, or to begin a wave, on all ranks at one step."""

STEP_BLOCKS: Final = 3
"""Blocks per domain that growth runs ahead while requests wait."""

STEP_PAUSE_S: Final = 0.002

MARKS_PER_LEASE: Final = 1500
"""Steps that the leader takes at most while a rank stands still for a lease: its link holds 4,096 frames."""

HISTORY: Final = 512


T = TypeVar("T")


class StalledError(KVDistError):
    """A wave did not end in its time (L5)."""


class NotAtRestError(KVDistError):
    """Memory is held at the end of a wave that nothing accounts for (S10)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one request takes.

    Attributes:
        number: position in the endless list of requests.
        blocks: blocks per domain that it takes at once.
        lifetime: steps from admission to answer.
    """

    number: int
    blocks: Mapping[str, int]
    lifetime: int


def request(seed: int, number: int, domains: tuple[str, ...]) -> Request:
    """The request of this number; equal on all ranks and after every restart."""
    key = identity.mix(identity.mix(seed) ^ number)
    sizes = {"full": 2 + key % 11, "swa": 1 + (key >> 8) % 4}
    shortest, longest = LIFETIME_STEPS
    lifetime = shortest + (key >> 16) % (longest - shortest + 1)
    return Request(number, {name: sizes.get(name, 1) for name in domains}, lifetime)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests at the begin of an epoch.

    Attributes:
        waiting: numbers of the requests that are not answered yet, in order.
        wave: number of the next wave; its requests have not come yet.
    """

    waiting: tuple[int, ...] = ()
    wave: int = 0

    @property
    def issued(self) -> int:
        """Requests that have come so far."""
        return self.wave * WAVE_REQUESTS

    @property
    def answered(self) -> int:
        """Requests that have been answered."""
        return self.issued - len(self.waiting)


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of a wave.

    Attributes:
        wave: its number.
        began: wall clock.
        ended: wall clock.
        step: step of the epoch.
        digest: digest of all operations of the epoch.
    """

    wave: int
    began: float
    ended: float
    step: int
    digest: int


@dataclass(frozen=True, slots=True)
class Slowest:
    """The longest call so far."""

    seconds: float = 0.0
    call: str = ""


@dataclass(slots=True)
class _Live:
    """One request that has been admitted."""

    request: Request
    since: int
    blocks: dict[str, Blocks]
    stamp: int


@dataclass(slots=True)
class Record:
    """What a rank has to tell about its work.

    Attributes:
        rests: ends of waves.
        progress: wall clock of the last marks that published or gave back pages.
        misses: operations that found no memory.
        slowest: longest call of the coordinator.
        leaked_bytes: bytes above the null pages at the end of a wave, largest.
    """

    rests: deque[Rest] = field(default_factory=lambda: deque(maxlen=HISTORY))
    progress: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    misses: int = 0
    slowest: Slowest = field(default_factory=Slowest)
    leaked_bytes: int = 0


class Workload:
    """The work of one rank in one epoch. Scheduler thread only, except what is said otherwise.

    Args:
        coordinator: of this rank, in the epoch.
        stamps: of this process for this world; it knows which blocks still hold their fill pattern.
        board: where ranks say which wave they have ended.
        backlog: where the work begins, equal on all ranks.
        seed: of the requests.
        wave_s: a wave that lasts longer is stalled.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        stamps: Stamps,
        board: RestBoard,
        backlog: Backlog,
        *,
        seed: int,
        wave_s: float,
    ) -> None:
        self.record = Record()
        self.step = 0
        self.wave = backlog.wave
        self._coordinator = coordinator
        self._stamps = stamps
        self._board = board
        self._seed = seed
        self._wave_s = wave_s
        self._names = tuple(domain.name for domain in coordinator.stage.domains)
        self._per_page = [domain.blocks_per_page for domain in coordinator.stage.domains]
        self._queue = deque(backlog.waiting)
        self._live: dict[int, _Live] = {}
        self._pause_s = max(STEP_PAUSE_S, coordinator.config.lease_s / MARKS_PER_LEASE)
        self._word = 0
        self._asked_to_stop = False
        self._null_bytes = sum(
            coordinator.backing.expected_bytes(
                Run(DomainId(index), PageId(0), 1) for index in range(len(self._names))
            ).values()
        )

    # ------------------------------------------------------------------ from outside

    def ask_to_stop(self) -> None:
        """End the work of all ranks after the wave that runs. Effective on the leader. Threads: any."""
        self._asked_to_stop = True

    def backlog(self) -> Backlog:
        """What is not answered, those that were running first. Threads: any, once :meth:`run` has ended."""
        waiting = [*self._live, *self._queue]
        return Backlog(tuple(sorted(waiting)), self.wave)

    # ------------------------------------------------------------------ work

    def run(self) -> None:
        """Work wave after wave until every rank has seen the leader's wish to stop.

        Raises:
            RankLost, GroupFailed: from the coordinator.
            StalledError, NotAtRestError: see there.
        """
        while self._word != STOP_TOKENS:
            self._run_wave()

    def _run_wave(self) -> None:
        began = time.time()
        limit = time.monotonic() + self._wave_s
        self._queue.extend(range(self.wave * WAVE_REQUESTS, (self.wave + 1) * WAVE_REQUESTS))
        self.wave += 1
        settled = False
        while self._queue or self._live or not settled:
            self._raise_if_stalled(limit)
            settled = self._run_step()
        self._check_rest()
        self.record.rests.append(Rest(self.wave - 1, began, time.time(), self.step, self._coordinator.digest))
        self._board.ended(self.wave - 1)
        self._word = 0
        while not self._word:
            self._raise_if_stalled(limit)
            if self._coordinator.world.rank == LEADER and self._board.all_ended(self.wave - 1):
                self._coordinator.evict(STOP_TOKENS if self._asked_to_stop else NEXT_WAVE_TOKENS)
            self._run_step()

    def _raise_if_stalled(self, limit: float) -> None:
        if time.monotonic() > limit:
            raise StalledError(
                f"wave {self.wave - 1} has not ended on all ranks after {self._wave_s:g} s: {len(self._queue)} requests"
                f" wait, {len(self._live)} run, step {self.step}, domains {self._domains_text()}"
            )

    def _run_step(self) -> bool:
        """One engine step; whether nothing is left to be given back."""
        busy = bool(self._queue)
        self._coordinator.idle(not busy)
        self._coordinator.demand(dict.fromkeys(self._names, STEP_BLOCKS if busy else 0))
        for live in [live for live in self._live.values() if self.step - live.since >= live.request.lifetime]:
            self._answer(live)
        for live in self._live.values():
            if (self.step - live.since) % GROWS_EVERY_STEPS == GROWS_EVERY_STEPS - 1:
                self._extend(live)
        for _ in range(ADMITTED_PER_STEP):
            if not self._queue or not self._admit(self._queue[0]):
                break
        self.step += 1
        report = self._timed("step", self._coordinator.step)
        self._note(report.entries)
        time.sleep(self._pause_s)
        return report.settled

    def _admit(self, number: int) -> bool:
        wanted = request(self._seed, number, self._names)
        taken = self._alloc(wanted.blocks)
        if taken is None:
            return False
        self._queue.popleft()
        key = identity.request_key(number, 0)
        live = _Live(wanted, self.step, {name: Blocks() for name in self._names}, key)
        self._live[number] = live
        self._write(live, taken)
        return True

    def _extend(self, live: _Live) -> None:
        taken = self._alloc({self._names[0]: 1})
        if taken is not None:
            self._write(live, taken)

    def _alloc(self, needs: Mapping[str, int]) -> dict[str, list[int]] | None:
        taken = self._timed("alloc", lambda: self._coordinator.alloc(needs))
        self._note(self._coordinator.take_granted())
        if taken is None:
            self.record.misses += 1
            return None
        return {name: ids.tolist() for name, ids in taken.items()}

    def _write(self, live: _Live, taken: Mapping[str, list[int]]) -> None:
        for name, ids in taken.items():
            held = live.blocks[name]
            new = Blocks(ids, [identity.stamp(live.stamp, len(held) + index) for index in range(len(ids))])
            self._stamps.write(name, new)
            held.extend(new.ids, new.stamps)

    def _answer(self, live: _Live) -> None:
        for name, blocks in live.blocks.items():
            self._stamps.verify(name, blocks, "free")
        ids = {name: torch.tensor(blocks.ids, dtype=torch.int64) for name, blocks in live.blocks.items()}
        self._timed("free", lambda: self._coordinator.free(ids))
        del self._live[live.request.number]

    def _note(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if isinstance(entry, Publish):
                for run in entry.runs:
                    per_page = self._per_page[run.domain]
                    self._stamps.published(self._names[run.domain], run.first * per_page, run.count * per_page)
            elif isinstance(entry, Evict):
                self._word = entry.tokens
        if any(isinstance(entry, Publish | Reclaimed) for entry in entries):
            self.record.progress.append(time.time())

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return call()
        finally:
            seconds = time.monotonic() - began
            if seconds > self.record.slowest.seconds:
                self.record.slowest = Slowest(seconds, f"{name} at step {self.step}")

    # ------------------------------------------------------------------ rest

    def _check_rest(self) -> None:
        """At rest a rank holds what backs its null pages, exactly (S10), and has published nothing else."""
        held = sum(self._coordinator.backing.held_bytes())
        self.record.leaked_bytes = max(self.record.leaked_bytes, held - self._null_bytes)
        if held != self._null_bytes:
            raise NotAtRestError(
                f"rank {self._coordinator.world.rank} holds {held} bytes at the end of wave {self.wave - 1}, the null"
                f" pages take {self._null_bytes}; domains {self._domains_text()}"
            )

    def _domains_text(self) -> str:
        return " ".join(
            f"{name}={domain.published}/{domain.available}" for name, domain in self._coordinator.domains.items()
        )


def published_pages(coordinator: Coordinator) -> dict[str, tuple[int, ...]]:
    """Pages per domain that are published right after an epoch has begun, when only the null block is taken."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in coordinator.stage.domains:
        domain = coordinator.domains[spec.name]
        pages = range(1, domain.blocks // spec.blocks_per_page)
        found[spec.name] = (0, *(page for page in pages if domain.pool.run_is_free(page, 1)))
    return found


def stamps_of(coordinator: Coordinator) -> Stamps:
    """Stamps of a process that has just started: everything published was filled by it and used by nobody."""
    stage = coordinator.stage
    views = {
        pool.name: [coordinator.backing.tensor(pool.name, bank) for bank in range(pool.banks)]
        for pool in stage.pools
        if pool.layers
    }
    stamps = Stamps(stage, views, {name: domain.blocks for name, domain in coordinator.domains.items()})
    for name, pages in published_pages(coordinator).items():
        per_page = stage.domain(name).blocks_per_page
        for page in pages:
            stamps.published(name, page * per_page, per_page)
    return stamps


__all__ = [
    "STOP_TOKENS", "WAVE_REQUESTS", "Backlog", "NotAtRestError", "Record", "Request", "Rest", "Slowest",
    "StalledError", "Workload", "published_pages", "request", "stamps_of",
]  # fmt: skip
