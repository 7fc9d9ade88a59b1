"""Compressed attention as in DeepSeek-V4: sliding-window KV, C4 and C128 KV, indexer, compressor state.

Where the figures come from (SGLang 0.5.20, ``mem_cache/deepseek_v4_memory_pool.py`` and
``deepseek_v4_compress_state.py``):

* KV row: ``nope`` values in FP8, ``rope`` values in bfloat16, one scale byte per 64 ``nope`` values and one
  byte of padding; a token page is padded to a multiple of 576 bytes. 448 + 128 + 7 + 1 = 584 bytes.
* Indexer row, FP8: ``dim`` bytes and one 4-byte scale per 128; FP4: ``dim / 2`` bytes and one byte per 32.
* C4 state: per *scheduler page* of a window id a ring of 8 rows (16 with draft tokens); a row holds KV and
  score, each twice ``dim`` wide because windows overlap. The engine allocates one ring per *window*, twice
  what its addressing can reach; the surplus is address space here and never backed.
* C128 state is addressed by the request row: offline a ring of 128 rows (256 with draft tokens) of KV and
  score; online one row (maximum, sum, KV) per bank: bank 0 committed, one more per draft token.
* A cleared state row is KV 0 and score minus infinity; online, maximum minus infinity and the rest 0.
* Draft stages have sliding-window layers only and are indexed by the target's window ids.

Layers and ratios are those of the published ``config.json`` of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...coord.core.errors import ConfigError
from ..dtypes import DTYPE_BYTES, NEGATIVE_INFINITY
from ..sizing import DomainPlan, ModelPlan
from ..specs import FillPiece, PoolSpec, RowRule, align_up
from .registry import blocks_per_page, register, require_choice, require_positive


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Dimensions of a model with compressed attention.

    Attributes:
        compress_ratios: ratio per layer: 0 (window only), 4 or 128.
        nope_head_dim: dimensions kept in FP8.
        rope_head_dim: dimensions kept in bfloat16.
        index_head_dim: dimensions of the indexer.
        window_tokens: sliding window.
        quant_block: ``nope`` values per scale byte.
        page_align_bytes: token pages are padded to a multiple of it.
    """

    compress_ratios: tuple[int, ...]
    nope_head_dim: int = 448
    rope_head_dim: int = 64
    index_head_dim: int = 128
    window_tokens: int = 128
    quant_block: int = 64
    page_align_bytes: int = 576

    @property
    def head_dim(self) -> int:
        """Dimensions of the latent."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one token in a KV pool, without page padding."""
        return self.nope_head_dim + 2 * self.rope_head_dim + self.nope_head_dim // self.quant_block + 1

    def layers(self, *ratios: int) -> tuple[int, ...]:
        """Layers with one of these ratios."""
        return tuple(layer for layer, ratio in enumerate(self.compress_ratios) if ratio in ratios)


def _page_pool(
    name: str, domain: str, layers: tuple[int, ...], page_bytes: int, charged: int, ratio: int = 1, draft: bool = False
) -> PoolSpec:
    """A pool whose native buffer is ``[pages, bytes]`` of uint8."""
    return PoolSpec(
        name, domain, page_bytes, layers, (page_bytes,), ratio=ratio, fill_row_bytes=page_bytes,
        fill=(FillPiece(0, page_bytes),), budget_bytes=charged, draft=draft,
    )  # fmt: skip


def _state_fill(row_bytes: int, zero_bytes: int, dtype: str) -> tuple[FillPiece, ...]:
    """KV zero, score minus infinity behind it."""
    score = FillPiece(zero_bytes, row_bytes - zero_bytes, NEGATIVE_INFINITY[dtype])
    return (FillPiece(0, zero_bytes), score)


@dataclass(frozen=True, slots=True)
class _Options:
    page_size: int
    indexer: str
    online_c128: bool
    draft_layers: int
    draft_tokens: int
    state_dtype: str

    @property
    def c4_ring(self) -> int:
        return 16 if self.draft_layers else 8

    @property
    def c128_ring(self) -> int:
        return 256 if self.draft_layers else 128


