"""A prompt that no rank could ever hold, among others that wait: a clear error for it, and the others are answered."""

from __future__ import annotations

import shutil
import tempfile
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.sglang.cases import PROMPT
from tests.sglang.models import LLAMA_OPTIONS, write_llama
from tests.sglang.server import Server
from tests.sglang.settings import elastic

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvcached-sglang-", dir="/dev/shm"))
    # Less than the context length (1024 tokens) fits on a rank: 128 bytes a token, its share of what is shared off.
    settings = elastic(capacity_bytes=144 << 10)
    started = Server.start(
        write_llama(folder), folder, tp=2, options=(*LLAMA_OPTIONS, "--chunked-prefill-size", "256"), settings=settings
    )
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def test_the_queue_goes_on_behind_a_prompt_that_no_rank_could_hold(server: Server) -> None:
    cut = next(line for line in server.log.read_text().splitlines() if "event=capacity_cut" in line)
    tokens = int(cut.split("tokens=")[1].split()[0])
    assert 300 < tokens < 1000
    assert "cannot hold more beside its reserve" in cut
    with ThreadPoolExecutor(6) as pool:
        before = [pool.submit(server.generate, PROMPT[k : k + 250], 30) for k in (0, 50)]
        large = pool.submit(server.generate, [*PROMPT, *PROMPT][: tokens + 20], 4)
        after = [pool.submit(server.generate, PROMPT[k : k + 250], 8) for k in (100, 150, 200)]
        with pytest.raises(urllib.error.HTTPError) as refused:
            large.result()
        assert [len(answer.result()) for answer in (*before, *after)] == [30, 30, 8, 8, 8]
    assert refused.value.code == 400
    said = refused.value.read().decode()
    assert str(tokens + 20) in said, "what it needs"
    assert "allowed" in said
    assert server.grows() >= 1
    assert [state["failure"] for state in server.states()] == [None, None]
