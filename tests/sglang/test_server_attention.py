"""The real server: MLA and speculative decoding at two ranks, a window hybrid at two ranks in two stages.

Pages of 64 and of 16 tokens, chunked prefill. The tests run in the order in which they stand.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import cases
from tests.sglang.models_attention import WINDOW
from tests.sglang.regenerate import MLA, SPECULATION, SWA, Served
from tests.sglang.server import Server, eventually
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

POOLS = {
    MLA.name: {"mla_kv": "full"},
    SWA.name: {"mha_kv": "full", "swa_kv": "swa"},
    SPECULATION.name: {"mha_kv": "full", "draft_kv": "full"},
}


@pytest.fixture(scope="module", params=[MLA, SWA, SPECULATION], ids=lambda served: str(served.name))
def served(request: Any) -> Served:
    found: Served = request.param
    return found


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    # The last rank refuses once while the first prompt is served: all ranks see the same miss.
    settings = elastic(faults=f"rank={served.tp * served.pp - 1},op=create,nth=12,count=1")
    if served is SWA:
        # Nothing is kept ready: what a request finds was grown for it.
        settings |= {"KVCACHED_MIN_RESERVED_PAGES": "0", "KVCACHED_MAX_RESERVED_PAGES": "0"}
    started = served.start(folder, settings)
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_every_pool_is_elastic_on_every_rank(served: Served, server: Server) -> None:
    log = server.log.read_text()
    ranks = range(served.tp * served.pp)
    wanted = [
        f"event=pool rank={rank} name={name} elastic=yes domain={domain}"
        for rank in ranks
        for name, domain in POOLS[served.name].items()
    ]
    assert [line for line in wanted if line not in log] == []
    assert [state["runtime_pools"] for state in server.states()] == [{} for _ in ranks]


def test_tokens_are_those_of_the_native_pools_while_all_domains_grow(served: Served, server: Server) -> None:
    before = server.published()
    found = served.ask(server.generate, server.flush)
    expected = served.reference
    assert {name for name in expected if expected[name] != found[name]} == set()
    after = server.published()
    assert all(after[0][name] > before[0][name] for name in POOLS[served.name].values())
    assert server.grows() >= 4
    assert server.counter("refused") >= 1
    if served is SPECULATION:
        # A wrong draft costs time and no tokens. The model drafts for itself: natively 28 of 31 are right.
        assert server.drafts_accepted(cases.PROMPT[:300]) > 0.8


def test_a_lone_short_prompt_with_a_long_output_is_served(served: Served, server: Server) -> None:
    server.flush()
    # The engine wants more than a window and a page for such a request; the published null block is not free.
    page = 16
    eventually(
        lambda: all((state.get("swa", 0) - 1) * page <= WINDOW + page for state in server.published()), server.published
    )
    assert len(server.generate(cases.PROMPT[:10], 4 * WINDOW)) == 4 * WINDOW


def test_memory_comes_back_and_the_next_request_reads_fresh_pages(served: Served, server: Server) -> None:
    full = server.mapped_bytes()
    server.flush()
    # A retired run is out of the lists at once and out of memory a little later.
    eventually(
        lambda: all(less < more // 2 for less, more in zip(server.mapped_bytes(), full, strict=True)), server.published
    )  # fmt: skip
    assert server.counter("reclaimed_runs") >= 2
    eventually(lambda: len({tuple(sorted(state.items())) for state in server.published()}) == 1, server.published)
    assert server.generate(*cases.LLAMA_COLD) == served.reference["cold"]
    assert [state["failure"] for state in server.states()] == [None] * (served.tp * served.pp)
    if "swa" in POOLS[served.name].values():
        # 900 tokens with a window of 64, in chunks: what lies behind the window is freed while the request runs.
        server.flush()
        eventually(
            lambda: all(count <= 64 for state in server.published() for count in state.values()), server.published
        )
        server.generate(cases.PROMPT[:900], 100)
        # Free pages in between stay where their run is in use.
        eventually(lambda: in_use(server, "swa") < in_use(server, "full") // 2, server.states)


def in_use(server: Server, domain: str) -> int:
    """Blocks of rank 0 that requests or cached prefixes hold."""
    state = server.states()[0]["domains"][domain]
    return int(state["published"] - state["free"])
