"""The draft model of DeepSeek-V4: window layers that are backed with the target's, over the engine's own pools."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import drafts, specs
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.drafted import Engine, Served, model_runner, speculating
from tests.sglang.models import DSV4, LLAMA
from tests.sglang.test_dsv4_pools import tensors

__all__ = ["speculating"]

pytestmark = pytest.mark.slow

PAGE, FULL, WINDOW = 256, 32 * 256, 16 * 256
CONFIG = {**DSV4, "num_nextn_predict_layers": 1}


class Compressed(Engine):
    """The engine's own making of the pools of DeepSeek-V4 and of its draft model."""

    def __init__(self, folder: Path) -> None:
        from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

        super().__init__(folder, PAGE, (CONFIG, CONFIG))
        self.memory = MemoryPoolConfig(
            max_total_num_tokens=FULL, max_running_requests=8, full_max_total_num_tokens=FULL,
            swa_max_total_num_tokens=WINDOW, c4_max_total_num_tokens=FULL // 4, c128_max_total_num_tokens=FULL // 128,
            c4_state_pool_size=WINDOW // 128 * 16,
        )  # fmt: skip
        for runner in (self.target, self.draft):
            runner.kv_cache_dtype = torch.float8_e4m3fn


@pytest.fixture(params=[PAGE])
def page(request: Any) -> int:
    found: int = request.param
    return found


@pytest.fixture
def served(speculating: None, tmp_path: Path, registry: Any) -> Iterator[Served]:
    made = Served(Compressed(tmp_path), registry, host_capacity_bytes=64 << 20).start()
    yield made
    made.close()


def window_buffers(made: Served) -> list[torch.Tensor]:
    found: list[torch.Tensor] = made.draft.token_to_kv_pool.swa_kv_pool.kv_buffer
    return found


def test_pools_are_the_native_ones_with_longer_rings_and_nothing_is_reserved(
    speculating: None, tmp_path: Path, registry: Any
) -> None:
    native = [tensors(pools.token_to_kv_pool) for pools in Compressed(tmp_path).make()]
    served = Served(Compressed(tmp_path), registry, host_capacity_bytes=64 << 20).start()
    try:
        assert served.runtime.phase is Phase.BOUND
        for pools, expected in zip((served.target, served.draft), native, strict=True):
            found = tensors(pools.token_to_kv_pool)
            assert {n: [(t.shape, t.stride(), t.dtype) for t in layers] for n, layers in found.items()} == {
                n: [(t.shape, t.stride(), t.dtype) for t in layers] for n, layers in expected.items()
            }
        assert served.snapshot("runtime_pools") == {}
        assert served.coordinator.stage.pool("draft_swa_kv").domain == specs.SWA
        assert served.coordinator.stage.pool("c4_state").rows_per_block == 16
        mapping = served.target.token_to_kv_pool.full_to_swa_index_mapping
        assert served.draft.token_to_kv_pool.full_to_swa_index_mapping is mapping
    finally:
        served.close()


