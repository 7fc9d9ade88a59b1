"""The memory of one rank on the host device: bytes, views, fills, and failures as values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from kvcached_dist import _native
from kvcached_dist.coord.core.types import DomainId, PageId, Run, Txn
from kvcached_dist.errors import ConfigError, DriverError
from kvcached_dist.pools import DomainSpec, ModelSpec, PoolSpec, StageBacking, StageSpec, catalogue

GRANULE = 4096


@pytest.fixture
def device() -> _native.HostDevice:
    return _native.HostDevice(256 << 20, granule_bytes=GRANULE)


@pytest.fixture
def flash(device: _native.HostDevice) -> Iterator[StageBacking]:
    """Every family of the small compressed model, state banks included."""
    plan = catalogue.get("tiny-dsv4", online_c128=True, draft_layers=1, draft_tokens=3)
    rows = next(plan_.blocks_per_page for plan_ in plan.domains if plan_.name == "rows")
    stage = plan.with_blocks({"full": 12, "swa": 10, "rows": 4 * rows}).stage(0, 1)
    backing = StageBacking.open(device, stage)
    yield backing
    backing.close()


def run(stage: StageSpec, domain: str, first: int, count: int = 1) -> Run:
    return Run(DomainId(stage.domain_index(domain)), PageId(first), count)


def null_pages(stage: StageSpec) -> list[Run]:
    return [run(stage, domain.name, 0) for domain in stage.domains]


def grow(backing: StageBacking, txn: int, *runs: Run) -> None:
    for outcome in (backing.reserve(Txn(txn), runs), backing.map(runs)):
        assert outcome.ok, outcome.detail


def shrink(backing: StageBacking, *runs: Run) -> None:
    for outcome in (backing.unmap(runs), backing.release(runs)):
        assert outcome.ok, outcome.detail


def test_usage_is_the_exact_bytes_of_every_pool(flash: StageBacking, device: _native.HostDevice) -> None:
    """R53: three window pages and one full page mapped; after the release only page 0 is left."""
    stage = flash.stage
    null = null_pages(stage)
    grow(flash, 1, *null)

    def usage() -> dict[str, int]:
        return dict(zip((pool.name for pool in stage.pools), flash.held_bytes(), strict=True))

    reserved = usage()
    assert reserved == flash.expected_bytes(null)
    wanted = [run(stage, "swa", 1, 3), run(stage, "full", 1)]
    grow(flash, 2, *wanted)
    grown = usage()
    assert grown == flash.expected_bytes([*null, *wanted])
    assert flash.mapped_bytes() == flash.held_bytes() == list(grown.values())
    assert device.counters().bytes_created == sum(grown.values())
    assert grown["c128_state"] == reserved["c128_state"], "request rows did not grow"
    shrink(flash, *wanted)
    assert usage() == reserved
    shrink(flash, *null)
    assert sum(usage().values()) == sum(flash.held()) == 0


def test_missing_bytes_are_what_a_reserve_creates(flash: StageBacking, device: _native.HostDevice) -> None:
    runs = [*null_pages(flash.stage), run(flash.stage, "swa", 3, 4)]
    missing = flash.missing_bytes(runs)
    assert missing == sum(flash.expected_bytes(runs).values())
    before = device.free_bytes()
    assert flash.reserve(Txn(1), runs).ok
    assert before - device.free_bytes() == missing
    assert flash.missing_bytes(runs) == 0
    assert flash.abort(Txn(1)).ok
    assert device.free_bytes() == before


def test_border_granules_are_shared_by_neighbouring_runs(flash: StageBacking) -> None:
    stage = flash.stage
    left, right = run(stage, "full", 1), run(stage, "full", 2)
    grow(flash, 1, left)
    alone = flash.expected_bytes([right])["c128_kv"]
    added = dict(zip((pool.name for pool in stage.pools), flash.plan([right]), strict=True))["c128_kv"][1]
    assert added < alone


def test_fresh_pages_hold_the_pattern_of_their_family(flash: StageBacking) -> None:
    stage = flash.stage
    grow(flash, 1, *null_pages(stage), run(stage, "swa", 2), run(stage, "rows", 1))
    state = flash.layer("c4_state", 0)
    ring, half = stage.pool("c4_state").rows_per_block, 2 * 80
    for rows in (state[:ring], state[2 * ring : 3 * ring], state[-1:]):
        assert torch.equal(rows[:, :half], torch.zeros_like(rows[:, :half]))
        assert torch.isneginf(rows[:, half:]).all()
    assert not flash.tensor("swa_kv")[:, 2].any()
    rows_per_page = stage.domain("rows").blocks_per_page
    for bank in range(4):
        fresh = flash.tensor("c128_state", bank)[:, rows_per_page].view(torch.float32)
        assert torch.isneginf(fresh[:, :80]).all()
        assert not fresh[:, 80:].any()


def test_a_new_run_does_not_touch_its_neighbours_bytes(flash: StageBacking) -> None:
    stage = flash.stage
    grow(flash, 1, run(stage, "full", 1), run(stage, "full", 3))
    tensors = {name: flash.tensor(name) for name in ("c4_kv", "c4_indexer", "c128_kv")}
    for tensor in tensors.values():
        tensor[:, 1], tensor[:, 3] = 0xAB, 0xCD
    grow(flash, 2, run(stage, "full", 2))
    for name, tensor in tensors.items():
        assert (tensor[:, 1] == 0xAB).all(), name
        assert not tensor[:, 2].any(), name
        assert (tensor[:, 3] == 0xCD).all(), name
    shrink(flash, run(stage, "full", 2))
    assert all((tensor[:, 1] == 0xAB).all() and (tensor[:, 3] == 0xCD).all() for tensor in tensors.values())


def test_request_rows_survive_the_reuse_of_window_pages(flash: StageBacking) -> None:
    """R41: the row of a request is not found through the window table; its pages come and go."""
    stage = flash.stage
    grow(flash, 1, run(stage, "rows", 1), run(stage, "swa", 3))
    row = flash.tensor("c128_state")[:, stage.domain("rows").blocks_per_page]
    row[:] = 0x5A
    shrink(flash, run(stage, "swa", 3))
    grow(flash, 2, run(stage, "swa", 3))
    assert (row == 0x5A).all()
    shrink(flash, run(stage, "rows", 1))
    grow(flash, 3, run(stage, "rows", 1))
    assert torch.isneginf(row.view(torch.float32)[:, :80]).all()


def test_views_have_the_native_shape_for_every_layer(flash: StageBacking) -> None:
    """R31: shapes and strides equal those of a buffer that the engine would have allocated."""
    stage = flash.stage
    blocks = {domain.name: domain.blocks for domain in stage.domains}
    full, swa, rows = blocks["full"], blocks["swa"], blocks["rows"]
    c4_rows = -(-((swa - 1) * 16 + 16 + 1) // 4) * 4
    expected = {
        "swa_kv": (swa, 12_672),
        "c4_kv": (full, 3_456),
        "c4_indexer": (full, 4_224),
        "c128_kv": (full, 576),
        "c4_state": (c4_rows, 4 * 80),
        "c4_indexer_state": (c4_rows, 4 * 128),
        "c128_state": ((rows + 2) * 4, 3 * 80),
        "draft_swa_kv": (swa, 12_672),
    }
    for pool in stage.pools:
        views = [flash.layer(pool.name, index) for index in range(pool.buffers)]
        native = torch.empty(expected[pool.name], dtype=getattr(torch, pool.dtype), device="meta")
        for view in views:
            assert (view.shape, view.stride(), view.dtype) == (native.shape, native.stride(), native.dtype), pool.name
        addresses = [view.data_ptr() for view in views]
        assert addresses == sorted(set(addresses))
        assert all(b - a >= native.nbytes for a, b in itertools.pairwise(addresses))


def test_views_and_bytes_are_the_same_memory(flash: StageBacking) -> None:
    stage = flash.stage
    grow(flash, 1, run(stage, "full", 2))
    flash.layer("c4_kv", 1)[2] = 7
    tensor = flash.tensor("c4_kv")
    assert tensor.shape == (3, 12, 3_456)
    assert (tensor[1, 2] == 7).all()
    assert not tensor[0, 2].any()
    tokens = flash.layer("c4_kv", 1, "bfloat16", (12, 32, 8), (1_728, 54, 1))
    assert tokens.data_ptr() == tensor[1].data_ptr()
    assert tokens[2, 31, 7].view(torch.int16).item() == 0x0707


def test_banks_are_slices_of_the_native_buffer(flash: StageBacking) -> None:
    rows = flash.stage.domain("rows").blocks
    per_page = flash.stage.domain("rows").blocks_per_page
    grow(flash, 1, run(flash.stage, "rows", 1))
    for bank in range(4):
        flash.tensor("c128_state", bank)[2, per_page].view(torch.float32)[:] = bank
    native = flash.layer("c128_state", 2)
    values = [native[bank * (rows + 2) + per_page, 0].item() for bank in range(4)]
    assert values == [0.0, 1.0, 2.0, 3.0]


def test_k_and_v_are_separate_buffers(device: _native.HostDevice) -> None:
    stage = catalogue.get("tiny-llama").with_blocks({"full": 9}).stage(1, 2)
    backing = StageBacking.open(device, stage)
    assert stage.pool("mha_kv").layers == (2, 3)
    assert backing.tensor("mha_kv").shape == (4, 9, 1536)
    for index in range(4):
        view = backing.layer("mha_kv", index)
        assert (view.shape, view.stride(), view.dtype) == ((9 * 16, 2, 24), (48, 24, 1), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"'mha_kv': buffer 4 does not exist on this stage; it has 4"):
        backing.layer("mha_kv", 4)
    backing.close()


def test_layers_of_recurrent_state_are_one_tensor(device: _native.HostDevice) -> None:
    stage = catalogue.get("tiny-mamba").with_tokens(64).stage(0, 1)
    backing = StageBacking.open(device, stage)
    grow(backing, 1, run(stage, "mamba", 1))
    state = backing.layers("mamba_state")
    assert (state.shape, state.dtype) == ((2, 64, 4, 20, 12), torch.float32)
    state[1, 40] = 3.0
    assert torch.equal(backing.layer("mamba_state", 1)[40], state[1, 40])
    assert not backing.layer("mamba_state", 0)[40].any()
    with pytest.raises(ConfigError, match="buffer 1 does not exist; a layer has 1"):
        backing.layers("mamba_state", 1)
    backing.close()


def test_k_and_v_of_all_layers_interleave(device: _native.HostDevice) -> None:
    stage = catalogue.get("tiny-llama").with_blocks({"full": 9}).stage(0, 1)
    backing = StageBacking.open(device, stage)
    for buffer in (0, 1):
        stack = backing.layers("mha_kv", buffer)
        assert stack.shape == (4, 9 * 16, 2, 24)
        views = [backing.layer("mha_kv", 2 * layer + buffer) for layer in range(4)]
        assert [stack[layer].data_ptr() for layer in range(4)] == [view.data_ptr() for view in views]
    backing.close()


def test_views_that_leave_their_buffer_are_refused(flash: StageBacking) -> None:
    with pytest.raises(ConfigError, match=r"'c4_kv': a view of shape \(13, 3456\).* reaches 44928 bytes.* has 41472"):
        flash.layer("c4_kv", 0, "uint8", (13, 3456))
    with pytest.raises(ConfigError, match="do not go together"):
        flash.layer("c4_kv", 0, "uint8", (13, 3456), (3456,))
    with pytest.raises(ConfigError, match="dtype 'int7' is unknown"):
        flash.layer("c4_kv", 0, "int7")
    with pytest.raises(ConfigError, match="bank 4 does not exist; it has 4"):
        flash.tensor("c128_state", 4)
    with pytest.raises(ConfigError, match="no pool 'mla_kv'"):
        flash.tensor("mla_kv")
    assert flash.layer("c4_kv", 0, "uint8", (0, 5), (5, 1)).numel() == 0


def test_a_stage_without_layers_of_a_domain_agrees_at_once(device: _native.HostDevice) -> None:
    """R62: zero bytes, the same numbers, and every call succeeds."""
    stage = catalogue.get("tiny-dsv4").with_blocks({"full": 6, "swa": 6, "rows": 6}).stage(0, 4)
    backing = StageBacking.open(device, stage)
    runs = [run(stage, "full", 1, 3), run(stage, "rows", 1)]
    assert backing.missing_bytes(runs) == 0
    grow(backing, 1, *runs)
    assert sum(backing.held_bytes()) == 0
    assert backing.tensor("c4_kv").shape == (0, 6, 3_456)
    assert backing.layers("c4_state").shape[0] == 0
    shrink(backing, *runs)
    assert (backing.page_bytes("full"), backing.page_bytes("swa")) == (0, 2 * 12_672)
    backing.close()


def test_stages_of_three_and_five_layers_map_in_proportion(device: _native.HostDevice) -> None:
    """R32: two pages are 6 and 10 pages' worth."""
    pool = PoolSpec("kv", "full", GRANULE, tuple(range(8)), (GRANULE,))
    model = ModelSpec("eight", 8, (DomainSpec("full", 9, 16),), (pool,))
    mapped = []
    for stage in model.stages(2, partition=[3, 5]):
        backing = StageBacking.open(device, stage)
        grow(backing, 1, run(stage, "full", 1, 2))
        mapped.append(sum(backing.mapped_bytes()) // GRANULE)
        backing.close()
    assert mapped == [6, 10]


def test_running_out_of_memory_is_a_value_and_holds_nothing() -> None:
    stage = catalogue.get("tiny-llama").with_blocks({"full": 65}).stage(0, 1)
    device = _native.HostDevice(16 * GRANULE, granule_bytes=GRANULE)
    backing = StageBacking.open(device, stage)
    outcome = backing.reserve(Txn(1), [run(stage, "full", 0, 40)])
    assert (outcome.ok, outcome.exhausted) == (False, True)
    assert backing.pool_name(outcome.pool) == "mha_kv"
    assert sum(backing.held()) == 0
    assert device.free_bytes() == 16 * GRANULE
    assert backing.pool_name(-1) == "-"
    backing.close()


def test_a_page_too_small_for_a_block_is_refused_before_anything_is_reserved(device: _native.HostDevice) -> None:
    stage = catalogue.get("qwen3-next-80b", state_slots=3).with_tokens(64).stage(0, 1)
    reservations = device.counters().reservations
    wide = PoolSpec("mamba_state", "mamba", 3 << 20, (0,), (3 << 20,))
    model = ModelSpec("wide", 1, (DomainSpec("mamba", 4, 0),), (wide,))
    with pytest.raises(ConfigError, match="needs 4 MiB"):
        StageBacking.open(device, model.stage(0, 1), page_bytes=2 << 20)
    assert device.counters().reservations == reservations
    StageBacking.open(device, stage, page_bytes=2 << 20).close()


def test_close_gives_everything_back(device: _native.HostDevice) -> None:
    stage = catalogue.get("tiny-mamba").with_tokens(64).stage(0, 1)
    backing = StageBacking.open(device, stage)
    grow(backing, 1, *null_pages(stage))
    backing.close()
    backing.close()
    left = device.counters()
    assert (left.bytes_created, left.bytes_mapped, left.reservations) == (0, 0, 0)
    assert left.handles_created == left.handles_released


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_of_the_catalogue_can_be_reserved(name: str) -> None:
    """Addresses only: the largest models need terabytes of them and no memory."""
    plan = catalogue.get(name)
    model = plan.with_blocks({d.name: max(d.floor, 8 * d.blocks_per_page) for d in plan.domains})
    device = _native.HostDevice(1 << 30, granule_bytes=2 << 20)
    for stage in model.stages(2):
        backing = StageBacking.open(device, stage)
        assert sum(backing.held_bytes()) == 0
        assert backing.missing_bytes(null_pages(stage)) == sum(backing.expected_bytes(null_pages(stage)).values())
        backing.close()


def test_addresses_that_cannot_be_reserved_are_a_typed_error() -> None:
    device = _native.HostDevice(1 << 20, 4096)
    device.faults.arm("reserve", 1)
    stage = catalogue.get("tiny-llama").with_tokens(64).stage(0, 1)
    with pytest.raises(DriverError, match="cannot reserve"):
        StageBacking.open(device, stage)
