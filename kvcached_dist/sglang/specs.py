"""From what the engine is about to build to this library's pools and domains."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..coord.core.errors import ConfigError
from ..pools.catalogue import CompressedConfig
from ..pools.catalogue.attention import head_pools, token_pool
from ..pools.catalogue.deepseek_v4 import compressed
from ..pools.specs import DomainSpec, ModelSpec, PoolSpec, StageSpec, align_up
from .engine import context, draft_tokens, parallel_of

if TYPE_CHECKING:
    from .drafts import Draft

PAGE_BYTES_LEAST = 64 << 10
"""Blocks smaller than this are granted several at a time (on devices with a smaller granule: than the granule)."""

FULL = "full"
SWA = "swa"
ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Takeover:
    """Pools that this library takes over on one rank.

    Attributes:
        stage: pools and domains.
        ids: largest id that the engine's allocator hands out, per domain.
    """

    stage: StageSpec
    ids: Mapping[str, int]

    def block_tokens(self, domain: str) -> int:
        """Tokens of one block; 1 for request rows."""
        return max(1, self.stage.domain(domain).block_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in the model.

    Attributes:
        layers: layers of the whole model.
        first_layer: first layer of this stage, as the engine says.
        end_layer: one past its last layer.
        pp_rank: pipeline stage.
        pp_size: number of stages.
        tp_size: ranks that share a stage.
        granule_bytes: mapping unit of the device.
    """

    layers: int
    first_layer: int
    end_layer: int
    pp_rank: int
    pp_size: int
    tp_size: int
    granule_bytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """One id space of token pages of the engine, and what it indexes.

    Attributes:
        name: domain.
        tokens: usable tokens of the engine's buffers.
        page_size: tokens of a page; one block.
        pools: pools with all layers of the model.
        local_layers: layers whose buffers the engine makes on this stage; ``None``: those of the stage.
        window_tokens: sliding window; 0: none.
    """

    name: str
    tokens: int
    page_size: int
    pools: tuple[PoolSpec, ...]
    local_layers: tuple[int, ...] | None = None
    window_tokens: int = 0

    @property
    def ids(self) -> int:
        """Largest id that the engine's allocator hands out."""
        return self.tokens // self.page_size


def token_stage(sides: Sequence[Side], place: Place) -> Takeover:
    """Pools that are indexed by token pages.

    Args:
        sides: id spaces, in the order in which they are numbered.
        place: where this rank stands.

    Raises:
        ConfigError: the engine cuts its layers in a way that this library does not know.
    """
    domains = []
    for side in sides:
        per_page = blocks_per_page(side.pools, side.page_size, place.granule_bytes)
        blocks = align_up(side.ids + 1, per_page)
        domains.append(DomainSpec(side.name, blocks, side.page_size, per_page, side.window_tokens))
    pools = tuple(pool for side in sides for pool in side.pools)
    draft_layers = max((len(pool.layers) for pool in pools if pool.draft), default=0)
    model = ModelSpec("sglang", place.layers, tuple(domains), pools, draft_layers, place.tp_size)
    stage = _stage(model, place.pp_rank, place.pp_size, (place.first_layer, place.end_layer))
    for side in sides:
        if side.local_layers is not None:
            stage = _with_layers(stage, side.name, side.local_layers)
    return Takeover(stage, {side.name: side.ids for side in sides})


def _with_layers(stage: StageSpec, domain: str, layers: tuple[int, ...]) -> StageSpec:
    """The stage with exactly the buffers that the engine makes for a domain.

    Hybrids get a buffer for the first layer of the next stage as well (the engine's range of local layers includes its
    end). Nothing ever reads it, but the pool has it.
    """
    expected = {layer for pool in stage.pools if pool.domain == domain for layer in pool.layers}
    if not expected <= set(layers) or not set(layers) - expected <= {stage.end_layer}:
        raise ConfigError(
            f"stage {stage.pp_rank} of {stage.pp_size} keeps layers {list(layers)} in domain {domain}, expected"
            f" {sorted(expected)}: this way of cutting is not supported"
        )
    pools = tuple(replace(pool, layers=layers) if pool.domain == domain else pool for pool in stage.pools)
    return replace(stage, pools=pools)


