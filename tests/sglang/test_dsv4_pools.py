"""DeepSeek-V4: buffers of the engine's own pool classes over reservations, byte for byte of the native shape."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.coord.core.types import DomainId, PageId, Run, Txn
from kvcached_dist.pools.backing import StageBacking
from kvcached_dist.sglang import buffers, specs
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.request_states import RequestStates

PAGE = 256
FULL_PAGES, SWA_PAGES, SLOTS = 12, 5, 9
RATIOS = (0, 0, 4, 128, 4, 128)


def configurator(pp_rank: int = 0, pp_size: int = 1) -> Any:
    layers = len(RATIOS) // pp_size
    return SimpleNamespace(
        model_config=SimpleNamespace(
            num_hidden_layers=len(RATIOS), compress_ratios=list(RATIOS), qk_nope_head_dim=448, qk_rope_head_dim=64,
            index_head_dim=128, window_size=128,
        ),
        ps=SimpleNamespace(pp_rank=pp_rank, pp_size=pp_size, tp_size=1),
        pool_page_size=PAGE,
        layer_info=SimpleNamespace(start_layer=pp_rank * layers, end_layer=(pp_rank + 1) * layers),
    )  # fmt: skip


def takeover(
    pp_rank: int = 0, pp_size: int = 1, *, full_pages: int = FULL_PAGES, swa_pages: int = SWA_PAGES
) -> specs.Takeover:
    return specs.dsv4_stage(
        configurator(pp_rank, pp_size), full_tokens=full_pages * PAGE, swa_tokens=swa_pages * PAGE, request_slots=SLOTS
    )


def engine_pool(
    start: int = 0, end: int = len(RATIOS), *, full_pages: int = FULL_PAGES, swa_pages: int = SWA_PAGES
) -> Any:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    return DeepSeekV4TokenToKVPool(
        max_num_reqs=SLOTS - 1, num_req_slots=SLOTS, swa_size=swa_pages * PAGE, c4_size=full_pages * PAGE // 4,
        c128_size=full_pages * PAGE // 128, c4_state_pool_size=swa_pages * PAGE // 128 * 8, c128_state_pool_size=0,
        page_size=PAGE, swa_page_size=PAGE, sliding_window=128, dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
        indexer_head_dim=128, layer_num=end - start, device="cpu", enable_memory_saver=False,
        compression_ratios=list(RATIOS), start_layer=start, end_layer=end,
    )  # fmt: skip


def tensors(pool: Any) -> dict[str, list[torch.Tensor]]:
    """Every buffer of an engine pool, by the name that this library gives it."""
    states = [state for state in pool.compress_state_pools if state is not None]
    indexer = [state for state in pool.indexer_compress_state_pools if state is not None]
    return {
        "swa_kv": pool.swa_kv_pool.kv_buffer,
        "c4_kv": pool.c4_kv_pool.kv_buffer,
        "c128_kv": pool.c128_kv_pool.kv_buffer,
        "c4_indexer": pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
        "c4_state": [state.kv_score_buffer.kv_score for state in states if state.ratio == 4],
        "c128_state": [state.kv_score_buffer.kv_score for state in states if state.ratio == 128],
        "c4_indexer_state": [state.kv_score_buffer.kv_score for state in indexer],
    }


class Elastic:
    """An engine pool over reservations; page 0 of every domain is backed."""

    def __init__(self, registry: Any, pp_rank: int = 0, pp_size: int = 1, **pages: int) -> None:
        from sglang.srt.plugins.hook_registry import HookType

        self.plugin = Plugin(Config.preset("tests"))
        self.plugin.register(registry, HookType)
        registry.apply_hooks()
        self.taken = takeover(pp_rank, pp_size, **pages)
        self.backing = StageBacking.open(_native.HostDevice(64 << 20, 4096), self.taken.stage)
        self.back(0)
        made = buffers.Dsv4Buffers(self.backing, PAGE)
        self.plugin.building.dsv4 = made
        self.pool = engine_pool(self.taken.stage.first_layer, self.taken.stage.end_layer, **pages)
        made.finish()
        self.plugin.building.dsv4 = None

    def back(self, page: int) -> None:
        """Back one page of every domain."""
        runs = [Run(DomainId(domain), PageId(page), 1) for domain in range(len(self.taken.stage.domains))]
        assert self.backing.reserve(Txn(page + 1), runs).ok
        assert self.backing.map(runs).ok


@pytest.fixture
def native(engine_settings: Any) -> dict[str, list[torch.Tensor]]:
    return tensors(engine_pool())


@pytest.fixture
def elastic(engine_settings: Any, registry: Any, native: object) -> Iterator[Elastic]:
    made = Elastic(registry)
    yield made
    made.backing.close()


def test_every_buffer_has_the_native_shape_strides_and_type(
    native: dict[str, list[torch.Tensor]], elastic: Elastic
) -> None:
    def described(found: dict[str, list[torch.Tensor]]) -> dict[str, list[tuple[Any, ...]]]:
        return {name: [(t.shape, t.stride(), t.dtype) for t in layers] for name, layers in found.items()}

    assert described(tensors(elastic.pool)) == described(native)


def test_the_same_for_a_stage_without_layers_of_a_ratio(engine_settings: Any, registry: Any) -> None:
    expected = tensors(engine_pool(0, 2))
    made = Elastic(registry, 0, 3)
    try:
        found = tensors(made.pool)
        assert {name: len(layers) for name, layers in found.items()} == {n: len(v) for n, v in expected.items()}
        assert found["c4_kv"] == []
        assert made.backing.page_bytes("rows") == 0
    finally:
        made.backing.close()


def test_the_same_for_one_running_c128_state_per_request(
    engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    monkeypatch.setattr(deepseek_v4_memory_pool, "ONLINE_C128", True)
    with envs.SGLANG_OPT_USE_ONLINE_COMPRESS.override(True):
        expected = [(t.shape, t.stride()) for t in tensors(engine_pool())["c128_state"]]
        made = Elastic(registry)
    try:
        assert [(t.shape, t.stride()) for t in tensors(made.pool)["c128_state"]] == expected
        made.back(1)
        state = next(s for s in made.pool.compress_state_pools if s is not None and s.ratio == 128)
        state.kv_score_buffer.kv_score[1] = 5.0
        RequestStates(made.backing).reset([1])
        row = state.kv_score_buffer.kv_score[1]
        assert torch.isneginf(row[: len(row) // 3]).all()
        assert not row[len(row) // 3 :].any()
    finally:
        made.backing.close()


def test_the_same_for_the_fp4_indexer(engine_settings: Any, registry: Any) -> None:
    from sglang.srt.runtime_context import get_exec

    fp8_row = engine_pool().c4_indexer_kv_pool.get_bytes_per_token()
    with get_exec().kernel.override(enable_deepseek_v4_fp4_indexer=True):
        expected = tensors(engine_pool())
        made = Elastic(registry)
        fp4_row = made.pool.c4_indexer_kv_pool.get_bytes_per_token()
    try:
        assert fp4_row < fp8_row
        found = tensors(made.pool)
        for name, layers in expected.items():
            assert [(t.shape, t.stride(), t.dtype) for t in found[name]] == [
                (t.shape, t.stride(), t.dtype) for t in layers
            ]
        made.back(2)
        for layer in found["c4_indexer"]:
            assert not layer[2].any()
            layer[2] = 7
    finally:
        made.backing.close()


def test_all_stages_describe_the_same_model(engine_settings: Any) -> None:
    assert len({takeover(rank, 3).stage.digest() for rank in range(3)}) == 1


def test_nothing_but_null_pages_and_sentinels_is_backed_at_start(elastic: Elastic) -> None:
    stage = elastic.taken.stage
    assert sum(elastic.backing.mapped_bytes()) < stage.static_bytes() // 3


def test_a_published_page_is_usable_in_every_pool_of_its_domain(elastic: Elastic) -> None:
    elastic.back(2)
    kv = tensors(elastic.pool)
    for name in ("swa_kv", "c4_kv", "c128_kv", "c4_indexer"):
        for layer in kv[name]:
            assert not layer[2].any()
            layer[2] = 7
    for layer in kv["c4_state"]:
        rows = layer[2 * 8 : 3 * 8]
        half = rows.shape[1] // 2
        assert not rows[:, :half].any()
        assert torch.isneginf(rows[:, half:]).all()


def test_the_last_state_row_is_always_there(elastic: Elastic) -> None:
    for state in (*elastic.pool.compress_state_pools, *elastic.pool.indexer_compress_state_pools):
        if state is not None:
            state.kv_score_buffer[-1].clear()
            assert torch.isneginf(state.kv_score_buffer[-1].score).all()


def test_a_request_row_begins_empty_and_its_neighbours_are_left_alone(elastic: Elastic) -> None:
    elastic.back(1)
    elastic.back(2)
    states = [state for state in elastic.pool.compress_state_pools if state is not None and state.ratio == 128]
    for state in states:
        state.kv_score_buffer.kv_score[128 : 3 * 128] = 5.0
    RequestStates(elastic.backing).reset([2])
    for state in states:
        rows = state.kv_score_buffer.kv_score
        half = rows.shape[1] // 2
        assert (rows[128:256] == 5.0).all()
        assert not rows[256:384, :half].any()
        assert torch.isneginf(rows[256:384, half:]).all()


def test_a_reset_is_two_fills_for_all_layers(elastic: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in every prefill step, and the whole model has twenty such layers."""
    elastic.back(1)
    states, fill, fills = RequestStates(elastic.backing), torch.Tensor.index_fill_, []

    def noted(part: torch.Tensor, *args: Any) -> torch.Tensor:
        fills.append(part.shape)
        return fill(part, *args)

    monkeypatch.setattr(torch.Tensor, "index_fill_", noted)
    states.reset([1])
    assert [shape[0] for shape in fills] == [2, 2]


def test_a_layout_that_is_not_known_is_refused_by_name(engine_settings: Any, elastic: Elastic) -> None:
    made = buffers.Dsv4Buffers(elastic.backing, PAGE)
    with pytest.raises(ConfigError, match="pool c4_kv: a page has"):
        made.page_buffer(SimpleNamespace(page_size=64, get_bytes_per_token=lambda: 600), 13)
    with pytest.raises(ConfigError, match="did not create"):
        made.finish()
