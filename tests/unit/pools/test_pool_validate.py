"""Every refusal names the pool or domain, the value, and one that would work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcached_dist.errors import ConfigError
from kvcached_dist.pools import DomainSpec, FillPiece, ModelSpec, PoolSpec, RowRule, check_draft_tokens, check_page_size

POOL = PoolSpec("kv", "full", 4096, (0, 1), (4096,), fill_row_bytes=64, fill=(FillPiece(0, 64),))
DOMAIN = DomainSpec("full", 8, 256)
MODEL = ModelSpec("m", 2, (DOMAIN,), (POOL,))
DRAFT = replace(POOL, name="draft_kv", layers=(2, 3), draft=True)
STATE = PoolSpec("c4_state", "swa", 8 * 64, (0,), (16,), "float32", rows_per_block=8, ring_rows=8, sentinel_rows=1)
SWA = DomainSpec("swa", 8, 256, window_tokens=128)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(POOL, block_bytes=0), r"pool 'kv': block_bytes=0, must be at least 1"),
        (lambda: replace(POOL, block_bytes=-8), r"pool 'kv': block_bytes=-8, must be at least 1"),
        (lambda: replace(POOL, banks=0), r"pool 'kv': banks=0, must be at least 1"),
        (lambda: replace(POOL, ratio=0), r"pool 'kv': ratio=0, must be at least 1"),
        (lambda: replace(POOL, buffers_per_layer=0), r"pool 'kv': buffers_per_layer=0, must be at least 1"),
        (lambda: replace(POOL, sentinel_rows=-1), r"pool 'kv': sentinel_rows=-1, must be at least 0"),
        (lambda: replace(POOL, dtype="fp4"), r"pool 'kv': dtype 'fp4' is unknown; use one of uint8"),
        (lambda: replace(POOL, row_shape=()), r"pool 'kv': row_shape=\(\)"),
        (lambda: replace(POOL, row_shape=(4000,)), r"block_bytes=4096, but 1 rows of \(4000,\) uint8 are 4000 bytes"),
        (lambda: replace(POOL, layers=(1, 0)), r"layers \[1, 0\] must be ascending"),
        (lambda: replace(POOL, layers=(1, 1)), r"layers \[1, 1\] must be ascending"),
        (lambda: replace(POOL, native_rows=RowRule(0, 1)), r"pool 'kv': native rows: per_block=0"),
        (lambda: replace(POOL, fill_row_bytes=0), r"pool 'kv': fill_row_bytes=0, must be at least 4"),
        (lambda: replace(POOL, fill_row_bytes=48, fill=(FillPiece(0, 48),)), r"fill_row_bytes=48 does not divide"),
        (lambda: replace(POOL, fill=(FillPiece(32, 64),)), r"outside the row of 64 bytes; the row must have .* 96"),
        (lambda: replace(POOL, fill=(FillPiece(0, 32), FillPiece(16, 32))), r"must start at byte 32 or later"),
        (lambda: replace(POOL, fill=(FillPiece(2, 32),)), r"whole 4-byte words"),
        (lambda: replace(POOL, fill=(FillPiece(0, 0),)), r"whole 4-byte words"),
        (lambda: replace(POOL, fill=(FillPiece(0, 64, 1 << 32),)), r"0x100000000 must be an unsigned 32-bit word"),
        (
            lambda: replace(STATE, rows_per_block=16, block_bytes=16 * 64),
            r"'c4_state': 16 rows per block, but its ring of 8 rows advances once per scheduler page; .* with 8 rows",
        ),
        (lambda: replace(DOMAIN, blocks=1), r"domain 'full': 1 blocks leave nothing .* minimum is 2"),
        (lambda: replace(DOMAIN, blocks=0), r"domain 'full': 0 blocks"),
        (lambda: replace(DOMAIN, blocks_per_page=3, blocks=9), r"blocks_per_page=3 must be a power of two"),
        (lambda: replace(DOMAIN, blocks_per_page=16, blocks=257), r"257 blocks .* pages of 16; use 256 or 272"),
        (lambda: replace(DOMAIN, block_tokens=-1), r"domain 'full': block_tokens=-1, must be at least 0"),
        (
            lambda: replace(SWA, blocks=2),
            r"domain 'swa': 1 usable pages of 256 tokens .* window of 128 tokens .* minimum is 2 usable pages",
        ),
        (lambda: replace(SWA, window_tokens=256, blocks=3), r"'swa': 2 usable pages .* minimum is 3 usable pages"),
        (lambda: replace(MODEL, num_layers=0), r"model 'm': num_layers=0, must be at least 1"),
        (lambda: replace(MODEL, pools=()), r"model 'm': needs at least one domain and one pool"),
        (lambda: replace(MODEL, pools=(POOL, POOL)), r"pool 'kv' stands there twice"),
        (lambda: replace(MODEL, domains=(DOMAIN, DOMAIN)), r"domain 'full' stands there twice"),
        (lambda: replace(MODEL, pools=(replace(POOL, domain="swa"),)), r"'kv': unknown domain 'swa'; .* \['full'\]"),
        (lambda: replace(MODEL, domains=(DOMAIN, SWA)), r"domain 'swa': no pool is indexed by it"),
        (lambda: replace(MODEL, num_layers=1), r"'kv': layers \[0, 1\] must be layers of \[0, 1\)"),
        (
            lambda: replace(MODEL, pools=(POOL, DRAFT), draft_layers=1),
            r"'draft_kv': layers \[2, 3\] must be draft stages of \[2, 3\)",
        ),
        (
            lambda: replace(MODEL, domains=(replace(DOMAIN, block_tokens=250),), pools=(replace(POOL, ratio=4),)),
            r"'kv': ratio 4 does not divide the page of 250 tokens; the page must be a multiple of 4",
        ),
        (
            lambda: ModelSpec("m", 1, (replace(SWA, block_tokens=252),), (STATE,)),
            r"'c4_state': a ring of 8 rows does not divide the scheduler page of 252 tokens; .* multiple of 8",
        ),
        (
            lambda: ModelSpec("m", 1, (SWA,), (replace(STATE, native_rows=RowRule(8, 8)),)),
            r"'c4_state': 64 native rows for 8 blocks and 1 sentinel rows; the minimum is 65",
        ),
    ],
)  # fmt: skip
def test_refusals(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_block_larger_than_the_page_names_the_page_it_needs() -> None:
    """R34: a block of 3 MiB in a page of 2 MiB would make a pool without usable blocks."""
    pool = PoolSpec("mamba_state", "mamba", 3 << 20, (0,), (3 << 20,))
    stage = ModelSpec("m", 1, (DomainSpec("mamba", 4, 0),), (pool,)).stage(0, 1)
    with pytest.raises(ConfigError, match=r"'mamba_state': a block of 3 MiB .* page of 2 MiB; it needs 4 MiB") as error:
        check_page_size(stage, 2 << 20)
    assert "KVCACHED_PAGE_SIZE_MB=4" in str(error.value)
    check_page_size(stage, 4 << 20)
    with pytest.raises(ConfigError, match="page_bytes=4096, must be at least 2097152"):
        check_page_size(stage, 4096)


def test_a_pool_without_local_layers_may_have_any_block() -> None:
    pool = PoolSpec("mamba_state", "mamba", 3 << 20, (1,), (3 << 20,))
    small = PoolSpec("kv", "mamba", 4096, (0,), (4096,))
    stage = ModelSpec("m", 2, (DomainSpec("mamba", 4, 0),), (pool, small)).stage(0, 2)
    check_page_size(stage, 2 << 20)


def test_draft_tokens_must_cover_the_target() -> None:
    check_draft_tokens("draft_kv", 1000, 1000)
    with pytest.raises(ConfigError, match=r"pool 'draft_kv': 999 draft tokens, .* the minimum is 1000"):
        check_draft_tokens("draft_kv", 999, 1000)


def test_the_least_window_domain_is_accepted() -> None:
    assert replace(SWA, blocks=3).tokens == 512
