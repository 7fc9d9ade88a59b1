"""Draft models: their pools are backed in the transaction of the target, over the engine's own way of building both."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.coord.core.errors import ConfigError
from kvcached_dist.sglang import capacity, drafts, engine
from kvcached_dist.sglang.drafts import Draft
from kvcached_dist.sglang.offer import Offer, common_draft
from kvcached_dist.sglang.plugin import Plugin
from kvcached_dist.sglang.runtime import Phase
from tests.sglang.models import LLAMA, write_tokenizer
from tests.sglang.models_attention import MLA
from tests.sglang.test_agreement import configurator, runtime, sizes

pytestmark = pytest.mark.slow

TOKENS, GRANULE, HEADS = 1024, 4096, {"num_hidden_layers": 3, "head_dim": 24, "num_key_value_heads": 4}
LATENT = {**MLA, "num_hidden_layers": 1, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads": (LLAMA, {**LLAMA, **HEADS}),
    "latent": (MLA, LATENT),
    "heads beside latent": (MLA, {**LLAMA, **HEADS}),
}
"""Target and draft."""


def model_runner(folder: Path, config: dict[str, Any], *, draft: bool) -> Any:
    """As much of the engine's ``ModelRunner`` as exists before it makes pools."""
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    model, algorithm = ModelConfig(str(folder), is_draft_model=draft), SpeculativeAlgorithm.from_string("STANDALONE")
    one = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_tp_size", "attn_cp_size", "attn_dcp_size")
    return SimpleNamespace(
        ps=SimpleNamespace(tp_rank=0, pp_rank=0, **dict.fromkeys(one, 1)),
        model_config=model, is_draft_worker=draft, is_hybrid_swa=model.is_hybrid_swa, spec_algorithm=algorithm,
        use_mla_backend=model.attention_arch == AttentionArch.MLA, kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto", sliding_window_size=model.sliding_window_size,
        layer_info=resolve_layer_indices(
            model=SimpleNamespace(), model_config=model, is_draft_worker=draft, spec_algorithm=algorithm
        ),
    )  # fmt: skip


class Engine:
    """The engine's own making of the pools of a target and of its draft model, hooked or not.

    Args:
        folder: for the models.
        page: tokens of a page.
        models: target and draft.
    """

    def __init__(self, folder: Path, page: int, models: tuple[dict[str, Any], dict[str, Any]]) -> None:
        from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

        self.page, self.memory = page, MemoryPoolConfig(max_total_num_tokens=TOKENS, max_running_requests=8)
        self.target = model_runner(folder / "target", models[0], draft=False)
        self.draft = model_runner(folder / "draft", models[1], draft=True)
        self.scheduler = SimpleNamespace(
            draft_worker=SimpleNamespace(_draft_model_runners=lambda: (self.draft,)), tp_worker=None
        )  # fmt: skip

    def make(self) -> tuple[Any, Any]:
        """What the engine calls its pools: of the target, of the draft model."""
        target = self._pools(self.target, req_to_token_pool=None, token_to_kv_pool_allocator=None)
        shared = {
            "req_to_token_pool": target.req_to_token_pool,
            "token_to_kv_pool_allocator": target.token_to_kv_pool_allocator,
        }
        return target, self._pools(self.draft, **shared)

    def _pools(self, runner: Any, **shared: Any) -> Any:
        from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

        made = KVCacheConfigurator(
            device="cpu", gpu_id=0, pp_group=None, model=None, server_args=SimpleNamespace(nnodes=1),
            model_dtype=torch.bfloat16, page_size=self.page, post_capture_kv_active=False,
            spec_aux_config=None, is_hybrid_swa_compress=False, forward_stream=None, memory_pool_config=self.memory,
            **vars(runner), **shared,
        )  # fmt: skip
        return made._init_pools(sizes=made._derive_pool_sizes(config=self.memory), **shared)


@pytest.fixture(params=[1, 16, 64])
def page(request: Any) -> int:
    found: int = request.param
    return found


