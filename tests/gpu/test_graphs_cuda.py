"""Captured graphs: growth disturbs neither a capture nor a replay, and the next replay writes what has grown."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcached_dist import _native
from tests.coordinator.world import Rank, run_world, values
from tests.gpu.world import devices, model, on_card, settings, words

usable, reason = _native.cuda_available()
pytestmark = [pytest.mark.skipif(not usable, reason=reason), pytest.mark.timeout(240)]

REPLAYS = 20
BLOCKS = 8
"""Blocks that one replay writes: new ones each time, which stay in use."""


class Writer:
    """A captured graph that writes a word into the pages whose ids are in its buffers, in all layers."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._ids = torch.zeros(BLOCKS, dtype=torch.int64, device=data.device)
        self._word = torch.zeros(1, dtype=torch.int64, device=data.device)
        self._graph = torch.cuda.CUDAGraph()
        self._finished: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._write()  # once beforehand, into the null page: the first launch of a kernel loads it
        torch.cuda.synchronize(data.device)

    def _write(self) -> None:
        layers, _, size = self._data.shape
        self._data.index_copy_(1, self._ids, self._word.expand(layers, BLOCKS, size).contiguous())

    def capture(self, rank: Rank) -> torch.Tensor | None:
        """Capture the write; inside, blocks are allocated that are not backed yet."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._write()
            return rank.coordinator.domains["full"].alloc(BLOCKS)

    def replay(self, ids: torch.Tensor, word: int) -> None:
        """Write ``word`` into ``ids`` behind a kernel of about 20 ms."""
        self._ids.copy_(ids)
        self._word.fill_(word)
        torch.cuda._sleep(36_000_000)  # type: ignore[no-untyped-call]
        self._graph.replay()
        self._finished.record()

    def is_running(self) -> bool:
        """Whether the last replay has not finished."""
        return not self._finished.query()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_captured_graph_replays_over_memory_that_grows_between_replays(tmp_path: Path, ranks: int) -> None:
    """Memory grows inside the capture, and again while a replay runs; the next one writes the new pages.

    In a world of one the growth is done in the thread that captures and replays, with two ranks by their agents'
    threads. Ranks capture one after the other: where they share a card, nobody may synchronise it during a capture.
    """

    def body(rank: Rank) -> Any:
        card, full, data = on_card(rank), rank.coordinator.domains["full"], words(rank)
        torch.cuda.set_device(card)
        with torch.cuda.stream(torch.cuda.Stream(card)):  # type: ignore[no-untyped-call]
            writer, grown_inside = Writer(data), []
            for capturing in range(ranks):
                rank.meet()
                before = full.published
                mine = capturing == rank.coordinator.world.rank
                assert (writer.capture(rank) if mine else full.alloc(BLOCKS)) is not None
                grown_inside.append(full.published > before)
            rank.meet()
            written, published, beside = [], [], 0
            for number in range(REPLAYS):
                before = full.published
                blocks = full.alloc(BLOCKS)
                assert blocks is not None
                beside += number > 0 and full.published > before and writer.is_running()
                published.append(full.published)
                writer.replay(blocks, number)
                written.append(blocks)
            torch.cuda.synchronize(card)
            found = [bool((data[:, blocks.to(card)] == number).all()) for number, blocks in enumerate(written)]
        grown_between = sum(later > earlier for earlier, later in pairwise(published))
        return all(grown_inside), all(found), grown_between, beside

    spec, wanted = model(256), settings(tmp_path, run_pages_max=BLOCKS)
    results = values(run_world(body, tp=ranks, model=spec, settings=wanted, devices=devices(ranks)))
    assert [result[:3] for result in results] == [(True, True, REPLAYS - 1)] * ranks
    assert all(result[3] >= REPLAYS // 4 for result in results), f"memory grew beside too few replays: {results}"
