"""DeepSeek-V4 with two tensor-parallel ranks in two stages: the engine's control plane and pools, toy arithmetic."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.regenerate import DSV4
from tests.sglang.server import Server, eventually
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOLS = ("swa_kv", "c4_kv", "c4_indexer", "c128_kv", "c4_state", "c4_indexer_state", "c128_state")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    # A late stage refuses once: all ranks see the same miss.
    started = DSV4.start(folder, elastic(faults="rank=3,op=create,nth=30,count=1"))
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_every_pool_is_elastic_on_every_rank(server: Server) -> None:
    log = server.log.read_text()
    assert [
        (rank, pool) for rank in range(4) for pool in POOLS if f"rank={rank} name={pool} elastic=yes" not in log
    ] == []


def test_tokens_are_those_of_the_native_pools_while_all_domains_grow(server: Server) -> None:
    before = server.published()
    found = DSV4.ask(server.generate, server.flush)
    expected = DSV4.reference
    assert {name for name in expected if expected[name] != found[name]} == set()
    after = server.published()
    assert all(after[0][name] > before[0][name] for name in ("full", "swa"))
    assert server.grows() >= 3
    assert server.counter("refused") >= 1


def test_a_stage_without_layers_of_a_ratio_agrees_with_zero_bytes(server: Server) -> None:
    first, *_, last = server.states()
    assert first["pools"]["c128_kv"]["mapped_bytes"] == first["pools"]["c128_state"]["mapped_bytes"] == 0
    assert last["pools"]["c128_kv"]["mapped_bytes"] > 0


def test_idle_gives_pages_and_rows_back_and_keeps_null_pages_and_sentinels(server: Server) -> None:
    full = server.mapped_bytes()
    server.flush()
    # The reserve of two, and the null block.
    eventually(lambda: all(count <= 3 for state in server.published() for count in state.values()), server.published)
    # A retired run is out of the lists at once and out of memory a little later.
    eventually(
        lambda: all(0 < less < more for less, more in zip(server.mapped_bytes(), full, strict=True)), server.published
    )  # fmt: skip
    assert server.counter("reclaimed_runs") >= 3
    assert len({tuple(sorted(state.items())) for state in server.published()}) == 1


def test_the_first_request_after_it_reads_fresh_state(server: Server) -> None:
    assert DSV4.reference["cold"] == DSV4.reference["flushed"]
    found = DSV4.ask(server.generate, server.flush)
    assert found["cold"] == DSV4.reference["cold"]
    assert [state["failure"] for state in server.states()] == [None] * 4
