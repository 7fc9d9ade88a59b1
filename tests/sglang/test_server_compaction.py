"""The real server with two tensor-parallel ranks, windows and drafts: what the cache keeps at idle is moved.

The tests run in the order in which they stand.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import cases
from tests.sglang.matrix import dsv4
from tests.sglang.regenerate import SPECULATION, SWA, Served
from tests.sglang.server import Server, eventually
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Load:
    """Prompts of which a few are kept.

    Attributes:
        served: the server.
        page: tokens of a block.
        tokens: of a prompt.
        prompts: how many.
        budget: tokens that the prefix cache may keep at idle.
        left: blocks of each domain that may be published then: the null block, what is kept, a reserve, and a run that
            is not quite full.
    """

    served: Served
    page: int
    tokens: int
    prompts: int
    budget: int
    left: dict[str, int]


LOADS = (
    Load(
        replace(dsv4(2, 1, online=False, drafts=True), name="dsv4_drafts"), 256, 270, 14, 4 * 256, {"full": 7, "swa": 7}
    ),
    Load(replace(SWA, name="windows", pp=1), 16, 100, 27, 500, {"full": 48, "swa": 40}),
    Load(replace(SPECULATION, name="drafts"), 16, 100, 27, 500, {"full": 48}),
)


@pytest.fixture(scope="module", params=LOADS, ids=lambda load: str(load.served.name))
def load(request: Any) -> Load:
    found: Load = request.param
    return found


@pytest.fixture(scope="module")
def server(load: Load) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    started = load.served.start(
        folder, elastic() | {"KVCACHED_MAX_CACHED_TOKENS": str(load.budget), "KVCACHED_DIST_RUN_PAGES_MAX": "4"}
    )
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_what_is_kept_of_full_attention_and_windows_is_moved_together(server: Server, load: Load) -> None:
    assert "possible=no" not in server.log.read_text()
    step = (len(cases.PROMPT) - load.tokens) // load.prompts
    prompts = [cases.PROMPT[k * step : k * step + load.tokens] for k in range(load.prompts)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, 4), prompts))
        full = server.published()[0]
        # The last ones to be asked for are kept: one here, one there.
        kept = prompts[2 :: load.prompts // 3]
        list(pool.map(lambda prompt: server.generate(prompt, 4), kept))
    answers = [answered(server, prompt) for prompt in kept]
    drafts = load.served.options == SPECULATION.options
    right = [server.drafts_accepted(prompt) for prompt in kept if drafts]
    assert [cached for cached, _ in answers] == [(load.tokens - 1) // load.page * load.page] * len(kept)
    eventually(lambda: int(server.told()["compacted_tokens"]) > 0, server.states)
    eventually(
        lambda: all(rank[name] <= load.left[name] for rank in server.published() for name in load.left), server.states
    )
    assert all(full[name] > 1.5 * load.left[name] for name in load.left), full
    domain = server.states()[0]["domains"]["full"]
    assert (domain["published"] - domain["free"] - 1) * load.page > load.budget // 2, "it was kept, not evicted"
    log = server.log.read_text()
    assert all(f"event=compacted rank={rank} tokens=" in log for rank in (0, 1))
    assert [answered(server, prompt) for prompt in kept] == answers
    # What the draft model reads has moved as well: it is right as often as before.
    assert [server.drafts_accepted(prompt) for prompt in kept if drafts] == right


def test_the_engine_goes_on_as_ever(server: Server, load: Load) -> None:
    assert int(server.told()["compacted_tokens"]) > 0, "by the test before"
    flushed = load.served.ask(server.generate, server.flush)
    server.flush()
    assert load.served.ask(server.generate, server.flush) == flushed
    assert [state["failure"] for state in server.states()] == [None, None]


def answered(server: Server, prompt: list[int]) -> tuple[int, list[int]]:
    """Tokens of the prompt that were cached; greedy tokens."""
    parameters = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": parameters})
    return answer["meta_info"]["cached_tokens"], answer["output_ids"]
