"""From what the engine is about to build to this library's pools and domains."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..coord.core.errors import ConfigError
from ..pools.catalogue import CompressedConfig
from ..pools.catalogue.attention import head_pools
from ..pools.catalogue.deepseek_v4 import compressed
from ..pools.specs import DomainSpec, ModelSpec, PoolSpec, StageSpec, align_up
from .engine import context

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
class TokenGeometry:
    """A pool of K and V heads as the engine describes it.

    Attributes:
        tokens: usable tokens.
        page_size: tokens of a page; one block.
        layers: layers of the whole model.
        first_layer: first layer of this stage.
        end_layer: one past its last layer.
        heads: heads on this rank.
        k_dim: dimensions of a K head.
        v_dim: dimensions of a V head.
        dtype: torch name of the element type in memory.
        item_bytes: bytes of an element.
    """

    tokens: int
    page_size: int
    layers: int
    first_layer: int
    end_layer: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on this stage."""
        return self.heads * (self.k_dim + self.v_dim) * self.item_bytes * (self.end_layer - self.first_layer)

    @property
    def ids(self) -> int:
        """Largest id that the engine's allocator hands out."""
        return self.tokens // self.page_size


def mha_stage(geometry: TokenGeometry, *, pp_rank: int, pp_size: int, tp_size: int, granule_bytes: int) -> Takeover:
    """The pools of a model with plain K and V heads.

    Args:
        geometry: the engine's own description.
        pp_rank: pipeline stage.
        pp_size: number of stages.
        tp_size: ranks that share the heads.
        granule_bytes: mapping unit of the device.

    Raises:
        ConfigError: the engine cuts its layers in a way that this library does not know.
    """
    pools = head_pools(
        "mha", FULL, tuple(range(geometry.layers)), geometry.heads, (geometry.k_dim, geometry.v_dim),
        geometry.dtype, geometry.page_size,
    )  # fmt: skip
    per_page = blocks_per_page(pools, geometry.page_size, granule_bytes)
    blocks = align_up(geometry.ids + 1, per_page)
    domain = DomainSpec(FULL, blocks, geometry.page_size, per_page)
    model = ModelSpec("sglang", geometry.layers, (domain,), tuple(pools), tp_size=tp_size)
    stage = _stage(model, pp_rank, pp_size, (geometry.first_layer, geometry.end_layer))
    return Takeover(stage, {FULL: geometry.ids})


def _stage(model: ModelSpec, pp_rank: int, pp_size: int, layers: tuple[int, int]) -> StageSpec:
    stage = model.stage(pp_rank, pp_size, layer_partition(pp_size))
    if (stage.first_layer, stage.end_layer) != layers:
        raise ConfigError(
            f"stage {pp_rank} of {pp_size} has layers [{layers[0]}, {layers[1]}) in the engine, expected"
            f" [{stage.first_layer}, {stage.end_layer}): this way of cutting is not supported"
        )
    return stage


def dsv4_stage(configurator: Any, *, full_tokens: int, swa_tokens: int, request_slots: int) -> Takeover:
    """The pools of DeepSeek-V4: compressed and sliding-window KV, the indexer, the compressor states.

    Args:
        configurator: the engine's ``KVCacheConfigurator``.
        full_tokens: usable tokens of full attention.
        swa_tokens: usable tokens of the sliding window.
        request_slots: request rows, the padding row 0 included.

    Raises:
        ConfigError: the model or the way it is cut is none that this library knows.
    """
    model, parallel, page = configurator.model_config, configurator.ps, int(configurator.pool_page_size)
    layers = int(model.num_hidden_layers)
    environ = engine_flags()
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
        max_requests=request_slots - 1,
        state_dtype=environ.state_dtype,
    )
    # The engine's buffers have exactly its own number of rows: no padding to whole pages of several blocks.
    plan = replace(plan, domains=tuple(replace(domain, blocks_per_page=1) for domain in plan.domains))
    ids = {FULL: full_tokens // page, SWA: swa_tokens // page, ROWS: request_slots - 1}
    ids = {domain.name: ids[domain.name] for domain in plan.domains}
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
    """

    fp4_indexer: bool
    online_c128: bool
    state_dtype: str


def engine_flags() -> EngineFlags:
    """Read from the engine's own modules, where it has resolved them."""
    configurator = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    pools = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    dtype, _ = configurator._get_dsv4_compress_state_dtypes()
    return EngineFlags(
        bool(context("exec").kernel.enable_deepseek_v4_fp4_indexer),
        bool(pools.ONLINE_C128),
        str(dtype).removeprefix("torch."),
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


def mha_geometry(pool: Any, layers: int) -> TokenGeometry:
    """Of an ``MHATokenToKVPool`` that is about to create its buffers."""
    dtype = pool.store_dtype
    return TokenGeometry(
        tokens=pool.size,
        page_size=pool.page_size,
        layers=layers,
        first_layer=pool.start_layer,
        end_layer=pool.start_layer + pool.layer_num,
        heads=pool.head_num,
        k_dim=pool.head_dim,
        v_dim=pool.v_head_dim,
        # The catalogue names FP8 by its own type and stores it as bytes, as the engine does.
        dtype="float8_e4m3fn" if dtype.itemsize == 1 else str(dtype).removeprefix("torch."),
        item_bytes=dtype.itemsize,
    )
