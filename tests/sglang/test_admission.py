"""Admission against the engine's own ``PrefillAdder``: future tokens count on growth, a step does not."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.sglang import specs
from kvcached_dist.sglang.admission import Admission
from kvcached_dist.sglang.parked import ParkedChunk
from tests.sglang import test_swa_pools as swa
from tests.sglang.families import Rank

PAGE = 16


class Allocator:
    """As much of a token allocator as admission asks."""

    def __init__(self, free: int, page: int) -> None:
        self.page_size = page
        self.free = free

    def available_size(self) -> int:
        return self.free


class NoCache:
    """A prefix cache that holds nothing."""

    disable = True
    sliding_window_size = None

    def evictable_size(self) -> int:
        return 0

    def supports_mamba(self) -> bool:
        return False

    def is_tree_cache(self) -> bool:
        return False

    def inc_lock_ref(self, _node: object) -> Any:
        return SimpleNamespace(to_dec_params=lambda: None)

    def dec_lock_ref(self, *_: object) -> None:
        pass


class Growth(SimpleNamespace):
    """A runtime: so much is published and free, so much more could grow."""

    elastic = True

    def __init__(self, **values: Any) -> None:
        super().__init__(parked=ParkedChunk(30.0), **values)

    def growable_tokens(self) -> int:
        return int(self.growable)

    def published_free_tokens(self) -> int:
        return int(self.allocator.free)


def adder(free: int, chunk: int | None = 256, page: int = PAGE) -> Any:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    return PrefillAdder(page, NoCache(), Allocator(free, page), None, 1.0, 4096, chunk)


def hooked(free: int, growable: int, chunk: int | None = 256, page: int = PAGE) -> tuple[Admission, Any, Growth]:
    made = adder(free, chunk, page)
    growth = Growth(growable=growable, allocator=made.token_to_kv_pool_allocator)
    admission = Admission(growth)  # type: ignore[arg-type]
    admission.opened(None, made)
    return admission, made, growth


def request(tokens: int, cached: int = 0) -> Any:
    made = SimpleNamespace(
        full_untruncated_fill_ids=[0] * tokens, prefix_indices=[0] * cached, retracted_stain=False, last_node=None,
        sampling_params=SimpleNamespace(max_new_tokens=8, ignore_eos=False), output_ids=[], extend_range=None,
        kv=SimpleNamespace(holds_mamba=True),
    )  # fmt: skip

    def set_extend_range(start: int, end: int) -> None:
        made.extend_range = SimpleNamespace(start=start, end=end, length=end - start)

    made.set_extend_range = set_extend_range
    return made


def native(self: Any, req: Any) -> Any:
    """The engine's own method, below the hook."""
    from sglang.srt.managers.schedule_policy import PrefillAdder

    return PrefillAdder.add_chunked_req(self, req)


def test_growth_counts_for_later_tokens_only(engine_settings: Any) -> None:
    _, made, _ = hooked(free=64, growable=1000)
    assert made.rem_total_tokens == 1064
    assert made.cur_rem_tokens == 64


def test_a_chunk_that_fits_runs_whole(engine_settings: Any) -> None:
    admission, made, _ = hooked(free=512, growable=0)
    req = request(1000, cached=256)
    assert admission.add_chunked_req(native, made, req) is req
    assert req.extend_range.length == 256
    assert made.rem_chunk_tokens == 0


def test_a_chunk_shrinks_to_what_is_published(engine_settings: Any) -> None:
    admission, made, _ = hooked(free=100, growable=5000)
    req = request(1000, cached=256)
    assert admission.add_chunked_req(native, made, req) is req
    assert req.extend_range.length == 80, "whole pages, one of them kept for the engine's over-estimate"


@pytest.mark.parametrize("page", [1, 16])
def test_a_chunk_without_a_page_is_parked_and_nobody_overtakes_it(page: int, engine_settings: Any) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission, made, growth = hooked(free=page, growable=5000, page=page)
    req = request(1000, cached=256)
    assert admission.add_chunked_req(native, made, req) is req
    assert made.can_run_list == []
    assert req.extend_range is None
    assert growth.parked.rounds == 1
    verdict = admission.add_one_req(lambda *_: pytest.fail("admitted"), made, request(1))
    assert verdict == AddReqResult.OTHER


def test_a_request_whose_first_step_is_not_published_waits(engine_settings: Any) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission, made, _ = hooked(free=64, growable=5000)
    assert admission.add_one_req(lambda *_: "asked", made, request(48)) == "asked"
    assert admission.add_one_req(lambda *_: "asked", made, request(49)) == AddReqResult.NO_TOKEN


