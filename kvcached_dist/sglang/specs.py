"""From what the engine is about to build to this library's pools and domains."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..coord.core.errors import ConfigError
from ..pools.catalogue.attention import head_pools
from ..pools.specs import DomainSpec, ModelSpec, PoolSpec, StageSpec, align_up

PAGE_BYTES_LEAST = 64 << 10
"""Blocks smaller than this are granted several at a time (on devices with a smaller granule: than the granule)."""

FULL = "full"


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


def mha_stage(geometry: TokenGeometry, *, pp_rank: int, pp_size: int, tp_size: int, granule_bytes: int) -> StageSpec:
    """The stage of a model with plain K and V heads.

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
    stage = model.stage(pp_rank, pp_size, layer_partition(pp_size))
    if (stage.first_layer, stage.end_layer) != (geometry.first_layer, geometry.end_layer):
        raise ConfigError(
            f"stage {pp_rank} of {pp_size} has layers [{geometry.first_layer}, {geometry.end_layer}) in the engine,"
            f" expected [{stage.first_layer}, {stage.end_layer}): this way of cutting is not supported"
        )
    return stage


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


__all__ = ["FULL", "TokenGeometry", "blocks_per_page", "layer_partition", "mha_geometry", "mha_stage"]
