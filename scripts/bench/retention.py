#!/usr/bin/env python3
"""A model of what KVCACHED_DIST_RUN_SHARE trades: growths to fill a pool against memory that cached prefixes keep.

    scripts/bench/retention.py

A free list as SGLang keeps it (given from the head, freed to the tail), 32 requests at a time with prompts of 100 to
2,000 tokens and 24 to 48 tokens out, a prefix cache that evicts the oldest request, a domain of 6,250 pages of 64
tokens, run lengths from the policy itself. After three loads of 900 requests all but 16,000 cached tokens are evicted:
*kept* is the share of the domain in runs in which one of those still lives, for three seeds. Nothing is given back
before that, no list is sorted, and memory is never short.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from kvcached_dist.coord.core.policy import Policy, RunLength

PAGE_TOKENS, PAGES = 64, 6250
LOADS, REQUESTS, PARALLEL = 3, 900, 32
AHEAD, CACHED = 8192, 16_000
RUN_PAGES_MAX = 64
SHARES = (0, 32, 16, 8, 4, 2)


@dataclass
class Running:
    """One request: tokens still to come, and the ids that it has."""

    left: int
    ids: list[int]


@dataclass
class Pool:
    """A domain that grows, its free list and the prefixes that are cached."""

    share: int
    length: RunLength = field(init=False)
    runs: list[range] = field(default_factory=lambda: [range(1)])
    free: deque[int] = field(default_factory=lambda: deque(range(1, PAGE_TOKENS)))
    cached: deque[list[int]] = field(default_factory=deque)
    growths: int = 0

    def __post_init__(self) -> None:
        self.length = RunLength(Policy(run_pages_min=1, run_pages_max=RUN_PAGES_MAX, run_share=self.share))

    def grow(self) -> bool:
        """One growth for the next chunk; whether anything was left to grow."""
        held = self.runs[-1].stop
        pages = min(max(self.length.pages, AHEAD // PAGE_TOKENS), PAGES - held)
        if not pages:
            return False
        longest = pages if self.share else RUN_PAGES_MAX
        firsts = range(held, held + pages, longest)
        self.runs += [range(first, min(first + longest, held + pages)) for first in firsts]
        self.growths += 1
        self.free.extend(range(held * PAGE_TOKENS, (held + pages) * PAGE_TOKENS))
        self.length.grew(pages, held)
        return True

    def take(self, tokens: int) -> list[int]:
        """Ids for so many tokens, with a chunk ready behind them as long as anything can be grown."""
        while len(self.free) < tokens + AHEAD and self.grow():
            pass
        while len(self.free) < tokens:
            self.free.extend(self.cached.popleft())
        return [self.free.popleft() for _ in range(tokens)]

    def kept(self) -> float:
        """Share of the domain in runs that cannot go once the cache is down to its budget."""
        total = sum(map(len, self.cached))
        while total > CACHED:
            total -= len(self.cached[0])
            self.free.extend(self.cached.popleft())
        live = {token // PAGE_TOKENS for ids in self.cached for token in ids}
        return sum(len(run) for run in self.runs if not live.isdisjoint(run)) / PAGES


def serve(pool: Pool, choose: random.Random) -> None:
    """One load, closed loop."""
    running: list[Running] = []
    started = 0
    while started < REQUESTS or running:
        while len(running) < PARALLEL and started < REQUESTS:
            running.append(Running(choose.randint(24, 48), pool.take(choose.randint(100, 2000))))
            started += 1
        for request in running:
            request.ids += pool.take(1)
            request.left -= 1
        pool.cached.extend(request.ids for request in running if not request.left)
        running = [request for request in running if request.left]


def main() -> None:
    """Print one table."""
    table = Table(title=f"{PAGES:,} pages, {LOADS} loads of {REQUESTS} requests", title_justify="left")
    for heading in ("share", "growths to fill", "kept, least", "most"):
        table.add_column(heading, justify="right")
    for share in SHARES:
        growths, kept = 0, []
        for seed in range(3):
            pool = Pool(share)
            choose = random.Random(seed)
            for _ in range(LOADS):
                serve(pool, choose)
            growths = pool.growths
            kept.append(pool.kept())
        table.add_row(str(share or "never"), str(growths), f"{min(kept):.0%}", f"{max(kept):.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
