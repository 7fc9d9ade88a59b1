"""A world of two ranks on real cards: the cross-rank transaction over CUDA memory.

Rank r uses card ``r % cards``: one card carries both ranks, two cards one each. Ranks are threads of one process
with a device object each; the links are real.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.coord.core.types import Health
from kvcached_dist.pools.specs import DomainSpec, FillPiece, ModelSpec, PoolSpec
from tests.coordinator.world import Rank, config, run_world, values

usable, reason = _native.cuda_available()
pytestmark = [pytest.mark.skipif(not usable, reason=reason), pytest.mark.timeout(240)]

PAGE_BYTES = 149_760
"""Stride of a DeepSeek-V4 sliding-window page: it does not divide the 2 MiB granule."""

FILL = 0xFF80_0000


def model(pages: int, *, page_bytes: int = PAGE_BYTES, layers: int = 4) -> ModelSpec:
    pool = PoolSpec(
        "full_kv",
        "full",
        page_bytes,
        tuple(range(layers)),
        (page_bytes,),
        fill_row_bytes=64,
        fill=(FillPiece(0, 64, FILL),),
    )
    return ModelSpec("simple", layers, (DomainSpec("full", pages, 256, 1),), (pool,))


def devices(ranks: int = 2) -> list[_native.Device]:
    cards = torch.cuda.device_count()
    for card in range(min(cards, ranks)):
        torch.zeros(1, device=f"cuda:{card}")
    return [_native.CudaDevice(rank % cards) for rank in range(ranks)]


def settings(tmp_path: Path, **overrides: Any) -> Any:
    wanted = {"growth_deadline_s": 2.0, "lease_s": 20.0, "beat_s": 0.2, "run_pages_max": 64, **overrides}
    return config(physical_growth_lock_dir=str(tmp_path), **wanted)


def on_card(rank: Rank) -> torch.device:
    return torch.device("cuda", rank.device.ordinal)


def words(rank: Rank) -> torch.Tensor:
    """All pages as 64-bit words: ``[layers, pages, words]``."""
    return rank.coordinator.backing.tensor("full_kv").view(torch.int64)


def test_every_published_page_is_filled_writable_and_readable(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        torch.cuda.set_device(on_card(rank))
        data, bad = words(rank), 0
        pattern = torch.tensor([FILL | (FILL << 32)], dtype=torch.uint64).view(torch.int64).item()
        for round_number in range(20):
            blocks = full.alloc(7 + round_number)
            assert blocks is not None
            ids = blocks.to(on_card(rank))
            bad += int((data[:, ids] != pattern).sum()) if round_number == 0 else 0
            stamp = ids * 1000 + rank.coordinator.world.rank
            data[:, ids] = stamp[None, :, None]
            torch.cuda.synchronize()
            bad += int((data[:, ids] != stamp[None, :, None]).sum())
            full.free(blocks)
            rank.coordinator.step()
        rank.coordinator.idle(True)
        rank.settle()
        return bad, rank.returns_to_start()

    results = values(run_world(body, tp=2, model=model(128), settings=settings(tmp_path), devices=devices()))
    assert results == [(0, True)] * 2


def test_grow_and_reclaim_cycles_give_the_cards_memory_back_exactly(tmp_path: Path) -> None:
    cards = devices()
    free = [card.free_bytes() for card in cards]

    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        rank.coordinator.idle(True)
        for _ in range(200):
            blocks = full.alloc(32)
            assert blocks is not None
            full.free(blocks)
            rank.settle()
        counters = rank.device.counters()
        return rank.returns_to_start(), counters.handles_created > 1000

    assert (
        values(run_world(body, tp=2, model=model(64), settings=settings(tmp_path), devices=cards)) == [(True, True)] * 2
    )
    assert [card.free_bytes() for card in cards] == free


def test_short_memory_on_one_card_is_a_miss_on_both_ranks_and_passes(tmp_path: Path) -> None:
    cards = devices()
    page = 64 << 20
    ballast: list[torch.Tensor] = []
    victim = cards[-1].ordinal

    def body(rank: Rank) -> Any:
        full = rank.coordinator.domains["full"]
        if rank.coordinator.world.rank == 1:
            torch.cuda.empty_cache()
            room = rank.device.free_bytes() - 3 * page
            ballast.append(torch.empty(room, dtype=torch.uint8, device=f"cuda:{victim}"))
        rank.meet()
        missed = full.alloc(12)
        rank.coordinator.step()
        nothing_held = rank.returns_to_start()
        rank.meet()
        if rank.coordinator.world.rank == 1:
            ballast.clear()
            torch.cuda.empty_cache()
        rank.meet()
        deadline = time.monotonic() + 20
        while (taken := full.alloc(12)) is None and time.monotonic() < deadline:
            rank.coordinator.step()
            time.sleep(0.02)
        ids = None if taken is None else taken.tolist()
        if taken is not None:
            full.free(taken)
        return missed, nothing_held, ids, rank.coordinator.health["full"]

    spec = model(16, page_bytes=page, layers=1)
    results = values(
        run_world(
            body, tp=2, model=spec, settings=settings(tmp_path, gpu_utilization=1.0, page_size_mb=64), devices=cards
        )
    )
    assert results == [(None, True, list(range(1, 13)), Health.HEALTHY)] * 2


@pytest.mark.parametrize("call", ["create", "map", "access", "fill", "unmap", "release"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_driver_fault_on_either_rank_is_survived(tmp_path: Path, call: str, rank: int) -> None:
    def body(mine: Rank) -> Any:
        full = mine.coordinator.domains["full"]
        taken = []
        for _ in range(20):
            blocks = full.alloc(8)
            mine.coordinator.step()
            if blocks is not None:
                words(mine)[:, blocks.to(on_card(mine))] = 7
                taken.append(blocks)
            time.sleep(0.005)
        torch.cuda.synchronize(on_card(mine))
        for blocks in taken:
            full.free(blocks)
        mine.coordinator.idle(True)
        mine.settle()
        return len(taken) > 0, mine.returns_to_start(), mine.coordinator.health["full"], mine.coordinator.digest

    results = values(
        run_world(
            body,
            tp=2,
            model=model(128),
            settings=settings(tmp_path),
            devices=devices(),
            faults=[f"rank={rank},op={call},nth=3"],
        )
    )
    assert [result[:3] for result in results] == [(True, True, Health.HEALTHY)] * 2
    assert results[0][3] == results[1][3]


def test_nothing_is_unmapped_before_work_already_launched_has_finished(tmp_path: Path) -> None:
    """A long kernel chain reads and writes pages that the scheduler frees meanwhile."""

    def body(rank: Rank) -> Any:
        coordinator = rank.coordinator
        full, card = coordinator.domains["full"], on_card(rank)
        torch.cuda.set_device(card)
        data = words(rank)
        blocks = full.alloc(32)
        assert blocks is not None
        ids = blocks.to(card)
        unmaps = rank.device.counters().unmaps
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        data[:, ids] = 5
        total = data[:, ids].sum()
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record()
        full.free(blocks)
        coordinator.idle(True)
        early = 0
        while not finished.query():  # type: ignore[no-untyped-call]
            coordinator.step()
            early += rank.device.counters().unmaps - unmaps
            time.sleep(0.001)
        rank.settle()
        return early, int(total) == 5 * data[:, :32].numel(), rank.device.counters().unmaps > unmaps

    results = run_world(body, model=model(64), settings=settings(tmp_path), devices=devices(1))
    assert values(results) == [(0, True, True)]


def test_kernels_on_a_live_page_do_not_notice_growth_and_reclaim_beside_it(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        torch.cuda.set_device(card)
        full, data = coordinator.domains["full"], words(rank)
        live = full.alloc(1)
        assert live is not None
        page = data[:, int(live[0])]
        page.fill_(1)
        stop, rounds = threading.Event(), [0]

        def spin() -> None:
            with torch.cuda.stream(torch.cuda.Stream(card)):  # type: ignore[no-untyped-call]
                while not stop.is_set():
                    page.add_(1)
                    rounds[0] += 1
                    if rounds[0] % 200 == 0:
                        torch.cuda.current_stream().synchronize()
                torch.cuda.current_stream().synchronize()

        kernels = threading.Thread(target=spin)
        kernels.start()
        coordinator.idle(True)
        created = rank.device.counters().handles_created
        for _ in range(1000):
            blocks = full.alloc(1)
            assert blocks is not None
            full.free(blocks)
            rank.settle()
        stop.set()
        kernels.join(60)
        torch.cuda.synchronize()
        # A page of a granule of its own: every growth of it is a create in each layer.
        created = rank.device.counters().handles_created - created
        return bool((page == 1 + rounds[0]).all()), rounds[0] > 100, created >= 4000

    whole = model(64, page_bytes=2 << 20)
    wanted = settings(tmp_path, run_pages_max=1, run_share=0)
    assert values(run_world(body, model=whole, settings=wanted, devices=devices(1))) == [(True, True, True)]


def test_a_captured_graph_replays_over_a_pool_that_grew_after_the_capture(tmp_path: Path) -> None:
    """Growth runs in the agent's threads during the capture, too; relaxed capture keeps both apart."""

    def body(rank: Rank) -> Any:
        coordinator, card = rank.coordinator, on_card(rank)
        torch.cuda.set_device(card)
        full, data = coordinator.domains["full"], words(rank)
        ids = torch.zeros(8, dtype=torch.int64, device=card)
        value = torch.zeros(1, dtype=torch.int64, device=card)
        first = full.alloc(8)
        assert first is not None
        ids.copy_(first)
        data.index_fill_(1, ids, 0)
        torch.cuda.synchronize()
        graph, grown = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            data.index_copy_(1, ids, value.expand(data.shape[0], 8, data.shape[2]).contiguous())
            grown.append(full.alloc(40))
        right = True
        for step in range(1, 20):
            blocks = full.alloc(8)
            assert blocks is not None
            ids.copy_(blocks)
            value.fill_(step)
            graph.replay()
            torch.cuda.synchronize()
            right &= bool((data[:, blocks.to(card)] == step).all())
            full.free(blocks)
            coordinator.step()
        return right, grown[0] is not None

    assert values(run_world(body, model=model(128), settings=settings(tmp_path), devices=devices(1))) == [(True, True)]


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
        stop, looks = threading.Event(), [0]

        def look() -> None:
            while not stop.is_set():
                for layer in range(len(data)):
                    reader.launch(data[layer], ids, 9)
                looks[0] += 1
                if looks[0] % 50 == 0:
                    reader.wait()

        looking = threading.Thread(target=look)
        looking.start()
        coordinator.idle(True)
        for _ in range(200):
            blocks = full.alloc(16)
            assert blocks is not None
            full.free(blocks)
            rank.settle()
        stop.set()
        looking.join(60)
        return reader.mismatches(), looks[0] > 100

    found = run_world(body, tp=2, model=model(64), settings=settings(tmp_path), devices=devices())
    assert values(found) == [(0, True)] * 2
