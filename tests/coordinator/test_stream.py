"""Engine-stream mode: rank 0 decides, every rank applies, the engine's lists are told which ids exist."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvcached_dist import GroupFailed, World, _native
from kvcached_dist.coord.core.entries import Entry, Evict, Growable, Publish, Retire
from kvcached_dist.coord.core.transaction import TxnStep
from kvcached_dist.coord.links.store import connect_store
from kvcached_dist.fault_specs import FaultPlan
from kvcached_dist.stream import StreamCoordinator
from tests.coordinator.world import GRANULE, JOIN_S, config, simple_model, values

pytestmark = pytest.mark.slow

SLOW_UNMAP_S = 0.8
"""Well within the growth deadline of these tests."""


class PlainList:
    """The least engine list there can be: free ids in the order in which they are handed out."""

    def __init__(self, per_page: int) -> None:
        self.per_page = per_page
        self.free: list[int] = []
        self.known: set[int] = set()

    def _ids(self, first: int, count: int) -> list[int]:
        return [i for i in range(first * self.per_page, (first + count) * self.per_page) if i]

    def available(self) -> int:
        return len(self.free)

    def published(self) -> int:
        return len(self.known)

    def publish(self, first_page: int, count: int) -> None:
        self.free += self._ids(first_page, count)
        self.known |= set(self._ids(first_page, count))

    def retire(self, first_page: int, count: int) -> None:
        gone = set(self._ids(first_page, count))
        if not gone <= set(self.free):
            raise ValueError(f"{gone - set(self.free)} are in use")
        self.free = [i for i in self.free if i not in gone]
        self.known -= gone

    def run_is_free(self, first_page: int, count: int) -> bool:
        return set(self._ids(first_page, count)) <= set(self.free)

    def sort(self) -> None:
        self.free.sort()

    def ids_crc(self) -> int:
        return zlib.crc32(repr(self.free).encode())

    def verify(self) -> None:
        """Everything is known on the host."""


@dataclass
class Rank:
    """What a test body sees of its rank."""

    coordinator: StreamCoordinator
    lists: list[PlainList]
    stream: Any
    held_at_start: int

    @property
    def full(self) -> PlainList:
        return self.lists[0]

    def iteration(self, wanted: int = 0, *, idle: bool = False, running: int = 0) -> tuple[Entry, ...]:
        """One iteration of an engine: rank 0 broadcasts a list of requests, all ranks handle it."""
        if self.coordinator.leads:
            frames = self.coordinator.decide({"full": wanted}, idle=idle, running={"full": running})
            for follower in self.stream:
                follower.put(frames)
        else:
            frames = self.stream.get(timeout=JOIN_S)
        return self.coordinator.apply(frames) if frames else ()

    def until(self, reached: Callable[[], bool], wanted: int = 0, *, idle: bool = False) -> list[Entry]:
        """Iterate, on all ranks alike, until rank 0 has reached it."""
        seen: list[Entry] = []
        deadline = time.monotonic() + 10
        while True:
            seen += self.iteration(wanted, idle=idle)
            if self.coordinator.leads:
                done = reached()
                for follower in self.stream:
                    follower.put(done)
            else:
                done = self.stream.get(timeout=JOIN_S)
            if done:
                return seen
            assert time.monotonic() < deadline, f"not reached; {self.coordinator.stats}"
            time.sleep(0.002)


def run(body: Callable[[Rank], Any], *, size: int = 2, faults: Sequence[str] = (), **overrides: Any) -> list[Any]:
    """A world of ranks that are threads; the engine's broadcast is a queue per follower."""
    spec = simple_model()
    server = connect_store("127.0.0.1", 0, True, size, 10) if size > 1 else None
    queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size - 1)]
    results: list[Any] = [None] * size
    together = threading.Barrier(size)

    def rank_main(rank: int) -> None:
        lists: list[PlainList] = []

        def make_lists(_blocks: Sequence[int], per_page: Sequence[int]) -> list[PlainList]:
            lists[:] = [PlainList(count) for count in per_page]
            return lists

        coordinator: StreamCoordinator | None = None
        try:
            coordinator = StreamCoordinator.start(
                world=World(rank, size),
                stage=spec.stage(0, 1),
                device=_native.HostDevice(1 << 20, GRANULE),
                config=config(**overrides),
                make_lists=make_lists,
                store=None if server is None else server.clone(),  # type: ignore[attr-defined]
                faults=FaultPlan.parse(faults, size),
            )
            held = coordinator.physical.held_bytes()
            together.wait(JOIN_S)
            results[rank] = body(Rank(coordinator, lists, queues if rank == 0 else queues[rank - 1], held))
        except Exception as error:
            results[rank] = error
        finally:
            if coordinator is not None:
                coordinator.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    return results


def test_a_snapshot_counts_the_null_block_which_the_engine_never_sees() -> None:
    def body(rank: Rank) -> tuple[int, int, int]:
        rank.until(lambda: rank.full.available() >= 4, wanted=4)
        rank.full.free.pop()
        state = rank.coordinator.snapshot()["domains"]["full"]
        return (
            state["published"] - len(rank.full.known),
            state["published"] % state["blocks_per_page"],
            state["published"] - state["free"] - 1,
        )

    assert run(body) == [(1, 0, 1)] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_step_needs_is_published_in_the_mark_of_that_step(size: int) -> None:
    def body(rank: Rank) -> Any:
        start = rank.full.published()
        entries = rank.iteration(3)
        return start, [type(entry) for entry in entries].count(Publish), rank.full.available(), rank.coordinator.digest

    results = values(run(body, size=size))
    assert all(result == results[0] for result in results)
    start, publishes, available, _ = results[0]
    assert (start, publishes) == (0, 1)
    assert available >= 3