def _kv_pools(config: CompressedConfig, options: _Options) -> list[PoolSpec]:
    def kv(name: str, domain: str, layers: tuple[int, ...], ratio: int = 1, draft: bool = False) -> PoolSpec:
        charged = options.page_size // ratio * config.kv_row_bytes
        page_bytes = align_up(charged, config.page_align_bytes)
        return _page_pool(name, domain, layers, page_bytes, charged, ratio, draft)

    entries = options.page_size // 4
    fp8_bytes = config.index_head_dim + config.index_head_dim // 128 * 4
    fp4_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
    row_bytes = fp8_bytes if options.indexer == "fp8" else fp4_bytes
    c4_layers = config.layers(4)
    return [
        kv("swa_kv", "swa", tuple(range(len(config.compress_ratios)))),
        kv("c4_kv", "full", c4_layers, 4),
        # The engine's sizing charges the FP8 row for both formats on CUDA.
        _page_pool("c4_indexer", "full", c4_layers, entries * row_bytes, entries * fp8_bytes, 4),
        kv("c128_kv", "full", config.layers(128), 128),
    ]


def _c4_state(name: str, config: CompressedConfig, options: _Options, dim: int) -> PoolSpec:
    item = DTYPE_BYTES[options.state_dtype]
    ring, row_bytes = options.c4_ring, 4 * dim * item
    rings_per_page = options.page_size // config.window_tokens
    return PoolSpec(
        name, "swa", ring * row_bytes, config.layers(4), (4 * dim,), options.state_dtype, rows_per_block=ring,
        sentinel_rows=1, native_rows=RowRule(rings_per_page * ring, ring + 1, 4), ring_rows=ring,
        fill_row_bytes=row_bytes, fill=_state_fill(row_bytes, row_bytes // 2, options.state_dtype),
        budget_bytes=rings_per_page * ring * row_bytes,
    )  # fmt: skip


def _c128_state(config: CompressedConfig, options: _Options) -> PoolSpec:
    dim, item = config.head_dim, DTYPE_BYTES[options.state_dtype]
    layers = config.layers(128)
    if options.online_c128:
        row_bytes, maximum = 3 * dim * item, dim * item
        fill = (FillPiece(0, maximum, NEGATIVE_INFINITY[options.state_dtype]), FillPiece(maximum, row_bytes - maximum))
        return PoolSpec(
            "c128_state", "rows", row_bytes, layers, (3 * dim,), options.state_dtype,
            banks=1 + (options.draft_tokens if options.draft_layers else 0), sentinel_rows=2,
            fill_row_bytes=row_bytes, fill=fill,
        )  # fmt: skip
    ring, row_bytes = options.c128_ring, 2 * dim * item
    return PoolSpec(
        "c128_state", "rows", ring * row_bytes, layers, (2 * dim,), options.state_dtype, rows_per_block=ring,
        sentinel_rows=1, native_rows=RowRule(ring, ring + ring + 1, 128), ring_rows=ring,
        fill_row_bytes=row_bytes, fill=_state_fill(row_bytes, row_bytes // 2, options.state_dtype),
    )  # fmt: skip


def _check(name: str, config: CompressedConfig, options: _Options) -> None:
    require_positive(name, page_size=options.page_size)
    require_choice(name, "indexer", options.indexer, ("fp8", "fp4"))
    require_choice(name, "state_dtype", options.state_dtype, ("float32", "bfloat16"))
    unknown = sorted(set(config.compress_ratios) - {0, 4, 128})
    if unknown or not config.compress_ratios:
        raise ConfigError(f"model {name!r}: compress ratio {unknown[:1]} is unsupported; use 0, 4 or 128 per layer")
    if options.page_size % 128 or options.page_size % config.window_tokens:
        raise ConfigError(
            f"model {name!r}: page_size={options.page_size} must be a multiple of 128 (one C128 entry) and of the"
            f" window of {config.window_tokens} tokens; the minimum is {max(128, config.window_tokens)}"
        )
    if options.draft_layers < 0 or options.draft_tokens < 0:
        raise ConfigError(f"model {name!r}: draft_layers and draft_tokens must be at least 0")
    # A verify step writes all its draft tokens ahead of the window that the ring must keep.
    most = min(options.c4_ring - 8 + 2, options.c128_ring - 128 + 2)
    if options.draft_layers and options.draft_tokens > most:
        raise ConfigError(
            f"model {name!r}: draft_tokens={options.draft_tokens} do not fit the state rings; at most {most} do"
        )


def compressed(
    name: str,
    config: CompressedConfig,
    *,
    page_size: int = 256,
    tp_size: int = 1,
    indexer: str = "fp8",
    online_c128: bool = False,
    draft_layers: int = 0,
    draft_tokens: int = 0,
    draft_tokens_max: int = 0,
    max_requests: int = 256,
    swa_ratio: float = 0.1,
    state_dtype: str = "float32",
) -> ModelPlan:
    """Pools of a model with compressed attention.

    Args:
        name: name of the model.
        config: dimensions.
        page_size: tokens of a scheduler page (the engine insists on 256).
        tp_size: tensor-parallel size; every rank holds the whole latent, so bytes do not depend on it.
        indexer: ``fp8`` or ``fp4`` rows in the indexer.
        online_c128: keep one (maximum, sum, KV) row per request instead of a ring of raw states.
        draft_layers: draft (MTP) stages, each with a sliding-window KV buffer of its own.
        draft_tokens: draft tokens that one verify step writes; 0: one per stage and one more.
        draft_tokens_max: tokens that the draft's own configuration allows; 0: follows the target.
        max_requests: request rows beside row 0.
        swa_ratio: window tokens per full token (the engine's default for these models is 0.1).
        state_dtype: ``float32`` or ``bfloat16`` compressor state.

    Raises:
        ConfigError: an option does not work with the others; names it and a value that would.
    """
    tokens = draft_tokens or (draft_layers + 1 if draft_layers else 0)
    options = _Options(page_size, indexer, online_c128, draft_layers, tokens, state_dtype)
    require_positive(name, tp_size=tp_size, max_requests=max_requests, swa_ratio=swa_ratio)
    _check(name, config, options)
    pools = _kv_pools(config, options)
    pools.append(_c4_state("c4_state", config, options, config.head_dim))
    pools.append(_c4_state("c4_indexer_state", config, options, config.index_head_dim))
    num_layers = len(config.compress_ratios)
    domains = [
        DomainPlan("full", page_size, share=1.0),
        DomainPlan("swa", page_size, window_tokens=config.window_tokens, share=swa_ratio),
    ]
    if config.layers(128):
        state = _c128_state(config, options)
        pools.append(state)
        domains.append(DomainPlan("rows", 0, blocks_per_page(0, state.block_bytes), slots=max_requests))
    if draft_layers:
        target = pools[0]
        stages = tuple(range(num_layers, num_layers + draft_layers))
        pools.append(_page_pool("draft_swa_kv", "swa", stages, target.block_bytes, target.charged_bytes, draft=True))
    return ModelPlan(name, num_layers, tuple(domains), tuple(pools), draft_layers, tp_size, draft_tokens_max)


FLASH = CompressedConfig((0, 0, *(4, 128) * 20, 4))
"""DeepSeek-V4-Flash: 43 layers; two window-only ones, then C4 and C128 in turn (21 and 20)."""

PRO = CompressedConfig((128, 128, *(4, 128) * 29, 4))
"""DeepSeek-V4-Pro: 61 layers; two C128 ones, then C4 and C128 in turn (30 and 31)."""

TINY = CompressedConfig((0, 0, 4, 128, 4, 128, 4, 128), nope_head_dim=64, rope_head_dim=16)
"""Eight small layers of the same families; strides of KV, indexer and C4 state are no multiples of 4 KiB."""

register("deepseek-v4-flash", compressed, FLASH)
register("deepseek-v4-pro", compressed, PRO)
register("tiny-dsv4", compressed, TINY, page_size=128, max_requests=15, swa_ratio=0.5)