@pytest.fixture
def models(request: Any, page: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return MODELS[getattr(request, "param", {1: "heads", 16: "latent", 64: "heads beside latent"}[page])]


@pytest.fixture
def speculating(engine_settings: Any, page: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine's settings with drafts in a chain, one rank."""
    from sglang.srt.runtime_context import get_schedule, get_spec

    monkeypatch.setattr(engine, "world_group", lambda: SimpleNamespace(world_size=1))
    chosen = {"speculative_algorithm": "STANDALONE", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    with get_schedule().override(page_size=page), get_spec().override(**chosen, speculative_num_draft_tokens=2):
        yield


class Served:
    """Plugin, pools and coordinator of one process.

    Args:
        made: the engine.
        registry: its hook registry.
        settings: of this library.
    """

    def __init__(self, made: Engine, registry: Any, **settings: Any) -> None:
        from sglang.srt.plugins.hook_registry import HookType

        sizes = {"host_granule_bytes": GRANULE, "host_capacity_bytes": 16 << 20, "lease_s": 30.0}
        few = {"min_reserved_pages": 1, "max_reserved_pages": 2}
        self.engine = made
        self.plugin = Plugin(Config.preset("tests", **{**sizes, **few, **settings}))
        self.plugin.register(registry, HookType)
        registry.apply_hooks()
        self.runtime = self.plugin.runtime

    def start(self) -> Served:
        """Make the pools, as the scheduler does with its workers at hand."""
        self.plugin._worker_starts(self.engine.scheduler)
        self.target, self.draft = self.engine.make()
        return self

    @property
    def coordinator(self) -> Any:
        return self.runtime.coordinator

    def snapshot(self, what: str) -> Any:
        return self.coordinator.snapshot()[what]

    def mapped(self) -> dict[str, int]:
        return {name: pool["mapped_bytes"] for name, pool in self.snapshot("pools").items()}

    def step(self, pages: int, *domains: str, idle: bool = False) -> None:
        frames = self.coordinator.decide(
            dict.fromkeys(self.runtime.lists, 0) | dict.fromkeys(domains or ("full",), pages), idle=idle
        )
        if frames:
            self.coordinator.apply(frames)

    def extend(self, tokens: int) -> torch.Tensor:
        """Ids of one request, once they are published."""
        wanted = tokens if self.engine.page == 1 else -(-tokens // self.engine.page) + 1
        allocator, known = self.target.token_to_kv_pool_allocator, self.runtime.lists["full"]
        for _ in range(400):
            self.step(wanted)
            if known.available() >= wanted:
                break
            time.sleep(0.002)
        ids = allocator.alloc(-(-tokens // self.engine.page) * self.engine.page)
        assert ids is not None, self.snapshot("domains")
        return torch.as_tensor(ids)

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()


@pytest.fixture
def served(speculating: None, tmp_path: Path, page: int, models: Any, registry: Any) -> Iterator[Served]:
    made = Served(Engine(tmp_path, page, models), registry).start()
    yield made
    made.close()


def buffers(pool: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
    return found


def test_both_pools_are_the_native_ones_and_nothing_is_reserved(
    speculating: None, tmp_path: Path, page: int, models: Any, registry: Any
) -> None:
    native = [pools.token_to_kv_pool for pools in Engine(tmp_path, page, models).make()]
    served = Served(Engine(tmp_path, page, models), registry).start()
    try:
        for made, expected in zip((served.target, served.draft), native, strict=True):
            pairs = list(zip(buffers(made.token_to_kv_pool), buffers(expected), strict=True))
            assert all((m.shape, m.stride(), m.dtype) == (e.shape, e.stride(), e.dtype) for m, e in pairs)
            assert made.token_to_kv_pool.get_kv_size_bytes() == expected.get_kv_size_bytes()
        assert served.snapshot("runtime_pools") == {}
        assert sum(served.mapped().values()) < sum(buffer.nbytes for pool in native for buffer in buffers(pool)) // 4
    finally:
        served.close()


def test_a_page_comes_and_goes_with_its_draft_layers(served: Served) -> None:
    small = served.mapped()
    assert {"draft_kv"} < set(small)
    assert min(small.values()) > 0
    ids = served.extend(700)
    large = served.mapped()
    assert all(large[name] > 2 * small[name] for name in small)
    for number, buffer in enumerate(buffers(served.draft.token_to_kv_pool)):
        buffer[ids] = number + 1
    assert all(bool((b[ids] == n + 1).all()) for n, b in enumerate(buffers(served.draft.token_to_kv_pool)))
    served.target.token_to_kv_pool_allocator.free(ids)
    for _ in range(2000):
        served.step(0, idle=True)
        if all(size < large[name] // 2 for name, size in served.mapped().items()):
            break
        time.sleep(0.002)
    assert all(size < large[name] // 2 for name, size in served.mapped().items())
    kept = served.target.token_to_kv_pool_allocator.free_pages
    again = served.extend(600)
    fresh = again[~torch.isin(again // served.engine.page, kept)]
    assert len(fresh) > 50
    assert not any(buffer[fresh].any() for buffer in buffers(served.draft.token_to_kv_pool)), "old bytes came back"


@pytest.mark.parametrize("page", [16], indirect=True)
def test_a_page_that_lacks_its_draft_layers_is_not_published(served: Served) -> None:
    bytes_of = {pool.name: pool.lanes * pool.block_bytes for pool in served.coordinator.stage.pools}
    target = sum(size for name, size in bytes_of.items() if name != "draft_kv")
    room = served.coordinator.physical.budget_bytes()
    # Room for pages of the target alone, with its borders; less than one page of both.
    spare = min(target + bytes_of["draft_kv"] - 1, 4 * GRANULE)
    served.coordinator.register_runtime_pool("other", room - spare)
    known, before = served.runtime.lists["full"], served.runtime.lists["full"].published()
    for _ in range(200):
        served.step(32)
        time.sleep(0.002)
    assert (known.published(), served.coordinator.domains["full"].growable) == (before, 0)


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
def test_the_capacity_counts_both_and_the_draft_pool_follows_it(
    speculating: None, tmp_path: Path, page: int, models: Any, registry: Any
) -> None:
    served = Served(Engine(tmp_path, page, models), registry, host_capacity_bytes=256 << 10).start()
    try:
        draft = Draft(3, 4, (24, 24), torch.bfloat16)
        assert (served.runtime.draft, draft.token_bytes, draft.lanes) == (draft, 3 * 4 * 48 * 2, 6)
        # The null page and two shared granules of ten lanes; 256 bytes a token of the target.
        spare = 10 * 2 * GRANULE + page * (256 + draft.token_bytes)
        tokens = ((256 << 10) - spare) // (page * (256 + draft.token_bytes)) * page
        assert served.runtime.sizes.max_total_num_tokens == tokens < TOKENS
        sizes = [pools.token_to_kv_pool.size for pools in (served.target, served.draft)]
        assert sizes == [tokens, tokens]
    finally:
        served.close()


def kept_bytes(served: Served) -> dict[str, int]:
    """What a draft pool of K and V heads that stays with the engine takes."""
    pool = served.draft.token_to_kv_pool
    return {
        f"draft.token_to_kv_pool.{name}": sum(buffer.nbytes for buffer in getattr(pool, name))
        for name in ("k_buffer", "v_buffer")
    }


OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "other heads": ({"head_num": 2}, "pool draft_kv: the engine makes 3 layers of (2, 24)"),
    "another type": ({"dtype": torch.float32}, "pool draft_kv: the engine makes 3 layers of (4, 24) float32"),
    "more layers": ({"layer_num": 4}, "pool draft_kv: the engine makes 4 layers"),
    "more tokens": ({"size": 2 * TOKENS}, "pool 'draft_kv': a view of shape (2064, 4, 24)"),
    "another class": ({}, "the engine built a Another"),
}


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
@pytest.mark.parametrize("change", list(OTHERWISE))
@pytest.mark.parametrize("require", [False, True])
def test_a_draft_pool_that_was_not_described_stays_native_or_ends_the_start(
    change: str, require: bool, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sglang.srt.mem_cache import kv_cache_configurator

    made, pool_class = Engine(tmp_path, page, models), kv_cache_configurator.MHATokenToKVPool
    changes, why = OTHERWISE[change]
    draft_class = pool_class if changes else type("Another", (pool_class,), {"__module__": pool_class.__module__})

    def other_for_the_draft(size: int, **options: Any) -> Any:
        if options["layer_num"] != 3:
            return pool_class(size, **options)
        chosen = {"size": size, **options, **changes}
        return draft_class(chosen.pop("size"), **chosen)

    monkeypatch.setattr(kv_cache_configurator, "MHATokenToKVPool", other_for_the_draft)
    served = Served(made, registry, require=require)
    try:
        if require:
            with pytest.raises(ConfigError, match=re.escape(f"the draft pool would stay native: {why}")):
                served.start()
            return
        served.start()
        assert served.runtime.phase is Phase.BOUND
        assert served.snapshot("runtime_pools") == kept_bytes(served)
        (line,) = [text for record in caplog.records if "name=draft" in (text := record.getMessage())]
        assert why in line.replace("\\'", "'")
        served.draft.token_to_kv_pool.k_buffer[0][served.extend(600)] = 1
    finally:
        served.close()


def two(made: Engine) -> None:
    made.scheduler.draft_worker._draft_model_runners = lambda: (made.draft, made.draft)


def none(made: Engine) -> None:
    made.scheduler.draft_worker = None


def moved(made: Engine) -> None:
    made.scheduler.draft_worker = SimpleNamespace()


def windows(made: Engine) -> None:
    model = copy.copy(made.draft.model_config)
    model.full_attention_layer_ids = [1]
    described = SimpleNamespace(**{**vars(made.draft), "is_hybrid_swa": True, "model_config": model})
    made.scheduler.draft_worker._draft_model_runners = lambda: (described,)


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (none, "there are 0 draft models in this process"),
        (two, "there are 2 draft models in this process"),
        (moved, "laid out differently"),
        (windows, "not supported in a draft model: sliding windows"),
    ],
)
def test_what_cannot_be_described_stays_native_beside_an_elastic_target(
    change: Any, why: str, speculating: None, tmp_path: Path, page: int, models: Any, registry: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    made = Engine(tmp_path, page, models)
    change(made)
    served = Served(made, registry, require=True)
    try:
        served.start()
        assert (served.runtime.phase, list(served.mapped())) == (Phase.BOUND, ["mha_kv"])
        assert served.snapshot("runtime_pools") == kept_bytes(served)
        (line,) = [record.getMessage() for record in caplog.records if "name=draft" in record.getMessage()]
        assert why in line
    finally:
        served.close()


def test_ranks_that_describe_different_draft_models_keep_theirs() -> None:
    mine = Offer("", 640, Draft(1, 2, (16, 16), torch.bfloat16), 320)
    assert common_draft([mine, mine]) == (mine.draft, "")
    for other in (replace(mine, draft=None), replace(mine, draft=Draft(2, 2, (16, 16), torch.bfloat16))):
        draft, why = common_draft([mine, other])
        assert draft is None
        assert why.startswith(f"rank 1 has {other.draft}, rank 0 has Draft(layers=1")
    assert common_draft([mine, Offer(tokens=640, native_draft="none here")]) == (None, "rank 1: none here")


def test_the_least_of_all_ranks_holds_target_and_draft(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Draft(1, 2, (16, 16), torch.bfloat16)
    monkeypatch.setattr(drafts, "described", lambda *_: draft)
    monkeypatch.setattr(engine, "refusal", lambda *_args, **_options: None)
    made = configurator(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    alone, both = (capacity.fitting_tokens(made, sizes(), Config.preset("tests"), one) for one in (None, draft))
    assert both < alone
    for other, expected in ((Offer("", 4096, draft, 320), 320), (Offer("", 640, None, 0), 640)):
        monkeypatch.setattr(engine, "gather", lambda mine, other=other: [mine, other])
        deciding = runtime()
        cut: Any = deciding.agree(made, sizes(4096))
        assert (cut.max_total_num_tokens, deciding.draft) == (expected, other.draft)
