"""Exact bytes and shapes of the known models, against the engine's own formulae written out here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcached_dist.errors import ConfigError
from kvcached_dist.pools import ModelSpec, PoolSpec, catalogue
from kvcached_dist.pools.catalogue.deepseek_v4 import FLASH, PRO, compressed

NEGATIVE_INFINITY_FP32 = 0xFF800000


def sized(name: str, **options: Any) -> ModelSpec:
    """A model of any kind with some pages in every domain."""
    plan = catalogue.get(name, **options)
    return plan.with_blocks({d.name: max(d.floor, 16 * d.blocks_per_page) for d in plan.domains})


def pools(name: str, **options: Any) -> dict[str, PoolSpec]:
    return {pool.name: pool for pool in catalogue.get(name, **options).pools}


@pytest.mark.parametrize(
    ("name", "layers", "c4", "c128"), [("deepseek-v4-flash", 43, 21, 20), ("deepseek-v4-pro", 61, 30, 31)]
)
def test_layers_of_the_published_compressed_models(name: str, layers: int, c4: int, c128: int) -> None:
    found = {pool.name: len(pool.layers) for pool in catalogue.get(name).pools}
    assert found == {
        "swa_kv": layers,
        "c4_kv": c4,
        "c4_indexer": c4,
        "c128_kv": c128,
        "c4_state": c4,
        "c4_indexer_state": c4,
        "c128_state": c128,
    }


def test_order_of_ratios() -> None:
    assert FLASH.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert FLASH.compress_ratios[-3:] == (4, 128, 4)
    assert PRO.compress_ratios[:6] == (128, 128, 4, 128, 4, 128)
    assert PRO.compress_ratios[-3:] == (4, 128, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "swa_kv": ("swa", 149_760),
                "c4_kv": ("full", 37_440),
                "c4_indexer": ("full", 8_448),
                "c128_kv": ("full", 1_728),
                "c4_state": ("swa", 8 * 4 * 512 * 4),
                "c4_indexer_state": ("swa", 8 * 4 * 128 * 4),
                "c128_state": ("rows", 128 * 2 * 512 * 4),
            },
        ),
        ({"indexer": "fp4"}, {"c4_indexer": ("full", 64 * (64 + 4))}),
        ({"state_dtype": "bfloat16"}, {"c4_state": ("swa", 8 * 4 * 512 * 2), "c128_state": ("rows", 128 * 1024 * 2)}),
        ({"online_c128": True}, {"c128_state": ("rows", 3 * 512 * 4)}),
        (
            {"draft_layers": 3},
            {
                "draft_swa_kv": ("swa", 149_760),
                "c4_state": ("swa", 16 * 4 * 512 * 4),
                "c128_state": ("rows", 256 * 2 * 512 * 4),
            },
        ),
    ],
)
def test_block_bytes_of_compressed_attention(options: dict[str, Any], expected: dict[str, tuple[str, int]]) -> None:
    found = {name: (p.domain, p.block_bytes) for name, p in pools("deepseek-v4-flash", **options).items()}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("draft_layers", [0, 1])
@pytest.mark.parametrize("online", [False, True])
def test_native_shapes_of_compressed_attention(draft_layers: int, online: bool) -> None:
    """R31: shapes and strides of every buffer, from the engine's constructor arithmetic."""
    page, window, requests = 256, 128, 9
    full_tokens, swa_tokens = 12 * page, 5 * page
    c4_ring, c128_ring = (16, 256) if draft_layers else (8, 128)
    plan = catalogue.get(
        "deepseek-v4-flash", draft_layers=draft_layers, draft_tokens=4, online_c128=online, max_requests=requests
    )
    rows_domain = next(domain for domain in plan.domains if domain.name == "rows")
    row_blocks = rows_domain.blocks_for(requests)
    model = plan.with_blocks({"full": 13, "swa": 6, "rows": row_blocks})

    def pages(size: int, page_size: int) -> int:
        return (size + page_size + 1) // page_size

    def ring_rows(size: int, ring: int, ratio: int) -> int:
        return -(-(size + ring + 1) // ratio) * ratio

    slots = row_blocks
    c4_rows = ring_rows(swa_tokens // window * c4_ring, c4_ring, 4)
    expected = {
        "swa_kv": (pages(swa_tokens, page), 149_760),
        "c4_kv": (pages(full_tokens // 4, page // 4), 37_440),
        "c4_indexer": (pages(full_tokens // 4, page // 4), 64 * 132),
        "c128_kv": (pages(full_tokens // 128, page // 128), 1_728),
        "c4_state": (c4_rows, 2 * 2 * 512),
        "c4_indexer_state": (c4_rows, 2 * 2 * 128),
        "c128_state": ((slots + 2) * (1 + (4 if draft_layers else 0)), 3 * 512)
        if online
        else (ring_rows(slots * c128_ring, c128_ring, 128), 2 * 512),
    }
    if draft_layers:
        expected["draft_swa_kv"] = (pages(swa_tokens, page), 149_760)
    stage = model.stage(0, 1)
    found = {pool.name: pool.native_shape(stage.blocks(pool)) for pool in stage.pools}
    assert found == expected
    for pool in stage.pools:
        assert pool.native_strides() == (expected[pool.name][1], 1)
        assert pool.dtype == ("float32" if pool.name.endswith("state") else "uint8")


def test_engine_allocates_twice_the_c4_state_that_it_can_address() -> None:
    """The ring advances per scheduler page of 256 tokens; the engine sizes it per window of 128."""
    state = pools("deepseek-v4-flash")["c4_state"]
    usable = 1_000
    assert state.rows(usable + 1) == pytest.approx(2 * usable * state.rows_per_block, rel=0.01)
    assert state.charged_bytes == 2 * state.block_bytes


def test_engine_charges_the_fp8_indexer_row_for_both_formats() -> None:
    fp8, fp4 = catalogue.get("deepseek-v4-flash"), catalogue.get("deepseek-v4-flash", indexer="fp4")
    assert fp4.bytes_per_token() == fp8.bytes_per_token()
    assert [pool.charged_bytes for pool in fp4.pools if pool.name == "c4_indexer"] == [64 * 132]


def test_slot_0_is_part_of_the_state_buffer() -> None:
    """R34: the engine's state pool has one slot more than it hands out; slot 0 is padding."""
    mamba = catalogue.get("qwen3-next-80b", state_slots=7).with_tokens(64).domains[1]
    assert (mamba.blocks, mamba.tokens) == (8, 7)


def test_fill_of_cleared_state_rows() -> None:
    offline = pools("deepseek-v4-flash")
    for name, dim in (("c4_state", 1024), ("c4_indexer_state", 256), ("c128_state", 512)):
        half = dim * 4
        pieces = [(p.offset, p.bytes, p.pattern) for p in offline[name].fill]
        assert offline[name].fill_row_bytes == 2 * half
        assert pieces == [(0, half, 0), (half, half, NEGATIVE_INFINITY_FP32)]
    online = pools("deepseek-v4-flash", online_c128=True)["c128_state"]
    assert [(p.offset, p.bytes, p.pattern) for p in online.fill] == [
        (0, 2048, NEGATIVE_INFINITY_FP32),
        (2048, 4096, 0),
    ]
    narrow = pools("deepseek-v4-flash", state_dtype="bfloat16")["c4_state"]
    assert narrow.fill[1].pattern == 0xFF80FF80
    for name in ("swa_kv", "c4_kv", "c4_indexer", "c128_kv"):
        assert [(p.offset, p.bytes, p.pattern) for p in offline[name].fill] == [(0, offline[name].block_bytes, 0)]


def test_banks_and_sentinels() -> None:
    plain = pools("deepseek-v4-flash", online_c128=True)["c128_state"]
    banked = pools("deepseek-v4-flash", online_c128=True, draft_layers=1, draft_tokens=3)["c128_state"]
    assert (plain.banks, plain.sentinel_rows) == (1, 2)
    assert (banked.banks, banked.sentinel_rows) == (4, 2)
    offline = pools("deepseek-v4-flash")
    sentinels = {name: pool.sentinel_rows for name, pool in offline.items() if pool.sentinel_rows}
    assert sentinels == {"c4_state": 1, "c4_indexer_state": 1, "c128_state": 1}


def test_bytes_per_full_token_of_the_engine_log() -> None:
    """sglang#24523 logs 23,749.84: the Pro ratios with the MTP entry, C128 state still charged by the token."""
    plan = compressed("pro with its MTP entry", replace(PRO, compress_ratios=(*PRO.compress_ratios, 0)))
    c128_state = 31 * 0.1 * 2 * 512 * 4
    assert plan.bytes_per_token() + c128_state == pytest.approx(23_749.84, abs=0.005)


def test_draft_stages_are_charged_one_by_one() -> None:
    """R45: 1,056.8 bytes were charged for one of three stages; 1,401.6 is right; the layer ratio gives 3,170.5."""
    plan = catalogue.get("deepseek-v4-flash", draft_layers=3, swa_ratio=0.8)
    draft = [pool for pool in plan.pools if pool.draft]
    target = [pool for pool in plan.pools if not pool.draft]
    assert plan.bytes_per_token(draft) == pytest.approx(1_401.6)
    assert plan.bytes_per_token(target) / 43 == pytest.approx(1_056.8, abs=0.05)
    assert 3 * plan.bytes_per_token(target) / 43 == pytest.approx(3_170.5, abs=0.05)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "tiny-dsv4", "llama-3.1-8b", "deepseek-v3"])
def test_three_draft_stages_cost_three_layers_per_page(name: str) -> None:
    one, three = sized(name, draft_layers=1).stage(0, 1), sized(name, draft_layers=3).stage(0, 1)
    single = next(pool for pool in one.pools if pool.draft)
    triple = next(pool for pool in three.pools if pool.draft)
    assert triple.lanes == 3 * single.lanes
    assert triple.block_bytes == single.block_bytes
    assert three.page_bytes(triple.domain) - one.page_bytes(triple.domain) == 2 * single.lanes * single.block_bytes


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_sharded_and_then_replicated(tp_size: int, heads: int) -> None:
    pool = pools("llama-3.1-8b", tp_size=tp_size, page_size=16)["mha_kv"]
    assert pool.row_shape == (heads, 128)
    assert pool.block_bytes == 16 * heads * 128 * 2
    assert pool.buffers_per_layer == 2
    assert pool.native_shape(10) == (10 * 16, heads, 128)
    assert pool.native_strides() == (heads * 128, 128, 1)


def test_latent_is_the_same_on_every_rank() -> None:
    for tp_size in (1, 8):
        pool = pools("deepseek-v3", tp_size=tp_size)["mla_kv"]
        assert (pool.block_bytes, len(pool.layers)) == (64 * 576 * 2, 61)
        assert pool.native_shape(5) == (5 * 64, 1, 576)


def test_fp8_cache_is_stored_as_bytes() -> None:
    pool = pools("llama-3.1-8b", kv_dtype="float8_e4m3fn")["mha_kv"]
    assert (pool.dtype, pool.block_bytes) == ("uint8", 16 * 8 * 128)


def test_sliding_window_hybrids_split_their_layers() -> None:
    gpt = pools("gpt-oss-20b")
    assert gpt["swa_kv"].layers == tuple(range(0, 24, 2))
    assert gpt["mha_kv"].layers == tuple(range(1, 24, 2))
    gemma = pools("gemma-3-27b")
    assert (len(gemma["mha_kv"].layers), len(gemma["swa_kv"].layers)) == (10, 52)
    assert gemma["mha_kv"].layers[0] == 5


def test_v_heads_of_another_size_are_a_pool_of_their_own() -> None:
    config = catalogue.AttentionConfig(4, 2, 192, v_head_dim=128)
    plan = catalogue.attention.attention("k192-v128", config, page_size=16)
    assert [(p.name, p.row_shape, p.buffers_per_layer) for p in plan.pools] == [
        ("mha_k", (2, 192), 1),
        ("mha_v", (2, 128), 1),
    ]


def test_model_with_windows_only_counts_capacity_in_window_tokens() -> None:
    config = catalogue.AttentionConfig(2, 2, 32, window_tokens=64, window_layers=(0, 1))
    plan = catalogue.attention.attention("windows", config, page_size=16)
    model = plan.with_tokens(160)
    assert [(d.name, d.blocks) for d in model.domains] == [("swa", 11)]


def test_recurrent_state_shapes() -> None:
    found = pools("qwen3-next-80b", tp_size=2)
    assert found["mamba_conv"].row_shape == (4096, 3)
    assert found["mamba_state"].row_shape == (16, 128, 128)
    assert found["mamba_state"].block_bytes == 1 << 20
    assert found["mha_kv"].row_shape == (1, 256)
    assert found["mha_kv"].layers == tuple(range(3, 48, 4))
    assert len(found["mamba_state"].layers) == 36
    assert found["mamba_state"].native_shape(9) == (9, 16, 128, 128)


@pytest.mark.parametrize(
    ("name", "options", "domain", "per_page"),
    [
        ("deepseek-v4-flash", {}, "full", 1),
        ("deepseek-v4-flash", {}, "rows", 1),
        ("deepseek-v4-flash", {"online_c128": True}, "rows", 16),
        ("llama-3.1-8b", {"page_size": 16}, "full", 1),
        ("llama-3.1-8b", {"page_size": 1}, "full", 32),
        ("deepseek-v3", {"page_size": 1}, "full", 64),
        ("qwen3-next-80b", {}, "mamba", 1),
        ("tiny-mamba", {}, "mamba", 32),
    ],
)
def test_blocks_per_page(name: str, options: dict[str, Any], domain: str, per_page: int) -> None:
    """One for token pages; otherwise the least power of two with 64 KiB in the widest pool."""
    model = sized(name, **options)
    found = next(d for d in model.domains if d.name == domain)
    assert found.blocks_per_page == per_page
    if found.block_tokens <= 1:
        widest = max(pool.block_bytes for pool in model.pools if pool.domain == domain)
        assert per_page * widest >= 64 << 10
        assert per_page == 1 or per_page // 2 * widest < 64 << 10


def test_tiny_strides_do_not_divide_the_smallest_granule() -> None:
    for name in ("swa_kv", "c4_kv", "c4_indexer", "c128_kv", "c4_state"):
        block = pools("tiny-dsv4")[name].block_bytes
        assert block % 4096, name
        assert 4096 % block, name
    assert pools("tiny-llama")["mha_kv"].block_bytes == 1536


def test_tiny_model_has_every_family_of_the_large_one() -> None:
    assert set(pools("tiny-dsv4", draft_layers=1)) == set(pools("deepseek-v4-pro", draft_layers=1))


@pytest.mark.parametrize("name", catalogue.names())
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_every_model_cuts_into_stages_that_add_up(name: str, pp_size: int) -> None:
    model = sized(name)
    stages = model.stages(pp_size)
    for index, pool in enumerate(model.pools):
        assert sum((stage.pools[index].layers for stage in stages), ()) == pool.layers
    assert {stage.digest() for stage in stages} == {model.digest()}
    assert sum(s.static_bytes() for s in stages) == model.stage(0, 1).static_bytes()


def test_names_and_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"'gpt-5' is not in the catalogue; known are .*deepseek-v4-flash"):
        catalogue.get("gpt-5")
    with pytest.raises(ConfigError, match=r"has no option 'pagesize'; it takes .*page_size"):
        catalogue.get("tiny-llama", pagesize=16)
    with pytest.raises(ConfigError, match=r"indexer='fp5' must be one of 'fp8', 'fp4'"):
        catalogue.get("tiny-dsv4", indexer="fp5")
    with pytest.raises(ConfigError, match="in the catalogue already"):
        catalogue.register("tiny-llama", compressed, FLASH)
    assert "online_c128" in catalogue.options("tiny-dsv4")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deepseek-v4-flash", {"page_size": 64}, r"page_size=64 must be a multiple of 128 .* the minimum is 128"),
        ("deepseek-v4-flash", {"page_size": 0}, r"page_size=0 must be at least 1"),
        ("deepseek-v4-flash", {"max_requests": 0}, r"max_requests=0 must be at least 1"),
        ("deepseek-v4-flash", {"swa_ratio": -0.5}, r"swa_ratio=-0.5 must be greater than 0"),
        ("deepseek-v4-flash", {"draft_layers": 1, "draft_tokens": 11}, r"draft_tokens=11 do not fit .* at most 10 do"),
        ("llama-3.1-8b", {"tp_size": 3}, r"8 KV heads do not divide over tp_size=3"),
        ("llama-3.1-8b", {"kv_dtype": "int3"}, r"kv_dtype='int3' must be one of"),
        ("qwen3-next-80b", {"tp_size": 3}, r"32 value heads and .* must divide over tp_size=3"),
        ("deepseek-v3", {"draft_layers": -1}, r"draft_layers=-1 must be at least 0"),
    ],
)
def test_options_that_do_not_work_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        catalogue.get(name, **options)


def test_other_dimensions_give_other_bytes() -> None:
    base = compressed("m", FLASH).pools[0]
    other = compressed("m", replace(FLASH, nope_head_dim=512)).pools[0]
    assert (base.block_bytes, other.block_bytes) == (149_760, -(-256 * (512 + 128 + 8 + 1) // 576) * 576)
