"""What is measured: cells of ranks x layers x run length, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcached_dist.pools import catalogue
from kvcached_dist.pools.specs import ModelSpec

MODELS = {43: "deepseek-v4-flash", 61: "deepseek-v4-pro"}
"""Layers -> the catalogue's model with that many; the ``full`` domain (C4, indexer, C128) is the one that grows."""

DOMAIN = "full"
NULL_PAGES = 1
OTHER_BLOCKS = {"swa": 8, "rows": 8}
"""The other domains hold their null page and nothing more."""

REPEAT_BYTES = 48 << 30
"""Bytes that the repetitions of one cell may move, so that long runs are repeated less often."""

GRANULE_BYTES = 2 << 20


@dataclass(frozen=True)
class Options:
    """One benchmark run, as every rank process sees it.

    Attributes:
        backend: ``host`` or ``cuda``.
        layers: layer counts, keys of ``MODELS``.
        runs: run lengths in pages.
        repeats: repetitions of a short run.
        sustained_pages: pages that sustained growth covers at most.
        memory_bytes: memory that the ranks on one card may use together.
        cards: cards of the ranks, in turn.
        bare: shared library with the bare driver loop; empty: not measured.
        protocol: measure the coordinator, too (else the floor alone).
        profile: note where the time of a growth goes, and measure the floor in lock step.
        beside: per layer count, further run lengths that have something of another project beside them.
    """

    backend: str
    layers: tuple[int, ...]
    runs: tuple[int, ...]
    repeats: int
    sustained_pages: int
    memory_bytes: int
    cards: int
    bare: str
    protocol: bool
    profile: bool
    beside: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def lengths(self, layers: int) -> tuple[int, ...]:
        """Run lengths of a model, in pages."""
        return tuple(sorted({*self.runs, *self.beside.get(layers, ())}))


@dataclass(frozen=True)
class Cell:
    """One run length of one model under one number of ranks.

    Attributes:
        page_bytes: useful bytes of a page over all pools and layers.
        repeats: repetitions of the first growth; 0: the run does not fit into the memory.
        sustained: runs of one sustained growth.
    """

    ranks: int
    layers: int
    run: int
    page_bytes: int
    repeats: int
    sustained: int

    @property
    def useful_bytes(self) -> int:
        """Bytes of one run that the engine asked for: no rounding to granules."""
        return self.run * self.page_bytes

    @property
    def pages(self) -> int:
        """Pages that the cell uses, the null page included."""
        return NULL_PAGES + self.run * max(self.sustained, 1)


def model_of(layers: int, pages: int) -> ModelSpec:
    """The model with ``pages`` pages in the domain that grows."""
    return catalogue.get(MODELS[layers]).with_blocks({DOMAIN: pages, **OTHER_BLOCKS})


def pages_of(layers: int, useful_bytes: int) -> int:
    """Pages of the domain that grows whose bytes come closest to these."""
    page_bytes = model_of(layers, 8).stage(0, 1).page_bytes(DOMAIN)
    return max(1, round(useful_bytes / page_bytes))


def cell_of(options: Options, ranks: int, layers: int, run: int) -> Cell:
    """How often a run length is repeated, and how many runs of it make a sustained growth."""
    stage = model_of(layers, 8).stage(0, 1)
    page_bytes = stage.page_bytes(DOMAIN)
    lanes = sum(pool.lanes for pool in stage.pools if pool.domain == DOMAIN)
    borders = 2 * lanes * GRANULE_BYTES  # every lane may begin and end inside a granule
    share = options.memory_bytes // -(-ranks // options.cards)
    room = (share - sum(p.lanes for p in stage.pools) * 2 * GRANULE_BYTES) // page_bytes
    if run * page_bytes + borders > room * page_bytes:
        return Cell(ranks, layers, run, page_bytes, 0, 0)
    repeats = max(3, min(options.repeats, REPEAT_BYTES // (run * page_bytes * ranks)))
    sustained_pages = min(options.sustained_pages, room - borders // page_bytes)
    return Cell(ranks, layers, run, page_bytes, int(repeats), max(1, min(64, int(sustained_pages) // run)))


def all_runs(text: str) -> tuple[int, ...]:
    """``1,4,16`` as numbers."""
    return tuple(sorted({int(part) for part in text.split(",")}))