def test_a_request_that_takes_nearly_the_whole_chunk_is_looked_at(engine_settings: Any) -> None:
    """It is rounded up to pages and has one more: more than the chunk."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    for free, admitted in ((256 + 15, False), (256 + 16, True), (256 + 2 * PAGE, True)):
        admission, made, _ = hooked(free=free, growable=5000)
        verdict = admission.add_one_req(lambda *_: "asked", made, request(250))
        assert verdict == ("asked" if admitted else AddReqResult.NO_TOKEN), free


class Cached(NoCache):
    """A prefix cache: what a request has of it cannot be evicted for it."""

    def __init__(self, evictable: int, own: int) -> None:
        self.evictable, self.own = evictable, own

    def evictable_size(self) -> int:
        return self.evictable

    def inc_lock_ref(self, _node: object) -> Any:
        self.evictable -= self.own
        return super().inc_lock_ref(_node)

    def dec_lock_ref(self, *_: object) -> None:
        self.evictable += self.own


@pytest.mark.parametrize(("evictable", "own", "admitted"), [(64, 64, False), (128, 64, True), (127, 64, False)])
def test_a_request_is_not_admitted_for_what_its_own_prefix_holds(
    engine_settings: Any, evictable: int, own: int, admitted: bool
) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission, made, _ = hooked(free=16, growable=5000)
    made.tree_cache = Cached(evictable, own)
    # 64 tokens more than its prefix, and a page: 80, of which 16 are free.
    verdict = admission.add_one_req(lambda *_: "asked", made, request(64 + own, cached=own))
    assert verdict == ("asked" if admitted else AddReqResult.NO_TOKEN)
    assert made.tree_cache.evictable == evictable


def test_with_native_pools_the_engine_decides_alone(engine_settings: Any) -> None:
    admission, made, growth = hooked(free=0, growable=0)
    growth.elastic = False
    assert admission.add_one_req(lambda *_: "asked", made, request(4000)) == "asked"
    assert admission.add_chunked_req(lambda *_: "asked", made, request(4000)) == "asked"
    assert admission.add_one_req_ignore_eos(lambda *_: "asked", made, request(4000)) == "asked"


def test_the_future_of_requests_of_known_length_counts_on_growth(engine_settings: Any) -> None:
    admission, made, _ = hooked(free=64, growable=1000)
    seen: list[int] = []
    admission.add_one_req_ignore_eos(lambda adder, _req: seen.append(adder.cur_rem_tokens), made, request(10))
    assert seen == [1064]
    assert made.cur_rem_tokens == 64


# ---------------------------------------------------------------------- mixed chunks


def mixed(free: int, decoding: int, page: int = PAGE) -> tuple[Admission, Any]:
    """An adder whose step decodes so many requests beside its chunk, with nothing that could grow."""
    from sglang.srt.managers.schedule_policy import PrefillAdder

    made = PrefillAdder(page, NoCache(), Allocator(free, page), None, 1.0, 4096, 256, decoding)
    admission = Admission(Growth(growable=5000, allocator=made.token_to_kv_pool_allocator))  # type: ignore[arg-type]
    admission.opened(None, made)
    return admission, made


def test_a_chunk_leaves_a_page_for_every_request_that_decodes_with_it(engine_settings: Any) -> None:
    admission, made = mixed(free=8 * PAGE, decoding=5)
    req = request(1000, cached=256)
    assert admission.add_chunked_req(native, made, req) is req
    # One of the eight for the engine's over-estimate, five for the decodes.
    assert req.extend_range.length == 2 * PAGE


def test_a_chunk_is_parked_where_the_decodes_beside_it_may_need_all(engine_settings: Any) -> None:
    admission, made = mixed(free=3 * PAGE, decoding=5)
    req = request(1000, cached=256)
    assert admission.add_chunked_req(native, made, req) is req
    assert made.can_run_list == []


@pytest.mark.parametrize(("decoding", "admitted"), [(0, True), (1, True), (2, False), (5, False)])
def test_a_request_leaves_a_page_for_every_request_that_decodes_with_it(
    decoding: int, admitted: bool, engine_settings: Any
) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission, made = mixed(free=6 * PAGE, decoding=decoding)
    verdict = admission.add_one_req(lambda *_: "asked", made, request(4 * PAGE))
    assert verdict == ("asked" if admitted else AddReqResult.NO_TOKEN)


def test_pages_of_one_token_cost_a_mixed_step_what_the_engine_counts(engine_settings: Any) -> None:
    _, made = mixed(free=100, decoding=5, page=1)
    assert made.cur_rem_tokens == 95


def test_without_mixed_chunks_decodes_cost_nothing(engine_settings: Any) -> None:
    _, made = mixed(free=100, decoding=0)
    assert made.cur_rem_tokens == 100


# ---------------------------------------------------------------------- sliding windows


@pytest.fixture
def hybrid(request: Any, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine's pools, allocators and cache of a hybrid, our hooks in force, and what is asked of a scheduler."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import SWAChunkCache

    page, window = request.param
    rank = Rank(registry, monkeypatch, swa.hybrid_configurator(sliding_window_size=window))
    rank.build(lambda: swa.engine_pool(page), lambda pool, rows: swa.allocator(page, pool, rows))
    cache = SWAChunkCache(
        CacheInitParams(
            disable=True, req_to_token_pool=rank.rows, token_to_kv_pool_allocator=rank.allocator,
            page_size=page, sliding_window_size=window, chunked_prefill_size=256,
        )
    )  # fmt: skip
    idle = SimpleNamespace(reqs=[], batch_is_full=False)
    rank.runtime._scheduler = SimpleNamespace(
        page_size=page, chunked_prefill_size=256, max_prefill_tokens=1024, max_running_requests=8,
        waiting_queue=[], chunked_req=None, running_batch=idle, last_batch=None, is_fully_idle=lambda: False,
        req_to_token_pool=rank.rows, tree_cache=cache,
    )  # fmt: skip
    yield rank
    rank.close()


def waiting(prompt: int, output: int) -> Any:
    """A request in the engine's queue, about to be admitted."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = Req(f"{prompt}", "", array("q", [1] * prompt), SamplingParams(max_new_tokens=output))
    made.init_next_round_input()
    return made


