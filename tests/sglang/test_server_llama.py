"""The real server with two tensor-parallel ranks: many cases on one server, the last one kills a rank.

The tests run in the order in which they stand. Each says from outside, through the snapshots, that memory really grew
and really came back.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcached_dist import _native
from tests.sglang import cases
from tests.sglang.regenerate import LLAMA
from tests.sglang.server import Server, eventually
from tests.sglang.settings import CARD_CAPACITY, CARD_KEPT_FREE, GRANULE, card_file, on_one_card

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

CACHE_BUDGET = 500
"""Tokens that the prefix cache may keep at idle."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not pytest's own: snapshots need a file system that can make unnamed files.
    path = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # While the first prompts are served a create is refused, and later a rank stands still for longer than the
    # growth deadline: requests wait, nobody dies.
    faults = "rank=1,op=create,nth=9,count=2;rank=1,op=hang,at=reserved,seconds=4,nth=4"
    settings = {
        **on_one_card(folder, faults=faults),
        "KVCACHED_MAX_CACHED_TOKENS": str(CACHE_BUDGET),
        "KVCACHED_DIST_GROWTH_DEADLINE_S": "1",
    }
    started = LLAMA.start(folder, settings)
    yield started
    started.stop()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def idle_bytes(server: Server) -> list[int]:
    """Mapped bytes once everything that can go has gone."""
    server.flush()
    eventually(lambda: server.states()[0]["domains"]["full"]["published"] <= 3 * 128, server.states)
    # A retired run is out of the lists at once and out of memory a little later; snapshots follow every beat.
    found: list[list[int]] = []

    def settled() -> bool:
        found.append(server.mapped_bytes())
        time.sleep(0.3)
        return found[-4:].count(found[-1]) == 4

    eventually(settled, server.states)
    return found[-1]


def test_every_pool_says_that_it_is_elastic(server: Server) -> None:
    log = server.log.read_text()
    for rank in (0, 1):
        assert f"event=pool rank={rank} name=mha_kv elastic=yes domain=full layers=2" in log


def test_tokens_are_those_of_the_native_pools_and_neither_a_refusal_nor_a_hang_kills_anybody(server: Server) -> None:
    before = server.mapped_bytes()
    expected = LLAMA.reference
    found = LLAMA.ask(server.generate, server.flush)
    assert {name for name in expected if expected[name] != found[name]} == set()
    assert server.grows() >= 4
    assert server.counter("refused") >= 1
    assert server.counter("queries") >= 1, "nobody stood still"
    assert all(grown > start for grown, start in zip(server.mapped_bytes(), before, strict=True))


def test_memory_comes_back_when_the_cache_is_flushed(server: Server) -> None:
    full = server.mapped_bytes()
    small = idle_bytes(server)
    assert all(less < more for less, more in zip(small, full, strict=True))
    assert server.counter("reclaimed_runs") >= 2
    assert server.generate(cases.PROMPT[:600], 12) == LLAMA.reference["cold"]


def test_the_prefix_cache_is_used_memory_while_memory_can_grow(server: Server) -> None:
    server.flush()
    for start in range(0, 800, 200):
        server.generate(cases.PROMPT[start : start + 100], 4)
    again = server.post(
        "/generate",
        {"input_ids": cases.PROMPT[:100], "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
    )
    assert again["meta_info"]["cached_tokens"] == 99


def evicted(server: Server) -> int:
    """Tokens that the log has evicted, as the scheduler itself says."""
    return int(server.told()["evicted_tokens"])


def test_the_prefix_cache_is_not_evicted_while_busy_and_goes_down_to_its_budget_at_idle(server: Server) -> None:
    server.flush()
    before = evicted(server)
    prompts = [cases.PROMPT[k : k + 300] for k in range(0, 600, 75)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, 12), prompts))
        held = server.mapped_bytes()
        busy = evicted(server) - before
        again = server.post(
            "/generate", {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        )
    assert busy == 0
    assert again["meta_info"]["cached_tokens"] == 299
    eventually(lambda: evicted(server) - before >= 8 * 300 - CACHE_BUDGET, server.states)
    eventually(
        lambda: all(less < more for less, more in zip(server.mapped_bytes(), held, strict=True)), server.states
    )  # fmt: skip


def test_what_the_cache_keeps_is_moved_together_and_memory_goes_down_to_its_budget(server: Server) -> None:
    server.flush()
    moved, prompts = int(server.told()["compacted_tokens"]), [cases.PROMPT[k : k + 100] for k in range(0, 800, 30)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, 4), prompts))
    # The last ones to be asked for are kept: one here, one there.
    kept = prompts[2::7]
    answers = [answered(server, prompt) for prompt in kept]
    full = server.published()[0]["full"]
    eventually(lambda: int(server.told()["compacted_tokens"]) > moved, server.states)
    # Pages of 128 tokens: those of the null block and of 500 tokens, a reserve, and a run that is not quite full.
    eventually(lambda: all(rank["full"] <= 7 * 128 for rank in server.published()), server.states)
    assert full > 14 * 128
    tokens = server.states()[0]["domains"]["full"]
    assert tokens["published"] - tokens["free"] - 1 > CACHE_BUDGET - 150, "it was kept, not evicted"
    log = server.log.read_text()
    assert all(f"event=compacted rank={rank} tokens=" in log for rank in (0, 1))
    again = [answered(server, prompt) for prompt in kept]
    assert again == answers
    assert [cached for cached, *_ in again] == [99] * len(kept)


