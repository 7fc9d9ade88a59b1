"""All ranks become elastic together or not at all, and none promises what another could not hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import engine
from kvcached_dist.sglang.offer import Offer
from kvcached_dist.sglang.runtime import Phase, Runtime
from kvcached_dist.sglang.starting import Starting


def configurator(**changes: Any) -> Any:
    parallel = SimpleNamespace(
        tp_rank=0, tp_size=2, pp_rank=0, pp_size=1, dp_size=1, attn_dp_size=1, attn_tp_size=2, attn_cp_size=1,
        attn_dcp_size=1,
    )  # fmt: skip
    model = SimpleNamespace(
        num_hidden_layers=2, head_dim=16, v_head_dim=16, get_num_kv_heads=lambda *_: 1,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    values: dict[str, Any] = {
        "ps": parallel, "model_config": model, "layer_info": SimpleNamespace(start_layer=0, end_layer=2),
        "is_draft_worker": False, "kv_cache_dtype": torch.bfloat16, "pool_page_size": 16, "device": "cpu",
        "spec_algorithm": SimpleNamespace(is_none=lambda: True), "post_capture_kv_active": False,
        "mambaish_config": None, "is_hybrid_swa": False, "use_mla_backend": False, "server_args": SimpleNamespace(),
        "kv_cache_dtype_str": "auto",
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def only_windows() -> Any:
    hf_config = SimpleNamespace(architectures=["UnlimitedOCRForCausalLM"])
    return SimpleNamespace(full_attention_layer_ids=[], swa_attention_layer_ids=[0, 1], hf_config=hf_config)


def sizes(tokens: int = 4096) -> Any:
    from sglang.srt.mem_cache.kv_cache_configurator import _PoolSizes

    return _PoolSizes(
        max_total_num_tokens=tokens, max_running_requests=8, full_max_total_num_tokens=None,
        swa_max_total_num_tokens=None, c4_max_total_num_tokens=0, c128_max_total_num_tokens=0, c4_state_pool_size=0,
        c128_state_pool_size=0, c4_state_dtype=None, c128_state_dtype=None,
    )  # fmt: skip


def starting(missing: tuple[str, ...] = (), **settings: Any) -> Starting:
    return Starting(Runtime(Config.preset("tests", **settings)), lambda: list(missing))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the other ranks answer, after this one."""
    answers: list[Any] = []
    monkeypatch.setattr(engine, "gather", lambda mine, *_: [mine, *answers])
    return answers


def test_a_plain_model_is_taken_over(engine_settings: Any, others: list[Any]) -> None:
    made = starting()
    assert made.agree(configurator(), sizes()) is None
    assert made.runtime.phase is Phase.AGREED


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_mla_backend": True, "is_hybrid_swa": True}, "MLA with sliding-window layers"),
        ({"is_hybrid_swa": True, "model_config": only_windows()}, "sliding-window layers only"),
        ({"kv_cache_dtype_str": "mxfp8"}, "KV of type mxfp8"),
        ({"mambaish_config": object()}, "recurrent state"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"post_capture_kv_active": True}, "KV sizing after graph capture"),
        ({"device": "npu"}, "device npu"),
    ],
)
def test_what_is_not_supported_stays_native_and_is_named(
    change: dict[str, Any], why: str, engine_settings: Any, others: list[Any]
) -> None:
    made = starting()
    assert made.agree(configurator(**change), sizes()) is None
    assert made.runtime.phase is Phase.NATIVE
    assert f"rank 0: not supported: {why}" in made.runtime.reason


@pytest.mark.parametrize(
    ("group", "setting", "value", "why"),
    [
        ("disagg", "disaggregation_mode", "decode", "disaggregated prefill or decode"),
        ("memory", "enable_unified_memory", True, "unified memory"),
        ("memory", "enable_hisparse", True, "HiSparse"),
        ("memory", "enable_hierarchical_cache", True, "the hierarchical cache"),
        ("memory", "enable_unified_cache_external_linker", True, "an external cache"),
        ("memory", "enable_lmcache", True, "LMCache"),
        ("memory", "enable_flexkv", True, "FlexKV"),
        ("memory", "radix_cache_backend", "mine", "the prefix cache of --radix-cache-backend mine"),
        ("memory", "enable_page_major_kv_layout", True, "the page-major layout"),
        ("exec.features", "enable_memory_saver", True, "the memory saver (release_memory_occupation)"),
        ("schedule", "prefill_only_disable_kv_cache", True, "prefill without a KV cache"),
    ],
)
def test_a_setting_of_the_engine_that_is_not_supported_keeps_the_native_pools(
    group: str, setting: str, value: object, why: str, engine_settings: Any
) -> None:
    first, *rest = group.split(".")
    settings = engine.context(first)
    for name in rest:
        settings = getattr(settings, name)
    assert engine.refusal(configurator(), dsv4_bridge=True) is None
    with settings.override(**{setting: value}):
        assert engine.refusal(configurator(), dsv4_bridge=True) == f"not supported: {why}"


