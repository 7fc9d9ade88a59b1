"""W, from the requests in hand."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.sglang import engine
from kvcached_dist.sglang.needs import IDLE_AFTER_S, Needs
from kvcached_dist.sglang.waiting import LOOK


def request(prompt: int, produced: int = 0, cached: int = 0) -> Any:
    return SimpleNamespace(
        origin_input_ids=[0] * prompt, output_ids=[0] * produced, prefix_indices=[0] * cached, input_ids=None
    )


def pulled(prompt: int) -> Any:
    return SimpleNamespace(input_ids=[0] * prompt)


def batch(requests: int) -> Any:
    return SimpleNamespace(reqs=[None] * requests)


def scheduler(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "page_size": 16, "chunked_prefill_size": 256, "max_prefill_tokens": 1024, "max_running_requests": 8,
        "waiting_queue": [], "chunked_req": None, "running_batch": batch(0), "last_batch": None,
        "is_fully_idle": lambda: True,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    schedule = SimpleNamespace(scheduler_recv_interval=1, speculative_algorithm=None)
    monkeypatch.setattr(engine, "context", lambda _name: schedule)
    return schedule


def pages(given: Any, *received: Any) -> int:
    return Needs(given).pages_and_rows(received)[0]


def test_nothing_in_hand_needs_nothing() -> None:
    assert Needs(scheduler()).pages_and_rows(()) == (0, 0)


def test_a_prompt_needs_its_pages_and_what_the_engine_asks_for_on_top() -> None:
    # 100 tokens are 7 pages; the engine rounds up and asks for a page more; one page so that something is left.
    assert pages(scheduler(), pulled(100)) == 7 + 2 + 1
    assert pages(scheduler(waiting_queue=[request(100)])) == 7 + 2 + 1
    assert pages(scheduler(waiting_queue=[request(90, produced=10)])) == 7 + 2 + 1


def test_prompts_count_up_to_the_chunk() -> None:
    assert pages(scheduler(), pulled(10_000)) == 16 + 2 + 1
    assert pages(scheduler(waiting_queue=[request(200)] * 5)) == 16 + 2 * 5 + 1


def test_prompts_in_hand_are_known_beyond_the_chunk() -> None:
    given = scheduler(waiting_queue=[request(200)] * 5)
    needs = Needs(given)
    needs.pages_and_rows([pulled(100)])
    assert needs.coming_pages == -(-1100 // 16) + 6
    given.waiting_queue.clear()
    needs.pages_and_rows(())
    assert needs.coming_pages == 0


def test_without_chunks_the_longest_prompt_counts_whole() -> None:
    whole = scheduler(chunked_prefill_size=-1)
    assert pages(whole, pulled(4096)) == 256 + 2 + 1
    assert pages(whole, *[pulled(512)] * 6) == 64 + 2 * 6 + 1


def test_a_parked_chunk_counts_with_what_is_left_of_it() -> None:
    assert pages(scheduler(chunked_req=request(300, cached=256))) == 3 + 2 + 1


def test_every_running_request_may_need_a_page_in_every_micro_batch() -> None:
    both = batch(3)
    running = scheduler(running_batch=both, running_mbs=[both, batch(2)], last_mbs=[None, None], mbs=[None, batch(1)])
    assert pages(running) == 6 + 1


def test_drafts_count_as_long_as_they_are_now(interval: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptive drafts grow and shrink while the engine serves."""
    longest = [2]
    monkeypatch.setattr(engine, "pages_per_decode", lambda _page: longest[0])
    interval.speculative_algorithm = "EAGLE"
    needs = Needs(scheduler(running_batch=batch(3)))
    longest[0] = 4
    assert needs.pages_and_rows(())[0] == 3 * 4 + 1
    assert needs.running_pages() == 3 * 4


