"""Pools that stay with the engine beside elastic ones are subtracted from the budget, exactly and once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.sglang.reservations import Reservations
from tests.sglang import test_dsv4_pools as dsv4
from tests.sglang.families import Rank, configurator
from tests.sglang.test_mla_pools import allocator, engine_pool

pytestmark = pytest.mark.slow


@pytest.fixture
def rank(engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(registry, monkeypatch, configurator())
    made.build(lambda: engine_pool(64), lambda pool, _rows: allocator(64, pool))
    yield made
    made.close()


def draft_pools(rank: Rank) -> Any:
    """Pools of a draft model: one of its own, the target's request rows and allocator."""
    return SimpleNamespace(
        req_to_token_pool=rank.rows, token_to_kv_pool=engine_pool(64), token_to_kv_pool_allocator=rank.allocator,
        unified_memory_pool=None,
    )  # fmt: skip


def kept(rank: Rank) -> dict[str, int]:
    found: dict[str, int] = rank.coordinator.snapshot()["runtime_pools"]
    return found


def test_nothing_is_registered_where_everything_is_elastic(rank: Rank) -> None:
    assert kept(rank) == {}


def test_a_draft_pool_takes_its_exact_bytes_from_the_budget(rank: Rank) -> None:
    before = rank.coordinator.physical.budget_bytes()
    pools = draft_pools(rank)
    rank.plugin._pools_built(pools, configurator(is_draft_worker=True))
    size = pools.token_to_kv_pool.get_kv_size_bytes()
    assert kept(rank) == {"draft.token_to_kv_pool.kv_buffer": size}
    assert before - rank.coordinator.physical.budget_bytes() == size


def test_the_engine_cannot_grow_into_it(engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rank(registry, monkeypatch, configurator())
    made.build(lambda: engine_pool(64), lambda pool, _rows: allocator(64, pool))
    try:
        room = made.coordinator.physical.budget_bytes()
        made.coordinator.register_runtime_pool("other", room - 3 * 64 * 128 * 2 * 4)
        assert 1 <= growable(made) <= 3
    finally:
        made.close()


def growable(rank: Rank) -> int:
    """Pages that are backed, and that could be, once the leader knows the new budget."""
    for _ in range(300):
        rank.step({"full": 16})
        time.sleep(0.002)
    known: int = rank.coordinator.domains["full"].growable
    return known + rank.runtime.lists["full"].published()


def test_the_switch_turns_it_off(engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rank(registry, monkeypatch, configurator(), sglang_dsv4_runtime_reservation=False)
    made.build(lambda: engine_pool(64), lambda pool, _rows: allocator(64, pool))
    try:
        made.plugin._pools_built(draft_pools(made), configurator(is_draft_worker=True))
        assert kept(made) == {}
    finally:
        made.close()


class Book:
    """What was registered."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __call__(self, name: str, size: int) -> None:
        self.calls.append((name, size))


def pool_of(**values: Any) -> Any:
    """An object of the engine that only has attributes."""
    from sglang.srt.mem_cache import memory_pool

    class Pool:
        pass

    Pool.__module__ = memory_pool.__name__
    made = Pool()
    vars(made).update(values)
    return made


def reserved(pools: Any, *ours: torch.Tensor) -> tuple[Reservations, Book]:
    book = Book()
    made = Reservations(book, "cpu", frozenset(tensor.untyped_storage().data_ptr() for tensor in ours), rank=0)
    made.add(pools)
    return made, book


def test_a_storage_counts_once_whoever_shows_it(engine_settings: Any) -> None:
    state = torch.zeros(1000, dtype=torch.float32)
    inner = pool_of(states=[state[:10], state[500:]], wrapped={"a": (state.view(torch.uint8),)})
    inner.owner = inner
    made, _ = reserved(SimpleNamespace(token_to_kv_pool=pool_of(pool=inner), req_to_token_pool=inner))
    assert made.bytes == {"token_to_kv_pool.pool.states": 4000}


def test_layers_of_a_pool_are_one_entry(engine_settings: Any) -> None:
    layers = [torch.zeros(3, 8, dtype=torch.uint8) for _ in range(5)]
    made, _ = reserved(SimpleNamespace(token_to_kv_pool=pool_of(kv_buffer=layers)))
    assert made.bytes == {"token_to_kv_pool.kv_buffer": 5 * 24}


def test_views_of_our_reservations_index_tables_and_other_devices_do_not_count(engine_settings: Any) -> None:
    elastic = torch.zeros(64)
    made, book = reserved(
        SimpleNamespace(
            token_to_kv_pool=pool_of(
                k_buffer=[elastic[1:]], table=torch.zeros(9, dtype=torch.int32), mask=torch.zeros(9, dtype=torch.bool),
                pointers=torch.zeros(3, dtype=torch.uint64), elsewhere=torch.zeros(9, device="meta"),
                nothing=torch.zeros(0), module=torch.nn.Linear(3, 3), other=SimpleNamespace(kv=torch.zeros(4)),
            ),
        ),
        elastic,
    )  # fmt: skip
    assert (made.bytes, book.calls) == ({}, [])


def test_taking_a_pool_over_removes_its_entry(engine_settings: Any) -> None:
    pool, elastic = pool_of(kv_buffer=[torch.zeros(16)]), torch.zeros(16)
    made, book = reserved(SimpleNamespace(token_to_kv_pool=pool), elastic)
    pool.kv_buffer = [elastic]
    made.scan()
    assert made.bytes == {}
    assert book.calls == [("token_to_kv_pool.kv_buffer", 64), ("token_to_kv_pool.kv_buffer", 0)]


def test_the_split_indexer_of_deepseek_v4_stays_native_beside_elastic_pools(
    engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import deepseek_v4_memory_pool
    from sglang.srt.runtime_context import get_exec

    monkeypatch.setattr(deepseek_v4_memory_pool, "_is_hip", True)
    with get_exec().kernel.override(enable_deepseek_v4_fp4_indexer=True):
        made = dsv4.Elastic(registry)
    try:
        assert "c4_indexer" not in [pool.name for pool in made.taken.stage.pools]
        indexer = made.pool.c4_indexer_kv_pool
        ours = frozenset(made.backing.native.base(i) for i in range(len(made.taken.stage.pools)))
        book = Book()
        reservations = Reservations(book, "cpu", ours, rank=0)
        reservations.add(SimpleNamespace(token_to_kv_pool=made.pool))
        path = "token_to_kv_pool.c4_indexer_kv_pool.index_k_"
        assert reservations.bytes == {
            f"{path}payload_buffer": sum(buffer.nbytes for buffer in indexer.index_k_payload_buffer),
            f"{path}scale_buffer": sum(buffer.nbytes for buffer in indexer.index_k_scale_buffer),
        }
    finally:
        made.backing.close()
