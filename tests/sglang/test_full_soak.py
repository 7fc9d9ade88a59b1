"""500 requests at random, with clients that go away and aborts, and memory is back where it began.

Three ways in which memory may come back: there is no prefix cache, it is flushed, or it has a budget.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang import cases
from tests.sglang.matrix import ROWS, dsv4
from tests.sglang.regenerate import Served
from tests.sglang.server import Server
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

REQUESTS = 500
PARALLEL = 6
HELD = 8
"""Looks, a quarter of a second apart."""

BUDGET_TOKENS = 256
"""Of the prefix cache; the engine's pages are single tokens there."""

ALONE = ("cold", "prefix_hit", "flushed")
"""Requests that are served alone: how they are cut into steps does not depend on what has become of the pools."""

LLAMA = next(row for row in ROWS if (row.tp, row.pp, row.page) == (2, 1, 1))
STAGES = next(row for row in ROWS if (row.tp, row.pp, row.page) == (2, 2, 16))

SOAKS: Mapping[str, tuple[Served, Mapping[str, str]]] = {
    "llama_no_radix": (STAGES.served(), {}),
    "llama_flushed": (LLAMA.served(), {}),
    "llama_budget": (replace(LLAMA, overlap=False).served(), {"KVCACHED_MAX_CACHED_TOKENS": str(BUDGET_TOKENS)}),
    "deepseek_v4_flushed": (dsv4(2, 1, online=False), {}),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def comes_to(server: Server, wanted: Callable[[], bool], wait_s: float = 90.0) -> None:
    """Waits until something holds, and has held for two seconds.

    Requests whose client has gone may still run for a while: memory that does not change is not yet idle memory.
    """
    deadline, held = time.monotonic() + wait_s, 0
    while held < HELD:
        held = held + 1 if wanted() else 0
        assert time.monotonic() < deadline, server.states()
        time.sleep(0.25)


def settled_bytes(server: Server) -> list[int]:
    """Mapped bytes of a server that has nothing to do, once they no longer change."""
    found = [server.mapped_bytes()]

    def same() -> bool:
        found.append(server.mapped_bytes())
        return found[-1] == found[-2]

    comes_to(server, same)
    return found[-1]


def ids(server: Server) -> list[dict[str, tuple[int, int]]]:
    """Published and free ids of every domain on every rank."""
    return [
        {name: (domain["published"], domain["free"]) for name, domain in state["domains"].items()}
        for state in server.states()
    ]


def tokens_in_use(server: Server) -> int:
    """Of the first rank, cached prefixes included, where a page is one token."""
    tokens = server.states()[0]["domains"]["full"]
    return int(tokens["published"]) - int(tokens["free"]) - 1


def soak(server: Server, longest: int) -> Counter[str]:
    """Random requests; how they ended."""
    choose = random.Random(11)
    plan = [(choose.randrange(400), choose.randrange(5, longest), choose.randrange(1, 30)) for _ in range(REQUESTS)]

    def one(number: int) -> str:
        start, length, tokens = plan[number]
        prompt = cases.PROMPT[start : start + length]
        try:
            if number % 5 == 1:
                server.generate(prompt, 200, timeout_s=0.05 + 0.01 * (number % 17))
                return "answered in spite of haste"
            if number % 23 == 2:
                server.post("/abort_request", {"abort_all": True})
                return "abort of all"
            return "answered" if len(server.generate(prompt, tokens)) == tokens else "aborted"
        except TimeoutError:
            return "client gone"
        except urllib.error.HTTPError:
            return "refused"

    with ThreadPoolExecutor(PARALLEL) as pool:
        return Counter(pool.map(one, range(REQUESTS)))


@pytest.mark.parametrize("name", SOAKS)
def test_500_requests_leave_nothing(name: str, folder: Path, record_property: Callable[[str, object], None]) -> None:
    served, settings = SOAKS[name]
    server = served.start(folder, {**elastic(), **settings})
    try:
        # What the first request leaves behind for good is there before.
        before = served.ask(server.generate, server.flush)
        server.flush()
        start, idle = settled_bytes(server), ids(server)
        peak, reclaimed = start, server.counter("reclaimed_runs")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(soak, server, 150 if served.ask is cases.dsv4 else 400)
            while not running.done():
                peak = [max(pair) for pair in zip(peak, server.mapped_bytes(), strict=True)]
                time.sleep(0.2)
            ends = running.result()
        assert sum(ends.values()) == REQUESTS
        assert ends["answered"] > REQUESTS // 2
        assert ends["client gone"] > 10
        if "budget" in name:
            comes_to(server, lambda: 0 < tokens_in_use(server) <= BUDGET_TOKENS)
            record_property("tokens_within_budget", tokens_in_use(server))
        if "no_radix" not in name:
            server.flush()
        comes_to(server, lambda: ids(server) == idle)
        # Strides of DeepSeek-V4 divide no granule: how many granules a page takes depends on which page was kept.
        borders = 0.05 if served.ask is cases.dsv4 else 0.0
        comes_to(
            server,
            lambda: all(abs(a - b) <= borders * b for a, b in zip(server.mapped_bytes(), start, strict=True)),
        )  # fmt: skip
        assert all(most > least for most, least in zip(peak, start, strict=True))
        assert server.counter("reclaimed_runs") > reclaimed
        states = server.states()
        assert [state["failure"] for state in states] == [None] * len(states)
        assert all(state["domains"] == states[0]["domains"] for state in states)
        after = served.ask(server.generate, server.flush)
        assert {name: after[name] for name in ALONE} == {name: before[name] for name in ALONE}
        record_property("ends", dict(ends))
        record_property("mapped_bytes_idle_and_peak", [start, peak])
        for counter in ("refused", "reclaimed_runs"):
            record_property(counter, server.counter(counter))
        record_property("grows", server.grows())
    finally:
        server.stop()