def test_a_window_page_comes_and_goes_with_its_draft_layer(served: Served) -> None:
    small = served.mapped()
    known = served.runtime.lists[specs.SWA]
    for _ in range(400):
        served.step(8, specs.FULL, specs.SWA)
        if known.available() >= 8:
            break
        time.sleep(0.002)
    zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([6 * PAGE])
    ids = served.target.token_to_kv_pool_allocator.alloc_extend(
        zero, zero, length, length, torch.tensor([-1]), 6 * PAGE
    )
    window = served.draft.token_to_kv_pool.translate_loc_from_full_to_swa(ids)
    large = served.mapped()
    assert all(large[name] > 2 * small[name] for name in ("swa_kv", "draft_swa_kv"))
    for buffer in window_buffers(served):
        buffer[window // PAGE] = 7
    served.target.token_to_kv_pool_allocator.free(ids)
    for _ in range(2000):
        served.step(0, specs.FULL, specs.SWA, idle=True)
        if all(served.mapped()[name] < large[name] // 2 for name in ("swa_kv", "draft_swa_kv")):
            return
        time.sleep(0.002)
    raise AssertionError(served.mapped())


def draft_line(caplog: pytest.LogCaptureFixture) -> str:
    """What is said of a draft pool that is not the described one."""
    (line,) = [text for record in caplog.records if "name=draft " in (text := record.getMessage())]
    return line


@pytest.mark.parametrize("require", [False, True])
def test_a_draft_pool_with_more_layers_stays_native_or_ends_the_start(
    require: bool, speculating: None, tmp_path: Path, registry: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sglang.srt.mem_cache import kv_cache_configurator as module

    pool_class = module.DeepSeekV4TokenToKVPool

    def with_two_layers(**options: Any) -> Any:
        if options["c4_size"] == 0:
            options |= {"compression_ratios": [0, 0], "layer_num": 2, "end_layer": 2}
        return pool_class(**options)

    monkeypatch.setattr(module, "DeepSeekV4TokenToKVPool", with_two_layers)
    served = Served(Compressed(tmp_path), registry, host_capacity_bytes=64 << 20, require=require)
    try:
        if require:
            with pytest.raises(ConfigError, match="draft pool would stay native: pool draft_swa_kv: the engine makes"):
                served.start()
            return
        served.start()
        # The first layer was taken over before the second one came.
        (second,) = window_buffers(served)[1:]
        assert served.snapshot("runtime_pools") == {"draft.token_to_kv_pool.swa_kv_pool.kv_buffer": second.nbytes}
        line = draft_line(caplog)
        assert line.startswith("event=pool rank=0 name=draft elastic=partly ")
        assert "layers of it that are used: 1 of 1" in line
    finally:
        served.close()


def test_a_draft_pool_with_fewer_layers_is_said_to_be_elastic_in_part(
    speculating: None, tmp_path: Path, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = Compressed(tmp_path)
    described = SimpleNamespace(**{**vars(made.draft), "layer_info": SimpleNamespace(num_effective_layers=2)})
    made.scheduler.draft_worker._draft_model_runners = lambda: (described,)
    served = Served(made, registry, host_capacity_bytes=64 << 20).start()
    try:
        assert (len(window_buffers(served)), served.snapshot("runtime_pools")) == (1, {})
        line = draft_line(caplog)
        assert line.startswith(
            "event=pool rank=0 name=draft elastic=partly why='the engine did not create draft_swa_kv"
        )
        assert "layers of it that are used: 1 of 2" in line
    finally:
        served.close()


def test_a_pool_that_is_made_later_has_memory_of_its_own(served: Served) -> None:
    assert served.snapshot("runtime_pools") == {}
    later = served.engine.init()
    kept = sum(buffer.nbytes for buffer in later.token_to_kv_pool.swa_kv_pool.kv_buffer)
    assert served.snapshot("runtime_pools") == {"draft.token_to_kv_pool.swa_kv_pool.kv_buffer": kept}


def test_compressed_attention_in_only_one_of_the_two_is_not_described(engine_settings: Any, tmp_path: Path) -> None:
    made, other = Compressed(tmp_path), model_runner(tmp_path / "other", LLAMA, draft=True)
    for draft, target in ((made.draft, other), (other, made.target)):
        worker = SimpleNamespace(_draft_model_runners=lambda draft=draft: (draft,))
        with pytest.raises(ConfigError, match="compressed attention in it or in its target, not in both"):
            drafts.described(SimpleNamespace(draft_worker=worker), target)


def test_a_draft_model_with_another_window_stays_native(speculating: None, tmp_path: Path, registry: Any) -> None:
    made = Compressed(tmp_path)
    made.draft.model_config.window_size = 64
    served = Served(made, registry, host_capacity_bytes=64 << 20).start()
    try:
        assert served.runtime.phase is Phase.BOUND
        assert "draft_swa_kv" not in served.mapped()
        # The rings are those of speculative decoding all the same: the target's buffers are the native ones.
        assert served.coordinator.stage.pool("c4_state").rows_per_block == 16
        kept = sum(buffer.nbytes for buffer in window_buffers(served))
        assert served.snapshot("runtime_pools")["draft.token_to_kv_pool.swa_kv_pool.kv_buffer"] == kept
    finally:
        served.close()


def test_drafts_beside_online_states_keep_the_native_pools(
    speculating: None, tmp_path: Path, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    monkeypatch.setattr(deepseek_v4_memory_pool, "ONLINE_C128", True)
    with envs.SGLANG_OPT_USE_ONLINE_COMPRESS.override(True), envs.SGLANG_EXPERIMENTAL_ONLINE_C128_MTP.override(True):
        served = Served(Compressed(tmp_path), registry).start()
    assert served.runtime.phase is Phase.NATIVE
    assert "drafts beside online C128 states" in served.runtime.reason


def test_the_draft_pool_is_cut_with_its_target(speculating: None, tmp_path: Path, registry: Any) -> None:
    served = Served(Compressed(tmp_path), registry, host_capacity_bytes=24 << 20, require=True).start()
    try:
        window = served.plugin.starting.sizes.swa_max_total_num_tokens
        assert 0 < window < WINDOW
        assert served.plugin.starting.sizes.max_total_num_tokens < FULL
        assert served.snapshot("runtime_pools") == {}
        sizes = [pools.token_to_kv_pool.swa_kv_pool.size for pools in (served.target, served.draft)]
        assert sizes == [window, window]
    finally:
        served.close()


def test_the_capacity_counts_the_draft_layer(speculating: None, tmp_path: Path, registry: Any) -> None:
    from kvcached_dist.sglang import capacity

    served = Served(Compressed(tmp_path), registry, host_capacity_bytes=64 << 20).start()
    try:
        configurator, sizes = served.plugin.starting.configurator, served.plugin.starting.sizes
        alone, both = (capacity.token_cost(configurator, sizes, one) for one in (None, served.plugin.starting.draft))
        assert (both.window_bytes - alone.window_bytes) * PAGE == 149_760
        assert (both.token_bytes, both.lanes) == (alone.token_bytes, alone.lanes + 1)
    finally:
        served.close()