@pytest.mark.parametrize(
    ("sizes_and_ranks", "why"),
    [
        ({"dp_size": 2}, "several data-parallel replicas"),
        ({"attn_cp_size": 2}, "context-parallel attention"),
        ({"attn_dcp_size": 2}, "context-parallel attention"),
    ],
)
def test_a_topology_that_is_not_supported_keeps_the_native_pools(
    sizes_and_ranks: dict[str, int], why: str, engine_settings: Any
) -> None:
    made = configurator()
    vars(made.ps).update(sizes_and_ranks)
    assert engine.refusal(made, dsv4_bridge=True) == f"not supported: {why}"


def test_the_radix_tree_in_cpp_keeps_the_native_pools(engine_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1")
    assert engine.refusal(configurator(), dsv4_bridge=True) == "not supported: the radix tree in C++"


def test_diffusion_models_keep_the_native_pools(engine_settings: Any) -> None:
    made = configurator(server_args=SimpleNamespace(dllm_algorithm="LowConfidence"))
    assert engine.refusal(made, dsv4_bridge=True) == "not supported: diffusion models"


def test_deepseek_v4_stays_native_where_its_bridge_is_off(
    engine_settings: Any, others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "is_dsv4", lambda _configurator: True)
    assert engine.refusal(configurator(), dsv4_bridge=True) is None
    made = starting(sglang_dsv4_kv_pool_bridge=False)
    made.agree(configurator(), sizes())
    assert made.runtime.reason == "rank 0: not supported: DeepSeek-V4 (KVCACHED_SGLANG_DSV4_KV_POOL_BRIDGE is off)"


@pytest.mark.parametrize("missing", ["spec_algorithm", "layer_info", "pool_page_size"])
def test_an_engine_that_is_laid_out_differently_stays_native(
    missing: str, engine_settings: Any, others: list[Any]
) -> None:
    """Whether what it lacks is needed to refuse or to count what fits."""
    made = starting()
    odd = configurator()
    delattr(odd, missing)
    made.agree(odd, sizes())
    assert "laid out differently" in made.runtime.reason
    assert missing in made.runtime.reason


def test_one_rank_that_cannot_keeps_the_native_pools_of_all(engine_settings: Any, others: list[Any]) -> None:
    others.append(Offer(refused="not hooked: a.b.c"))
    made = starting()
    made.agree(configurator(), sizes())
    assert (made.runtime.phase, made.runtime.reason) == (Phase.NATIVE, "rank 1: not hooked: a.b.c")
    with pytest.raises(ConfigError, match="rank 1: not hooked"):
        starting(require=True).agree(configurator(), sizes())


def test_a_hook_that_is_not_in_force_is_named(engine_settings: Any, others: list[Any]) -> None:
    made = starting(missing=("x.y",))
    made.agree(configurator(), sizes())
    assert made.runtime.reason == "rank 0: not hooked: x.y"


def test_the_capacity_is_what_the_smallest_rank_could_ever_hold(
    engine_settings: Any, others: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    others.append(Offer(tokens=1600))
    made = starting()
    cut: Any = made.agree(configurator(), sizes(4096))
    assert cut.max_total_num_tokens == made.sizes.max_total_num_tokens == 1600
    assert cut.max_running_requests == 8
    assert "rank 1 cannot hold more" in caplog.text


def test_a_small_device_cuts_in_whole_pages(engine_settings: Any, others: list[Any]) -> None:
    # 128 bytes a token on this rank; the null page and the borders of four lanes go off first.
    cut: Any = starting(host_capacity_bytes=256 << 10).agree(configurator(), sizes(4096))
    assert cut.max_total_num_tokens % 16 == 0
    assert 0 < cut.max_total_num_tokens * 128 <= 256 << 10


def test_draft_models_are_left_alone(engine_settings: Any, others: list[Any]) -> None:
    made = starting()
    assert made.agree(configurator(is_draft_worker=True), sizes()) is None
    assert made.runtime.phase is Phase.UNDECIDED


def test_an_engine_that_builds_another_pool_stays_native(engine_settings: Any, others: list[Any]) -> None:
    made = starting()
    made.agree(configurator(), sizes())
    made.bind(SimpleNamespace(token_to_kv_pool=SimpleNamespace()))
    assert made.runtime.phase is Phase.NATIVE
    assert "the engine built a SimpleNamespace" in made.runtime.reason


def test_elastic_buffers_without_elastic_lists_end_the_start(engine_settings: Any, others: list[Any]) -> None:
    """Too late for native pools: the engine's lists would hand out ids without memory."""
    made = starting(missing=("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._init_pools",))
    made.configurator, made.runtime.phase = configurator(), Phase.STARTED
    with pytest.raises(ConfigError, match=r"rank 0: the engine has elastic buffers.*not hooked: .*\._init_pools\. Run"):
        made.attach(SimpleNamespace())
    assert made.runtime.phase is Phase.STARTED


@pytest.mark.parametrize("phase", [Phase.UNDECIDED, Phase.AGREED])
def test_an_engine_that_built_its_pools_elsewhere_stays_native(phase: Phase) -> None:
    made = starting()
    made.runtime.phase = phase
    made.attach(SimpleNamespace())
    assert made.runtime.phase is Phase.NATIVE
    assert made.runtime.reason == f"the engine built its pools elsewhere (phase {phase.value})"
