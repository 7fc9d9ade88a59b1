"""Checks of specs. Every message names the pool or domain, the value, and one that would work."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ..coord.core.errors import ConfigError
from .dtypes import DTYPE_BYTES

if TYPE_CHECKING:
    from .specs import DomainSpec, ModelSpec, PoolSpec, StageSpec

PAGE_UNIT_BYTES = 2 << 20
"""``KVCACHED_PAGE_SIZE_MB`` is a multiple of 2 MiB."""


def format_bytes(count: int) -> str:
    """A byte count for people: whole MiB where that is exact, bytes otherwise."""
    if count >= 1 << 20 and count % (1 << 20) == 0:
        return f"{count >> 20} MiB"
    return f"{count} bytes"


def _at_least(owner: str, minimum: int, **values: int) -> None:
    for field, value in values.items():
        if value < minimum:
            raise ConfigError(f"{owner}: {field}={value}, must be at least {minimum}")


def check_pool(pool: PoolSpec) -> None:
    """Check what can be checked of a pool by itself.

    Raises:
        ConfigError: names the pool, the value and the minimum.
    """
    owner = f"pool {pool.name!r}"
    _at_least(
        owner, 1, block_bytes=pool.block_bytes, rows_per_block=pool.rows_per_block, ratio=pool.ratio,
        buffers_per_layer=pool.buffers_per_layer, banks=pool.banks,
    )  # fmt: skip
    _at_least(owner, 0, sentinel_rows=pool.sentinel_rows, ring_rows=pool.ring_rows, budget_bytes=pool.budget_bytes)
    _check_rows(owner, pool)
    if list(pool.layers) != sorted(set(pool.layers)) or any(layer < 0 for layer in pool.layers):
        raise ConfigError(f"{owner}: layers {list(pool.layers)} must be ascending, without repeats, from 0")
    if pool.ring_rows and pool.rows_per_block != pool.ring_rows:
        raise ConfigError(
            f"{owner}: {pool.rows_per_block} rows per block, but its ring of {pool.ring_rows} rows advances once per"
            f" scheduler page; size it with {pool.ring_rows} rows per block"
        )
    _check_fill(owner, pool)


def _check_rows(owner: str, pool: PoolSpec) -> None:
    if pool.dtype not in DTYPE_BYTES:
        raise ConfigError(f"{owner}: dtype {pool.dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    if not pool.row_shape or min(pool.row_shape) < 1:
        raise ConfigError(f"{owner}: row_shape={pool.row_shape}, every dimension must be at least 1")
    rows_bytes = pool.rows_per_block * prod(pool.row_shape) * DTYPE_BYTES[pool.dtype]
    if rows_bytes != pool.block_bytes:
        raise ConfigError(
            f"{owner}: block_bytes={pool.block_bytes}, but {pool.rows_per_block} rows of {pool.row_shape}"
            f" {pool.dtype} are {rows_bytes} bytes"
        )
    rule = pool.native_rows
    if rule is not None:
        _at_least(f"{owner}: native rows", 1, per_block=rule.per_block, align=rule.align)
        _at_least(f"{owner}: native rows", 0, extra=rule.extra)


def _check_fill(owner: str, pool: PoolSpec) -> None:
    if not pool.fill:
        return
    _at_least(owner, 4, fill_row_bytes=pool.fill_row_bytes)
    if pool.block_bytes % pool.fill_row_bytes:
        raise ConfigError(
            f"{owner}: fill_row_bytes={pool.fill_row_bytes} does not divide the block of {pool.block_bytes} bytes"
        )
    end = 0
    for piece in pool.fill:
        if piece.bytes < 4 or piece.offset % 4 or piece.bytes % 4:
            raise ConfigError(f"{owner}: fill {piece} needs an offset and a length in whole 4-byte words, at least one")
        if not 0 <= piece.pattern < 1 << 32:
            raise ConfigError(f"{owner}: fill pattern {piece.pattern:#x} must be an unsigned 32-bit word")
        if piece.offset < end:
            raise ConfigError(f"{owner}: fill {piece} must start at byte {end} or later: pieces ascend without overlap")
        end = piece.offset + piece.bytes
        if end > pool.fill_row_bytes:
            raise ConfigError(
                f"{owner}: fill {piece} lies outside the row of {pool.fill_row_bytes} bytes; the row must have at"
                f" least {end}"
            )


def check_domain(domain: DomainSpec) -> None:
    """Check the size of a domain.

    Raises:
        ConfigError: names the domain, the value and the minimum.
    """
    owner = f"domain {domain.name!r}"
    _at_least(owner, 1, blocks_per_page=domain.blocks_per_page)
    _at_least(owner, 0, block_tokens=domain.block_tokens, window_tokens=domain.window_tokens)
    per_page = domain.blocks_per_page
    if per_page & (per_page - 1):
        raise ConfigError(f"{owner}: blocks_per_page={per_page} must be a power of two")
    if domain.blocks % per_page:
        low = domain.blocks - domain.blocks % per_page
        raise ConfigError(
            f"{owner}: {domain.blocks} blocks are not whole pages of {per_page}; use {low or per_page} or"
            f" {low + per_page}"
        )
    if domain.blocks < 2 * per_page:
        raise ConfigError(
            f"{owner}: {domain.blocks} blocks leave nothing beside page 0, which holds the null block; the minimum is"
            f" {2 * per_page} blocks"
        )
    minimum = minimum_blocks(domain.block_tokens, domain.window_tokens, per_page)
    if domain.blocks < minimum:
        raise ConfigError(
            f"{owner}: {domain.blocks - 1} usable pages of {domain.block_tokens} tokens cannot admit a request with a"
            f" window of {domain.window_tokens} tokens (the engine asks for more than window + page); the minimum is"
            f" {minimum - 1} usable pages beside the null page"
        )


def minimum_blocks(block_tokens: int, window_tokens: int, blocks_per_page: int = 1) -> int:
    """Least blocks, the null block included, with which the engine can admit a request.

    A sliding-window pool must hold *more* than the window and one page: two usable pages where the
    window is shorter than a page.

    Source: SGLang 0.5.20 refuses ``window + page_size >= swa_tokens`` at start.
    """
    least = 2 * blocks_per_page
    if block_tokens and window_tokens:
        usable = (window_tokens + block_tokens) // block_tokens + 1
        least = max(least, -(-(usable + 1) // blocks_per_page) * blocks_per_page)
    return least


def check_model(model: ModelSpec) -> None:
    """Check how pools, domains and layers of a model fit together.

    Raises:
        ConfigError: names the pool or domain, the value and the minimum.
    """
    owner = f"model {model.name!r}"
    _at_least(owner, 1, num_layers=model.num_layers, tp_size=model.tp_size)
    _at_least(owner, 0, draft_layers=model.draft_layers)
    if not model.domains or not model.pools:
        raise ConfigError(f"{owner}: needs at least one domain and one pool")
    for kind, names in (("domain", [d.name for d in model.domains]), ("pool", [p.name for p in model.pools])):
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"{owner}: {kind} {repeated[0]!r} stands there twice; names must be unique")
    domains = {domain.name: domain for domain in model.domains}
    for pool in model.pools:
        if pool.domain not in domains:
            raise ConfigError(f"pool {pool.name!r}: unknown domain {pool.domain!r}; the model has {sorted(domains)}")
        _check_layers(model, pool)
        _check_pool_in_domain(pool, domains[pool.domain])
    unused = [d.name for d in model.domains if all(p.domain != d.name for p in model.pools)]
    if unused:
        raise ConfigError(f"domain {unused[0]!r}: no pool is indexed by it; leave it out")


def _check_layers(model: ModelSpec, pool: PoolSpec) -> None:
    first = model.num_layers if pool.draft else 0
    end = model.num_layers + (model.draft_layers if pool.draft else 0)
    if any(not first <= layer < end for layer in pool.layers):
        what = "draft stages" if pool.draft else "layers"
        raise ConfigError(f"pool {pool.name!r}: layers {list(pool.layers)} must be {what} of [{first}, {end})")


def _check_pool_in_domain(pool: PoolSpec, domain: DomainSpec) -> None:
    owner = f"pool {pool.name!r}"
    if domain.block_tokens and domain.block_tokens % pool.ratio:
        raise ConfigError(
            f"{owner}: ratio {pool.ratio} does not divide the page of {domain.block_tokens} tokens; the page must be a"
            f" multiple of {pool.ratio}"
        )
    if pool.ring_rows and domain.block_tokens and domain.block_tokens % pool.ring_rows:
        raise ConfigError(
            f"{owner}: a ring of {pool.ring_rows} rows does not divide the scheduler page of {domain.block_tokens}"
            f" tokens; the page must be a multiple of {pool.ring_rows}"
        )
    needed = domain.blocks * pool.rows_per_block + pool.sentinel_rows
    if pool.rows(domain.blocks) < needed:
        raise ConfigError(
            f"{owner}: {pool.rows(domain.blocks)} native rows for {domain.blocks} blocks and {pool.sentinel_rows}"
            f" sentinel rows; the minimum is {needed}"
        )


def check_page_size(stage: StageSpec, page_bytes: int) -> None:
    """Refuse blocks that are larger than the configured page.

    Args:
        stage: local pools.
        page_bytes: ``KVCACHED_PAGE_SIZE_MB`` in bytes.

    Raises:
        ConfigError: names the pool and the page size that it needs.
    """
    _at_least("KVCACHED_PAGE_SIZE_MB", PAGE_UNIT_BYTES, page_bytes=page_bytes)
    for pool in stage.pools:
        if pool.layers and pool.block_bytes > page_bytes:
            needed = -(-pool.block_bytes // PAGE_UNIT_BYTES) * PAGE_UNIT_BYTES
            raise ConfigError(
                f"pool {pool.name!r}: a block of {format_bytes(pool.block_bytes)} does not fit a page of"
                f" {format_bytes(page_bytes)}; it needs {format_bytes(needed)} (KVCACHED_PAGE_SIZE_MB={needed >> 20})"
            )


def check_draft_tokens(pool: str, draft_tokens: int, target_tokens: int) -> None:
    """Refuse a draft pool that is smaller than the pool of the target whose ids index it.

    Args:
        pool: name of the draft pool.
        draft_tokens: tokens configured for it.
        target_tokens: tokens of the target *after* every adjustment (sliding window, page rounding).

    Raises:
        ConfigError: ids of the target would write behind the draft pool's end.
    """
    if draft_tokens < target_tokens:
        raise ConfigError(
            f"pool {pool!r}: {draft_tokens} draft tokens, but target ids go up to {target_tokens}; the minimum is"
            f" {target_tokens}"
        )
