"""Our growth and reclaim: a coordinator per run length, driven the way an engine drives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from kvcached_dist import Config, Coordinator, World, _native
from kvcached_dist.coord.core.transaction import Verdict
from kvcached_dist.pools.specs import StageSpec

from .plan import DOMAIN, Cell
from .samples import WARM_UP, now_us
from .seams import GROWTH, RECLAIM, SUSTAINED, WARM_UP_SECTION

STEPS_MAX = 5000
PAUSE_S = 0.002


class Protocol:
    """One rank of a world that grows and gives back runs of one length.

    Args:
        cell: what is measured.
        rank: this rank.
        device: where memory comes from.
        stage: pools and domains.
        store: bootstrap store; ``None`` for a world of one.
        meet: waits for the other rank processes.
    """

    def __init__(
        self,
        cell: Cell,
        rank: int,
        device: _native.Device,
        stage: StageSpec,
        store: TCPStore | None,
        meet: Callable[[], None],
    ) -> None:
        config = Config.preset(
            "engine",
            min_reserved_pages=0,
            max_reserved_pages=0,
            run_pages_min=cell.run,
            run_pages_max=cell.run,
            run_share=0,
            start_timeout_s=120.0,
            growth_deadline_s=10.0,
        )
        self._cell = cell
        self._meet = meet
        self.coordinator = Coordinator.start(
            world=World(rank, cell.ranks, 1),
            stage=stage,
            device=device,
            config=config,
            store=store,
            session=f"bench-{cell.ranks}-{cell.layers}-{cell.run}",
        )

    def close(self) -> None:
        self._meet()
        self.coordinator.close()

    def measure(self, mark: Callable[[str], None]) -> dict[str, Any]:
        """First growth, reclaim and sustained growth of the cell, in microseconds of this rank.

        Args:
            mark: told which section begins.
        """
        grow: list[float] = []
        for repeat in range(WARM_UP + self._cell.repeats):
            self._meet()
            mark(WARM_UP_SECTION if repeat < WARM_UP else GROWTH)
            began = now_us()
            ids = self._grow()
            ended = now_us()
            mark(RECLAIM)
            if repeat >= WARM_UP:
                grow.append(ended - began)
            self.coordinator.domains[DOMAIN].free(ids)
            self._give_back()
        reclaim = [float(micros) for micros in self._reclaims()][-self._cell.repeats :]
        sustained = self._sustained(mark)
        return {"grow_us": grow, "reclaim_us": reclaim, "sustained_us": sustained}

    def _grow(self) -> Any:
        ids = self.coordinator.domains[DOMAIN].alloc(self._cell.run)
        if ids is None:
            raise RuntimeError(f"growing {self._cell.run} pages was a miss: {self.coordinator.stats}")
        return ids

    def _sustained(self, mark: Callable[[str], None]) -> list[float]:
        taken: list[Any] = []
        micros: list[float] = []
        self._meet()
        mark(SUSTAINED)
        for _ in range(self._cell.sustained):
            began = now_us()
            taken.append(self._grow())
            micros.append(now_us() - began)
        mark(RECLAIM)
        self._meet()
        for ids in taken:
            self.coordinator.domains[DOMAIN].free(ids)
        self._give_back()
        return micros

    def _give_back(self) -> None:
        """Idle until nothing is left to reclaim, one engine step at a time, on every rank."""
        self.coordinator.idle(True)
        for _ in range(STEPS_MAX):
            if self.coordinator.step().settled:
                break
            time.sleep(PAUSE_S)
        else:
            raise RuntimeError(f"not settled after {STEPS_MAX} steps: {self.coordinator.stats}")
        self.coordinator.idle(False)

    def _reclaims(self) -> list[int]:
        """From RETIRE to the last RELEASED, by the leader's clock; empty on followers."""
        leader = self.coordinator._leader
        if leader is None:
            return []
        return [item.ended - item.started for item in leader.commit.closed if item.verdict is Verdict.RECLAIMED]
