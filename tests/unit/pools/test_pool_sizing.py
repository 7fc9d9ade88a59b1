"""From a capacity to sizes, as the native engine does it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_dist.errors import ConfigError
from kvcached_dist.pools import DomainPlan, catalogue, check_capacity, minimum_bytes

GIB = 1 << 30


def test_sizes_of_compressed_attention_follow_the_engine() -> None:
    capacity, requests, page = 20 * GIB, 256, 256
    plan = catalogue.get("deepseek-v4-flash", max_requests=requests)
    slots = requests + 1
    state_rows = -(-(slots * 128 + 128 + 1) // 128) * 128
    fixed = state_rows * 2 * 512 * 4 * 20
    per_token = 0.1 * 584 * 43 + 584 / 4 * 21 + 584 / 128 * 20 + 132 / 4 * 21
    per_token += 0.1 * 8 / 128 * (4 * 512 * 4 + 4 * 128 * 4) * 21
    full = int((capacity - fixed) / per_token) // page * page
    swa = int(full * 0.1) // page * page
    model = plan.with_capacity(capacity)
    assert plan.bytes_per_token() == pytest.approx(per_token)
    assert {d.name: (d.blocks, d.tokens) for d in model.domains} == {
        "full": (full // page + 1, full),
        "swa": (swa // page + 1, swa),
        "rows": (slots, requests),
    }


def test_static_bytes_are_what_the_engine_allocates() -> None:
    model = catalogue.get("deepseek-v4-flash", max_requests=4).with_blocks({"full": 11, "swa": 4, "rows": 5})
    stage = model.stage(0, 2)
    c4_rows = -(-(3 * 2 * 8 + 8 + 1) // 4) * 4
    expected = (
        21 * 4 * 149_760
        + 10 * 11 * (37_440 + 8_448)
        + 9 * 11 * 1_728
        + 10 * c4_rows * (2048 + 512) * 4
        + 9 * (5 + 2) * 128 * 1024 * 4
    )
    assert stage.static_bytes() == expected


def test_static_bytes_count_every_bank() -> None:
    plan = catalogue.get("deepseek-v4-flash", online_c128=True, draft_layers=1, draft_tokens=3)
    model = plan.with_blocks({"full": 11, "swa": 4, "rows": 32})
    pool = model.stage(0, 1).pool("c128_state")
    assert pool.static_bytes(32) == 20 * (32 + 2) * 4 * 3 * 512 * 4


def test_static_bytes_stay_near_the_capacity() -> None:
    """Page padding and the null page are what the engine's own sizing leaves out."""
    for name in catalogue.names():
        capacity = 24 * GIB
        static = catalogue.get(name).with_capacity(capacity).stage(0, 1).static_bytes()
        assert 0.97 * capacity < static < 1.04 * capacity, name


def test_the_rank_with_the_least_room_decides() -> None:
    """R61: ranks that could hold 100 and 63 pages both get 63, whichever of them is the smaller."""
    plan = catalogue.get("tiny-mla", tp_size=2, page_size=16)
    page = 16 * 48 * 2 * 4
    for capacities in ([100 * page, 63 * page], [63 * page, 100 * page]):
        model = plan.with_capacity(capacities, granule_bytes=4096)
        assert model.domains[0].blocks == 64
        assert model.domains[0].tokens == 63 * 16


def test_the_longest_stage_decides() -> None:
    plan = catalogue.get("deepseek-v4-pro")
    halves = [stage.static_bytes() for stage in plan.with_capacity(10 * GIB, pp_size=2).stages(2)]
    assert max(halves) < 1.05 * 10 * GIB
    uneven = plan.with_capacity(10 * GIB, pp_size=2, partition=[11, 50])
    even = plan.with_capacity(10 * GIB, pp_size=2)
    assert uneven.domains[0].blocks < even.domains[0].blocks


def test_a_cap_on_tokens() -> None:
    plan = catalogue.get("tiny-llama")
    assert plan.with_capacity(GIB, tokens_max=1_000).domains[0].tokens == 992
    assert plan.with_tokens(1_000).domains[0].tokens == 992


