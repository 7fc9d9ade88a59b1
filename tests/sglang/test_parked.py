"""A parked chunk: how long it may wait, and that the engine's own abort gives back all that it held."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.sglang import parked as parked_module
from kvcached_dist.sglang import specs
from kvcached_dist.sglang.engine import evict
from kvcached_dist.sglang.needs import Needs
from kvcached_dist.sglang.parked import ParkedChunk
from kvcached_dist.sglang.runtime import Mark
from tests.sglang import test_mla_pools as mla
from tests.sglang.families import Rank, configurator

LIMIT_S = 30.0
CHUNK = 128


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of parked chunks, to be set."""
    at = [100.0]
    monkeypatch.setattr(parked_module, "time", SimpleNamespace(monotonic=lambda: at[0]))
    return at


def chunked(name: str = "long") -> Any:
    return SimpleNamespace(rid=name, origin_input_ids=[0] * 900)


def alone() -> bool:
    return True


def test_a_chunk_that_is_parked_for_too_long_with_nothing_else_running_is_ended_once(
    engine_settings: Any, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    parked, request = ParkedChunk(LIMIT_S), chunked()
    for _ in range(30):
        parked.found_nothing(request)
        assert parked.aborts(request, alone) == []
        now[0] += 1.0
    assert caplog.text == ""
    parked.found_nothing(request)
    (abort,) = parked.aborts(request, alone)
    assert (abort.rid, abort.abort_all) == ("long", False)
    assert "event=parked_chunk_ended request=long prompt_tokens=900 waited_s=30.0" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    parked.found_nothing(request)
    assert parked.aborts(request, alone) == []
    assert parked.rounds == 32


def others(now: list[float], parked: ParkedChunk, request: Any) -> list[Any]:
    """A request decodes for a moment."""
    parked.found_nothing(request)
    return parked.aborts(request, lambda: False)


def pause(now: list[float], parked: ParkedChunk, request: Any) -> list[Any]:
    """The engine is paused: it looks for requests and plans no step."""
    now[0] += LIMIT_S
    return parked.aborts(request, alone)


def progress(now: list[float], parked: ParkedChunk, request: Any) -> list[Any]:
    """The chunk ran, and the next one is parked."""
    return parked.aborts(request, alone)


def another(now: list[float], parked: ParkedChunk, request: Any) -> list[Any]:
    """Another request is the chunked one."""
    parked.found_nothing(other := chunked("other"))
    return parked.aborts(other, alone)


@pytest.mark.parametrize("between", [others, pause, progress, another])
def test_the_time_counts_anew_after_anything_else(between: Any, engine_settings: Any, now: list[float]) -> None:
    parked, request = ParkedChunk(LIMIT_S), chunked()
    parked.found_nothing(request)
    parked.aborts(request, alone)
    now[0] += LIMIT_S - 1
    assert between(now, parked, request) == []
    parked.found_nothing(request)
    now[0] += 2
    assert parked.aborts(request, alone) == []
    parked.found_nothing(request)
    now[0] += LIMIT_S
    assert len(parked.aborts(request, alone)) == 1


# ---------------------------------------------------------------------- against the engine's own scheduler


@pytest.fixture(params=[(1, True), (16, True), (16, False)], ids=["page1", "page16", "page16-no-prefix-cache"])
def rank(request: Any, engine_settings: Any, registry: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Pools and allocators of the engine, and a scheduler whose chunked request has run one chunk."""
    page, radix = request.param
    made = Rank(registry, monkeypatch, configurator(), parked_s=LIMIT_S)
    made.build(lambda: mla.engine_pool(page), lambda pool, _rows: mla.allocator(page, pool))
    made.runtime._scheduler = scheduler(made, page, radix)
    yield made
    made.close()


def scheduler(rank: Rank, page: int, radix: bool) -> Any:
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = CacheInitParams(
        disable=False, req_to_token_pool=rank.rows, token_to_kv_pool_allocator=rank.allocator, page_size=page
    )
    made: Any = object.__new__(Scheduler)
    empty = SimpleNamespace(reqs=[], batch_is_full=False)
    made.__dict__.update(
        page_size=page, chunked_prefill_size=CHUNK, max_prefill_tokens=1024, max_running_requests=8, waiting_queue=[],
        running_batch=empty, last_batch=None, req_to_token_pool=rank.rows, token_to_kv_pool_allocator=rank.allocator,
        tree_cache=(RadixCache if radix else ChunkCache)(params), mm_receiver=None, dllm_config=None, chunked_req=None,
        _pending_chunked_abort_req=None, disaggregation_mode=DisaggregationMode.NULL, sent=[],
        ps=SimpleNamespace(pp_size=1), grammar_manager=SimpleNamespace(grammar_queue=[], abort_requests=lambda _: None),
        is_fully_idle=lambda: False, collect_inflight_reqs=list,
    )  # fmt: skip
    tokenizer = SimpleNamespace(send_output=lambda out, _: made.sent.append(out))
    made.ipc_channels = SimpleNamespace(send_to_tokenizer=tokenizer)
    # What the engine does for the first chunk of a prompt.
    long = Req("long", "", array("q", range(3, 403)), SamplingParams(max_new_tokens=8))
    long.init_next_round_input(made.tree_cache)
    long.lock_receipt = made.tree_cache.inc_lock_ref(long.last_node).to_dec_params()
    long.set_extend_range(0, CHUNK)
    made.ids = mla.extend(rank, CHUNK)
    (row,) = rank.rows.alloc([long])
    rank.rows.write((row, slice(0, CHUNK)), made.ids.to(torch.int32))
    long.kv.kv_allocated_len = long.kv.kv_committed_len = CHUNK
    made.chunked_req = long
    made.stash_chunked_request(long)
    return made


@pytest.mark.slow
def test_the_abort_gives_back_rows_and_pages_and_the_queue_moves(rank: Rank, now: list[float]) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    runtime, engine = rank.runtime, rank.runtime._scheduler
    known, long = runtime.lists[specs.FULL], engine.chunked_req
    # Nothing is left, and nothing can come.
    taken = rank.allocator.alloc(rank.allocator.available_size())
    sent: list[Any] = []
    for _ in range(3):
        adder = PrefillAdder(engine.page_size, engine.tree_cache, rank.allocator, None, 1.0, 1024, CHUNK)
        long.init_next_round_input()
        assert adder.add_chunked_req(long) is long
        assert adder.can_run_list == []
        now[0] += LIMIT_S / 2
        sent += [item for item in runtime.to_broadcast([]) if not isinstance(item, Mark)]
    (abort,) = sent
    engine.abort_request(abort)
    engine.process_pending_chunked_abort()
    assert engine.chunked_req is None
    assert [out.rid for out in engine.sent] == ["long"]
    assert sorted(rank.rows.free_slots) == list(range(1, rank.rows.size + 1))
    free = known.available() * engine.page_size
    assert free + engine.tree_cache.evictable_size() == CHUNK
    assert engine.tree_cache.protected_size() == 0
    # Ids and all: what the chunk held can be evicted and handed out again.
    evict(engine.tree_cache, CHUNK)
    again = rank.allocator.alloc(CHUNK)
    assert sorted(again.tolist()) == sorted(engine.ids.tolist())
    rank.allocator.free(again)
    rank.allocator.free(taken)
    assert known.available() == known.published()


@pytest.mark.slow
def test_what_enters_the_queue_of_the_engine_is_counted(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counted = rank.runtime._scheduler, []
    rank.runtime.to_broadcast([])
    monkeypatch.setattr(Needs, "queued", lambda _needs, request: counted.append(request))
    engine.__dict__.update(
        _set_or_validate_priority=lambda _: True, _abort_on_queued_limit=lambda _: False, processed_tokens_counter=0,
        _prefetch_kvcache=lambda _: None,
    )  # fmt: skip
    for retracted in (False, True):
        request = SimpleNamespace(time_stats=SimpleNamespace(set_wait_queue_entry_time=lambda: None))
        engine._add_request_to_queue(request, is_retracted=retracted)
    assert counted == engine.waiting_queue
    assert len(counted) == 2
