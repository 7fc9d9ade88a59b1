"""DP attention with the real engine: two queues of requests, each with ids, memory and marks of its own."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang import cases
from tests.sglang.models_attention import OPTIONS, write_mla, write_qwen3
from tests.sglang.regenerate import CPU_ATTENTION, Served
from tests.sglang.server import Server, eventually
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

GROUPS = 2

DP_OPTIONS = (*OPTIONS, "--chunked-prefill-size", "512", "--dp", str(GROUPS), "--enable-dp-attention")
"""The engine gives each group its share of a chunk."""

STANDIN = {"DP_ATTENTION": "1"}

HEADS = (*DP_OPTIONS, "--page-size", "16")

ROWS = [
    *(Served(f"tp{tp}_dp{GROUPS}", write_qwen3, cases.llama, tp, 1, HEADS, STANDIN) for tp in (2, 4)),
    Served(
        f"mla-tp2_dp{GROUPS}", write_mla, cases.llama, 2, 1, (*DP_OPTIONS, "--page-size", "64"),
        STANDIN | CPU_ATTENTION,
    ),
]  # fmt: skip
"""Groups of one rank and of two."""

HELD = 4
"""Times in a row that bytes must be the same, 0.3 s apart: snapshots follow every beat, of 0.1 s here."""

Tokens = Mapping[str, Mapping[str, list[int]]]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def to_group(server: Server, group: int) -> cases.Generate:
    """Requests that the engine is told to give to one group; the other takes part with empty batches."""

    def generate(prompt: Sequence[int], tokens: int) -> list[int]:
        parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "routed_dp_rank": group}
        found: list[int] = server.post("/generate", body)["output_ids"]
        return found

    return generate


def settled_bytes(group: Server) -> list[int]:
    """Mapped bytes of a group that has nothing to do, once they no longer change."""
    found: list[list[int]] = []

    def settled() -> bool:
        found.append(group.mapped_bytes())
        time.sleep(0.3)
        return found[-HELD:].count(found[-1]) == HELD

    eventually(settled, group.states)
    return found[-1]


def native_tokens(served: Served, folder: Path) -> Tokens:
    server = served.start(folder, {})
    try:
        tokens = {str(group): served.ask(to_group(server, group), server.flush) for group in range(GROUPS)}
        return {**tokens, "both": served.ask(server.generate, server.flush)}
    finally:
        server.stop()


@pytest.mark.parametrize("served", ROWS, ids=lambda served: served.name)
def test_every_group_is_elastic_by_itself(
    served: Served, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    expected = native_tokens(served, folder)
    ranks = served.tp // GROUPS
    # Ranks are counted within a group, so each group meets the refusals, at its own last rank.
    server = served.start(folder, elastic(faults=f"rank={ranks - 1},op=create,nth=9,count=2"))
    try:
        groups = [replace(server, name=f"served-dp{number}") for number in range(GROUPS)]
        assert [len(group.states()) for group in groups] == [ranks] * GROUPS
        assert "elastic=no" not in server.log.read_text()
        server.flush()
        start, idle = [settled_bytes(group) for group in groups], [group.published() for group in groups]
        for number, group in enumerate(groups):
            other = groups[1 - number]
            grows, asked, untouched = group.grows(), other.counter("grow_foreground"), settled_bytes(other)
            assert served.ask(to_group(server, number), server.flush) == expected[str(number)]
            # Its prompts grow its own pools and no other's: marks reach the ranks of their group only.
            assert group.grows() >= grows + 3
            assert group.counter("refused") >= 1
            assert all(most > least for most, least in zip(group.mapped_bytes(), start[number], strict=True))
            assert other.mapped_bytes() == untouched
            assert other.counter("grow_foreground") == asked
            server.flush()
            eventually(lambda: [each.published() for each in groups] == idle, lambda: [*map(Server.states, groups)])
        assert served.ask(server.generate, server.flush) == expected["both"]
        grown = [group.mapped_bytes() for group in groups]
        server.flush()
        # Idle are as many ids as at the start, not the same ones: an id may lie on one more mapping unit than another.
        eventually(lambda: [each.published() for each in groups] == idle, lambda: [*map(Server.states, groups)])
        for group, most in zip(groups, grown, strict=True):
            assert all(less < more for less, more in zip(settled_bytes(group), most, strict=True))
            assert group.counter("reclaimed_runs") >= 2
            assert [state["failure"] for state in group.states()] == [None] * ranks
        for number in range(GROUPS):
            assert to_group(server, number)(*cases.LLAMA_COLD) == expected[str(number)]["cold"]
        record_property("grows", sum(group.grows() for group in groups))
        record_property("refused", sum(group.counter("refused") for group in groups))
        record_property("reclaimed_runs", sum(group.counter("reclaimed_runs") for group in groups))
        record_property("mapped_bytes_start", start)
        record_property("mapped_bytes_grown", grown)
    finally:
        server.stop()