def test_state_memory_is_split_from_kv_memory() -> None:
    plan = catalogue.get("qwen3-next-80b", mamba_memory_ratio=0.9)
    per_slot = 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    capacity = 16 * GIB
    slots = int(capacity * 0.9 / 1.9 // per_slot)
    model = plan.with_capacity(capacity)
    sizes = {d.name: d.blocks for d in model.domains}
    assert sizes["mamba"] == slots
    assert sizes["full"] == (capacity - slots * per_slot) // (12 * 2 * 2 * 256 * 2) // 16 + 1


def test_fixed_slots_are_rounded_up_to_whole_pages() -> None:
    model = catalogue.get("tiny-mamba", state_slots=40).with_tokens(160)
    mamba = model.domains[1]
    assert (mamba.blocks, mamba.blocks_per_page, mamba.pages) == (64, 32, 2)
    online = catalogue.get("deepseek-v4-flash", online_c128=True, max_requests=256).with_tokens(10_240)
    assert next(d.blocks for d in online.domains if d.name == "rows") == 272


def test_single_token_blocks_are_rounded_down_to_whole_pages() -> None:
    model = catalogue.get("llama-3.1-8b", page_size=1).with_tokens(1_000)
    assert model.domains[0].blocks == 992


@pytest.mark.parametrize("name", catalogue.names())
@pytest.mark.parametrize("pp_size", [1, 2])
def test_the_named_minimum_works_and_less_does_not(name: str, pp_size: int) -> None:
    plan = catalogue.get(name)
    granule = 4096
    with pytest.raises(ConfigError, match=r"capacity 4096 bytes is too small for rank \d: .*minimum per rank") as error:
        plan.with_capacity(4096, pp_size, granule_bytes=granule)
    named = str(error.value).rsplit("the minimum per rank is ", 1)[1].split()
    minimum = int(named[0]) * (1 << 20 if named[1] == "MiB" else 1)
    model = plan.with_capacity(minimum, pp_size, granule_bytes=granule)
    assert all(domain.blocks >= 2 * domain.blocks_per_page for domain in model.domains)
    with pytest.raises(ConfigError, match="is too small"):
        plan.with_capacity(minimum - granule, pp_size, granule_bytes=granule)


def test_a_capacity_below_the_null_pages_names_need_and_minimum() -> None:
    stage = catalogue.get("deepseek-v4-flash").with_capacity(20 * GIB, 2).stage(1, 2)
    needed = minimum_bytes(stage, 2 << 20)
    with pytest.raises(ConfigError) as error:
        check_capacity(stage, 2 << 20, needed - 1, rank=3)
    text = str(error.value)
    assert f"capacity {needed - 1} bytes is too small for rank 3" in text
    assert f"need {needed >> 20} MiB there; the minimum is {needed >> 20} MiB" in text
    check_capacity(stage, 2 << 20, needed, rank=3)


def test_a_short_rank_is_named() -> None:
    plan = catalogue.get("tiny-llama", tp_size=2)
    with pytest.raises(ConfigError, match=r"capacity 4096 bytes is too small for rank 3"):
        plan.with_capacity([GIB, GIB, GIB, 4096], 2, granule_bytes=4096)
    with pytest.raises(ConfigError, match="3 capacities for 4 ranks"):
        plan.with_capacity([GIB] * 3, 2)
    with pytest.raises(ConfigError, match="must be positive"):
        plan.with_capacity(0)


def test_draft_smaller_than_the_adjusted_target_is_refused() -> None:
    """R45: target 1,000 tokens after adjustment, draft configured for 900."""
    plan = catalogue.get("tiny-llama", page_size=8, draft_layers=1, draft_tokens_max=900)
    with pytest.raises(ConfigError, match=r"'draft_kv': 900 draft tokens, .* up to 1000; the minimum is 1000"):
        plan.with_tokens(1_000)
    roomy = catalogue.get("tiny-llama", page_size=8, draft_layers=1, draft_tokens_max=1_000)
    assert roomy.with_tokens(1_000).domains[0].tokens == 1_000


def test_draft_shares_the_domain_of_the_target() -> None:
    """R45: a page for token 980 of the target is a page of the draft in the same grant."""
    model = catalogue.get("tiny-llama", page_size=8, draft_layers=3).with_tokens(1_000)
    stage = model.stage(0, 1)
    assert stage.pool("draft_kv").domain == stage.pool("mha_kv").domain
    assert stage.page_bytes("full") == (4 + 3) * 2 * 8 * 2 * 24 * 2


def test_explicit_sizes_are_independent_of_one_another() -> None:
    """R46: every domain has its own limit; a long context needs no more window pages."""
    plan = catalogue.get("deepseek-v4-flash")
    model = plan.with_blocks({"full": 9, "swa": 5, "rows": 3})
    longer = plan.with_blocks({"full": 65, "swa": 5, "rows": 3})
    assert [d.blocks for d in model.domains] == [9, 5, 3]
    for domain in ("swa", "rows"):
        assert model.stage(0, 1).domain(domain) == longer.stage(0, 1).domain(domain)
    with pytest.raises(ConfigError, match=r"give blocks for exactly \['full', 'rows', 'swa'\]"):
        plan.with_blocks({"full": 9})


def test_growing_token_pools_leaves_request_rows_alone() -> None:
    """R41: C128 state is sized by requests, never by tokens."""
    plan = catalogue.get("deepseek-v4-flash", max_requests=4)
    small, large = plan.with_tokens(20_480).stage(0, 1), plan.with_tokens(20_480 + 64 * 256).stage(0, 1)
    assert small.blocks(small.pool("c128_state")) == large.blocks(large.pool("c128_state")) == 5


def test_domain_plans_state_one_rule() -> None:
    with pytest.raises(ConfigError, match="only one of them"):
        DomainPlan("full", 16, share=1.0, slots=4)
    with pytest.raises(ConfigError, match="only one of them"):
        DomainPlan("full", 16)
    with pytest.raises(ConfigError, match="is sized by memory; give slots"):
        catalogue.get("qwen3-next-80b").with_tokens(1_024)


@settings(max_examples=40)
@given(megabytes=st.integers(32, 4_000), more=st.integers(0, 64))
def test_more_memory_never_means_fewer_blocks(megabytes: int, more: int) -> None:
    plan = catalogue.get("tiny-dsv4")
    less = plan.with_capacity(megabytes << 20, granule_bytes=4096)
    plenty = plan.with_capacity((megabytes + more) << 20, granule_bytes=4096)
    assert all(a.blocks <= b.blocks for a, b in zip(less.domains, plenty.domains, strict=True))