@pytest.mark.parametrize("seed", range(200))
def test_a_step_that_only_decodes_needs_what_a_whole_look_would_say(seed: int) -> None:
    """Whatever else is going on, the short look leaves it to the whole one."""
    choose = random.Random(seed)

    def sometimes(value: Any, other: Any) -> Any:
        return value if choose.random() < 0.15 else other

    given = scheduler(
        running_batch=batch(choose.randint(0, 2)),
        last_batch=sometimes(batch(choose.randint(1, 3)), None),
        waiting_queue=sometimes([request(100)], []),
        chunked_req=sometimes(request(300, cached=256), None),
        grammar_manager=SimpleNamespace(grammar_queue=sometimes([request(50)], [])),
        **sometimes({"running_mbs": [batch(2)]}, {}),
    )
    needs = Needs(given)
    received = sometimes([pulled(40)], [])
    needs.pages_and_rows(())
    if choose.random() < 0.15:
        needs.queued(SimpleNamespace(**vars(request(10)), beam_group=SimpleNamespace(beam_width=2)))
        needs.pages_and_rows(())
    quiet = needs.decoding(received)
    others = given.waiting_queue or given.chunked_req or given.grammar_manager.grammar_queue or received
    whole, rows = needs.pages_and_rows(received)
    assert not quiet or (quiet, 0) == (whole, rows)
    assert bool(quiet) == (not others and whole > 0 and not hasattr(given, "running_mbs") and needs._widest == 1)


def test_a_step_that_only_decodes_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    given = scheduler()
    needs = Needs(given)
    assert not needs.idle(())
    given.running_batch = batch(1)
    assert needs.decoding(())
    given.running_batch = batch(0)
    now[0] += 2 * IDLE_AFTER_S
    assert not needs.idle(())


def test_every_beam_has_a_row_and_takes_blocks_of_its_own() -> None:
    beams = request(100)
    beams.beam_group = SimpleNamespace(beam_width=4)
    given = scheduler(waiting_queue=[])
    needs = Needs(given)
    given.waiting_queue.append(beams)
    needs.queued(beams)
    assert needs.pages_and_rows(()) == (7 + 2 + 1, 4)
    given.waiting_queue.clear()
    given.running_batch = SimpleNamespace(reqs=[beams, request(10)])
    found, rows = needs.pages_and_rows(())
    assert found == 4 + 1 + 1
    assert rows >= 3, "its further beams get their rows when its prefill is done"
    assert needs.running_pages() == 5


def test_rows_are_bounded_by_what_may_run() -> None:
    assert Needs(scheduler(waiting_queue=[request(1)] * 50)).pages_and_rows(())[1] == 9


def test_skipped_broadcasts_are_needed_ahead(interval: SimpleNamespace) -> None:
    interval.scheduler_recv_interval = 4
    assert pages(scheduler(running_batch=batch(3))) == 3 * 4 + 1


def test_a_pause_between_two_requests_is_not_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    given = scheduler()
    needs = Needs(given)
    assert not needs.idle(())
    now[0] += IDLE_AFTER_S
    assert needs.idle(())
    assert needs.idle([SimpleNamespace(rid="how are you")]), "a question about the engine's state is no work"
    assert not needs.idle([pulled(1)])
    now[0] += IDLE_AFTER_S / 2
    assert not needs.idle(())


# ---------------------------------------------------------------------- long queues


