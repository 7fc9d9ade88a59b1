"""Memory comes back while the engine is busy, although its list is first-in-first-out and scatters what is free."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvcached_dist import World, _native
from kvcached_dist.config import Config
from kvcached_dist.coord.core.entries import Retire, Sort
from kvcached_dist.pools.specs import DomainSpec, FillPiece, ModelSpec, PoolSpec
from kvcached_dist.sglang.census import HostCopy
from kvcached_dist.sglang.fence import StreamFence
from kvcached_dist.sglang.lists import TokenList
from kvcached_dist.stream import EngineList, StreamCoordinator
from tests.sglang.late import Late

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PER_PAGE, PAGES, TOKENS = 32, 64, 2000

ANSWERS_EVERY = 20
"""Iterations after which a late device has answered."""


class Engine:
    """The engine's token allocator over elastic memory, one iteration at a time; one rank."""

    def __init__(self, late: Late | None = None) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        pool = PoolSpec("kv", "full", 128, (0,), (128,), fill_row_bytes=128, fill=(FillPiece(0, 128),))
        model = ModelSpec("busy", 1, (DomainSpec("full", PAGES * PER_PAGE, 1, PER_PAGE),), (pool,))
        self.tokens: TokenList
        self.late = late
        self.iterations = 0
        self.coordinator = StreamCoordinator.start(
            world=World(),
            stage=model.stage(0, 1),
            device=_native.HostDevice(4 << 20, 4096),
            config=Config.preset("tests", min_reserved_pages=1, max_reserved_pages=2, run_pages_max=4, lease_s=30.0),
            make_lists=self._make_lists,
            fence=None if late is None else lambda: StreamFence((), self.tokens.take_checks()),
        )
        self.allocator = TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", None, False)
        self.tokens.bind(self.allocator)
        self.seen: list[type] = []

    def _make_lists(self, blocks: Sequence[int], per_page: Sequence[int]) -> list[EngineList]:
        self.tokens = TokenList("full", blocks[0], per_page[0], TOKENS, self.late or HostCopy)
        return [self.tokens]

    def iterate(self, wanted: int) -> None:
        self.iterations += 1
        if self.late is not None and self.iterations % ANSWERS_EVERY == 0:
            self.late.pass_time()
        frames = self.coordinator.decide({"full": wanted}, idle=False)
        if frames:
            self.seen += [type(entry) for entry in self.coordinator.apply(frames)]

    def alloc(self, count: int) -> torch.Tensor:
        self.iterate(count)
        ids: torch.Tensor | None = self.allocator.alloc(count)
        assert ids is not None, "W was not published although memory can grow"
        return ids

    def free(self, ids: torch.Tensor) -> None:
        self.allocator.free(self.tokens.admit(ids))


@pytest.fixture(params=["host", "late device"])
def engine(request: pytest.FixtureRequest, engine_settings: Any) -> Iterator[Engine]:
    made = Engine(None if request.param == "host" else Late())
    yield made
    made.coordinator.close()


def test_a_peak_comes_back_under_a_light_load_that_never_pauses(engine: Engine) -> None:
    choose = random.Random(6)
    live = [engine.alloc(4) for _ in range(400)]
    top = engine.tokens.published()
    assert top >= 1600
    live = [token for ids in live for token in torch.split(ids, 1)]
    choose.shuffle(live)
    while len(live) > 100:
        engine.free(live.pop())
    deadline = time.monotonic() + 60
    while engine.tokens.published() > top // 3:
        assert time.monotonic() < deadline, (engine.tokens.published(), engine.coordinator.stats)
        live.append(engine.alloc(1))
        engine.free(live.pop(choose.randrange(len(live))))
    assert Retire in engine.seen
    assert Sort in engine.seen, "the list was never in the way: this test shows nothing"
    held = torch.cat(live).tolist()
    assert not set(held) & set(engine.allocator.free_pages.tolist())
    deadline = time.monotonic() + 20
    while not engine.coordinator.stats.reclaim.count:
        assert time.monotonic() < deadline, engine.coordinator.stats
        engine.iterate(0)