def answered(server: Server, prompt: list[int]) -> tuple[int, list[int], list[float]]:
    """Tokens of the prompt that were cached; greedy tokens and their log probabilities."""
    parameters = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
    answer = server.post("/generate", body)
    meta = answer["meta_info"]
    return meta["cached_tokens"], answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]]


def test_a_neighbour_on_the_card_comes_and_goes(server: Server, folder: Path) -> None:
    idle_bytes(server)
    card = _native.HostDevice(CARD_CAPACITY, GRANULE, card_file=str(card_file(folder)))
    geometry = _native.PoolGeometry(
        name="hog", domain=0, pages=512, reservation_bytes=512 * GRANULE, lanes=[(0, GRANULE)], pinned=[], fill=[],
        fill_row_bytes=0,
    )  # fmt: skip
    hog = _native.Backing(card, [geometry])
    try:
        # What is left backs one page of 128 tokens on both ranks; each of them alone could still back two.
        taken = (card.free_bytes() - CARD_KEPT_FREE) // GRANULE - 10
        assert hog.reserve(1, [(0, 0, taken)]).ok
        eventually(lambda: server.states()[0]["domains"]["full"]["growable"] <= 256, server.states)
        with ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(server.generate, cases.PROMPT[k : k + 800], 12) for k in (0, 50, 100)]
            try:
                eventually(lambda: server.states()[0]["domains"]["full"]["growable"] == 0, server.states)
                time.sleep(1.0)
                assert server.states()[0]["domains"]["full"]["growable"] == 0
                assert not any(answer.done() for answer in answers)
            finally:
                hog.abort(1)
            tokens = [answer.result() for answer in answers]
    finally:
        hog.close()
    assert [len(answer) for answer in tokens] == [12, 12, 12]
    assert server.generate(cases.PROMPT[:600], 12) == LLAMA.reference["cold"]
    assert [state["failure"] for state in server.states()] == [None, None]


def test_random_requests_with_aborts_and_disconnects_leave_nothing(server: Server) -> None:
    choose = random.Random(5)
    small = idle_bytes(server)

    def one(number: int) -> bool:
        start, length, tokens = choose.randrange(400), choose.randrange(5, 400), choose.randrange(1, 30)
        prompt = cases.PROMPT[start : start + length]
        try:
            if number % 5 == 0:
                server.generate(prompt, 200, timeout_s=0.05)  # the client goes away
            elif number % 7 == 0:
                server.post("/abort_request", {"abort_all": True})
            else:
                return len(server.generate(prompt, tokens)) == tokens
        except (OSError, KeyError):
            return False  # it was aborted, or its client had gone
        return False

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(one, range(60))) >= 5  # the others were aborted, or their clients went away
    assert idle_bytes(server) == small
    first, second = server.states()
    assert first["domains"] == second["domains"]


def test_a_prompt_beyond_the_context_is_an_error_and_the_queue_goes_on(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate([5] * 5000, 4)
    assert refused.value.code == 400
    assert len(server.generate(cases.PROMPT[:50], 4)) == 4


def test_a_killed_rank_ends_all_of_them_with_the_first_cause(server: Server) -> None:
    views: list[Any] = server.ranks()
    pids = {view.rank: view.owner.pid for view in views}
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: not alive(pids[0]), server.tail, 10.0)
    assert time.monotonic() - killed < 1.5
    log = server.log.read_text()
    assert "event=group_failed rank=0" in log
    assert "rank 1: rank lost" in log
