"""What the engine is told that a rank could ever hold, per family of pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import capacity, engine
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.test_agreement import configurator, sizes, starting
from tests.sglang.test_dsv4_pools import configurator as dsv4_configurator

GRANULE = 4096


def latent(tp: int = 2) -> Any:
    made = configurator(use_mla_backend=True, pool_page_size=64)
    made.ps.attn_tp_size = tp
    made.model_config.kv_lora_rank, made.model_config.qk_rope_head_dim = 512, 64
    return made


def hybrid(**changes: Any) -> Any:
    made = configurator(is_hybrid_swa=True, is_hybrid_swa_compress=False, sliding_window_size=63, **changes)
    made.model_config.full_attention_layer_ids, made.model_config.swa_attention_layer_ids = [1], [0]
    return made


def window_sizes(full: int = 4096, window: int = 2048) -> Any:
    fields = {name: getattr(sizes(full), name) for name in type(sizes()).__struct_fields__}
    fields |= {"full_max_total_num_tokens": full, "swa_max_total_num_tokens": window}
    return type(sizes())(**fields)


def settings(capacity_bytes: int) -> Config:
    return Config.preset("tests", host_capacity_bytes=capacity_bytes, host_granule_bytes=GRANULE)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_latent_is_whole_on_every_rank(tp: int, engine_settings: Any) -> None:
    assert capacity.token_cost(latent(tp), sizes()) == capacity.TokenCost(576 * 2 * 2, lanes=2)


def test_heads_are_shared_and_k_and_v_can_differ(engine_settings: Any) -> None:
    made = configurator()
    made.model_config.v_head_dim = 8
    made.model_config.get_num_kv_heads = lambda tp, _dcp: 8 // tp
    assert capacity.token_cost(made, sizes()).token_bytes == 4 * (16 + 8) * 2 * 2


def test_window_layers_count_with_their_share(engine_settings: Any) -> None:
    costs = capacity.token_cost(hybrid(), window_sizes())
    assert (costs.token_bytes, costs.window_bytes, costs.window_share) == (64, 64, 0.5)
    assert costs.bytes == 96


def test_window_layers_can_have_a_geometry_of_their_own(engine_settings: Any) -> None:
    made = hybrid()
    made.is_hybrid_swa_compress = True
    made.model_config.get_swa_num_kv_heads = lambda _tp: 3
    made.model_config.swa_head_dim, made.model_config.swa_v_head_dim = 8, 4
    assert capacity.token_cost(made, window_sizes()).window_bytes == 3 * 12 * 2


def test_what_fits_is_whole_pages_with_null_pages_and_borders_taken_off(engine_settings: Any) -> None:
    page_bytes = 64 * 576 * 2 * 2
    spare = 2 * 2 * GRANULE + page_bytes
    fits = [capacity.fitting_tokens(latent(), sizes(), settings(spare + pages * page_bytes)) for pages in (0, 1, 7)]
    assert fits == [0, 64, 7 * 64]
    assert capacity.fitting_tokens(latent(), sizes(), settings(spare + 7 * page_bytes - 4096)) == 6 * 64


def test_a_cut_keeps_the_share_of_window_tokens(engine_settings: Any) -> None:
    less = capacity.cut(window_sizes(), 1024, hybrid())
    assert (less.max_total_num_tokens, less.full_max_total_num_tokens, less.swa_max_total_num_tokens) == (
        1024, 1024, 512,
    )  # fmt: skip
    assert less.max_running_requests == window_sizes().max_running_requests
    assert capacity.cut(sizes(4096), 1024, configurator()).full_max_total_num_tokens is None


def test_a_rank_without_room_for_a_page_is_said(engine_settings: Any) -> None:
    assert capacity.fitting_tokens(latent(), sizes(), settings(GRANULE)) == 0
    with pytest.raises(ConfigError, match="could not hold a single page"):
        capacity.cut(sizes(), 0, latent())


def test_a_window_that_does_not_fit_is_said(engine_settings: Any) -> None:
    # More than the window of 63 and a page of 16 tokens: the engine itself refuses less.
    assert capacity.cut(window_sizes(), 192, hybrid()).swa_max_total_num_tokens == 96
    with pytest.raises(ConfigError, match=r"144 tokens beside its reserve, 64 of them in window layers.*more than 79"):
        capacity.cut(window_sizes(), 144, hybrid())


def test_a_window_that_fits_on_no_rank_keeps_the_native_pools(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "gather", lambda mine, *_: [mine])
    made = starting(host_capacity_bytes=48 << 10, host_granule_bytes=GRANULE)
    assert made.agree(hybrid(), window_sizes()) is None
    assert made.runtime.phase is Phase.NATIVE
    assert "in window layers" in made.runtime.reason
    enough = starting(host_capacity_bytes=96 << 10, host_granule_bytes=GRANULE)
    smaller: Any = enough.agree(hybrid(), window_sizes())
    assert (enough.runtime.phase, enough.sizes) == (Phase.AGREED, smaller)
    assert 96 < smaller.swa_max_total_num_tokens < 2048


def test_types_of_eight_bits_are_one_byte(engine_settings: Any) -> None:
    made = latent()
    made.kv_cache_dtype = torch.float8_e4m3fn
    assert capacity.token_cost(made, sizes()).token_bytes == 576 * 2


def compressed(layers: range = range(6)) -> Any:
    """Six layers of DeepSeek-V4, or some of them on one of two stages."""
    made = dsv4_configurator(layers.start // 3 if len(layers) < 6 else 0, 6 // len(layers))
    made.model_config.hf_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
    made.device, made.is_hybrid_swa, made.sliding_window_size = "cpu", True, 128
    return made


def compressed_sizes() -> Any:
    fields = {name: getattr(sizes(), name) for name in type(sizes()).__struct_fields__}
    fields |= {
        "max_total_num_tokens": 100 * 256, "full_max_total_num_tokens": 100 * 256, "swa_max_total_num_tokens": 20 * 256,
        "c4_max_total_num_tokens": 100 * 64, "c128_max_total_num_tokens": 100 * 2, "c4_state_pool_size": 20 * 16,
        "max_running_requests": 8,
    }  # fmt: skip
    return type(sizes())(**fields)


def test_deepseek_v4_is_counted_by_its_pages(engine_settings: Any) -> None:
    costs = capacity.token_cost(compressed(), compressed_sizes())
    # Two layers with C4 KV (64 entries, padded to 37,440 bytes) and an indexer, two with C128 KV (1,728 bytes).
    assert costs.token_bytes * 256 == 2 * (37_440 + 64 * 132) + 2 * 1_728
    assert (costs.window_share, costs.fixed_bytes > 0) == (0.2, True)


def test_deepseek_v4_is_cut_in_all_its_sizes(engine_settings: Any) -> None:
    made, native = compressed(), compressed_sizes()
    costs = capacity.token_cost(made, native)
    spare = costs.lanes * 2 * GRANULE + costs.fixed_bytes + int((costs.token_bytes + costs.window_bytes) * 256) + 1
    fits = capacity.fitting_tokens(made, native, settings(spare + int(costs.bytes * 256 * 50)))
    assert fits == 50 * 256
    less = capacity.cut(native, fits, made)
    assert (less.max_total_num_tokens, less.full_max_total_num_tokens) == (50 * 256, 50 * 256)
    assert (less.swa_max_total_num_tokens, less.c4_state_pool_size) == (10 * 256, 10 * 16)
    assert (less.c4_max_total_num_tokens, less.c128_max_total_num_tokens) == (50 * 64, 50 * 2)


def test_a_stage_counts_its_own_layers_only(engine_settings: Any) -> None:
    first, second = (capacity.token_cost(compressed(half), compressed_sizes()) for half in (range(3), range(3, 6)))
    assert first.token_bytes != second.token_bytes
    whole = capacity.token_cost(compressed(), compressed_sizes())
    assert first.token_bytes + second.token_bytes == whole.token_bytes
