"""A whole world of ranks in one process: a thread and a host device per rank, real links, real memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcached_dist import Config, Coordinator, World, _native
from kvcached_dist.agent_ports import Fence
from kvcached_dist.coord.core.leader import Leader
from kvcached_dist.coord.links.store import connect_store
from kvcached_dist.fault_specs import FaultPlan
from kvcached_dist.pools.specs import DomainSpec, FillPiece, ModelSpec, PoolSpec, StageSpec

GRANULE = 4096
JOIN_S = 50.0


def simple_model(
    *,
    pages: int = 9,
    layers: int = 4,
    block_bytes: int = GRANULE,
    blocks_per_page: int = 1,
    domains: Sequence[str] = ("full",),
) -> ModelSpec:
    """A model with one K/V pool per domain; a page is one granule per layer and buffer unless told otherwise."""
    specs = tuple(DomainSpec(name, pages * blocks_per_page, 16, blocks_per_page) for name in domains)
    pools = tuple(
        PoolSpec(
            f"{name}_kv",
            name,
            block_bytes,
            tuple(range(layers)),
            (block_bytes,),
            buffers_per_layer=2,
            fill_row_bytes=64,
            fill=(FillPiece(0, 64, 0x5A5A5A5A),),
        )
        for name in domains
    )
    return ModelSpec("simple", layers, specs, pools)


@dataclass
class Rank:
    """What a test body sees of its rank."""

    coordinator: Coordinator
    leader: Leader
    device: _native.Device
    together: threading.Barrier
    held_at_start: int
    counters_at_start: _native.Counters

    def returns_to_start(self, wait_s: float = 5.0) -> bool:
        """Whether the bytes come back to those at the start, and the handles agree with the leader's count (S10).

        Waits for both: an ABORT is done behind the verdict. Says on stdout what does not agree.
        """
        deadline, pause = time.monotonic() + wait_s, threading.Event()
        while (wrong := self._not_as_at_start()) and time.monotonic() < deadline:
            pause.wait(0.002)
        if wrong:
            print(f"rank {self.coordinator.world.rank} after {wait_s} s: {wrong}")
        return not wrong

    def _not_as_at_start(self) -> str:
        counted = self.leader.peers[self.coordinator.world.rank].handles
        held, counters = tuple(self.coordinator.backing.held()), self.device.counters()
        alive = counters.handles_created - counters.handles_released
        if self.held() != self.held_at_start:
            return f"{self.held()} bytes held, {self.held_at_start} at the start"
        if held != counted or alive != sum(counted):
            return f"handles per pool {held}, created - released {alive}, the leader counts {counted}"
        return ""

    def held(self) -> int:
        """Physical bytes this rank holds."""
        return sum(self.coordinator.backing.held_bytes())

    def meet(self) -> None:
        """Wait for every other rank's thread."""
        self.together.wait(JOIN_S)

    def settle(self, steps: int = 2000) -> None:
        """End steps until the leader has nothing left to do."""
        pause = threading.Event()
        for _ in range(steps):
            if self.coordinator.step().settled:
                return
            pause.wait(0.001)
        raise AssertionError(f"not settled after {steps} steps")


Body = Callable[[Rank], Any]


def config(**overrides: Any) -> Config:
    """Settings of these tests: nothing grows unless an operation needs it."""
    quiet = {"min_reserved_pages": 0, "max_reserved_pages": 0, "run_pages_max": 1, "run_share": 0}
    # Long enough for a machine that runs many other things; no test here waits for a deadline that it does not mean.
    patient = {"growth_deadline_s": 1.0, "lease_s": 10.0, "start_timeout_s": 30.0}
    return Config.preset("tests", **{**quiet, **patient, **overrides})


@contextlib.contextmanager
def two_on_a_card(card: Path, capacity_bytes: int, stage: StageSpec, **overrides: Any) -> Iterator[list[Coordinator]]:
    """Two engines of one rank each on the same card; they are closed behind the block."""
    made: list[Coordinator] = []
    try:
        for _ in range(2):
            device = _native.HostDevice(capacity_bytes, GRANULE, card_file=str(card))
            settings = config(gpu_utilization=1.0, **overrides)
            made.append(Coordinator.start(world=World(), stage=stage, device=device, config=settings))
        yield made
    finally:
        for coordinator in made:
            coordinator.close()


def run_world(
    body: Body,
    *,
    tp: int = 1,
    pp: int = 1,
    model: ModelSpec | None = None,
    settings: Config | Sequence[Config] | None = None,
    capacity: int | Sequence[int] = 1 << 20,
    faults: Sequence[str] = (),
    devices: Sequence[_native.Device] | None = None,
    fence: Callable[[], Fence] | None = None,
) -> list[Any]:
    """Start a world, run ``body`` on every rank, close it.

    Returns:
        Per rank what the body returned, or the exception that its start or the body raised.
    """
    size = tp * pp
    spec = model or simple_model()
    capacities = [capacity] * size if isinstance(capacity, int) else list(capacity)
    cards: list[_native.Device] = list(devices or [_native.HostDevice(room, GRANULE) for room in capacities])
    settings = settings or config()
    per_rank = [settings] * size if isinstance(settings, Config) else list(settings)
    plan = FaultPlan.parse(faults, size)
    server = connect_store("127.0.0.1", 0, True, size, 10) if size > 1 else None
    results: list[Any] = [None] * size
    together = threading.Barrier(size)
    leaders: list[Leader] = []

    def run(rank: int) -> None:
        try:
            coordinator = Coordinator.start(
                world=World(rank, tp, pp),
                stage=spec.stage(rank // tp, pp),
                device=cards[rank],
                config=per_rank[rank],
                store=None if server is None else server.clone(),  # type: ignore[attr-defined]
                faults=plan,
                fence=fence,
            )
        except Exception as error:
            results[rank] = error
            return
        try:
            held, counters = sum(coordinator.backing.held_bytes()), cards[rank].counters()
            if coordinator._leader is not None:
                leaders.append(coordinator._leader)
            together.wait(JOIN_S)
            results[rank] = body(Rank(coordinator, leaders[0], cards[rank], together, held, counters))
        except Exception as error:
            results[rank] = error
            together.abort()  # nobody waits for this rank in vain
        finally:
            coordinator.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"{thread.name} did not end: results so far {results}"
    return results


def values(results: Sequence[Any]) -> list[Any]:
    """The results, or the first exception among them that does not follow from another one."""
    errors = [result for result in results if isinstance(result, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return list(results)
