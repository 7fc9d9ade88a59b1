"""Plain attention: MHA and GQA with separate K and V, MLA, and sliding-window hybrids of MHA.

Native shapes (SGLang 0.5.20): MHA keeps K and V of a layer as ``[tokens + page_size, heads, dim]`` each
(``MHATokenToKVPool``), MLA one ``[tokens + page_size, 1, rank + rope]`` (``MLATokenToKVPool``), hybrids two
MHA pools with layers of their own (``SWAKVPool``). The page in front is the null page. FP8 caches are
stored as uint8. Dimensions are those of the published ``config.json`` of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...coord.core.errors import ConfigError
from ..dtypes import DTYPE_BYTES
from ..sizing import DomainPlan, ModelPlan
from ..specs import FillPiece, PoolSpec
from .registry import blocks_per_page, register, require_choice, require_positive, shard_heads

KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Dimensions of a model with K and V heads.

    Attributes:
        num_layers: layers.
        kv_heads: KV heads over all ranks.
        head_dim: dimensions of a K head.
        v_head_dim: dimensions of a V head; 0: as K.
        window_tokens: sliding window of the layers in ``window_layers``.
        window_layers: layers with a sliding window; the others attend to everything.
        swa_ratio: window tokens per full token (the engine's default is 0.8).
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    window_tokens: int = 0
    window_layers: tuple[int, ...] = ()
    swa_ratio: float = 0.8

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.window_layers)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Dimensions of a model with one shared latent (MLA).

    Attributes:
        num_layers: layers.
        kv_lora_rank: dimensions of the latent.
        rope_head_dim: rotary dimensions behind it.
    """

    num_layers: int
    kv_lora_rank: int = 512
    rope_head_dim: int = 64


def token_pool(
    name: str,
    domain: str,
    layers: tuple[int, ...],
    row_shape: tuple[int, ...],
    kv_dtype: str,
    page_size: int,
    *,
    buffers: int = 1,
    draft: bool = False,
) -> PoolSpec:
    """A pool with one row per token.

    Args:
        name: name of the pool.
        domain: domain that indexes it.
        layers: layers that own a buffer.
        row_shape: shape of one token.
        kv_dtype: element type; FP8 is stored as uint8, as in the engine.
        page_size: tokens of a block.
        buffers: buffers per layer.
        draft: belongs to a draft model.
    """
    stored = "uint8" if DTYPE_BYTES[kv_dtype] == 1 else kv_dtype
    row_bytes = DTYPE_BYTES[stored]
    for dimension in row_shape:
        row_bytes *= dimension
    block_bytes = row_bytes * page_size
    return PoolSpec(
        name, domain, block_bytes, layers, row_shape, stored, rows_per_block=page_size, buffers_per_layer=buffers,
        fill_row_bytes=block_bytes, fill=(FillPiece(0, block_bytes),), draft=draft,
    )  # fmt: skip


def head_pools(
    prefix: str,
    domain: str,
    layers: tuple[int, ...],
    heads: int,
    dims: tuple[int, int],
    kv_dtype: str,
    page_size: int,
    *,
    draft: bool = False,
) -> list[PoolSpec]:
    """K and V of a set of layers: one pool where both have the same geometry, two otherwise.

    Args:
        prefix: ``mha``, ``swa`` or ``draft``.
        domain: domain that indexes them.
        layers: layers that own buffers.
        heads: heads on this rank.
        dims: dimensions of a K head and of a V head.
        kv_dtype: element type.
        page_size: tokens of a block.
        draft: belongs to a draft model.
    """
    if dims[0] == dims[1]:
        shape = (heads, dims[0])
        return [token_pool(f"{prefix}_kv", domain, layers, shape, kv_dtype, page_size, buffers=2, draft=draft)]
    return [
        token_pool(f"{prefix}_{part}", domain, layers, (heads, dim), kv_dtype, page_size, draft=draft)
        for part, dim in zip(("k", "v"), dims, strict=True)
    ]


def token_domain(name: str, pools: list[PoolSpec], page_size: int, window_tokens: int, share: float) -> DomainPlan:
    """Domain of token pages, with B from its widest pool."""
    widest = max(pool.block_bytes for pool in pools if pool.domain == name)
    return DomainPlan(name, page_size, blocks_per_page(page_size, widest), window_tokens, share)


