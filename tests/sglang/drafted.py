"""The engine's own way of building the pools of a target and of its draft model, and what serves them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.sglang import engine
from kvcached_dist.sglang.plugin import Plugin
from tests.sglang.models import LLAMA, write_tokenizer
from tests.sglang.models_attention import MLA

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
        self.init = partial(made._init_pools, sizes=made._derive_pool_sizes(config=self.memory), **shared)
        return self.init()


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


def kept_bytes(served: Served) -> dict[str, int]:
    """What a draft pool of K and V heads that stays with the engine takes."""
    pool = served.draft.token_to_kv_pool
    return {
        f"draft.token_to_kv_pool.{name}": sum(buffer.nbytes for buffer in getattr(pool, name))
        for name in ("k_buffer", "v_buffer")
    }
