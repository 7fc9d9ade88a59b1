"""A block store and a coordinator without processes, memory or protocol, for tests of what stands on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvcached_dist.coord.core.entries import Entry, Evict
from kvcached_dist.coord.core.types import Health
from kvcached_dist.pools.specs import StageSpec
from kvcached_dist.replay.scheduler import Scheduler, SchedulerConfig
from kvcached_dist.replay.sequence import Blocks, Shape
from kvcached_dist.replay.workload import Request

DSV4 = Shape(full_tokens=256, swa_tokens=256, window_tokens=128, slots=("rows",))


class FakeStore:
    """Free lists in lowest-id order, with everything written down.

    Args:
        sizes: usable blocks per domain.
        misses: asked with the number of each allocation, whether it misses although blocks are free.
    """

    def __init__(self, sizes: Mapping[str, int], misses: Callable[[int], bool] = lambda number: False) -> None:
        self.free_ids = {name: list(range(count, 0, -1)) for name, count in sizes.items()}
        self.sizes = dict(sizes)
        self.contents: dict[tuple[str, int], int] = {}
        self.log: list[tuple[Any, ...]] = []
        self.wrong: list[tuple[str, int, str]] = []
        self.evictions: list[int] = []
        self._misses = misses
        self._allocations = 0

    @property
    def in_use(self) -> dict[str, int]:
        return {name: self.sizes[name] - len(ids) for name, ids in self.free_ids.items()}

    def alloc(self, need: Mapping[str, int]) -> dict[str, list[int]] | None:
        self._allocations += 1
        short = any(count > len(self.free_ids[name]) for name, count in need.items())
        if short or self._misses(self._allocations):
            self.log.append(("miss", tuple(need.items())))
            return None
        granted = {name: [self.free_ids[name].pop() for _ in range(count)] for name, count in need.items()}
        self.log.append(("alloc", tuple((name, tuple(ids)) for name, ids in granted.items())))
        return granted

    def headroom(self, domain: str) -> int:
        return len(self.free_ids[domain])

    def blocks(self, domain: str) -> int:
        return self.sizes[domain]

    def free(self, domain: str, blocks: Blocks) -> None:
        self._compare(domain, blocks, "free")
        assert not set(blocks.ids) & set(self.free_ids[domain]), "freed twice"
        self.free_ids[domain] += blocks.ids
        self.free_ids[domain].sort(reverse=True)
        self.log.append(("free", domain, tuple(blocks.ids)))

    def check(self, domain: str, blocks: Blocks) -> None:
        self._compare(domain, blocks, "prefix hit")
        self.log.append(("check", domain, tuple(blocks.ids)))

    def request_eviction(self, tokens: int) -> None:
        self.evictions.append(tokens)

    def write(self, domain: str, blocks: Blocks) -> None:
        for block, stamp in zip(blocks.ids, blocks.stamps, strict=True):
            self.contents[domain, block] = stamp

    def _compare(self, domain: str, blocks: Blocks, when: str) -> None:
        for block, stamp in zip(blocks.ids, blocks.stamps, strict=True):
            if self.contents.get((domain, block)) != stamp:
                self.wrong.append((domain, block, when))


@dataclass
class Run:
    """A scheduler driven step by step on a fake store; EVICT entries come one step after they were asked for."""

    requests: list[Request]
    store: FakeStore
    shape: Shape = DSV4
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    step: int = 0
    now_us: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.requests, self.shape, self.config, self.store)
        self._evictions_seen = 0

    def one_step(self) -> Any:
        while self._evictions_seen < len(self.store.evictions):
            self.scheduler.evict(self.store.evictions[self._evictions_seen])
            self._evictions_seen += 1
        self.scheduler.begin(self.step, self.now_us)
        batch = self.scheduler.schedule(self.step)
        for name, blocks in batch.writes.items():
            self.store.write(name, blocks)
        self.step += 1
        self.now_us += 5_000 + 20 * batch.prefill_tokens
        return batch

    def finish(self, steps_max: int = 20_000) -> None:
        while not self.scheduler.done:
            assert self.step < steps_max, "the trace does not end"
            self.one_step()
        self.scheduler.flush()


class FakeCoordinator:
    """A coordinator of one rank whose pages are all published from the start.

    Args:
        stage: what the rank holds; made of plain tensors, so keep it tiny.
    """

    def __init__(self, stage: StageSpec) -> None:
        self.stage = stage
        self.world = SimpleNamespace(rank=0, tp=1, pp=1, size=1)
        self.config = SimpleNamespace(lease_s=1.0)
        self.faults = SimpleNamespace(active=False)
        self.device = SimpleNamespace(counters=lambda: SimpleNamespace(bytes_created=self.held))
        self.digest = 7
        self.health = {domain.name: Health.HEALTHY for domain in stage.domains}
        self.store = FakeStore({domain.name: domain.blocks - 1 for domain in stage.domains})
        self.domains = {
            domain.name: SimpleNamespace(
                blocks=domain.blocks, growable=0, available=property(lambda _: 0), name=domain.name
            )
            for domain in stage.domains
        }
        self.tensors = {
            pool.name: torch.empty(pool.buffers, stage.blocks(pool), pool.block_bytes, dtype=torch.uint8)
            for pool in stage.pools
        }
        self.backing = SimpleNamespace(tensor=lambda name, bank=0: self.tensors[name])
        self.idles: list[bool] = []
        self.demands: list[dict[str, int]] = []
        self._evict: list[Entry] = []
        self._step = 0
        self._fill()

    @property
    def held(self) -> int:
        return 1000 + sum(self.store.in_use.values())

    def _fill(self) -> None:
        for pool in self.stage.pools:
            row = torch.zeros(pool.fill_row_bytes or pool.block_bytes, dtype=torch.uint8)
            for piece in pool.fill:
                word = torch.tensor(list(piece.pattern.to_bytes(4, "little")), dtype=torch.uint8)
                row[piece.offset : piece.offset + piece.bytes] = word.repeat(piece.bytes // 4)
            self.tensors[pool.name][:] = row.repeat(pool.block_bytes // len(row))

    @property
    def stats(self) -> Any:
        nothing = SimpleNamespace(count=0, p50_ms=0.0, p99_ms=0.0)
        return SimpleNamespace(
            grow=nothing, grow_foreground=0, grow_background=0, grow_aborted=0, grow_retained=0,
            reclaim=nothing, reclaim_cancelled=0, reclaim_restored=0, stage_lag_steps_max=0,
        )  # fmt: skip

    def alloc(self, need: Mapping[str, int]) -> dict[str, torch.Tensor] | None:
        granted = self.store.alloc(need)
        return None if granted is None else {name: torch.tensor(ids) for name, ids in granted.items()}

    def take_granted(self) -> tuple[Entry, ...]:
        return ()

    def free(self, ids: Mapping[str, torch.Tensor]) -> None:
        for name, blocks in ids.items():
            self.store.free_ids[name] += blocks.tolist()
            self.store.free_ids[name].sort(reverse=True)

    def step(self) -> Any:
        self._step += 1
        entries, self._evict = tuple(self._evict), []
        return SimpleNamespace(step=self._step, entries=entries, settled=True)

    def evict(self, tokens: int) -> None:
        self._evict.append(Evict(tokens))

    def idle(self, idle: bool) -> None:
        self.idles.append(idle)

    def demand(self, blocks: Mapping[str, int]) -> None:
        self.demands.append(dict(blocks))
