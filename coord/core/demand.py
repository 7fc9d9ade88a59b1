"""What the leader wants: growth for a waiting operation and growth ahead of demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .calm import ANY, Bounds, Numbers
from .entries import Entry, Publish, Reclaimed, Retire, Unretire
from .pages import PageState
from .policy import Policy, RecentLow, RecentPeak, RunLength, growth_target
from .transaction import QUERIES_MAX, Retained, Transaction, TxnStep
from .types import Cause, CauseKind, DomainId, Rank, Run, Tick

if TYPE_CHECKING:
    from .leader import Leader

RUNS_PER_TXN_MAX = 64
"""Runs of one transaction; bounds frames and the work of one agent turn."""

SPARE_SHARE = 4
"""One part in so many of what could still be grown may be held ready beyond the demand of the next step."""

SHORT_SHARE = 8
"""Memory is short when less than one part in so many of a domain is free or could still be grown."""

COMING_STEPS = 4
"""Of what waits behind the next step, so many times its W may be grown together with it."""

REFUSALS_MAX = 2
"""Refused grows for one waiting operation before it is a miss."""


@dataclass(slots=True)
class Foreground:
    """An operation of the leader's scheduler that found too few blocks.

    Attributes:
        needs: blocks per domain that it takes, all or nothing.
        deadline: when it becomes a miss.
        verdict: ``None`` while open.
        refusals: grows refused for it.
        cause: last refusal.
    """

    needs: Mapping[DomainId, int]
    deadline: Tick
    verdict: bool | None = None
    refusals: int = 0
    cause: Cause | None = None


def verdict_wait(policy: Policy) -> int:
    """Longest wait of an operation for its verdict, in ticks.

    Longer than the last query of a grow can stay unanswered, so that its outcome comes first.
    """
    return policy.growth_deadline + (QUERIES_MAX + 2) * policy.query_interval


class Demand:
    """Quantities and triggers of one leader."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._memory = leader.memory
        domains = len(leader.tables)
        self._domains = tuple(DomainId(domain) for domain in range(domains))
        self.step_blocks = [0] * domains
        """W: the largest allocation of one engine step, in blocks, per domain."""
        self.coming = [0] * domains
        """What requests in hand take in all, this step and later ones, as far as it is known; per domain in blocks."""
        self.idle = False
        self.foreground: Foreground | None = None
        self._run_length = [RunLength(leader.policy) for _ in range(domains)]
        window = leader.policy.demand_window
        self._peaks = [RecentPeak(window) for _ in range(domains)]
        self._taken = [RecentPeak(window) for _ in range(domains)]
        self._lows = [RecentLow(window) for _ in range(domains)]
        self.left = [0] * domains
        """Free blocks behind the last mark, in front of the step that it began."""

    # ------------------------------------------------------------------ foreground

    def wait_for(self, needs: Mapping[DomainId, int]) -> Foreground:
        """An operation needs more than is free. Advances with every input of the leader until it has a verdict."""
        leader = self._leader
        self.foreground = Foreground(dict(needs), Tick(leader.now + verdict_wait(leader.policy)))
        gone = [Rank(rank) for rank, peer in enumerate(leader.peers) if peer.left]
        if gone:
            leader.fail_closed(gone[0])
        self.advance()
        return self.foreground

    def advance(self) -> None:
        """Decide or move the waiting operation, if there is one."""
        waiting = self.foreground
        leader = self._leader
        if waiting is None or waiting.verdict is not None or not leader.active:
            return
        short = self._short_pages(waiting.needs)
        if not short:
            waiting.verdict = True
            return
        txn = leader.commit.txn
        if txn is not None and txn.step is TxnStep.DRAINING:
            leader.commit.cancel_retirement("an operation needs the blocks")
            self.advance()
        elif leader.now >= waiting.deadline or (txn is not None and txn.late) or waiting.refusals >= REFUSALS_MAX:
            waiting.verdict = False
        elif txn is None and not self._grow(short, waiting):
            leader.counters.known_misses += 1
            waiting.verdict = False

    def _short_pages(self, needs: Mapping[DomainId, int]) -> dict[DomainId, int]:
        leader = self._leader
        short: dict[DomainId, int] = {}
        for domain, blocks in needs.items():
            missing = blocks - leader.replica.available(domain) - leader.due_blocks(domain)
            if missing > 0:
                short[domain] = -(-missing // leader.replica.blocks_per_page[domain])
        return short

    # ------------------------------------------------------------------ every step

    def step_ends(self) -> None:
        """At a mark, before its entries: how much the step behind the last mark has taken, and what it left."""
        leader = self._leader
        for domain in self._domains:
            free = leader.replica.available(domain)
            self._taken[domain].note(max(0, self.left[domain] - free), leader.now)
            self._lows[domain].note(free, leader.now)

    def published_inside(self, runs: Iterable[Run]) -> None:
        """Runs are published between two steps, for an operation: what the step takes of them is its demand too."""
        for run in runs:
            self.left[run.domain] += run.count * self._leader.replica.blocks_per_page[run.domain]

    def background(self) -> None:
        """After a mark was applied: grow ahead of demand where a domain is below its watermark."""
        leader = self._leader
        for domain, blocks in zip(self._domains, self.step_blocks, strict=True):
            self.left[domain] = leader.replica.available(domain)
            if self.idle:
                self._peaks[domain].forget()
                self._taken[domain].forget()
            else:
                self._peaks[domain].note(blocks, leader.now)
        if leader.commit.txn is not None or not leader.active or leader.quiescent():
            return
        wanted = self._background_targets(whole_runs=True)
        if not self._memory.fits(wanted):
            # Domains share the memory of a rank: all of them cannot have whole runs, but what is missing may fit, or
            # a part of it.
            wanted = self._memory.fitting(self._background_targets(whole_runs=False))
        if wanted:
            self._grow(wanted, None)

    # ------------------------------------------------------------------ steps without a decision

    def bounds(self, domain: DomainId) -> Bounds | None:
        """Within what a step has nothing to grow in a domain, if no input comes; ``None``: every step has to look.

        The watermark rises with W and with what steps took, or stays; so it is the highest of any step within these.
        Where there is enough for the largest step of late, steps may be as large as that, else as this one.
        """
        leader = self._leader
        if self._memory.backable(domain) < leader.tables[domain].pages // SHORT_SHARE:
            return None  # what is free is asked for in every step
        if not self._memory.affordable(domain):
            return ANY
        wanted, peak, taken = self.step_blocks[domain], self._peaks[domain].blocks, self._taken[domain].blocks
        per_page = leader.replica.blocks_per_page[domain]
        largest = max(peak, self._watermark(domain, peak, peak + taken) * per_page)
        if wanted < peak and leader.replica.available(domain) >= largest:
            return Bounds(peak, largest, taken)
        return Bounds(wanted, max(wanted, self.low_pages(domain) * per_page), taken)

    def windows_end(self) -> Tick:
        """When the first of the windows ends for which demand is remembered."""
        return min(window.ends for of_kind in (self._peaks, self._taken, self._lows) for window in of_kind)

    def skipped(self, numbers: Numbers, last: Tick) -> None:
        """Steps have passed without a decision: their demand counts all the same.

        Args:
            numbers: what they left behind.
            last: when the last of them began.
        """
        domain = numbers.domain
        self._peaks[domain].note(numbers.wanted, last)
        self._taken[domain].note(numbers.taken, last)
        self._lows[domain].note(numbers.least, last)

    # ------------------------------------------------------------------ growing

    def _background_targets(self, *, whole_runs: bool) -> dict[DomainId, int]:
        targets = ((domain, self._background_target(domain, whole_runs=whole_runs)) for domain in self._domains)
        return {domain: pages for domain, pages in targets if pages > 0}

    def _background_target(self, domain: DomainId, *, whole_runs: bool = True) -> int:
        absent = self._memory.affordable(domain)
        if self.idle and (exchange := self._leader.reclaim.exchange_pages(domain)):
            # All of it or nothing: a part lets no run go, and would only be held on top of it.
            return exchange if exchange <= absent else 0
        if not self.idle:
            absent += self._leader.tables[domain].count(PageState.RETAINED)
        run_pages = self._run_pages(domain) if whole_runs and not self.idle else 1
        return growth_target(self.free_pages(domain), self.low_pages(domain), run_pages, absent)

    def _grow(self, wanted: Mapping[DomainId, int], waiting: Foreground | None) -> bool:
        """Open a grow of at least ``wanted`` pages, of more under sustained demand. ``False``: the answer is known."""
        leader = self._leader
        if leader.backoff.active(leader.now):
            return False
        retry = self._retry_for(wanted)
        if retry is not None:
            leader.commit.open_grow(retry.runs, foreground=waiting is not None, retry=retry)
            return True
        if not self._memory.fits(wanted):
            return False
        pages = dict(wanted)
        if waiting is not None and waiting.refusals == 0:
            longer = {domain: max(count, self._run_pages(domain)) for domain, count in wanted.items()}
            pages = longer if self._memory.fits(longer) else pages
        runs: list[Run] = []
        for domain, count in sorted(pages.items()):
            picked = leader.tables[domain].pick(count, self._longest_run(domain, max(count, self._run_pages(domain))))
            if sum(run.count for run in picked) < wanted[domain]:
                return False
            runs.extend(picked)
        leader.commit.open_grow(tuple(runs[:RUNS_PER_TXN_MAX]), foreground=waiting is not None)
        return True

    def _retry_for(self, wanted: Mapping[DomainId, int]) -> Retained | None:
        """Retained runs that this demand adopts: all of a batch or none of it.

        A batch that it could fill, or any one of its domains where it cannot be met otherwise: the memory of a batch is
        held on every rank already.
        """
        short = not self._memory.fits(wanted)
        for batch in self._leader.commit.retained:
            pages = batch.pages()
            if all(wanted.get(DomainId(domain), 0) >= count for domain, count in pages.items()):
                return batch
            if short and any(domain in pages for domain in wanted):
                return batch
        return None

    def refused(self, txn: Transaction, cause: Cause) -> None:
        """A grow was aborted: shorter runs, and the waiting operation may try once with just what it needs."""
        self.relaxed(txn.runs)
        waiting = self.foreground
        if waiting is None or waiting.verdict is not None or not txn.foreground:
            return
        waiting.refusals += 1
        waiting.cause = cause
        needed = self._short_pages(waiting.needs)
        asked: dict[DomainId, int] = {}
        for run in txn.runs:
            asked[run.domain] = asked.get(run.domain, 0) + run.count
        smaller = any(asked.get(domain, 0) > count for domain, count in needed.items())
        if cause.kind is CauseKind.EXHAUSTED and smaller and waiting.refusals < REFUSALS_MAX:
            self._leader.backoff.succeeded()
        else:
            waiting.verdict = False

    def relaxed(self, runs: Iterable[Run]) -> None:
        """Memory is given back or was refused: the next growth starts small again."""
        for domain in {run.domain for run in runs}:
            self._run_length[domain].relaxed()

    def grew(self, txn: Transaction) -> None:
        """A grow will be published."""
        brought: dict[DomainId, int] = {}
        for run in txn.runs:
            brought[run.domain] = brought.get(run.domain, 0) + run.count
        for domain, pages in brought.items():
            self._run_length[domain].grew(pages, self._leader.tables[domain].count(PageState.PUBLISHED))

    # ------------------------------------------------------------------ capacity

    def short_blocks(self, domain: DomainId) -> int:
        """Blocks that memory lacks so that a share of the domain could still be had; 0 where memory is not short.

        What could be had is free beyond the demand of the next step, or could still be backed on every rank.
        """
        leader = self._leader
        if not leader.active:
            return 0
        spare = max(0, self.free_pages(domain) - self.low_pages(domain)) + self._memory.backable(domain)
        return max(0, leader.tables[domain].pages // SHORT_SHARE - spare) * leader.replica.blocks_per_page[domain]

    def settled(self, entries: Iterable[Entry]) -> bool:
        """Whether nothing is open, nothing is due and nothing could be given back or grown."""
        leader = self._leader
        changes = any(isinstance(entry, Publish | Retire | Unretire | Reclaimed) for entry in entries)
        if changes or leader.commit.txn is not None or leader.log.due() or leader.commit.retained or not leader.active:
            return False
        if leader.reclaim.paused():
            return False
        return not any(self._background_target(domain) > 0 for domain in self._domains)

    # ------------------------------------------------------------------ inner

    def low_pages(self, domain: DomainId) -> int:
        """Growth watermark in pages: the reserve, or what one step can take.

        While busy also :meth:`recent_pages`, so that the step behind the next one finds memory without waiting; out of
        memory that is not short: a neighbour is not kept waiting.
        """
        return self._watermark(domain, self.step_blocks[domain], self._recent_blocks(domain))

    def _watermark(self, domain: DomainId, blocks: int, recent: int) -> int:
        """In pages, for a step that takes so many blocks, where steps lately took or were about to take ``recent``."""
        leader = self._leader
        per_page = leader.replica.blocks_per_page[domain]
        pages = -(-blocks // per_page)
        if (more := -(-recent // per_page) - pages) > 0:
            pages += min(more, self._memory.affordable(domain) // SPARE_SHARE)
        return min(max(leader.policy.reserved_pages_min, pages), leader.tables[domain].pages - 1)

    def recent_pages(self, domain: DomainId) -> int:
        """What steps were about to take lately, and the next one with what a step really took on top; 0 at idle.

        Whatever memory there is: pages that the next prompt will want again are not given back between two prompts.
        """
        return -(-self._recent_blocks(domain) // self._leader.replica.blocks_per_page[domain])

    def _recent_blocks(self, domain: DomainId) -> int:
        if self.idle:
            return 0
        return max(self._peaks[domain].blocks, self.step_blocks[domain] + self._taken[domain].blocks)

    def free_pages(self, domain: DomainId, *, due: bool = True) -> int:
        """Published free pages; with ``due`` also those that the next mark publishes."""
        leader = self._leader
        blocks = leader.replica.available(domain) + (leader.due_blocks(domain) if due else 0)
        return blocks // leader.replica.blocks_per_page[domain]

    def returnable_pages(self, domain: DomainId) -> int:
        """Published free pages that may go while busy: those that no step of the last while has needed.

        All of them where the card has little left: a neighbour may be waiting for what is free here, however much of it
        there is.
        """
        leader = self._leader
        blocks = leader.replica.available(domain)
        if self._memory.backable(domain) >= leader.tables[domain].pages // SHORT_SHARE:
            blocks = self._lows[domain].least(blocks)
        return blocks // leader.replica.blocks_per_page[domain]

    def _run_pages(self, domain: DomainId) -> int:
        """Pages of the next run: as demand has lasted so far, or, where prompts wait already, as long as they need.

        A queue that an empty pool meets is then not grown for step by step, with each of these steps waiting. Out of
        memory that is not short, and not after a refusal that nothing has refuted: what was too long would be again.
        """
        leader = self._leader
        pages = self._run_length[domain].pages
        if leader.commit.short is None:
            coming = min(self.coming[domain], COMING_STEPS * self.step_blocks[domain])
            behind = -(-coming // leader.replica.blocks_per_page[domain]) - self.free_pages(domain)
            pages = max(pages, min(behind, self._memory.backable(domain) // SPARE_SHARE))
        return min(pages, self._longest_run(domain, pages))

    def _longest_run(self, domain: DomainId, pages: int) -> int:
        """Pages of a run at most, where ``pages`` are wanted: no driver call is repeated for what comes together.

        What lies beyond the ordinary longest run is not taken from memory that is short, and not at all where runs
        never follow demand.
        """
        policy = self._leader.policy
        spare = self._memory.backable(domain) // SPARE_SHARE if policy.run_share else 0
        return max(policy.run_pages_max, min(pages, spare))
