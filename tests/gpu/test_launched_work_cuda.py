"""Work that was launched on a card, and growth and reclaim beside it: nothing is unmapped early, nobody waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.agent_ports import Fence
from kvcached_dist.coord.core.entries import Publish
from kvcached_dist.cuda_fence import CudaFence
from tests.coordinator.world import Rank, run_world, values
from tests.gpu.world import FILL_WORD, GRANULE_BYTES, devices, model, on_card, settings, words

usable, reason = _native.cuda_available()
pytestmark = [pytest.mark.skipif(not usable, reason=reason), pytest.mark.timeout(240)]

SECOND = 1_800_000_000
"""Clock cycles of a card, about: what ``torch.cuda._sleep`` counts."""

STEP_MAX_S = 0.05
"""A step that only records an event and sends messages takes less, on a machine that runs other things too."""


def busy(seconds: float) -> None:
    """Let the current stream do nothing for about this long."""
    torch.cuda._sleep(int(seconds * SECOND))  # type: ignore[no-untyped-call]


def recorded() -> torch.cuda.Event:
    """An event behind what is on the current stream."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextlib.contextmanager
def launching(launch: Callable[[], object], wait: Callable[[], object], every: int) -> Iterator[list[int]]:
    """Launch work from a thread of its own, again and again, while the block runs.

    Args:
        launch: puts one round of work on a stream.
        wait: until that stream has done it all.
        every: rounds between two waits, so that no more than these are queued.

    Yields:
        The number of rounds; behind the block all of them are done, and what went wrong in one is raised.
    """
    stop, rounds = threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            launch()
            rounds[0] += 1
            if rounds[0] % every == 0:
                wait()
        wait()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield rounds
        finally:
            stop.set()
        working.result(60)


def grow_and_reclaim(rank: Rank, blocks: int, times: int) -> None:
    """Take so many blocks and give them and their memory back, so many times."""
    full = rank.coordinator.domains["full"]
    for _ in range(times):
        taken = full.alloc(blocks)
        assert taken is not None
        full.free(taken)
        rank.settle()


@dataclass
class Retirement:
    """What became of pages that were freed behind half a second of work.

    Attributes:
        early: unmaps that were seen while that work had not finished.
        content_right: the work found its pages as it had written them.
        reclaimed: the pages were unmapped afterwards.
        steps_s: how long each step took that began before the work had finished.
    """

    early: int
    content_right: bool
    reclaimed: bool
    steps_s: list[float]

    def check(self) -> None:
        """R15, R59: unmapped behind the work; and the step that retires the pages waits for it no more than others."""
        assert (self.early, self.content_right, self.reclaimed) == (0, True, True)
        longest = max(self.steps_s)
        assert longest < STEP_MAX_S, f"a step waited {longest:.3f} s for the device"
        assert len(self.steps_s) >= 100, f"only {len(self.steps_s)} steps beside half a second of work"


def freed_behind_work(rank: Rank) -> Retirement:
    """Free pages behind a long kernel that is followed by others which write and read them, and go on stepping."""
    coordinator, card = rank.coordinator, on_card(rank)
    full, data = coordinator.domains["full"], words(rank)
    torch.cuda.set_device(card)
    blocks = full.alloc(32)
    assert blocks is not None
    ids = blocks.to(card)
    # Once beforehand: the first launch of a kernel loads it, which waits for the device.
    data.index_fill_(1, ids, 4)
    total = data[:, ids].sum()
    torch.cuda.synchronize()
    unmaps, early, steps_s = rank.device.counters().unmaps, 0, []
    busy(0.5)
    data.index_fill_(1, ids, 5)
    total = data[:, ids].sum()
    finished = recorded()
    full.free(blocks)
    coordinator.idle(True)
    while True:
        begin = time.perf_counter()
        coordinator.step()
        steps_s.append(time.perf_counter() - begin)
        unmapped = rank.device.counters().unmaps - unmaps
        if finished.query():  # type: ignore[no-untyped-call]
            break
        early = max(early, unmapped)
        time.sleep(0.001)
    rank.settle()
    right = int(total) == 5 * data[:, :32].numel()
    return Retirement(early, right, rank.device.counters().unmaps > unmaps, steps_s)


def test_nothing_is_unmapped_before_work_already_launched_has_finished(tmp_path: Path) -> None:
    """The retirement waits for an event; the scheduler goes on meanwhile."""
    found = run_world(freed_behind_work, model=model(64), settings=settings(tmp_path), devices=devices(1))
    values(found)[0].check()


class WaitsForTheDevice(CudaFence):
    """Mutant: ``torch.cuda.synchronize()`` in the fence. Right contents, but the scheduler stands still."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        super().__init__()


class WaitsForTheStream(CudaFence):
    """Mutant: the stream is waited for, not the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize("mutant", [WaitsForTheDevice, WaitsForTheStream])
def test_a_fence_that_waits_is_noticed(tmp_path: Path, mutant: type[Fence]) -> None:
    """The test above with a fence that does not only record an event: one step takes as long as the work before it."""
    (found,) = values(
        run_world(freed_behind_work, model=model(64), settings=settings(tmp_path), devices=devices(1), fence=mutant)
    )
    assert (found.early, found.content_right, found.reclaimed) == (0, True, True)
    with pytest.raises(AssertionError, match="a step waited"):
        found.check()


