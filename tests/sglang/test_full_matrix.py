"""Every way of serving the tiny models, natively and elastically in turn: ``./scripts/test_sglang --full``."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.sglang import cases
from tests.sglang.matrix import DSV4_ROWS, RETRACTIONS, ROWS
from tests.sglang.regenerate import Served
from tests.sglang.server import Server
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

Note = Callable[[str, object], None]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own: snapshots need a file system that can make unnamed files.
    path = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def eventually(reached: Callable[[], bool], server: Server, wait_s: float = 60.0) -> None:
    deadline = time.monotonic() + wait_s
    while not reached():
        assert time.monotonic() < deadline, server.states()
        time.sleep(0.1)


def native_tokens(served: Served, folder: Path) -> Mapping[str, list[int]]:
    server = served.start(folder, {})
    try:
        tokens = served.ask(server.generate, server.flush)
        retracted = "#retracted_reqs" in server.log.read_text()
    finally:
        server.stop()
    assert retracted == (served.settings.items() >= RETRACTIONS.items())
    return tokens


def published(server: Server) -> list[dict[str, int]]:
    return [{name: domain["published"] for name, domain in state["domains"].items()} for state in server.states()]


def serve_elastically(served: Served, folder: Path, expected: Mapping[str, list[int]], note: Note) -> None:
    ranks = served.tp * served.pp
    # The last rank refuses twice while the first prompts are served: all ranks see the same miss. Before that it makes
    # extents of the null pages, for more pools of DeepSeek-V4 than of Llama.
    nth = 9 if served.ask is cases.llama else 30
    server = served.start(folder, elastic(faults=f"rank={ranks - 1},op=create,nth={nth},count=2"))
    try:
        start, first = server.mapped_bytes(), published(server)
        found = served.ask(server.generate, server.flush)
        assert {name for name in expected if expected[name] != found[name]} == set()
        log = server.log.read_text()
        assert ("#retracted_reqs" in log) == (served.settings.items() >= RETRACTIONS.items())
        assert "elastic=no" not in log
        grown = server.mapped_bytes()
        assert all(more > less for more, less in zip(grown, start, strict=True))
        assert server.grows() >= 3
        assert server.counter("refused") >= 1
        server.flush()
        eventually(lambda: all(more > less for more, less in zip(grown, server.mapped_bytes(), strict=True)), server)
        eventually(lambda: server.counter("reclaimed_runs") >= 2, server)
        eventually(lambda: len({tuple(sorted(state.items())) for state in published(server)}) == 1, server)
        assert (
            server.generate(*(cases.LLAMA_COLD if served.ask is cases.llama else cases.DSV4_COLD)) == expected["cold"]
        )
        assert [state["failure"] for state in server.states()] == [None] * ranks
        assert set(published(server)[0]) == set(first[0])
        note("grows", server.grows())
        note("refused", server.counter("refused"))
        note("reclaimed_runs", server.counter("reclaimed_runs"))
        note("mapped_bytes_start", start)
        note("mapped_bytes_grown", grown)
        if "c128_state" in (last := server.states()[-1]["pools"]):
            note("c128_state_virtual_bytes", last["c128_state"]["virtual_bytes"])
        note("retractions", log.count("#retracted_reqs"))
    finally:
        server.stop()


@pytest.mark.parametrize("served", [row.served() for row in ROWS], ids=lambda served: served.name)
def test_llama(served: Served, folder: Path, record_property: Note) -> None:
    serve_elastically(served, folder, native_tokens(served, folder), record_property)


@pytest.mark.parametrize("served", DSV4_ROWS, ids=lambda served: served.name)
def test_deepseek_v4(served: Served, folder: Path, record_property: Note) -> None:
    serve_elastically(served, folder, native_tokens(served, folder), record_property)
