"""W, from the requests in hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_dist.sglang import engine
from kvcached_dist.sglang.needs import IDLE_AFTER_S, Needs


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