def test_pages_freed_behind_queued_writes_are_unmapped_behind_them(tmp_path: Path) -> None:
    """R59: 200 times a page is freed while its write is still behind a sleeping kernel; a page is a granule of its own.

    A page that were unmapped too early would fault under the write; one that were grown again too early would not hold
    the fill. The page next to it stays in use.
    """

    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        full, data = coordinator.domains["full"], words(rank)
        torch.cuda.set_device(card)
        with torch.cuda.stream(torch.cuda.Stream(card)):  # type: ignore[no-untyped-call]
            live = full.alloc(1)
            assert live is not None
            neighbour = data[:, int(live[0])]
            neighbour.fill_(7)
            bad = torch.zeros((), dtype=torch.int64, device=card)
            unmaps, behind = rank.device.counters().unmaps, 0
            coordinator.idle(True)
            for _ in range(200):
                blocks = full.alloc(1)
                assert blocks is not None
                page = data[:, int(blocks[0])]
                bad += (page != FILL_WORD).sum()
                busy(0.002)
                page.fill_(5)
                written = recorded()
                full.free(blocks)
                behind += not written.query()  # type: ignore[no-untyped-call]
                rank.settle()
            torch.cuda.synchronize(card)
            bad += (neighbour != 7).sum()
            return int(bad), rank.device.counters().unmaps - unmaps, behind > 100

    spec, wanted = model(4, page_bytes=GRANULE_BYTES, layers=2), settings(tmp_path, run_pages_max=1)
    results = values(run_world(body, tp=2, model=spec, settings=wanted, devices=devices()))
    assert results == [(0, 200 * 2, True)] * 2


def test_a_fresh_page_holds_the_fill_for_whoever_reads_it_at_once(tmp_path: Path) -> None:
    """R72: 100 times, right after the publication and from another stream than that of the fill.

    Before they go the pages are filled with something else, so that memory which comes back, zeros, or a translation
    that is not there yet, would all be seen.
    """

    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        full, fresh, published = coordinator.domains["full"], words(rank)[:, 1:17], 0
        torch.cuda.set_device(card)
        with torch.cuda.stream(torch.cuda.Stream(card)):  # type: ignore[no-untyped-call]
            bad = torch.zeros((), dtype=torch.int64, device=card)
            coordinator.idle(True)
            for _ in range(100):
                blocks = full.alloc(16)
                assert blocks is not None
                bad += (fresh != FILL_WORD).sum()
                assert blocks.tolist() == list(range(1, 17))
                entries = coordinator.take_granted()
                published += sum(run.count for entry in entries if isinstance(entry, Publish) for run in entry.runs)
                fresh.fill_(0x5A5A_5A5A)
                full.free(blocks)
                rank.settle()
            return int(bad), published

    results = values(run_world(body, tp=2, model=model(64), settings=settings(tmp_path), devices=devices()))
    assert results == [(0, 100 * 16)] * 2


def test_kernels_on_a_live_page_do_not_notice_growth_and_reclaim_beside_it(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        torch.cuda.set_device(card)
        full, data = coordinator.domains["full"], words(rank)
        live = full.alloc(1)
        assert live is not None
        page = data[:, int(live[0])]
        page.fill_(1)
        stream: torch.cuda.Stream = torch.cuda.Stream(card)  # type: ignore[no-untyped-call]

        def add() -> None:
            with torch.cuda.stream(stream):
                page.add_(1)

        with launching(add, stream.synchronize, every=200) as rounds:
            coordinator.idle(True)
            created = rank.device.counters().handles_created
            grow_and_reclaim(rank, 1, 1000)
        torch.cuda.synchronize()
        # A page of a granule of its own: every growth of it is a create in each layer.
        created = rank.device.counters().handles_created - created
        return bool((page == 1 + rounds[0]).all()), rounds[0] > 100, created >= 4000

    whole = model(64, page_bytes=GRANULE_BYTES)
    wanted = settings(tmp_path, run_pages_max=1, run_share=0)
    assert values(run_world(body, model=whole, settings=wanted, devices=devices(1))) == [(True, True, True)]


def test_alloc_free_and_step_never_synchronise_the_device(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        torch.cuda.set_device(on_card(rank))
        full = rank.coordinator.domains["full"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                blocks = full.alloc(4)
                assert blocks is not None
                full.free(blocks)
                rank.coordinator.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    assert values(run_world(body, model=model(128), settings=settings(tmp_path), devices=devices(1))) == [True]


def test_kernels_of_another_card_read_published_pages_while_others_are_reclaimed(tmp_path: Path) -> None:
    """With two cards every rank's pages are read by the other card, over NVLink; with one by kernels beside."""
    oracle = pytest.importorskip("tests.gpu.oracle")

    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        torch.cuda.set_device(card)
        full, data = coordinator.domains["full"], words(rank)
        live = full.alloc(4)
        assert live is not None
        data[:, live.to(card)] = 9
        torch.cuda.synchronize()
        neighbour = torch.device("cuda", (card.index + 1) % torch.cuda.device_count())
        backing = coordinator.backing.native
        for offset, size, _, _ in backing.extents(0):
            oracle.allow(backing.base(0) + offset, size, neighbour.index)
        reader, ids = oracle.Reader(neighbour), live.to(neighbour)
        torch.cuda.synchronize(neighbour)

        def look() -> None:
            for layer in range(len(data)):
                reader.launch(data[layer], ids, 9)

        with launching(look, reader.wait, every=50) as looks:
            coordinator.idle(True)
            grow_and_reclaim(rank, 16, 200)
        return reader.mismatches(), looks[0] > 100

    found = run_world(body, tp=2, model=model(64), settings=settings(tmp_path), devices=devices())
    assert values(found) == [(0, True)] * 2
