"""A world of ranks on real cards: rank r uses card ``r % cards``, so that one card carries all ranks, two one each.

Ranks are threads of one process with a device object each; the links are real.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvcached_dist import _native
from kvcached_dist.coord.core.entries import Entry, Publish, Retire, Unretire
from kvcached_dist.coord.core.runs import RunState
from kvcached_dist.coord.core.types import Run, Txn
from kvcached_dist.pools.specs import DomainSpec, FillPiece, ModelSpec, PoolSpec
from tests.coordinator.world import Rank, config

PAGE_BYTES = 149_760
"""Stride of a DeepSeek-V4 sliding-window page: it does not divide the 2 MiB granule."""

GRANULE_BYTES = 2 << 20

FILL = 0xFF80_0000
FILL_WORD: int = struct.unpack("<q", struct.pack("<II", FILL, FILL))[0]
"""A 64-bit word of a fresh page."""

SETTLE_S = 20.0


def model(
    pages: int, *, page_bytes: int = PAGE_BYTES, layers: int = 4, owners: Sequence[int] | None = None
) -> ModelSpec:
    """A model with one pool.

    Args:
        pages: of the domain; one block each.
        page_bytes: of a page in one layer.
        layers: of the model.
        owners: layers that own a buffer; all of them by default.
    """
    pool = PoolSpec(
        "full_kv",
        "full",
        page_bytes,
        tuple(range(layers) if owners is None else owners),
        (page_bytes,),
        fill_row_bytes=64,
        fill=(FillPiece(0, 64, FILL),),
    )
    return ModelSpec("simple", layers, (DomainSpec("full", pages, 256, 1),), (pool,))


def devices(ranks: int = 2) -> list[_native.Device]:
    """One device object per rank, made where torch has its context and allocator already, as in an engine."""
    cards = torch.cuda.device_count()
    for card in range(min(cards, ranks)):
        torch.zeros(1, device=f"cuda:{card}")
    return [_native.CudaDevice(rank % cards) for rank in range(ranks)]


def settings(tmp_path: Path, **overrides: Any) -> Any:
    wanted = {"growth_deadline_s": 2.0, "lease_s": 20.0, "beat_s": 0.2, "run_pages_max": 64, **overrides}
    return config(physical_growth_lock_dir=str(tmp_path), **wanted)


def on_card(rank: Rank) -> torch.device:
    return torch.device("cuda", rank.device.ordinal)


def words(rank: Rank) -> torch.Tensor:
    """All pages as 64-bit words: ``[layers, pages, words]``."""
    return rank.coordinator.backing.tensor("full_kv").view(torch.int64)


class Published:
    """What every published page of a rank has to hold: the fill, or what the test has written since.

    Which pages these are follows from the entries that took effect, and is compared with what the replica and the
    participant of the rank say.

    Attributes:
        words: the word that a page is full of, by page.
        filled: pages that were published so far, each time counted.
    """

    def __init__(self, rank: Rank) -> None:
        self.words = {0: FILL_WORD}  # the start has published the null page
        self.filled = 0
        self._rank = rank
        self._retired: dict[Txn, dict[int, int]] = {}

    def granted(self) -> None:
        """After an ``alloc``: what took effect inside it."""
        self._apply(self._rank.coordinator.take_granted())

    def settle(self) -> None:
        """End steps until the leader has nothing left to do."""
        deadline, settled = time.monotonic() + SETTLE_S, False
        while not settled:
            assert time.monotonic() < deadline, f"not settled within {SETTLE_S} s"
            report = self._rank.coordinator.step()
            self._apply(report.entries)
            settled = report.settled
            time.sleep(0.001)

    def write(self, ids: torch.Tensor, word: int) -> None:
        """Write a word of its own into each of these pages, in all layers."""
        stamps = word + ids
        where = on_card(self._rank)
        words(self._rank)[:, ids.to(where)] = stamps.to(where)[None, :, None]
        self.words.update(zip(ids.tolist(), stamps.tolist(), strict=True))

    def mismatches(self) -> int:
        """Words of published pages that a kernel does not find as they should be."""
        self._agrees_with_the_rank()
        where = on_card(self._rank)
        ids = torch.tensor(list(self.words), device=where)
        wanted = torch.tensor(list(self.words.values()), device=where)
        return int((words(self._rank)[:, ids] != wanted[None, :, None]).sum())

    def _agrees_with_the_rank(self) -> None:
        coordinator = self._rank.coordinator
        assert len(self.words) == coordinator.domains["full"].published
        with coordinator._agent.changed:
            runs = coordinator._agent.participant.held.runs(RunState.PUBLISHED)
        assert set(self.words) == set(_pages(runs))

    def _apply(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            match entry:
                case Publish(txn=txn, runs=runs):
                    self._retired.pop(txn, None)  # restored, and filled anew
                    fresh = dict.fromkeys(_pages(runs), FILL_WORD)
                    self.filled += len(fresh)
                    self.words.update(fresh)
                case Retire(txn=txn, runs=runs):
                    self._retired[txn] = {page: self.words.pop(page) for page in _pages(runs)}
                case Unretire(txn=txn):
                    self.words.update(self._retired.pop(txn))
                case _:
                    pass


def _pages(runs: Iterable[Run]) -> Iterable[int]:
    return (page for run in runs for page in range(run.first, run.end))