def _stage(model: ModelSpec, pp_rank: int, pp_size: int, layers: tuple[int, int]) -> StageSpec:
    stage = model.stage(pp_rank, pp_size, layer_partition(pp_size))
    if (stage.first_layer, stage.end_layer) != layers:
        raise ConfigError(
            f"stage {pp_rank} of {pp_size} has layers [{layers[0]}, {layers[1]}) in the engine, expected"
            f" [{stage.first_layer}, {stage.end_layer}): this way of cutting is not supported"
        )
    return stage


def dsv4_stage(
    configurator: Any, *, full_tokens: int, swa_tokens: int, request_slots: int, draft: Draft | None = None
) -> Takeover:
    """The pools of DeepSeek-V4: compressed and sliding-window KV, the indexer, the compressor states.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        full_tokens: usable tokens of full attention.
        swa_tokens: usable tokens of the sliding window.
        request_slots: request rows, the padding row 0 included.
        draft: draft model whose window layers are backed with the target's.

    Raises:
        ConfigError: the model or the way it is cut is none that this library knows.
    """
    model, parallel, page = configurator.model_config, parallel_of(configurator), int(configurator.pool_page_size)
    layers = int(model.num_hidden_layers)
    environ, drafted = engine_flags(), draft_tokens()
    if drafted and environ.online_c128:
        raise ConfigError("not supported: drafts beside online C128 states")
    plan = compressed(
        "sglang-dsv4",
        CompressedConfig(
            tuple(model.compress_ratios[:layers]),
            model.qk_nope_head_dim,
            model.qk_rope_head_dim,
            model.index_head_dim,
            model.window_size,
        ),
        page_size=page,
        tp_size=parallel.tp_size,
        indexer="fp4" if environ.fp4_indexer else "fp8",
        online_c128=environ.online_c128,
        # Rings of states are longer with drafts, whoever keeps the pool of the draft model.
        draft_layers=(draft.layers if draft else 1) if drafted else 0,
        draft_tokens=drafted,
        max_requests=request_slots - 1,
        state_dtype=environ.state_dtype,
    )
    # The engine's buffers have exactly its own number of rows: no padding to whole pages of several blocks.
    plan = replace(plan, domains=tuple(replace(domain, blocks_per_page=1) for domain in plan.domains))
    ids = {FULL: full_tokens // page, SWA: swa_tokens // page, ROWS: request_slots - 1}
    ids = {domain.name: ids[domain.name] for domain in plan.domains}
    native = {"c4_indexer"} if environ.split_indexer else set()
    native |= set() if draft else {"draft_swa_kv"}
    plan = replace(plan, pools=tuple(pool for pool in plan.pools if pool.name not in native))
    spec = plan.with_blocks({name: largest + 1 for name, largest in ids.items()})
    info = configurator.layer_info
    stage = _stage(spec, parallel.pp_rank, parallel.pp_size, (info.start_layer, info.end_layer))
    return Takeover(stage, ids)


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Choices of the engine that decide the layout of DeepSeek-V4 pools.

    Attributes:
        fp4_indexer: indexer rows in FP4.
        online_c128: one running C128 state per request instead of a ring.
        state_dtype: torch name of the element type of compressor states.
        split_indexer: FP4 payload and scales in buffers of their own (AITER); they stay with the engine.
    """

    fp4_indexer: bool
    online_c128: bool
    state_dtype: str
    split_indexer: bool


def engine_flags() -> EngineFlags:
    """Read from the engine's own modules, where it has resolved them."""
    configurator = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    pools = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    dtype, _ = configurator._get_dsv4_compress_state_dtypes()
    fp4 = bool(context("exec").kernel.enable_deepseek_v4_fp4_indexer)
    return EngineFlags(
        fp4, bool(pools.ONLINE_C128), str(dtype).removeprefix("torch."), fp4 and bool(getattr(pools, "_is_hip", False))
    )


def blocks_per_page(pools: Sequence[PoolSpec], page_size: int, granule_bytes: int) -> int:
    """B: one for token pages, for single tokens the least power of two that fills a page."""
    if page_size > 1:
        return 1
    widest = max(pool.block_bytes for pool in pools)
    least = min(PAGE_BYTES_LEAST, granule_bytes)
    return 1 << max(0, math.ceil(math.log2(least / widest)))


def layer_partition(pp_size: int) -> tuple[int, ...] | None:
    """Layers per stage where the operator fixed them, as the engine reads it."""
    text = os.environ.get("SGLANG_PP_LAYER_PARTITION", "")
    return tuple(int(part) for part in text.split(",")) if text and pp_size > 1 else None


def head_side(prefix: str, domain: str, layers: tuple[int, ...], pool: HeadPool) -> Side:
    """A pool of K and V heads.

    Args:
        prefix: of the names: ``mha`` or ``swa``.
        domain: domain that indexes it.
        layers: layers of the model that have it.
        pool: the engine's own description.
    """
    pools = head_pools(
        prefix, domain, layers, pool.heads, (pool.k_dim, pool.v_dim), stored_name(pool.dtype), pool.page_size
    )  # fmt: skip
    return Side(domain, pool.tokens, pool.page_size, tuple(pools))


@dataclass(frozen=True, slots=True)
class HeadPool:
    """An ``MHATokenToKVPool``, made or about to be made.

    Attributes:
        tokens: usable tokens.
        page_size: tokens of a page.
        heads: heads on this rank.
        k_dim: dimensions of a K head.
        v_dim: dimensions of a V head.
        dtype: element type that the cache is for.
    """

    tokens: int
    page_size: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, pool: Any) -> HeadPool:
        """One that is about to create its buffers."""
        return cls(pool.size, pool.page_size, pool.head_num, pool.head_dim, pool.v_head_dim, pool.dtype)