def test_an_idle_engine_gives_everything_back() -> None:
    def body(rank: Rank) -> Any:
        held = rank.held_at_start
        rank.until(lambda: rank.full.available() >= 5, 5)
        grown = rank.coordinator.physical.held_bytes()
        entries = rank.until(lambda: rank.coordinator.physical.held_bytes() == held, idle=True)
        return held, grown, any(isinstance(entry, Retire) for entry in entries), rank.full.free

    for held, grown, retired, free in values(run(body)):
        assert grown > held
        assert retired
        assert free == []


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_only_what_runs_waits_for_the_end_of_an_unmap(size: int, full: bool) -> None:
    """On a full card, too: what it waits for is what is being given back."""

    def body(rank: Rank) -> Any:
        def unmapping() -> bool:
            leader = rank.coordinator._leader
            assert leader is not None
            return leader.commit.txn is not None and leader.commit.txn.step is TxnStep.UNMAPPING

        rank.until(lambda: rank.full.available() >= 4, 4)
        if full:
            if rank.coordinator.leads:
                rank.coordinator.set_limit(rank.coordinator.physical.held_bytes(), 1)
            rank.until(lambda: rank.coordinator.domains["full"].growable == 0)
        rank.until(unmapping, idle=True)
        begun = time.monotonic()
        new = rank.iteration(3)
        middle = time.monotonic()
        known = list(rank.full.free)
        running = rank.iteration(3, running=3)
        return (
            any(isinstance(entry, Publish) for entry in new),
            known,
            any(isinstance(entry, Publish) for entry in running),
            rank.full.available() >= 3,
            not rank.coordinator.leads or middle - begun < SLOW_UNMAP_S / 2,
        )

    slow = f"rank={size - 1},op=slow,at=unmap,ms={int(1000 * SLOW_UNMAP_S)}"
    assert values(run(body, size=size, faults=[slow])) == [(False, [], True, True, True)] * size


def test_blocks_in_use_stay() -> None:
    def body(rank: Rank) -> Any:
        rank.until(lambda: rank.full.available() >= 4, 4)
        mine = [rank.full.free.pop(0) for _ in range(2)]
        rank.until(lambda: not rank.full.free and not rank.coordinator.stats.reclaim_cancelled, idle=True)
        return mine, sorted(rank.full.known)

    for mine, known in values(run(body)):
        assert sorted(mine) == known


def test_a_refusal_makes_growable_fall_and_the_engine_is_told_by_the_log() -> None:
    def body(rank: Rank) -> Any:
        first = rank.iteration(2)
        refused = rank.full.available(), rank.coordinator.domains["full"].growable
        rank.until(lambda: rank.full.available() >= 2, 2)
        return any(isinstance(entry, Growable) and entry.blocks == 0 for entry in first), refused, rank.full.available()

    for told, refused, later in values(run(body, faults=["rank=1,op=create,nth=1"])):
        assert told
        assert refused == (0, 0)
        assert later >= 2


def test_memory_is_short_where_little_is_free_and_little_could_be_grown() -> None:
    """Of nine pages one eighth is one page: with a limit at what is held there is not even that."""

    def body(rank: Rank) -> Any:
        before = rank.coordinator.short_blocks("full")
        if rank.coordinator.leads:
            rank.coordinator.set_limit(rank.coordinator.physical.held_bytes(), 1)
        rank.until(lambda: rank.coordinator.short_blocks("full") == 1)
        if rank.coordinator.leads:
            rank.coordinator.set_limit(0, 2)
        rank.until(lambda: rank.coordinator.short_blocks("full") == 0)
        return before

    assert values(run(body)) == [0, 0]


def test_a_lost_mark_is_found_and_ends_the_world() -> None:
    def body(rank: Rank) -> Any:
        rank.iteration(1)
        if rank.coordinator.leads:
            for wanted in (2, 3):
                frames = rank.coordinator.decide({"full": wanted}, idle=False)
                rank.coordinator.apply(frames)
            rank.stream[0].put(frames)
            return str(rank.coordinator.await_failure(5))
        with pytest.raises(GroupFailed, match="lost, repeated or damaged"):
            rank.coordinator.apply(rank.stream.get(timeout=JOIN_S))
        return str(rank.coordinator.failure)

    leader, follower = values(run(body))
    assert "S12" in follower
    assert "S12" in leader


def test_lists_that_differ_are_found_at_the_next_mark() -> None:
    def body(rank: Rank) -> Any:
        rank.until(lambda: rank.full.available() >= 3, 3)
        if not rank.coordinator.leads:
            rank.full.free.reverse()
            with pytest.raises(GroupFailed, match="do not run the same operations"):
                rank.until(lambda: True, 6)
            return None
        # The failure may be known before this mark is applied here.
        with contextlib.suppress(GroupFailed):
            rank.iteration(6)
        return str(rank.coordinator.await_failure(5))

    leader, _ = values(run(body))
    assert "rank 1" in leader


def test_silence_costs_nothing() -> None:
    def body(rank: Rank) -> Any:
        rank.until(lambda: rank.full.available() >= 2, 2)
        before = rank.coordinator.marks
        for _ in range(50):
            rank.iteration(2)
        return rank.coordinator.marks - before

    assert max(values(run(body))) <= 2


@pytest.mark.parametrize("tokens", [7, 0])
def test_an_eviction_reaches_every_rank_in_the_same_mark(tokens: int) -> None:
    """So does a compaction, which is one of nothing."""

    def body(rank: Rank) -> Any:
        rank.coordinator.evict(tokens)
        if not tokens:
            rank.coordinator.compact()
        return [entry for entry in rank.iteration() if isinstance(entry, Evict)]

    assert values(run(body)) == [[Evict(tokens)], [Evict(tokens)]]
