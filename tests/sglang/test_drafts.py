"""Draft models: their pools are backed in the transaction of the target, over the engine's own way of building both."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.config import Config
from kvcached_dist.sglang import capacity, drafts, engine, specs
from kvcached_dist.sglang.drafts import Draft
from kvcached_dist.sglang.offer import Offer, common_draft
from tests.sglang.drafted import GRANULE, TOKENS, Engine, Served, buffers, models, page, served, speculating
from tests.sglang.test_agreement import configurator, sizes, starting

__all__ = ["models", "page", "served", "speculating"]

pytestmark = pytest.mark.slow


def test_both_pools_are_the_native_ones_and_nothing_is_reserved(
    speculating: None, tmp_path: Path, page: int, models: Any, registry: Any
) -> None:
    native = [pools.token_to_kv_pool for pools in Engine(tmp_path, page, models).make()]
    served = Served(Engine(tmp_path, page, models), registry).start()
    try:
        for made, expected in zip((served.target, served.draft), native, strict=True):
            pairs = list(zip(buffers(made.token_to_kv_pool), buffers(expected), strict=True))
            assert all((m.shape, m.stride(), m.dtype) == (e.shape, e.stride(), e.dtype) for m, e in pairs)
            assert made.token_to_kv_pool.get_kv_size_bytes() == expected.get_kv_size_bytes()
        assert served.snapshot("runtime_pools") == {}
        assert sum(served.mapped().values()) < sum(buffer.nbytes for pool in native for buffer in buffers(pool)) // 4
    finally:
        served.close()


def test_what_the_cache_keeps_moves_with_its_draft_layers(served: Served) -> None:
    """So there must be nothing of the draft that the ids index beside these lanes."""
    assert served.plugin.runtime._drafts == [True]
    lanes = {lane.data_ptr() for lane in served.plugin.runtime.started.backing.lanes(specs.FULL)}
    own = (buffer for pools in (served.target, served.draft) for buffer in buffers(pools.token_to_kv_pool))
    assert lanes == {buffer.data_ptr() for buffer in own}


def test_a_page_comes_and_goes_with_its_draft_layers(served: Served) -> None:
    small = served.mapped()
    assert {"draft_kv"} < set(small)
    assert min(small.values()) > 0
    ids = served.extend(700)
    large = served.mapped()
    assert all(large[name] > 2 * small[name] for name in small)
    for number, buffer in enumerate(buffers(served.draft.token_to_kv_pool)):
        buffer[ids] = number + 1
    assert all(bool((b[ids] == n + 1).all()) for n, b in enumerate(buffers(served.draft.token_to_kv_pool)))
    served.target.token_to_kv_pool_allocator.free(ids)
    for _ in range(2000):
        served.step(0, idle=True)
        if all(size < large[name] // 2 for name, size in served.mapped().items()):
            break
        time.sleep(0.002)
    assert all(size < large[name] // 2 for name, size in served.mapped().items())
    kept = served.target.token_to_kv_pool_allocator.free_pages
    again = served.extend(600)
    fresh = again[~torch.isin(again // served.engine.page, kept)]
    assert len(fresh) > 50
    assert not any(buffer[fresh].any() for buffer in buffers(served.draft.token_to_kv_pool)), "old bytes came back"


@pytest.mark.parametrize("page", [16], indirect=True)
def test_a_page_that_lacks_its_draft_layers_is_not_published(served: Served) -> None:
    bytes_of = {pool.name: pool.lanes * pool.block_bytes for pool in served.coordinator.stage.pools}
    target = sum(size for name, size in bytes_of.items() if name != "draft_kv")
    room = served.coordinator.physical.budget_bytes()
    # Room for pages of the target alone, with its borders; less than one page of both.
    spare = min(target + bytes_of["draft_kv"] - 1, 4 * GRANULE)
    served.coordinator.register_runtime_pool("other", room - spare)
    known, before = served.runtime.lists["full"], served.runtime.lists["full"].published()
    for _ in range(200):
        served.step(32)
        time.sleep(0.002)
    assert (known.published(), served.coordinator.domains["full"].growable) == (before, 0)


@pytest.mark.parametrize("page", [16], indirect=True)
@pytest.mark.parametrize("models", ["heads"], indirect=True)
def test_the_capacity_counts_both_and_the_draft_pool_follows_it(
    speculating: None, tmp_path: Path, page: int, models: Any, registry: Any
) -> None:
    served = Served(Engine(tmp_path, page, models), registry, host_capacity_bytes=256 << 10).start()
    try:
        draft = Draft(3, 4, (24, 24), torch.bfloat16)
        assert (served.plugin.starting.draft, draft.token_bytes, draft.lanes) == (draft, 3 * 4 * 48 * 2, 6)
        # The null page and two shared granules of ten lanes; 256 bytes a token of the target.
        spare = 10 * 2 * GRANULE + page * (256 + draft.token_bytes)
        tokens = ((256 << 10) - spare) // (page * (256 + draft.token_bytes)) * page
        assert served.plugin.starting.sizes.max_total_num_tokens == tokens < TOKENS
        sizes = [pools.token_to_kv_pool.size for pools in (served.target, served.draft)]
        assert sizes == [tokens, tokens]
    finally:
        served.close()


def test_ranks_that_describe_different_draft_models_keep_theirs() -> None:
    mine = Offer(tokens=640, draft=Draft(1, 2, (16, 16), torch.bfloat16), tokens_with_draft=320)
    assert common_draft([mine, mine]) == (mine.draft, "")
    for other in (replace(mine, draft=None), replace(mine, draft=Draft(2, 2, (16, 16), torch.bfloat16))):
        draft, why = common_draft([mine, other])
        assert draft is None
        assert why.startswith(f"rank 1 has {other.draft}, rank 0 has Draft(layers=1")
    assert common_draft([mine, Offer(tokens=640, native_draft="none here")]) == (None, "rank 1: none here")


def test_the_least_of_all_ranks_holds_target_and_draft(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Draft(1, 2, (16, 16), torch.bfloat16)
    monkeypatch.setattr(drafts, "described", lambda *_: draft)
    monkeypatch.setattr(engine, "refusal", lambda *_args, **_options: None)
    made = configurator(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    alone, both = (capacity.fitting_tokens(made, sizes(), Config.preset("tests"), one) for one in (None, draft))
    assert both < alone
    with_draft = Offer(tokens=4096, draft=draft, tokens_with_draft=320)
    for other, expected in ((with_draft, 320), (Offer(tokens=640), 640)):
        monkeypatch.setattr(engine, "gather", lambda mine, *_, other=other: [mine, other])
        deciding = starting()
        cut: Any = deciding.agree(made, sizes(4096))
        assert (cut.max_total_num_tokens, deciding.draft) == (expected, other.draft)
