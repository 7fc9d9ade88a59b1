"""Continuous batching: equal on every rank, and nothing lost whatever is short."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from kvcached_dist.errors import CapacityError
from kvcached_dist.replay import traces
from kvcached_dist.replay.scheduler import SchedulerConfig
from kvcached_dist.replay.sequence import Shape
from kvcached_dist.replay.workload import Request, VirtualClock
from tests.replay.fakes import DSV4, FakeStore, Run

ROOMY = {"full": 4000, "swa": 500, "rows": 64}
TIGHT = {"full": 190, "swa": 40, "rows": 16}


def request(index: int, prompt: int, output: int, hashes: tuple[int, ...] = (), at_us: int = 0) -> Request:
    return Request(index, at_us, prompt, output, hashes)


def run(
    requests: list[Request],
    sizes: dict[str, int] | None = None,
    *,
    shape: Shape = DSV4,
    store: FakeStore | None = None,
    **config: int,
) -> Run:
    return Run(requests, store or FakeStore(sizes or ROOMY), shape, SchedulerConfig(**config))


def assert_clean(finished: Run) -> None:
    """Everything was given back, and every block held what its owner wrote."""
    assert finished.store.wrong == []
    assert finished.store.in_use == dict.fromkeys(finished.store.sizes, 0)
    assert finished.scheduler.totals.completed == len(finished.requests)
    assert finished.scheduler.cache.tokens == 0


def op_log_digest(depth: int = 3) -> str:
    finished = run(traces.generate(60, 3), TIGHT, depth=depth, cached_tokens=20_000)
    finished.finish()
    return hashlib.sha256(repr(finished.store.log).encode()).hexdigest()


def test_four_ranks_do_the_same_operations_in_the_same_order() -> None:
    requests = traces.generate(8, 11)
    logs = []
    for _ in range(4):
        store = FakeStore({"full": 110, "swa": 30, "rows": 8}, misses=lambda number: number % 17 == 0)
        rank = run(requests, store=store, depth=3, cached_tokens=8_000)
        rank.finish()
        assert_clean(rank)
        logs.append(rank.store.log)
    assert logs[0] == logs[1] == logs[2] == logs[3]
    kinds = {entry[0] for entry in logs[0]}
    assert kinds == {"alloc", "free", "check", "miss"}


@pytest.mark.slow
def test_operations_do_not_depend_on_hash_randomisation() -> None:
    code = "from tests.replay.test_scheduler import op_log_digest; print(op_log_digest())"
    digests = set()
    for seed in ("0", "1", "31337"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=50
        )
        digests.add(done.stdout.strip())
    assert digests == {op_log_digest()}


def test_a_request_takes_what_its_tokens_need_and_gives_it_all_back() -> None:
    alone = run([request(0, 700, 400)], depth=1)
    alone.one_step()
    assert alone.store.in_use == {"full": 3, "swa": 3, "rows": 1}
    alone.finish()
    assert_clean(alone)
    full = sum(len(dict(entry[1]).get("full", ())) for entry in alone.store.log if entry[0] == "alloc")
    # 700 prompt tokens and 399 generated ones whose KV is kept.
    assert full == -(-(700 + 399) // 256)


def test_prefill_is_cut_into_chunks() -> None:
    alone = run([request(0, 5000, 1)], depth=1, chunk_tokens=2048)
    assert [alone.one_step().prefill_tokens for _ in range(4)] == [2048, 2048, 904, 0]


def test_window_blocks_retire_while_compressed_history_stays() -> None:
    alone = run([request(0, 8192, 600)], depth=1, chunk_tokens=2048)
    most_swa = 0
    for _ in range(100):
        alone.one_step()
        most_swa = max(most_swa, alone.store.in_use["swa"])
    # One chunk and the window before it; afterwards the window and the block that is written.
    assert most_swa == 2048 // 256 + 1
    assert alone.store.in_use["swa"] <= 2
    assert alone.store.in_use["full"] >= 8192 // 256
    alone.finish()
    assert_clean(alone)


def test_results_come_depth_steps_later_and_a_request_decodes_once_in_depth_steps() -> None:
    alone = run([request(0, 100, 5)], depth=3)
    sizes = [len(alone.one_step().items) for _ in range(16)]
    assert sizes == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert alone.scheduler.done


def test_a_shared_prefix_is_computed_once_and_checked_on_the_hit() -> None:
    hashes = (1, 2, 3, 4)
    pair = run(
        [request(0, 2048 + 100, 4, (*hashes, 5)), request(1, 2048 + 50, 4, (*hashes, 6), at_us=900_000)], depth=1
    )
    pair.now_us = 0
    pair.finish()
    assert_clean(pair)
    assert pair.scheduler.totals.reused_tokens == 2048
    hits = [entry for entry in pair.store.log if entry[0] == "check"]
    assert [(domain, len(ids)) for _, domain, ids in hits] == [("full", 8), ("swa", 1)]


def test_a_prompt_that_is_cached_entirely_still_computes_its_last_block() -> None:
    three = run([request(n, 1024, 2, (1, 2), at_us=n * 500_000) for n in range(3)], depth=1)
    three.finish()
    assert_clean(three)
    # The last token must be computed, so only the first node may be reused, once the second has left its window there.
    assert three.scheduler.totals.reused_tokens == 512


def test_a_branching_point_becomes_usable_for_the_third_request() -> None:
    requests = [
        request(0, 2048, 2, (1, 2, 3, 4)),
        request(1, 2048, 2, (1, 2, 8, 9), at_us=1_000_000),
        request(2, 2048, 2, (1, 2, 6, 7), at_us=2_000_000),
    ]
    three = run(requests, depth=1)
    three.finish()
    assert_clean(three)
    # The second finds (1, 2) without its window, recomputes it and leaves the window there.
    assert three.scheduler.totals.reused_tokens == 1024


def test_the_cache_is_bounded_only_through_logged_evictions() -> None:
    requests = [request(n, 2048, 2, tuple(range(10 * n, 10 * n + 4)), at_us=n * 400_000) for n in range(6)]
    bounded = run(requests, depth=1, cached_tokens=4096)
    seen = []
    while not bounded.scheduler.done:
        bounded.one_step()
        seen.append(bounded.scheduler.cache.tokens)
    assert bounded.store.evictions == [2048, 2048, 2048, 2048]
    assert max(seen) == 4096 + 2048
    assert bounded.scheduler.cache.tokens <= 4096 + 2048
    bounded.scheduler.flush()
    assert_clean(bounded)


def test_the_youngest_is_retracted_when_memory_is_short_and_still_completes() -> None:
    # Both fit when admitted; together their outputs do not.
    requests = [request(0, 1000, 500), request(1, 1000, 500)]
    short = run(requests, {"full": 9, "swa": 20, "rows": 4}, depth=1, cached_tokens=0)
    order = []
    while not short.scheduler.done:
        before = short.scheduler.totals.completed
        short.one_step()
        if short.scheduler.totals.completed > before:
            order.append(short.scheduler.totals.completed)
        assert short.step < 5_000
    short.scheduler.flush()
    assert_clean(short)
    assert short.scheduler.totals.retracted == 1
    # What was generated before the retraction is prefilled, not generated again.
    assert short.scheduler.totals.output_tokens == 1000
    assert short.scheduler.totals.prefill_tokens > 2000


def test_cached_prefixes_go_before_anybody_is_retracted() -> None:
    first = request(0, 4096, 2, tuple(range(8)))
    second = request(1, 4096, 100, (), at_us=1_000_000)
    short = run([first, second], {"full": 20, "swa": 20, "rows": 4}, depth=1)
    short.finish()
    assert_clean(short)
    assert short.scheduler.totals.retracted == 0
    assert short.store.evictions != []


@pytest.mark.parametrize("depth", [1, 3])
def test_a_request_that_cannot_fit_alone_ends_the_run_with_a_clear_error(depth: int) -> None:
    alone = run([request(0, 100_000, 10)], TIGHT, depth=depth)
    with pytest.raises(
        CapacityError, match=r"--capacity is too small for request 0 alone \(100000 prompt and 10 output"
    ):
        alone.finish(steps_max=2000)


def test_a_first_chunk_that_never_fits_ends_the_run_too() -> None:
    alone = run([request(0, 4000, 10)], {"full": 4, "swa": 4, "rows": 1})
    with pytest.raises(CapacityError, match=r"request 0 alone .* of full there are 4, 0 of them in use"):
        alone.one_step()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("admitted", [False, True])
def test_a_request_that_would_fit_waits_for_memory_from_elsewhere(depth: int, admitted: bool) -> None:
    """No number of steps ends it: how long memory takes to come is not a matter of steps."""
    there = [True]
    store = FakeStore(ROOMY, misses=lambda _: not there[0])
    alone = run([request(0, 5000, 300)], store=store, depth=depth)
    for _ in range(5 if admitted else 0):
        alone.one_step()
    assert bool(alone.scheduler.running) == admitted
    there[0] = False
    for _ in range(5000):
        alone.one_step()
    assert alone.scheduler.starving is not None
    assert "request 0 alone (5000 prompt and 300 output tokens)" in alone.scheduler.starving
    there[0] = True
    for _ in range(depth):
        alone.one_step()
    assert alone.scheduler.starving is None
    alone.finish()
    assert_clean(alone)


def test_a_request_beside_others_does_not_starve() -> None:
    """Others will give memory back, or be retracted."""
    there = [True]
    both = run([request(0, 1000, 300), request(1, 1000, 300)], store=FakeStore(ROOMY, misses=lambda _: not there[0]))
    both.one_step()
    assert len(both.scheduler.running) == 2
    there[0] = False
    while len(both.scheduler.running) == 2:
        assert both.scheduler.starving is None
        both.one_step()
    while both.scheduler.starving is None:
        both.one_step()
    assert "request 0 alone" in both.scheduler.starving


def test_a_miss_while_blocks_are_available_is_a_signal_not_an_error() -> None:
    """R19: what `available` said is not a promise; a peer may have taken the memory meanwhile."""
    rng = random.Random(4)
    missing = {number for number in range(5000) if rng.random() < 0.3}
    store = FakeStore(ROOMY, misses=lambda number: number in missing)
    unlucky = run(traces.generate(10, 2), store=store, depth=3)
    unlucky.finish()
    assert_clean(unlucky)
    assert unlucky.scheduler.totals.misses > 10


def test_a_miss_takes_nothing() -> None:
    """R18: nobody owns blocks of an allocation that was not made."""
    store = FakeStore({"full": 8, "swa": 8, "rows": 1}, misses=lambda number: number == 1)
    alone = run([request(0, 1000, 2)], store=store, depth=1)
    alone.one_step()
    assert store.in_use == {"full": 0, "swa": 0, "rows": 0}
    assert alone.scheduler.running == []
    alone.finish()
    assert_clean(alone)


def test_one_running_request_is_enough_for_a_pipeline() -> None:
    """R50: a limit of one request and a deep pipeline must not starve anybody for ever."""
    single = run([request(n, 900, 6) for n in range(4)], depth=5, max_running=1)
    single.finish()
    assert_clean(single)


def test_no_more_requests_run_than_there_are_rows() -> None:
    shape = replace(DSV4, slot_limit=2)
    two = run([request(n, 300, 50) for n in range(5)], shape=shape, depth=1)
    most = 0
    while not two.scheduler.done:
        two.one_step()
        most = max(most, len(two.scheduler.running))
    assert most == 2


def test_recurrent_models_share_no_prefixes_and_hold_one_state() -> None:
    shape = Shape(full_tokens=64, swa_tokens=0, window_tokens=0, slots=("mamba",), share_prefixes=False)
    hashes = (1, 2, 3, 4)
    pair = run(
        [request(0, 2048, 4, hashes), request(1, 2048, 4, hashes, at_us=900_000)],
        {"full": 200, "mamba": 4}, shape=shape, depth=1,
    )  # fmt: skip
    pair.one_step()
    assert pair.store.in_use["mamba"] == 1
    pair.finish()
    assert pair.scheduler.totals.reused_tokens == 0
    assert pair.store.in_use == {"full": 0, "mamba": 0}


def test_demand_names_the_largest_allocation_of_a_step() -> None:
    waiting = run([request(n, 4000, 100) for n in range(6)], depth=3, chunk_tokens=2048)
    assert waiting.scheduler.demand() == {"full": 0, "swa": 0, "rows": 0}
    waiting.one_step()
    demand = waiting.scheduler.demand()
    assert demand == {"full": 8 + 1, "swa": 8 + 1, "rows": 1}
    for _ in range(200):
        before = waiting.scheduler.demand()
        taken_before = len(waiting.store.log)
        waiting.one_step()
        for entry in waiting.store.log[taken_before:]:
            if entry[0] == "alloc":
                taken = {name: len(ids) for name, ids in entry[1]}
                assert all(count <= before.get(name, 0) + 8 for name, count in taken.items())


def test_flushing_while_something_runs_is_refused() -> None:
    busy = run([request(0, 1000, 100)])
    busy.one_step()
    with pytest.raises(ValueError, match="nothing runs"):
        busy.scheduler.flush()


def test_a_step_lasts_five_milliseconds_and_twenty_microseconds_a_prefill_token() -> None:
    clock = VirtualClock()
    assert clock.advance(0) == 5_000
    assert clock.advance(2048) == 5_000 + 40_960
    assert clock.jump(10) == 0
    assert clock.jump(60_000) == 60_000 - 50_960
    assert clock.now_us == 60_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 3, 7])
def test_random_traces_with_random_misses_lose_nothing(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    rate = rng.choice([0.0, 0.05, 0.4])
    missing = {number for number in range(200_000) if rng.random() < rate}
    sizes = {"full": rng.choice([190, 400]), "swa": rng.choice([30, 60]), "rows": rng.choice([4, 20])}
    store = FakeStore(sizes, misses=lambda number: number in missing)
    shape = replace(DSV4, slot_limit=sizes["rows"])
    finished = run(
        traces.generate(50, seed), store=store, shape=shape, depth=depth, cached_tokens=rng.choice([0, 5_000, 200_000])
    )
    finished.finish(steps_max=200_000)
    assert_clean(finished)
