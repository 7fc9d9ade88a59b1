"""Sliding-window hybrids: two pools of K and V heads in two domains, over the engine's own pool and allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.conftest import undone
from tests.sglang.families import Rank, configurator
from tests.sglang.prefixes import PROMPTS, keep, node_by_node, prefix_cache, watch_entering

pytestmark = pytest.mark.slow

FULL_TOKENS, SWA_TOKENS, HEADS, DIM = 1024, 768, 2, 64
FULL_LAYERS, SWA_LAYERS = [1, 3], [0, 2]
HYBRID = {specs.FULL: FULL_LAYERS, specs.SWA: SWA_LAYERS}


def model() -> Any:
    types = ["full_attention" if layer in FULL_LAYERS else "sliding_attention" for layer in range(4)]
    return SimpleNamespace(
        num_hidden_layers=4, hf_config=SimpleNamespace(architectures=["MellumForCausalLM"]),
        hf_text_config=SimpleNamespace(num_hidden_layers=4, layer_types=types),
    )  # fmt: skip


def hybrid_configurator(**changes: Any) -> Any:
    return configurator(**{"model_config": model(), "sliding_window_size": 63, **changes})


def engine_pool(page: int, layers: dict[str, list[int]] | None = None, **more: Any) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    local = layers or HYBRID
    return SWAKVPool(
        size=FULL_TOKENS, size_swa=SWA_TOKENS, page_size=page, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM,
        swa_attention_layer_ids=local[specs.SWA], full_attention_layer_ids=local[specs.FULL], device="cpu",
        enable_kv_cache_copy=False, **more,
    )  # fmt: skip


def allocator(page: int, pool: Any, rows: Any) -> Any:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    return SWATokenToKVPoolAllocator(
        FULL_TOKENS, SWA_TOKENS, page, torch.bfloat16, "cpu", pool, False, req_to_token_pool=rows
    )  # fmt: skip


def buffers(pool: Any) -> list[torch.Tensor]:
    parts = (pool.full_kv_pool, pool.swa_kv_pool)
    return [buffer for part in parts for buffer in (*part.k_buffer, *part.v_buffer)]


@pytest.fixture(params=[1, 16, 64])
def rank(request: Any, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    page = request.param
    made = Rank(registry, monkeypatch, hybrid_configurator())
    made.build(lambda: engine_pool(page), lambda pool, rows: allocator(page, pool, rows))
    yield made
    made.close()


def extend(rank: Rank, tokens: int) -> torch.Tensor:
    """One new request of the engine, after its step was decided."""
    page = rank.pool.page_size
    wanted = tokens if page == 1 else -(-tokens // page) + 2
    rank.publish({specs.FULL: wanted, specs.SWA: wanted})
    if page == 1:
        ids = rank.allocator.alloc(tokens)
    else:
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
        ids = rank.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
    assert ids is not None
    return torch.as_tensor(ids)


def published(rank: Rank) -> tuple[int, int]:
    """Backed tokens of both domains."""
    page = rank.pool.page_size
    return rank.runtime.lists[specs.FULL].published() * page, rank.runtime.lists[specs.SWA].published() * page


@pytest.mark.parametrize("more", [{}, {"swa_head_num": 1, "swa_head_dim": 32, "swa_v_head_dim": 16, "v_head_dim": 48}])
@pytest.mark.parametrize("page", [1, 64])
def test_buffers_are_the_native_ones(
    page: int, more: dict[str, Any], engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = engine_pool(page, **more)
    rank = Rank(registry, monkeypatch, hybrid_configurator())
    rank.build(lambda: engine_pool(page, **more), lambda pool, rows: allocator(page, pool, rows))
    try:
        for made, expected in zip(buffers(rank.pool), buffers(native), strict=True):
            assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert rank.pool.layers_mapping == native.layers_mapping
        assert {domain.name for domain in rank.coordinator.stage.domains} == {specs.FULL, specs.SWA}
        assert rank.mapped_bytes() < sum(native.get_kv_size_bytes()) // 4
    finally:
        rank.close()


def test_window_tokens_are_given_back_while_the_full_ones_stay(rank: Rank) -> None:
    old, last = [extend(rank, 128) for _ in range(3)], extend(rank, 128)
    full, window = published(rank)
    full_buffers, window_buffers = buffers(rank.pool)[:4], buffers(rank.pool)[4:]
    for number, ids in enumerate((*old, last)):
        for buffer in full_buffers:
            buffer[ids] = number + 1
    tail = rank.allocator.translate_loc_from_full_to_swa(last)
    for buffer in window_buffers:
        buffer[tail] = 7
    for ids in old:
        rank.allocator.free_swa(ids)
    # A run is given back whole, so a run of the last request's window may stay.
    rank.settle(lambda: published(rank)[1] <= window - 128)
    assert published(rank)[0] >= 4 * 128
    for number, ids in enumerate((*old, last)):
        assert all((buffer[ids] == number + 1).all() for buffer in full_buffers)
    assert all((buffer[tail] == 7).all() for buffer in window_buffers)
    assert not rank.allocator.translate_loc_from_full_to_swa(torch.cat(old)).any()
    # The engine frees what is left of such a request in one go; its window is gone already.
    for ids in old:
        rank.allocator.free_full(ids)
    rank.allocator.free(last)
    rank.settle(lambda: published(rank)[0] <= full // 2)


def test_everything_comes_back(rank: Rank) -> None:
    requests = [extend(rank, tokens) for tokens in (200, 77, 130)]
    full = rank.mapped_bytes()
    for ids in requests:
        rank.allocator.free(ids)
    rank.settle(lambda: rank.mapped_bytes() < full // 2)
    again = extend(rank, 300)
    for buffer in buffers(rank.pool)[:4]:
        buffer[again] = 1
    for buffer in buffers(rank.pool)[4:]:
        buffer[rank.allocator.translate_loc_from_full_to_swa(again)] = 1


def test_a_flush_leaves_only_what_is_published(rank: Rank) -> None:
    extend(rank, 200)
    rank.allocator.clear()
    assert (rank.allocator.full_available_size(), rank.allocator.swa_available_size()) == published(rank)


def test_the_null_page_is_there_in_both(rank: Rank) -> None:
    for buffer in buffers(rank.pool):
        buffer[: rank.pool.page_size] = 3


@pytest.mark.parametrize("page", [1, 16])
def test_what_an_eviction_frees_enters_both_lists_together_and_as_it_would_node_by_node(
    page: int, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    looks: list[list[tuple[str, int]]] = [[], []]
    for together in (False, True):
        with undone(registry), contextlib.closing(Rank(registry, monkeypatch, hybrid_configurator())) as rank:
            rank.build(lambda: engine_pool(page), lambda pool, rows: allocator(page, pool, rows))
            cache = prefix_cache(rank.allocator, page, "FULL", "SWA", sliding_window_size=page)
            # Everything at once: a growth beside the requests would come sooner in one round than in the other.
            rank.publish({name: rank.runtime.lists[name].book.ids for name in (specs.FULL, specs.SWA)})
            for prompt in PROMPTS:
                # Long enough that a window ends inside.
                keep(cache, [*prompt, 50, 51], extend(rank, (len(prompt) + 2) * page))
            for known in rank.runtime.lists.values():
                watch_entering(known, looks[together], monkeypatch)
            with contextlib.nullcontext() if together else node_by_node(rank.runtime):
                said = make_room(cache, full=9 * page, window=14 * page)
            assert said == [rank.allocator.full_available_size(), rank.allocator.swa_available_size()]
            parts = rank.allocator.full_attn_allocator.free_pages, rank.allocator.swa_attn_allocator.free_pages
            found.append((*map(torch.Tensor.tolist, parts), cache.full_evictable_size(), cache.swa_evictable_size()))
    assert found[0] == found[1]
    assert len(looks[0]) > 4
    assert [name for name, _ in looks[1]] == [specs.FULL, specs.SWA]
    assert min(ids for _, ids in looks[1]) >= 9


def make_room(cache: Any, full: int, window: int) -> list[int]:
    """An eviction for a step that lacks so many tokens; what the engine believed to be available at its end."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    said: list[int] = []
    walk = cache._evict_components

    def and_look(*args: Any, **more: Any) -> None:
        walk(*args, **more)
        said.extend(cache._component_available_size(component) for component in cache.tree_components)

    cache._evict_components = and_look
    cache.evict_for_alloc(EvictParams(num_tokens=full, swa_num_tokens=window))
    return said