def attention(
    name: str,
    config: AttentionConfig,
    *,
    page_size: int = 16,
    tp_size: int = 1,
    kv_dtype: str = "bfloat16",
    draft_layers: int = 0,
    draft_tokens_max: int = 0,
    swa_ratio: float = 0.0,
) -> ModelPlan:
    """Pools of a model with K and V heads, with or without sliding-window layers.

    Args:
        name: name of the model.
        config: dimensions.
        page_size: tokens of a block.
        tp_size: ranks that share the heads; with fewer heads than ranks every rank keeps one.
        kv_dtype: element type of the cache.
        draft_layers: layers of a draft model with the target's geometry, in the full domain.
        draft_tokens_max: tokens that the draft's own configuration allows; 0: follows the target.
        swa_ratio: window tokens per full token; 0: the model's default.

    Raises:
        ConfigError: an option does not work; names it and a value that would.
    """
    require_positive(name, page_size=page_size, tp_size=tp_size)
    require_choice(name, "kv_dtype", kv_dtype, KV_DTYPES)
    if draft_layers < 0 or swa_ratio < 0:
        raise ConfigError(f"model {name!r}: draft_layers={draft_layers} and swa_ratio={swa_ratio} must be at least 0")
    heads = shard_heads(name, "KV heads", config.kv_heads, tp_size)
    dims = (config.head_dim, config.v_head_dim or config.head_dim)
    pools: list[PoolSpec] = []
    domains: list[DomainPlan] = []
    if config.full_layers:
        pools += head_pools("mha", "full", config.full_layers, heads, dims, kv_dtype, page_size)
        domains.append(token_domain("full", pools, page_size, 0, 1.0))
    if config.window_layers:
        pools += head_pools("swa", "swa", config.window_layers, heads, dims, kv_dtype, page_size)
        # Without full layers capacity is counted in window tokens and the ratio means nothing.
        share = (swa_ratio or config.swa_ratio) if config.full_layers else 1.0
        domains.append(token_domain("swa", pools, page_size, config.window_tokens, share))
    if draft_layers:
        stages = tuple(range(config.num_layers, config.num_layers + draft_layers))
        pools += head_pools("draft", domains[0].name, stages, heads, dims, kv_dtype, page_size, draft=True)
    return ModelPlan(
        name, config.num_layers, tuple(domains), tuple(pools), draft_layers, tp_size, draft_tokens_max
    )  # fmt: skip


def latent(
    name: str,
    config: LatentConfig,
    *,
    page_size: int = 64,
    tp_size: int = 1,
    kv_dtype: str = "bfloat16",
    draft_layers: int = 0,
    draft_tokens_max: int = 0,
) -> ModelPlan:
    """Pools of a model with one latent per token (MLA).

    Args:
        name: name of the model.
        config: dimensions.
        page_size: tokens of a block.
        tp_size: ranks; each holds the whole latent, so bytes do not depend on it.
        kv_dtype: element type of the cache.
        draft_layers: layers of a draft (MTP) model with the target's geometry.
        draft_tokens_max: tokens that the draft's own configuration allows; 0: follows the target.

    Raises:
        ConfigError: an option does not work; names it and a value that would.
    """
    require_positive(name, page_size=page_size, tp_size=tp_size)
    require_choice(name, "kv_dtype", kv_dtype, KV_DTYPES)
    if draft_layers < 0:
        raise ConfigError(f"model {name!r}: draft_layers={draft_layers} must be at least 0")
    row_shape = (1, config.kv_lora_rank + config.rope_head_dim)
    layers = tuple(range(config.num_layers))
    pools = [token_pool("mla_kv", "full", layers, row_shape, kv_dtype, page_size)]
    if draft_layers:
        stages = tuple(range(config.num_layers, config.num_layers + draft_layers))
        pools.append(token_pool("draft_kv", "full", stages, row_shape, kv_dtype, page_size, draft=True))
    domains = (token_domain("full", pools, page_size, 0, 1.0),)
    return ModelPlan(name, config.num_layers, domains, tuple(pools), draft_layers, tp_size, draft_tokens_max)


def _every(num_layers: int, period: int) -> tuple[int, ...]:
    """Window layers where every ``period``-th layer attends to everything."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) % period)


register("llama-3.1-8b", attention, AttentionConfig(32, 8, 128))
register("llama-3.1-70b", attention, AttentionConfig(80, 8, 128))
register("gpt-oss-20b", attention, AttentionConfig(24, 8, 64, window_tokens=128, window_layers=_every(24, 2)))
register("gpt-oss-120b", attention, AttentionConfig(36, 8, 64, window_tokens=128, window_layers=_every(36, 2)))
register("gemma-3-27b", attention, AttentionConfig(62, 16, 128, window_tokens=1024, window_layers=_every(62, 6)))
register("deepseek-v3", latent, LatentConfig(61))
register("tiny-llama", attention, AttentionConfig(4, 2, 24))
register("tiny-swa", attention, AttentionConfig(6, 2, 24, window_tokens=32, window_layers=_every(6, 3)), swa_ratio=0.5)
register("tiny-mla", latent, LatentConfig(4, 40, 8), page_size=16)
