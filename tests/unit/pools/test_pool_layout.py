"""Addresses inside a reservation, and physical bytes of runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_dist.errors import ConfigError
from kvcached_dist.pools import catalogue, minimum_bytes
from kvcached_dist.pools.layout import granules_covered, runs_bytes, stage_layout
from kvcached_dist.pools.specs import ModelSpec, StageSpec

TINY = ("tiny-dsv4", "tiny-llama", "tiny-mamba", "tiny-mla", "tiny-swa")


def model(name: str, **options: object) -> ModelSpec:
    plan = catalogue.get(name, **options)
    return plan.with_blocks({d.name: max(d.floor, 6 * d.blocks_per_page) for d in plan.domains})


def banked() -> StageSpec:
    return model("tiny-dsv4", online_c128=True, draft_layers=1, draft_tokens=3).stage(0, 1)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("granule", [4096, 64 << 10, 2 << 20])
def test_lanes_and_pinned_rows_are_disjoint_and_inside(name: str, granule: int) -> None:
    for layout in stage_layout(model(name).stage(0, 1), granule):
        spans = sorted(layout.spans(0, layout.pages) + list(layout.pinned))
        assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(spans))
        assert all(offset >= 0 and offset + length <= layout.reservation_bytes for offset, length in spans)
        assert layout.reservation_bytes % granule == 0
        assert len(layout.lanes) == layout.pool.lanes


def test_buffers_start_on_granules_except_where_sentinels_are_packed() -> None:
    granule = 2 << 20
    stage = catalogue.get("deepseek-v4-flash").with_blocks({"full": 9, "swa": 9, "rows": 7}).stage(0, 1)
    for layout in stage_layout(stage, granule):
        aligned = layout.buffer_stride % granule == 0
        assert aligned == (layout.pool.sentinel_rows == 0)
        assert layout.buffer_stride % 4096 == 0


def test_a_sentinel_shares_its_granule_with_page_0_of_the_next_layer() -> None:
    granule = 2 << 20
    stage = catalogue.get("deepseek-v4-flash").with_tokens(1 << 20).stage(0, 1)
    layout = next(p for p in stage_layout(stage, granule) if p.pool.name == "c4_state")
    shared = sum(
        (offset + length - 1) // granule == base // granule
        for (offset, length), base in zip(layout.pinned, layout.lanes[1:], strict=False)
    )
    assert shared == len(layout.lanes) - 1
    only_null = runs_bytes(layout, [(layout.domain, 0, 1)], granule)
    assert only_null <= (len(layout.lanes) + 1 + 1) * granule


def test_banks_lie_at_one_stride_inside_a_buffer() -> None:
    stage = banked()
    layout = next(p for p in stage_layout(stage, 4096) if p.pool.name == "c128_state")
    rows = stage.domain("rows").blocks + 2
    row_bytes = 3 * 80 * 4
    assert layout.bank_stride == rows * row_bytes
    assert layout.lanes[:4] == tuple(bank * rows * row_bytes for bank in range(4))
    assert layout.pinned[1] == ((2 * rows - 2) * row_bytes, 2 * row_bytes)


def test_a_pool_without_layers_takes_no_addresses() -> None:
    stage = model("tiny-dsv4").stages(4)[0]
    for layout in stage_layout(stage, 4096):
        if layout.pool.name != "swa_kv":
            assert (layout.reservation_bytes, layout.lanes, layout.pinned) == (0, (), ())


def test_pages_hold_whole_groups_of_blocks() -> None:
    stage = model("tiny-mamba").stage(0, 1)
    layout = next(p for p in stage_layout(stage, 4096) if p.pool.name == "mamba_state")
    assert layout.page_bytes == 32 * 3840
    assert layout.pages == stage.domain("mamba").pages


@settings(max_examples=40)
@given(
    spans=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 70)), max_size=8),
    granule=st.sampled_from([1, 7, 64]),
)
def test_granules_are_counted_once(spans: list[tuple[int, int]], granule: int) -> None:
    touched = {byte // granule for offset, length in spans for byte in range(offset, offset + length)}
    assert granules_covered(spans, granule) == len(touched)


@pytest.mark.parametrize("name", TINY)
def test_minimum_is_the_null_page_and_one_more_of_every_domain(name: str) -> None:
    granule = 4096
    stage = model(name).stage(0, 1)
    touched = set()
    for number, layout in enumerate(stage_layout(stage, granule)):
        ranges = [(base, 2 * layout.page_bytes) for base in layout.lanes] + list(layout.pinned)
        touched |= {(number, g) for at, n in ranges for g in range(at // granule, (at + n - 1) // granule + 1)}
    assert minimum_bytes(stage, granule) == len(touched) * granule


@pytest.mark.parametrize("granule", [0, 2048, 6000, 3 << 20])
def test_granules_must_be_powers_of_two(granule: int) -> None:
    with pytest.raises(ConfigError, match=f"granule_bytes={granule} must be a power of two of at least 4096"):
        stage_layout(model("tiny-llama").stage(0, 1), granule)