@pytest.mark.parametrize(
    ("stage", "layers", "local"),
    [
        (0, (0, 2), {specs.FULL: [1], specs.SWA: [0, 2]}),  # the engine's range of layers includes its end
        (1, (2, 4), {specs.FULL: [3], specs.SWA: [2]}),
    ],
)
def test_a_stage_has_the_buffers_that_the_engine_makes(
    stage: int, layers: tuple[int, int], local: dict[str, list[int]], engine_settings: Any
) -> None:
    taken = staged(stage, layers, local)
    assert [list(taken.stage.pool(name).layers) for name in ("mha_kv", "swa_kv")] == [
        local[specs.FULL], local[specs.SWA],
    ]  # fmt: skip
    assert taken.stage.digest() == staged(1, (2, 4), {specs.FULL: [3], specs.SWA: [2]}).stage.digest()
    assert taken.ids == {specs.FULL: FULL_TOKENS // 64, specs.SWA: SWA_TOKENS // 64}


def staged(stage: int, layers: tuple[int, int], local: dict[str, list[int]]) -> specs.Takeover:
    chosen = {
        "size": FULL_TOKENS, "size_swa": SWA_TOKENS, "page_size": 64, "dtype": torch.bfloat16, "head_num": HEADS,
        "head_dim": DIM, "swa_attention_layer_ids": local[specs.SWA], "full_attention_layer_ids": local[specs.FULL],
    }  # fmt: skip
    return specs.hybrid_stage(hybrid_configurator(), chosen, specs.Place(4, *layers, stage, 2, 1, 4096))


def test_a_cut_that_is_not_known_is_refused(engine_settings: Any) -> None:
    with pytest.raises(ConfigError, match="keeps layers"):
        staged(0, (0, 2), {specs.FULL: [1, 3], specs.SWA: [0]})
    with pytest.raises(ConfigError, match="no layers of domain full"):
        staged(0, (0, 2), {specs.FULL: [], specs.SWA: [0]})


def test_other_pools_inside_stay_native(engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    latent = {
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "page_size": 64,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    rank = Rank(registry, monkeypatch, hybrid_configurator())
    rank.build(
        lambda: engine_pool(
            64, full_kv_pool_class=MLATokenToKVPool, swa_kv_pool_class=MLATokenToKVPool, full_kv_pool_kwargs=latent,
            swa_kv_pool_kwargs=latent,
        ),
        lambda pool, rows: allocator(64, pool, rows),
    )  # fmt: skip
    assert (rank.runtime.phase, rank.coordinator) == (Phase.NATIVE, None)
