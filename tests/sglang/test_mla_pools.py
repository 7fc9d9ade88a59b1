"""MLA: one latent per token and layer, over the engine's own pool and allocators."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import buffers, specs
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.families import Rank, configurator, stripes

pytestmark = pytest.mark.slow

TOKENS, RANK, ROPE, LAYERS = 1024, 96, 32, 4


def pool_class(name: str) -> Any:
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, name)


def engine_pool(page: int, dtype: torch.dtype = torch.bfloat16, name: str = "MLATokenToKVPool", **more: Any) -> Any:
    return pool_class(name)(
        TOKENS, page_size=page, dtype=dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False, start_layer=0, end_layer=LAYERS, **more,
    )  # fmt: skip


def allocator(page: int, pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if page == 1:
        return TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(TOKENS, page, torch.bfloat16, "cpu", pool, False)


@pytest.fixture(params=[1, 16, 64])
def rank(request: Any, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    page = request.param
    made = Rank(registry, monkeypatch, configurator())
    made.build(lambda: engine_pool(page), lambda pool, _rows: allocator(page, pool))
    yield made
    made.close()


def extend(rank: Rank, tokens: int) -> torch.Tensor:
    """One new request of the engine, after its step was decided."""
    page = rank.pool.page_size
    rank.publish({specs.FULL: tokens if page == 1 else -(-tokens // page) + 2})
    if page == 1:
        ids = rank.allocator.alloc(tokens)
    else:
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
        ids = rank.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
    assert ids is not None
    return torch.as_tensor(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [1, 64])
def test_buffers_are_the_native_ones(
    page: int, dtype: torch.dtype, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = engine_pool(page, dtype)
    rank = Rank(registry, monkeypatch, configurator())
    rank.build(lambda: engine_pool(page, dtype), lambda pool, _rows: allocator(page, pool))
    try:
        for made, expected in zip(rank.pool.kv_buffer, native.kv_buffer, strict=True):
            assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert rank.pool.get_kv_size_bytes() == native.get_kv_size_bytes()
        assert rank.pool.data_ptrs.tolist() == [buffer.data_ptr() for buffer in rank.pool.kv_buffer]
        assert rank.mapped_bytes() < rank.pool.get_kv_size_bytes() // 4
    finally:
        rank.close()


def test_what_a_request_writes_is_what_it_reads_and_memory_comes_back(rank: Rank) -> None:
    small = rank.mapped_bytes()
    requests = [extend(rank, tokens) for tokens in (200, 77, 300, 130)]
    assert rank.mapped_bytes() > 3 * small
    written = {}
    for number, ids in enumerate(requests):
        for layer in range(LAYERS):
            rows = stripes(len(ids), RANK + ROPE, 10 * number + layer).to(torch.bfloat16)
            rank.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), ids, rows, rows[..., :RANK])
            written[number, layer] = rows
    for (number, layer), rows in written.items():
        assert torch.equal(rank.pool.get_key_buffer(layer)[requests[number]], rows)
        assert torch.equal(rank.pool.get_value_buffer(layer)[requests[number]], rows[..., :RANK])
    for ids in requests:
        rank.allocator.free(ids)
    full = rank.mapped_bytes()
    rank.settle(lambda: rank.mapped_bytes() < full // 2)
    kept = rank.allocator.free_pages * rank.pool.page_size
    again = extend(rank, 600)
    fresh = again[~torch.isin(again // rank.pool.page_size * rank.pool.page_size, kept)]
    assert len(fresh) > 50
    assert not any(buffer[fresh].any() for buffer in rank.pool.kv_buffer), "a page came back with old bytes"


def test_the_null_page_is_always_there(rank: Rank) -> None:
    for buffer in rank.pool.kv_buffer:
        buffer[: rank.pool.page_size] = 3


def test_a_flush_leaves_only_what_is_published(rank: Rank) -> None:
    extend(rank, 300)
    rank.allocator.clear()
    known = rank.runtime.lists[specs.FULL]
    assert rank.allocator.available_size() == known.published() * rank.pool.page_size < TOKENS


@pytest.mark.parametrize("change", [{"kv_cache_dim": RANK}, {"layer_num": LAYERS + 1}, {"store_dtype": torch.uint8}])
def test_a_pool_that_is_not_the_described_one_is_refused_by_name(rank: Rank, change: dict[str, Any]) -> None:
    pool = SimpleNamespace(**{**vars(rank.pool), **change})
    with pytest.raises(ConfigError, match="pool mla_kv: the engine makes"):
        buffers.latent_buffers(rank.coordinator.backing, pool)


def test_every_stage_describes_the_same_model(engine_settings: Any) -> None:
    pool = SimpleNamespace(size=TOKENS, page_size=64, kv_cache_dim=RANK + ROPE, dtype=torch.bfloat16)
    side = specs.latent_side(tuple(range(5)), pool)
    taken = [
        specs.token_stage([side], specs.Place(5, first, end, stage, 2, 4, 4096))
        for stage, (first, end) in enumerate([(0, 2), (2, 5)])
    ]
    assert len({found.stage.digest() for found in taken}) == 1
    assert [found.stage.pool("mla_kv").layers for found in taken] == [(0, 1), (2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("MLATokenToKVPoolFP4", {}),
        ("DSATokenToKVPool", {"kv_cache_dim": RANK + ROPE, "index_head_dim": 128}),
        ("MLATokenToKVPool", {"use_dsa": True}),
    ],
)
def test_variants_of_the_layout_build_themselves(
    name: str, more: dict[str, Any], engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(registry, monkeypatch, configurator())
    rank.build(lambda: engine_pool(64, name=name, **more), lambda pool, _rows: allocator(64, pool))
    assert rank.runtime.phase is Phase.NATIVE
    assert rank.runtime.reason == f"rank 0: the engine built a {name}"
    assert rank.coordinator is None
