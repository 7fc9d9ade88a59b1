"""Admission against the engine's own ``PrefillAdder``: future tokens count on growth, a step does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.sglang.admission import Admission

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
    parked_chunks = 0

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
    assert growth.parked_chunks == 1
    verdict = admission.add_one_req(lambda *_: pytest.fail("admitted"), made, request(1))
    assert verdict == AddReqResult.OTHER


def test_a_request_whose_first_step_is_not_published_waits(engine_settings: Any) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission, made, _ = hooked(free=64, growable=5000)
    assert admission.add_one_req(lambda *_: "asked", made, request(48)) == "asked"
    assert admission.add_one_req(lambda *_: "asked", made, request(49)) == AddReqResult.NO_TOKEN


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
