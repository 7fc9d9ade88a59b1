"""A world of two ranks on real cards: what pages hold, what is given back, and memory or a driver that refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.coord.core.transaction import Verdict
from kvcached_dist.coord.core.types import Cause, CauseKind, Health
from tests.coordinator.world import Rank, run_world, values
from tests.gpu.world import GRANULE_BYTES, Published, devices, model, on_card, settings, words

usable, reason = _native.cuda_available()
pytestmark = [pytest.mark.skipif(not usable, reason=reason), pytest.mark.timeout(240)]


def test_every_published_page_holds_what_belongs_there(tmp_path: Path) -> None:
    """S3, S13: kernels read all published pages in every round; fresh ones hold the fill, others what was written.

    A page of each round stays in use beside pages that are reclaimed and grown again in every other round; pages do
    not divide the granule, so most of them share one with a neighbour.
    """

    def body(rank: Rank) -> Any:
        coordinator, full = rank.coordinator, rank.coordinator.domains["full"]
        torch.cuda.set_device(on_card(rank))
        published, kept, bad = Published(rank), [], []
        for round_number in range(20):
            blocks = full.alloc(7 + round_number)
            assert blocks is not None
            published.granted()
            bad.append(published.mismatches())
            published.write(blocks, 1000 * (1 + 20 * coordinator.world.rank + round_number))
            bad.append(published.mismatches())
            kept.append(blocks[:1])
            full.free(blocks[1:])
            coordinator.idle(round_number % 2 == 1)
            published.settle()
            bad.append(published.mismatches())
        for block in kept:
            full.free(block)
        coordinator.idle(True)
        published.settle()
        return bad, published.filled, published.mismatches(), rank.returns_to_start()

    results = values(run_world(body, tp=2, model=model(128), settings=settings(tmp_path), devices=devices()))
    assert [result[0] for result in results] == [[0] * 60] * 2
    assert [result[2:] for result in results] == [(0, True)] * 2
    assert results[0][1] == results[1][1] > 150, "hardly anything was grown again"


CYCLES, CYCLES_MIN, CYCLES_S = 10_000, 1_000, 20.0


def test_grow_and_reclaim_cycles_give_the_cards_memory_back_exactly(tmp_path: Path) -> None:
    """10,000 cycles, or as many as fit into 20 s (not less than 1,000): one page, one layer, through the protocol.

    A cycle is a growth, a retirement and the eight steps or so that they take; on two busy processors, with host memory
    and all ranks in one interpreter, it takes 6 to 12 ms. The driver calls alone do all 10,000 in
    ``test_native_cuda.py``. How many there were is printed.
    """
    cards = devices()
    free = [card.free_bytes() for card in cards]
    deadline = time.monotonic() + CYCLES_S
    goes_on = [True]

    def body(rank: Rank) -> Any:
        full, done = rank.coordinator.domains["full"], 0
        rank.coordinator.idle(True)
        while goes_on[0] and done < CYCLES:
            for _ in range(100):
                blocks = full.alloc(1)
                assert blocks is not None
                full.free(blocks)
                rank.settle()
            done += 100
            rank.meet()
            goes_on[0] = time.monotonic() < deadline  # by both, between two meetings: the last one counts for both
            rank.meet()
        returned, counters = rank.returns_to_start(), rank.device.counters()
        return returned, counters.handles_created - rank.counters_at_start.handles_created == done, done

    spec, wanted = model(3, page_bytes=GRANULE_BYTES, layers=1), settings(tmp_path, run_pages_max=1)
    results = values(run_world(body, tp=2, model=spec, settings=wanted, devices=cards))
    assert [result[:2] for result in results] == [(True, True)] * 2
    print(f"{results[0][2]} cycles")
    assert results[0][2] == results[1][2] >= CYCLES_MIN, f"too few cycles in {CYCLES_S} s for a statement"
    assert [card.free_bytes() for card in cards] == free


def refusal(rank: Rank) -> Cause | None:
    """Why the last growth was refused, as the leader has recorded it; ``None`` on other ranks."""
    leader = rank.coordinator._leader
    if leader is None:
        return None
    with rank.coordinator._agent.changed:
        return [closed.cause for closed in leader.commit.closed if closed.verdict is Verdict.ABORTED][-1]


@pytest.mark.parametrize(
    ("taken_before", "said", "creates"),
    [("missing_bytes", "device memory", False), ("reserve", "CUDA_ERROR_OUT_OF_MEMORY", True)],
    ids=["the check", "the create"],
)
def test_short_memory_on_one_rank_is_a_miss_on_both_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_before: str, said: str, creates: bool
) -> None:
    """Memory of rank 1's card is taken while it does a RESERVE: before it looks what is free, or right afterwards.

    In the second case free memory has passed the check, and cuMemCreate itself refuses in the middle of the runs. Rank
    1 has three layers and rank 0 one; what is left on the card is enough for two, so that rank 1 is refused and rank 0
    is not, in whatever order they come where they share a card. Taken earlier, a beat could tell the leader, which
    would know the answer and not ask.
    """
    page = 64 << 20
    layer_bytes = 12 * page
    ballast: list[torch.Tensor] = []

    def take_memory(rank: Rank) -> None:
        backing = rank.coordinator.backing
        goes_on = getattr(backing, taken_before)

        def hooked(*arguments: Any) -> Any:
            monkeypatch.undo()  # once
            torch.cuda.empty_cache()
            room = rank.device.free_bytes() - 2 * layer_bytes
            ballast.append(torch.empty(room, dtype=torch.uint8, device=on_card(rank)))
            return goes_on(*arguments)

        monkeypatch.setattr(backing, taken_before, hooked)

    def body(rank: Rank) -> Any:
        full, mine = rank.coordinator.domains["full"], rank.coordinator.world.rank
        if mine == 1:
            take_memory(rank)
        rank.meet()
        missed = full.alloc(12)
        cause = refusal(rank)
        rank.coordinator.step()
        nothing_held = rank.returns_to_start()
        created = rank.device.counters().handles_created - rank.counters_at_start.handles_created
        rank.meet()
        if mine == 1:
            assert ballast, "the memory was never taken: the test shows nothing"
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
        return cause, created, (missed, nothing_held, ids, rank.coordinator.health["full"])

    spec = model(16, page_bytes=page, layers=6, owners=(0, 3, 4, 5))
    wanted = settings(tmp_path, gpu_utilization=1.0, page_size_mb=64, growth_deadline_s=5.0)
    results = values(run_world(body, pp=2, model=spec, settings=wanted, devices=devices()))
    cause = results[0][0]
    assert (cause.kind, cause.rank) == (CauseKind.EXHAUSTED, 1)
    assert said in cause.detail
    assert (results[1][1] > 0) is creates
    assert [result[2] for result in results] == [(None, True, list(range(1, 13)), Health.HEALTHY)] * 2


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
        hits = mine.device.faults.hits().get(call, 0)
        return hits, len(taken) > 0, mine.returns_to_start(), mine.coordinator.health["full"], mine.coordinator.digest

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
    assert [result[0] for result in results] == [int(mine == rank) for mine in range(2)], "the fault did not strike"
    assert [result[1:4] for result in results] == [(True, True, Health.HEALTHY)] * 2
    assert results[0][4] == results[1][4]