def verdicts(rank: Any, requests: list[Any]) -> list[Any]:
    """What the engine's adder, with our hooks, says to these requests in the step after that in which they came."""
    from sglang.srt.managers.schedule_policy import PrefillAdder

    scheduler = rank.runtime._scheduler
    scheduler.waiting_queue = requests
    mark = rank.runtime.decide([])
    if mark is not None:
        rank.runtime.apply(mark)
    made = PrefillAdder(rank.allocator.page_size, scheduler.tree_cache, rank.allocator, None, 1.0, 1024, 256)
    return [made.add_one_req(req, has_chunked_req=False, truncation_align_size=None) for req in requests]


@pytest.mark.slow
@pytest.mark.parametrize("output", [100, 400, 800])
@pytest.mark.parametrize("hybrid", [(1, 512), (16, 512), (64, 512)], indirect=True)
def test_a_short_prompt_with_a_long_output_has_its_window_at_the_next_step(hybrid: Any, output: int) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    assert verdicts(hybrid, [waiting(10, output)]) == [AddReqResult.CONTINUE]
    windows = hybrid.runtime.lists[specs.SWA]
    assert windows.published() < windows.book.ids, "a window more, and not all there is"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("hybrid", [(1, 100), (16, 100), (16, 10), (64, 100), (64, 30)], indirect=True)
def test_requests_have_their_windows_in_whatever_order_the_engine_asks(hybrid: Any, seed: int) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    chance = random.Random(seed)
    several = [waiting(chance.choice((1, 10, 60)), chance.choice((1, 30, 60))) for _ in range(4)]
    chance.shuffle(several)
    assert AddReqResult.NO_TOKEN not in verdicts(hybrid, several)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [(1, 100), (16, 100)], indirect=True)
def test_nobody_overtakes_a_chunk_that_finds_nothing_in_window_layers(hybrid: Any) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    verdicts(hybrid, [waiting(60, 8)])
    windows = hybrid.allocator.swa_attn_allocator
    windows.alloc(windows.available_size())
    made = PrefillAdder(
        hybrid.allocator.page_size, hybrid.runtime._scheduler.tree_cache, hybrid.allocator, None, 1.0, 1024, 256
    )
    parked, short = waiting(300, 8), waiting(1, 1)
    assert made.add_chunked_req(parked) is parked
    assert made.can_run_list == []
    assert made.add_one_req(short, has_chunked_req=True, truncation_align_size=None) == AddReqResult.OTHER
    assert hybrid.runtime.parked.rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [(1, 100), (16, 100)], indirect=True)
def test_a_chunk_leaves_window_pages_to_the_decodes_beside_it(hybrid: Any) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    verdicts(hybrid, [waiting(200, 8)])
    page, windows = hybrid.allocator.page_size, hybrid.allocator.swa_attn_allocator
    windows.alloc(windows.available_size() - 8 * page)
    made = PrefillAdder(page, hybrid.runtime._scheduler.tree_cache, hybrid.allocator, None, 1.0, 1024, 256, 5)
    chunk = waiting(300, 8)
    assert made.add_chunked_req(chunk) is chunk
    assert chunk.extend_range.length == 2 * page


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [(1, 512)], indirect=True)
def test_no_more_windows_are_wanted_than_there_are_places_or_ids(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[dict[str, int]] = []

    def decide(blocks: dict[str, int], **_: Any) -> tuple[bytes, ...]:
        wanted.append(blocks)
        return ()

    monkeypatch.setattr(hybrid.coordinator, "decide", decide)
    hybrid.runtime._scheduler.waiting_queue = [waiting(1, 8) for _ in range(8)]
    hybrid.runtime.decide([])
    hybrid.rows.alloc_rows(8)
    hybrid.runtime.decide([])
    prompts = 8 + 2 * 8 + 1
    assert [blocks[specs.SWA] for blocks in wanted] == [swa.SWA_TOKENS, prompts + 511]
    assert {blocks[specs.FULL] for blocks in wanted} == {prompts}