def naive(given: Any, *received: Any) -> int:
    """W in pages with a walk through all that waits, in whatever order it will be."""
    lengths = [len(item.input_ids) for item in received]
    lengths += [len(item.origin_input_ids) + len(item.output_ids) for item in given.waiting_queue]
    chunk = given.chunked_prefill_size
    tokens = min(sum(lengths), chunk if chunk > 0 else max(given.max_prefill_tokens, *lengths, 0))
    admitted = min(len(lengths), given.max_running_requests + 1)
    return -(-tokens // given.page_size) + 2 * admitted + 1 if tokens else 0


@pytest.mark.parametrize("chunk", [4096, 1 << 30, -1])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_queue_never_needs_less_than_a_walk_through_it_would_say(chunk: int, seed: int) -> None:
    chance = random.Random(seed)
    given = scheduler(chunked_prefill_size=chunk, waiting_queue=[], max_prefill_tokens=64)
    needs = Needs(given)
    for step in range(250):
        queue = given.waiting_queue
        # What the engine does between two looks: admit, abort, sort; and queue what came or was retracted.
        for _ in range(chance.choice((0, 0, 1, 3, 9, 40)) if step < 150 else 0):
            length = chance.choice((1, 5, 30, *[chance.randrange(100, 9000)] * (chance.random() < 0.1)))
            queue.append(request(length, produced=chance.choice((0, 0, 50))))
            needs.queued(queue[-1])
        if step % 3 == 0:
            chance.shuffle(queue)
        leaving = set(chance.sample(range(len(queue)), min(len(queue), chance.choice((0, 0, 0, 0, 1, 9)))))
        given.waiting_queue = [item for place, item in enumerate(queue) if place not in leaving]
        received = [pulled(chance.choice((1, 700))) for _ in range(chance.choice((0, 0, 2)))]
        assert needs.pages_and_rows(received)[0] >= naive(given, *received)


def test_what_has_left_a_long_queue_is_found_in_a_round() -> None:
    long, short = [request(5000)], [request(1) for _ in range(100)]
    given = scheduler(chunked_prefill_size=-1, waiting_queue=[*long, *short])
    needs = Needs(given)
    assert needs.pages_and_rows(())[0] == naive(given)
    given.waiting_queue = short
    high = naive(scheduler(chunked_prefill_size=-1, waiting_queue=[*long, *short]))
    seen = [needs.pages_and_rows(())[0] for _ in range(2 * -(-101 // LOOK))]
    assert seen[0] == high
    assert seen[-1] == naive(given) < high


@pytest.mark.parametrize("chunk", [256, -1])
def test_a_step_looks_at_a_bounded_number_of_requests(chunk: int) -> None:
    looked: list[int] = []

    class Counted(SimpleNamespace):
        @property
        def origin_input_ids(self) -> list[int]:
            looked.append(1)
            return [0]

    given = scheduler(chunked_prefill_size=chunk, waiting_queue=[Counted(output_ids=[]) for _ in range(1000)])
    needs = Needs(given)
    for _ in range(200):
        looked.clear()
        needs.pages_and_rows(())
        assert len(looked) <= LOOK


def test_many_prompts_whose_grammar_is_compiled_count_as_a_chunk() -> None:
    manager = SimpleNamespace(grammar_queue=[(request(1), None)] * (LOOK + 1))
    assert pages(scheduler(grammar_manager=manager)) == 16 + 2 * 9 + 1
    assert pages(scheduler(grammar_manager=manager, chunked_prefill_size=-1)) == 2 + 2 * 9 + 1


def test_every_request_of_a_received_batch_counts() -> None:
    assert Needs(scheduler()).pages_and_rows([SimpleNamespace(batch=[pulled(10)] * 5)]) == (4 + 2 * 5 + 1, 5)


# ---------------------------------------------------------------------- sliding windows


@pytest.mark.parametrize(("page", "window", "more"), [(1, 512, 511), (16, 512, 31), (16, 500, 31), (256, 128, 0)])
def test_a_window_is_wanted_for_each_request_that_could_be_admitted(page: int, window: int, more: int) -> None:
    given = scheduler(page_size=page, tree_cache=SimpleNamespace(sliding_window_size=window))
    assert Needs(given).window_pages(rows=5, places=8) == 5 * more
    assert Needs(given).window_pages(rows=5, places=1) == 2 * more
    given.enable_priority_preemption = True
    assert Needs(given).window_pages(rows=5, places=1) == 5 * more


@pytest.mark.parametrize("window", [None, 0])
def test_without_windows_nothing_more_is_wanted(window: int | None) -> None:
    assert Needs(scheduler(tree_cache=SimpleNamespace(sliding_window_size=window))).window_pages(5, 8) == 0
