"""One-line breaks of the quantities: how much is grown, kept ready and given back, and when."""

from __future__ import annotations

from .mutant import CORE, Mutant

DEMAND = (
    Mutant(
        "recent-demand-is-forgotten",
        "L1: what a step took lately is not kept ready",
        CORE + "demand.py",
        "        if (more := -(-recent // per_page) - pages) > 0:\n",
        "        if (more := -(-recent // per_page) - pages) > 1 << 30:\n",
    ),
    Mutant(
        "gives-back-what-is-free-for-a-moment",
        "quantities: while busy a run goes although it was needed a moment ago",
        CORE + "reclaim.py",
        "if pressed else demand.returnable_pages(domain)\n",
        "if pressed or demand else demand.returnable_pages(domain)\n",
    ),
    Mutant(
        "what-a-queue-did-not-take-stays",
        "quantities: what was needed once is kept while the engine is busy, however long it has been free since",
        CORE + "policy.py",
        "            self._previous = self._current\n            self._current = number\n",
        "            self._previous = self._current\n            self._current = min(number, self._current)\n",
    ),
    Mutant(
        "what-the-next-prompt-takes-goes",
        "quantities: the floor of a reclaim is the growth watermark, which short memory lowers",
        CORE + "reclaim.py",
        "            high = max(leader.policy.reserved_pages_max, low, demand.recent_pages(domain))\n",
        "            high = max(leader.policy.reserved_pages_max, low)\n",
    ),
    Mutant(
        "retained-runs-wait-for-a-large-request",
        "M6: memory is short and what is retained is not adopted",
        CORE + "demand.py",
        "        short = not self._memory.fits(wanted)\n",
        "        short = False\n",
    ),
    Mutant(
        "an-adopted-batch-is-paid-twice",
        "S7: the budget of a rank falls by what it holds already",
        CORE + "commit.py",
        "                if not txn.adopted:\n",
        "                if txn:\n",
    ),
    Mutant(
        "whole-runs-or-nothing",
        "L5: domains that share memory stop growing although what is missing fits",
        CORE + "demand.py",
        "            wanted = self._memory.fitting(self._background_targets(whole_runs=False))\n",
        "            wanted = {}\n",
    ),
    Mutant(
        "long-runs-take-what-is-left",
        "quantities: a run that follows what is held takes the last memory ahead of demand",
        CORE + "demand.py",
        "        return max(policy.run_pages_max, min(pages, spare))\n",
        "        return max(policy.run_pages_max, pages if spare else 0)\n",
    ),
    Mutant(
        "a-queue-is-grown-for-step-by-step",
        "quantities: prompts that wait for an empty pool wait for one growth after the other",
        CORE + "demand.py",
        "            pages = max(pages, min(behind, self._memory.backable(domain) // SPARE_SHARE))\n",
        "            pages = max(pages, 0 * behind)\n",
    ),
    Mutant(
        "a-queue-takes-what-is-left",
        "quantities: prompts that wait are grown for out of memory that is short",
        CORE + "demand.py",
        "            pages = max(pages, min(behind, self._memory.backable(domain) // SPARE_SHARE))\n",
        "            pages = max(pages, behind)\n",
    ),
    Mutant(
        "a-queue-repeats-a-refusal",
        "L1: the same long run is asked for after every pause, and nothing else can be grown meanwhile",
        CORE + "demand.py",
        "        if leader.commit.short is None:\n            coming",
        "        if leader:\n            coming",
    ),
    Mutant(
        "what-is-kept-ready-takes-what-is-left",
        "quantities: what was wanted lately is kept ready out of memory that is short",
        CORE + "demand.py",
        "self._memory.affordable(domain) // SPARE_SHARE)\n        return min(max(leader",
        "self._memory.affordable(domain))\n        return min(max(leader",
    ),
    Mutant(
        "a-neighbour-waits-for-a-window",
        "quantities: what is free is kept although the card has little left",
        CORE + "demand.py",
        "        if self._memory.backable(domain) >= leader.tables[domain].pages // SHORT_SHARE:\n",
        "        if self._memory.backable(domain) >= 0:\n",
    ),
    Mutant(
        "runs-never-follow-what-is-held",
        "quantities: a growth costs the same however long demand goes on",
        CORE + "demand.py",
        "pick(count, self._longest_run(domain, max(count, self._run_pages(domain))))\n",
        "pick(count, leader.policy.run_pages_max)\n",
    ),
    Mutant(
        "a-pause-outlives-the-shortage",
        "L5: a rank that has memory again is not asked",
        CORE + "leader.py",
        "            self.backoff.lifted(self.now)\n",
        "            self.backoff.active(self.now)\n",
    ),
    Mutant(
        "every-domain-counts-with-all-memory",
        "L5: domains that are short together grow by nothing",
        CORE + "memory.py",
        "        if self.fits(new):\n            return dict(pages)\n",
        "        if self.fits(new) or new:\n            return dict(pages)\n",
    ),
    Mutant(
        "released-memory-waits-for-a-beat",
        "L5: an operation that waited for a release is a miss although it has what it needs",
        CORE + "commit.py",
        "does not wait for that.\n                self._spend(rank, txn.runs, sign=-1)\n",
        "does not wait for that.\n                self._spend(rank, txn.runs, sign=0)\n",
    ),
    Mutant(
        "a-beat-is-believed-while-memory-is-created",
        "S7: creates are paid for twice",
        CORE + "leader.py",
        "        if not creating:\n",
        "        if not creating or beat:\n",
    ),
    Mutant(
        "a-batch-forgets-its-tries",
        "rule M3: runs are quarantined after fewer failed retries than the setting says",
        CORE + "commit.py",
        "            self.retained.append(txn.retained)\n"
        "        else:\n            leader.become(txn.runs, PageState.PUBLISHED)\n",
        "            self.retained.append(Retained(txn.runs, 9, txn.retained.cause))\n"
        "        else:\n            leader.become(txn.runs, PageState.PUBLISHED)\n",
    ),
    Mutant(
        "a-part-of-an-exchange",
        "quantities: an idle engine holds more instead of less",
        CORE + "demand.py",
        "            return exchange if exchange <= absent else 0\n",
        "            return min(exchange, absent)\n",
    ),
    Mutant(
        "every-beat-ends-a-pause",
        "quantities: a refusal that memory does not explain is repeated at every beat",
        CORE + "leader.py",
        "        return had + max(had // 8,",
        "        return had + min(0,",
    ),
    Mutant(
        "a-look-is-lost-to-a-transaction",
        "L4: growth in step with the looks puts off what could go",
        CORE + "reclaim.py",
        "        if not pressed and self._steps < self._next_look:\n",
        "        if not pressed and self._steps % leader.policy.reclaim_interval_steps:\n",
    ),
)

__all__ = ["DEMAND"]