def latent_side(layers: tuple[int, ...], pool: Any) -> Side:
    """An ``MLATokenToKVPool`` that is about to create its buffers: one latent per token, whole on every rank."""
    shape = (1, int(pool.kv_cache_dim))
    spec = token_pool("mla_kv", FULL, layers, shape, stored_name(pool.dtype), pool.page_size)
    return Side(FULL, pool.size, pool.page_size, (spec,))


def stored_name(dtype: torch.dtype) -> str:
    """Name of an element type in the catalogue, which stores 8-bit types as bytes, as the engine does."""
    return "float8_e4m3fn" if dtype.itemsize == 1 else str(dtype).removeprefix("torch.")


def hybrid_stage(configurator: Any, chosen: Mapping[str, Any], place: Place) -> Takeover:
    """The two pools of a sliding-window hybrid with K and V heads.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        chosen: with what the engine makes its ``SWAKVPool``, by name; the pools inside it do not exist yet.
        place: where this rank stands.

    Raises:
        ConfigError: this way of cutting layers is not known, or the stage has no layers of one kind.
    """
    local = {
        FULL: tuple(sorted(chosen["full_attention_layer_ids"])),
        SWA: tuple(sorted(chosen["swa_attention_layer_ids"])),
    }
    empty = [name for name, layers in local.items() if not layers]
    if empty:
        raise ConfigError(f"stage {place.pp_rank} of {place.pp_size} has no layers of domain {empty[0]}")
    if any(list(chosen[f"{name}_attention_layer_ids"]) != list(layers) for name, layers in local.items()):
        raise ConfigError(f"stage {place.pp_rank}: the layers of a pool are not in ascending order")
    page, dtype = int(chosen["page_size"]), chosen["dtype"]

    def of(tokens: int, prefix: str) -> HeadPool:
        # The engine's own rule: the pool of window layers may have a geometry of its own.
        def own(name: str) -> int | None:
            found = chosen.get(f"{prefix}{name}") if prefix else None
            return chosen.get(name) if found is None else found

        v_dim = own("v_head_dim")
        return HeadPool(
            tokens, page, int(own("head_num") or 0), int(own("head_dim") or 0),
            int(chosen["head_dim"] if v_dim is None else v_dim), dtype,
        )  # fmt: skip

    full_layers, swa_layers = hybrid_layers(configurator.model_config, place.layers)
    full = head_side("mha", FULL, full_layers, of(int(chosen["size"]), ""))
    swa = head_side("swa", SWA, swa_layers, of(int(chosen["size_swa"]), "swa_"))
    window = int(configurator.sliding_window_size or 0)
    return token_stage(
        [replace(full, local_layers=local[FULL]), replace(swa, local_layers=local[SWA], window_tokens=window)], place
    )


def hybrid_layers(model: Any, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers of the whole model with full attention and with a window.

    The lists in the engine's model configuration are cut to the stage before pools are built, so they are derived
    again, where the engine derives them.
    """
    module = importlib.import_module("sglang.srt.configs.model_config")
    swa, full = module.get_hybrid_layer_ids(model.hf_config.architectures, model.hf_text_config)
    cut = [tuple(sorted(layer for layer in ids if layer < layers)) for ids in (full, swa)]
    return cut[0], cut[1]
