"""Stages, digests, and the arithmetic of pools."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_dist.errors import ConfigError
from kvcached_dist.pools import DomainSpec, FillPiece, ModelSpec, PoolSpec, RowRule, catalogue, layer_range


def page_pool(name: str, domain: str, layers: tuple[int, ...], block_bytes: int = 4096, **more: object) -> PoolSpec:
    return PoolSpec(name, domain, block_bytes, layers, (block_bytes,), **more)  # type: ignore[arg-type]


def eight_layers() -> ModelSpec:
    return ModelSpec("eight", 8, (DomainSpec("full", 17, 16),), (page_pool("kv", "full", tuple(range(8))),))


@settings(max_examples=60)
@given(num_layers=st.integers(0, 200), pp_size=st.integers(1, 16))
def test_stages_are_contiguous_and_the_last_ones_are_longer(num_layers: int, pp_size: int) -> None:
    ranges = [layer_range(num_layers, rank, pp_size) for rank in range(pp_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_layers
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    lengths = [end - first for first, end in ranges]
    assert lengths == sorted(lengths)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "expected"),
    [
        (61, 2, [(0, 30), (30, 61)]),
        (43, 4, [(0, 10), (10, 21), (21, 32), (32, 43)]),
        (8, 1, [(0, 8)]),
        (3, 4, [(0, 0), (0, 1), (1, 2), (2, 3)]),
    ],
)
def test_stages_of_known_models(num_layers: int, pp_size: int, expected: list[tuple[int, int]]) -> None:
    assert [layer_range(num_layers, rank, pp_size) for rank in range(pp_size)] == expected


@settings(max_examples=40)
@given(st.data())
def test_a_partition_fixes_the_stages(data: st.DataObject) -> None:
    partition = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=8))
    ranges = [layer_range(sum(partition), rank, len(partition), partition) for rank in range(len(partition))]
    assert [end - first for first, end in ranges] == partition
    assert ranges[-1][1] == sum(partition)


def test_partitions_that_do_not_add_up() -> None:
    with pytest.raises(ConfigError, match=r"partition \[3, 4\] must name 2 stages and add up to 8 layers"):
        layer_range(8, 0, 2, [3, 4])
    with pytest.raises(ConfigError, match="stage 2 of 2 does not exist"):
        layer_range(8, 2, 2)
    assert layer_range(8, 0, 1, [3, 4]) == (0, 8), "one stage ignores the target's partition"


def test_stages_of_three_and_five_layers_share_ids_and_not_bytes() -> None:
    """R32."""
    short, long = eight_layers().stages(2, partition=[3, 5])
    assert (short.first_layer, short.end_layer, long.end_layer) == (0, 3, 8)
    assert short.domains == long.domains
    assert 2 * short.page_bytes("full") == 6 * 4096
    assert 2 * long.page_bytes("full") == 10 * 4096
    assert short.digest() == long.digest()


def test_a_stage_without_layers_of_a_group_keeps_it_with_zero_bytes() -> None:
    """R62: equal numbers on all stages, zero bytes where a stage has no layer of a family."""
    model = ModelSpec(
        "groups",
        6,
        (DomainSpec("full", 5, 16), DomainSpec("swa", 5, 16, window_tokens=8)),
        (page_pool("a", "full", (0, 3)), page_pool("b", "swa", (1, 4)), page_pool("c", "swa", (2, 5))),
    )
    first, second = model.stages(2)
    assert [len(pool.layers) for pool in first.pools] == [len(pool.layers) for pool in second.pools] == [1, 1, 1]
    uneven = model.stages(2, partition=[1, 5])[0]
    assert [pool.layers for pool in uneven.pools] == [(0,), (), ()]
    assert [uneven.pool_index(name) for name in "abc"] == [0, 1, 2]
    assert (uneven.page_bytes("full"), uneven.page_bytes("swa")) == (4096, 0)
    tiny = catalogue.get("tiny-dsv4").with_blocks({"full": 4, "swa": 4, "rows": 4}).stages(4)[0]
    assert {pool.name for pool in tiny.pools if pool.layers} == {"swa_kv"}
    assert tiny.page_bytes("rows") == 0


def test_small_blocks_beside_large_ones() -> None:
    """R62: groups with block tokens smaller than the base are legal."""
    tokens = (256, 64, 8, 4)
    model = ModelSpec(
        "mixed",
        1,
        tuple(DomainSpec(f"d{n}", 8, n) for n in tokens),
        tuple(page_pool(f"p{n}", f"d{n}", (0,), 64 * n) for n in tokens),
    )
    assert [domain.tokens for domain in model.domains] == [7 * n for n in tokens]


def test_draft_pools_live_on_the_last_stage() -> None:
    model = catalogue.get("tiny-dsv4", draft_layers=2).with_blocks({"full": 4, "swa": 4, "rows": 4})
    drafts = [stage.pool("draft_swa_kv").layers for stage in model.stages(3)]
    assert drafts == [(), (), (8, 9)]
    assert model.stages(3)[2].end_layer == 8


def test_digest_is_equal_for_equal_models_and_changes_with_every_byte() -> None:
    model = eight_layers()
    assert model.digest() == eight_layers().digest()
    pool, domain = model.pools[0], model.domains[0]
    half = replace(pool, block_bytes=2048, row_shape=(2048,))
    variants = [
        replace(model, pools=(half,)),
        replace(model, pools=(replace(pool, row_shape=(2, 2048)),)),
        replace(model, pools=(replace(pool, row_shape=(1024,), dtype="float32"),)),
        replace(model, pools=(replace(pool, layers=tuple(range(7))),)),
        replace(model, pools=(replace(pool, buffers_per_layer=2),)),
        replace(model, pools=(replace(pool, ratio=4),)),
        replace(model, pools=(replace(pool, banks=2),)),
        replace(model, pools=(replace(pool, sentinel_rows=1),)),
        replace(model, pools=(replace(pool, native_rows=RowRule(1, 1, 4)),)),
        replace(model, pools=(replace(pool, fill_row_bytes=4096, fill=(FillPiece(0, 4096),)),)),
        replace(model, pools=(replace(pool, fill_row_bytes=4096, fill=(FillPiece(0, 4096, 1),)),)),
        replace(model, pools=(replace(pool, name="other"),)),
        replace(model, domains=(replace(domain, blocks=18),)),
        replace(model, domains=(replace(domain, block_tokens=32),)),
        replace(model, domains=(replace(domain, blocks=16, blocks_per_page=2),)),
        replace(model, domains=(replace(domain, window_tokens=8),)),
        replace(model, num_layers=9),
        replace(model, tp_size=2),
    ]
    digests = {model.digest(), *(variant.digest() for variant in variants)}
    assert len(digests) == len(variants) + 1


@settings(max_examples=40)
@given(
    pp_size=st.integers(1, 9),
    tp_size=st.sampled_from([1, 2]),
    name=st.sampled_from(["tiny-dsv4", "tiny-llama", "tiny-swa", "tiny-mamba", "tiny-mla"]),
)
def test_slicing_loses_and_doubles_nothing(pp_size: int, tp_size: int, name: str) -> None:
    plan = catalogue.get(name, tp_size=tp_size)
    model = plan.with_blocks({d.name: max(d.floor, 4 * d.blocks_per_page) for d in plan.domains})
    stages = model.stages(pp_size)
    for domain in model.domains:
        whole = model.stage(0, 1).page_bytes(domain.name)
        assert sum(stage.page_bytes(domain.name) for stage in stages) == whole
    for stage in stages:
        for pool in stage.pools:
            assert all(stage.first_layer <= layer < stage.end_layer for layer in pool.layers if not pool.draft)
        assert [pool.name for pool in stage.pools] == [pool.name for pool in model.pools]


def test_names_of_a_stage_are_looked_up() -> None:
    stage = eight_layers().stage(0, 1)
    assert stage.domain("full").blocks == 17
    with pytest.raises(ConfigError, match=r"no domain 'swa' in eight; it has \['full'\]"):
        stage.domain("swa")
    with pytest.raises(ConfigError, match=r"no pool 'c4_kv' in eight; it has \['kv'\]"):
        stage.pool("c4_kv")


@settings(max_examples=60)
@given(blocks=st.integers(2, 500), per_block=st.integers(1, 64), extra=st.integers(0, 70), align=st.integers(1, 130))
def test_native_rows_are_the_least_multiple(blocks: int, per_block: int, extra: int, align: int) -> None:
    exact = per_block * (blocks - 1) + extra
    rows = RowRule(per_block, extra, align).rows(blocks)
    assert rows % align == 0
    assert exact <= rows < exact + align
