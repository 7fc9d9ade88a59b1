"""A lost follower comes back: survivors and the restarted rank meet in the next epoch, also at the second try."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcached_dist import Coordinator, RankLost, World, _native, startup
from kvcached_dist.coord.core.types import Rank
from kvcached_dist.coord.links.store import connect_store

from .world import GRANULE, JOIN_S, config, simple_model

pytestmark = pytest.mark.slow

SIZE = 3
VICTIM = 2
LIMIT = 1 << 19


def vanish(links: Any) -> None:
    """As the peer sees it: the process of this rank is gone."""
    for link in links.values():
        link.kill("killed by the test")


def step_for_ever(coordinator: Coordinator) -> None:
    pause = threading.Event()
    while True:
        coordinator.step()
        pause.wait(0.005)


class Run:
    """Three ranks as threads; the last one is lost, and lost again on its way back if ``twice``."""

    def __init__(self, *, twice: bool) -> None:
        self.twice = twice
        self.server = connect_store("127.0.0.1", 0, True, SIZE, 10)
        self.settings = config(on_rank_lost="rejoin", start_timeout_s=20.0)
        self.results: list[Any] = [None] * SIZE
        self.losses = [0] * SIZE

    def arguments(self, rank: int) -> dict[str, Any]:
        return {
            "world": World(rank, SIZE, 1),
            "stage": simple_model().stage(0, 1),
            "device": _native.HostDevice(1 << 20, GRANULE),
            "config": self.settings,
            "store": self.server.clone(),  # type: ignore[attr-defined]
        }

    def rank(self, rank: int) -> None:
        try:
            self.results[rank] = self.life(rank)
        except Exception as error:
            self.results[rank] = error

    def life(self, rank: int) -> Any:
        coordinator = Coordinator.start(**self.arguments(rank))
        try:
            if rank == 0:
                coordinator.set_limit(LIMIT, revision=3)
            coordinator.step()
            if rank == VICTIM:
                vanish(coordinator._agent.links.by_rank)
                coordinator.close()
                coordinator = self.come_back(rank)
            else:
                self.survive(coordinator, rank)
            ids = coordinator.alloc({"full": 3})
            coordinator.step()
            return coordinator.epoch, coordinator.digest, ids is not None, coordinator.physical.limit_bytes
        finally:
            coordinator.close()

    def survive(self, coordinator: Coordinator, rank: int) -> None:
        with pytest.raises(RankLost):
            step_for_ever(coordinator)
        coordinator.evict(100)
        while True:
            self.losses[rank] += 1
            try:
                coordinator.rejoin(20.0)
                return
            except RankLost:
                continue

    def come_back(self, rank: int) -> Coordinator:
        if self.twice:
            given = self.arguments(rank)
            parts = startup.assemble(**given, session="kvcached", faults=None, fence=None)
            assert parts.inbox is not None
            vanish(parts.inbox.links)
            parts.inbox.close()
            parts.backing.close()
        return Coordinator.start(**self.arguments(rank))


@pytest.mark.parametrize("twice", [False, True])
def test_a_lost_follower_comes_back(twice: bool) -> None:
    run = Run(twice=twice)
    threads = [threading.Thread(target=run.rank, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), run.results
    epochs = {result[0] if isinstance(result, tuple) else repr(result) for result in run.results}
    assert epochs == {3 if twice else 2}
    assert {result[1:] for result in run.results} == {(run.results[0][1], True, LIMIT)}
    assert run.losses[Rank(0)] == (2 if twice else 1)
