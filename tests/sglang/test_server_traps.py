"""Traps that need the real engine: two servers, each with many disturbances, watched from inside and outside.

The tests of a server run in the order in which they stand.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.sglang.cases import PROMPT
from tests.sglang.server import eventually
from tests.sglang.trapped import Trapped, trapped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOLD_S = 8
"""Longer than a growth deadline and two queries, as a kernel that is built in-process; well within the lease."""


SLOW_S = 1.8
"""For an unmap: longer than a request needs until it finds nothing, and shorter than the deadline of an answer."""


@pytest.fixture(scope="module")
def skipping() -> Iterator[Trapped]:
    """Two tensor-parallel ranks, pages of one token; three of four broadcasts are skipped."""
    with trapped(tp=2, pp=1, options=("--chunked-prefill-size", "64", "--scheduler-recv-interval", "4")) as started:
        yield started


@pytest.fixture(scope="module")
def staged() -> Iterator[Trapped]:
    """Three pipeline stages with up to two batches more in flight, pages of 16 tokens, no prefix cache."""
    options = ("--page-size", "16", "--chunked-prefill-size", "64", "--pp-async-batch-depth", "2")
    with trapped(tp=1, pp=3, options=(*options, "--disable-radix-cache")) as started:
        yield started


def answer(trap: Trapped, prompt: list[int], tokens: int) -> Mapping[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    found: Mapping[str, Any] = trap.server.post("/generate", body)
    return found


def well(trap: Trapped) -> bool:
    """Nobody has failed, and all ranks have applied the same log."""
    entries = trap.entries()
    shortest = min(map(len, entries))
    assert len({tuple(rank[:shortest]) for rank in entries}) == 1
    return {state["failure"] for state in trap.server.states()} == {None}


# ---------------------------------------------------------------------- marks, cache, flush, requests of operators


def test_the_prefix_cache_is_never_evicted_while_memory_can_grow(skipping: Trapped) -> None:
    trap = skipping
    prompts = [PROMPT[start : start + 250] for start in range(0, 600, 60)]
    with ThreadPoolExecutor(5) as pool:
        first = list(pool.map(lambda prompt: trap.server.generate(prompt, 6), prompts))
    for prompt, expected in zip(prompts, first, strict=True):
        again = answer(trap, prompt, 6)
        assert again["output_ids"] == expected
        assert again["meta_info"]["cached_tokens"] == 249
    assert trap.events("evict") == []
    assert trap.server.grows() >= 4
    # Nothing would have been counted if nobody had looked: what does not fit beside the cache takes its place.
    for shift in (1, 2):
        trap.server.generate([token + shift for token in PROMPT[:900]], 4)
    assert trap.events("evict")
    assert well(trap)


def test_marks_that_skip_broadcasts_reach_every_rank_once_and_in_order(skipping: Trapped) -> None:
    # Marks go on at idle, so the last ones may be on their way.
    eventually(lambda: len({tuple(rank) for rank in skipping.entries()}) == 1, skipping.entries)
    leader, _ = skipping.entries()
    assert sum(name == "Publish" for name, _ in leader) >= 4
    assert well(skipping)


def test_a_flush_while_an_unmap_is_pending(skipping: Trapped) -> None:
    trap = skipping
    expected = trap.server.generate(PROMPT[:400], 8)
    begin = time.monotonic()

    def since(kind: str) -> int:
        return sum(event.at > begin for event in trap.events(kind))

    with trap.switched("slow_unmap"):
        trap.server.flush()
        eventually(lambda: since("UNMAP") >= 2, trap.server.states)
        trap.server.flush()
        assert since("RELEASE") == 0, "the unmap was over before the flush"
        assert trap.server.generate(PROMPT[:400], 8) == expected
        trap.server.flush()
        assert trap.server.generate(PROMPT[:400], 8) == expected
    eventually(lambda: since("RELEASE") >= 2, trap.server.states)
    assert well(trap)


def test_a_request_that_runs_is_not_ended_for_an_unmap_that_is_pending(skipping: Trapped) -> None:
    trap = skipping

    def full() -> Mapping[str, int]:
        found: Mapping[str, int] = trap.server.states()[0]["domains"]["full"]
        return found

    trap.server.generate(PROMPT[:800], 4)
    unmaps = len(trap.events("UNMAP"))
    with trap.switched("slow_unmap", SLOW_S):
        trap.server.flush()
        eventually(lambda: len(trap.events("UNMAP")) >= unmaps + 2, trap.server.states)
        eventually(lambda: full()["published"] <= 4 * full()["blocks_per_page"], trap.server.states)
        # Admitted into the reserve, it needs more long before the follower has unmapped.
        prompt = PROMPT[: full()["free"] - 20]
        found = trap.server.generate(prompt, 60)
    assert found == trap.server.generate(prompt, 60)
    begun = trap.events("UNMAP")[unmaps].at
    assert any(begun < event.at < begun + SLOW_S for event in trap.events("batch")), "it came when all was over"
    assert well(trap)


@pytest.mark.parametrize("what", ["release", "resume"])
def test_the_memory_saver_is_refused_with_a_reason_and_the_server_lives_on(what: str, skipping: Trapped) -> None:
    trap = skipping
    with pytest.raises(urllib.error.HTTPError) as refused:
        trap.server.post(f"/{what}_memory_occupation", {"tags": ["kv_cache"]})
    assert refused.value.code == 400
    said = json.loads(refused.value.read())["error"]["message"]
    assert said.startswith(f"{what}_memory_occupation is not supported with elastic KV pools: ")
    assert len(trap.server.generate(PROMPT[:100], 8)) == 8
    assert well(trap)


def test_nobody_dies_while_a_follower_holds_its_interpreter(skipping: Trapped) -> None:
    trap = skipping
    expected = trap.server.generate(PROMPT[300:700], 8)
    trap.shrink()
    before = trap.server.grows()
    trap.order("hold", str(HOLD_S))
    asked = time.monotonic()
    assert trap.server.generate(PROMPT[300:700], 8) == expected
    assert time.monotonic() - asked >= HOLD_S - 1
    (hold,), (held,) = trap.events("hold"), trap.events("held")
    assert held.at - hold.at >= HOLD_S - 0.1
    assert trap.server.generate(PROMPT[100:900], 8) == answer(trap, PROMPT[100:900], 8)["output_ids"]
    assert trap.server.grows() > before
    assert well(trap)


# ---------------------------------------------------------------------- a chunk that finds nothing


def parked_chunk(trap: Trapped) -> None:
    prompt = [*PROMPT, *PROMPT[:100]]
    expected = trap.server.generate(prompt, 8)
    trap.shrink()
    grown, parked = trap.server.grows(), trap.server.told()["parked_chunks"]
    with ThreadPoolExecutor(2) as pool:
        with trap.switched("slow"):
            started = len(trap.events("batch"))
            asked: Future[list[int]] = pool.submit(trap.server.generate, prompt, 8)
            eventually(lambda: len(trap.events("batch")) >= started + 2, trap.server.states)
            with trap.neighbour(leaves_bytes=3 * 8192):
                eventually(lambda: trap.server.told()["parked_chunks"] >= parked + 3, trap.server.states, 30.0)
                short: Future[list[int]] = pool.submit(trap.server.generate, PROMPT[5:40], 4)
                time.sleep(0.5)
                assert not asked.done()
                assert not short.done(), "a request has overtaken the parked one"
        assert asked.result(timeout=60) == expected
        assert len(short.result(timeout=60)) == 4
    assert trap.server.grows() > grown
    assert well(trap)


def test_a_chunk_that_finds_nothing_is_parked_with_pages_of_1(skipping: Trapped) -> None:
    parked_chunk(skipping)


def test_a_chunk_that_finds_nothing_is_parked_with_pages_of_16(staged: Trapped) -> None:
    parked_chunk(staged)


# ---------------------------------------------------------------------- a late stage


LATE_STEPS = 3
"""Batches that stage 0 runs ahead of the last of three stages: it needs the answer of the fourth before it goes on."""

LATE_ROUNDS = 8
"""Most rounds until a retirement falls into the moment when the stages are that far apart."""


def test_nothing_is_unmapped_before_a_late_stage_has_left_it(staged: Trapped) -> None:
    trap = staged
    prompts = [PROMPT[start : start + 60] for start in range(0, 80, 20)]
    expected = [trap.server.generate(prompt, 40) for prompt in prompts]
    long = trap.server.generate(PROMPT[:880], 4)
    with trap.switched("late"), ThreadPoolExecutor(len(prompts) + 2) as pool:
        asked = [pool.submit(trap.server.generate, prompt, 40) for prompt in prompts]
        leaving = [pool.submit(leave, trap) for _ in range(2)]
        assert trap.server.generate(PROMPT[:880], 4) == long
        assert [request.result(timeout=60) for request in asked] == expected
        for client in leaving:
            client.result(timeout=60)
        for turn in range(LATE_ROUNDS):
            if turn >= 3 and late_steps(trap) >= LATE_STEPS:
                break
            # They keep the engine busy, so that what the first prompt has used stays published for the second. Under
            # the limit one of them may be alone in a batch that finds nothing: the engine aborts it; a chunk waits.
            others = [pool.submit(keep_busy, trap, prompt) for prompt in prompts]
            assert trap.server.generate(PROMPT[:880], 4) == long
            chunks = pool.submit(trap.server.generate, PROMPT[:880], 4)
            give_back(trap)
            assert chunks.result(timeout=60) == long
            for other in others:
                other.result(timeout=60)
    assert late_steps(trap) >= LATE_STEPS
    assert well(trap)
    check_order(trap)


def leave(trap: Trapped) -> None:
    """A client that goes away; its batch does not."""
    with contextlib.suppress(OSError):
        trap.server.generate(PROMPT[:300], 300, timeout_s=0.3)


def keep_busy(trap: Trapped, prompt: list[int]) -> None:
    """A request of which nothing is expected."""
    with contextlib.suppress(urllib.error.HTTPError):
        trap.server.generate(prompt, 40)


def give_back(trap: Trapped) -> None:
    """What is free goes while chunks of a prompt follow one another through the stages: less may be held than is."""
    retired, started = len(trap.events("Retire")), len(trap.events("batch"))
    eventually(lambda: len(trap.events("batch")) >= started + 9, trap.server.states)
    trap.limit(max(trap.server.mapped_bytes()) // 2)
    eventually(lambda: len(trap.events("Retire")) > retired, trap.server.states)
    trap.limit(0)


def check_order(trap: Trapped) -> None:
    """No rank unmaps the runs of a retirement before every rank has applied it."""
    eventually(lambda: len(trap.events("RELEASE")) >= 4, trap.server.states)
    applied: dict[int, list[float]] = {}
    for event in trap.events("Retire"):
        applied.setdefault(event.numbers[1], []).append(event.at)
    unmapped = trap.events("UNMAP")
    assert len(unmapped) >= 4
    ranks = len(trap.server.states())
    for event in unmapped:
        times = applied[event.numbers[0]]
        assert len(times) == ranks, f"txn {event.numbers[0]}: only {len(times)} of {ranks} ranks had retired it"
        assert event.at >= max(times)


def late_steps(trap: Trapped) -> int:
    """Most batches by which the last stage was behind the first when the first retired something."""
    last = len(trap.server.states()) - 1
    behind, most = 0, 0
    for event in trap.events("batch", "Retire"):
        if event.what == "batch":
            behind += {0: 1, last: -1}.get(event.numbers[0], 0)
        elif event.numbers[0] == 0:
            most = max(most, behind)
    return most
