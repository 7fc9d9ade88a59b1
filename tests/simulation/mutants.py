"""One-line breaks of the protocol. Each must be found by the simulation or a scenario, and says which rule it breaks.

A mutant is data: a file, a text that stands in it exactly once, and what to put in its place. How it is
applied and looked for is in ``mutation``.
"""

# ruff: noqa: E501  (the texts of the mutants are lines of other files)

from __future__ import annotations

from .mutant import CORE, Mutant
from .mutants_demand import DEMAND

MUTANTS = (
    # ------------------------------------------------------------------ wrong variants of the protocol
    Mutant(
        "publish-after-reserve",
        "S2: mapping in the commit instead of before it",
        CORE + "commit.py",
        "                self._enter(TxnStep.MAPPING)\n",
        "                self._enter(TxnStep.MAPPING)\n                self._mapped(txn)\n                return\n",
    ),
    Mutant(
        "no-txn-check",
        "S3: answers without a transaction number",
        CORE + "commit.py",
        "if txn is None or message.txn != txn.txn or txn.step is not expected or rank not in txn.waiting:",
        "if txn is None or txn.step is not expected or rank not in txn.waiting:",
    ),
    Mutant(
        "abort-not-to-peers-of-the-refusing",
        "S7: a failure is not told to those who reserved",
        CORE + "commit.py",
        "self._broadcast(Abort)",
        "leader.send(cause.rank, Abort(leader.epoch, txn.txn))",
    ),
    Mutant(
        "participant-epoch-unchecked",
        "S8: frames of an older epoch are accepted",
        CORE + "participant.py",
        "if message.epoch != self.epoch:",
        "if message.epoch > self.epoch:",
    ),
    Mutant(
        "leader-epoch-unchecked",
        "S8: answers of an older epoch are accepted",
        CORE + "leader.py",
        "if message.epoch != self.epoch or not self.active:",
        "if message.epoch > self.epoch or not self.active:",
    ),
    Mutant(
        "unmap-without-drain",
        "S4: shrinking without draining",
        CORE + "participant.py",
        "        self._out.append(TakeFence(txn))\n",
        "        self.on_fence(txn, 0)\n",
    ),
    # ------------------------------------------------------------------ rules M1 to M9
    Mutant(
        "M3-abort-after-map",
        "M3: a deadline aborts a MAP",
        CORE + "silence.py",
        "        txn.late = True\n        pending.queries = 0\n",
        "        leader.commit.abort(Cause(CauseKind.DEADLINE, rank, 'late'))\n        return\n        pending.queries = 0\n",
    ),
    Mutant(
        "M3-aborted-retry-forgets-retained",
        "M3: after an aborted retry the runs count as absent",
        CORE + "commit.py",
        "        if txn.adopted:\n            leader.become(txn.runs, PageState.RETAINED)",
        "        if False:\n            leader.become(txn.runs, PageState.RETAINED)",
    ),
    Mutant(
        "M3-abort-takes-retained",
        "M3: ABORT treats adopted runs as its own",
        CORE + "participant.py",
        "TxnPhase.RUNNING, adopted=adopted)",
        "TxnPhase.RUNNING, adopted=False)",
    ),
    Mutant(
        "M4-unretire-after-unmap",
        "M4: a retirement is cancelled after UNMAP",
        CORE + "demand.py",
        "if txn is not None and txn.step is TxnStep.DRAINING:",
        "if txn is not None and txn.step in (TxnStep.DRAINING, TxnStep.UNMAPPING):",
    ),
    Mutant(
        "M4-unmap-with-one-drained",
        "M4: UNMAP when the first rank has drained",
        CORE + "commit.py",
        "                txn.lag_steps = max(txn.lag_steps, lag)\n",
        "                txn.lag_steps = max(txn.lag_steps, lag)\n                txn.waiting.clear()\n",
    ),
    Mutant(
        "M5-retire-without-looking",
        "M5: RETIRE of runs that are not free at that point",
        CORE + "reclaim.py",
        "if fits and free_list.run_is_free(run.first, run.count):",
        "if fits:",
    ),
    Mutant(
        "M6-growable-rises-at-retire",
        "M6: GROWABLE rises at RETIRE",
        CORE + "memory.py",
        "        opened = leader.tables[domain].count(PageState.OPEN)\n",
        "        opened = leader.tables[domain].count(PageState.OPEN)"
        " + leader.tables[domain].count(PageState.RETIRING)\n",
    ),
    Mutant(
        "M6-growable-falls-late",
        "M6: GROWABLE does not fall in the mark of the PUBLISH",
        CORE + "memory.py",
        "            if blocks < logged or blocks - logged >= slack:\n",
        "            if blocks < logged - 2 or blocks - logged >= slack:\n",
    ),
    Mutant(
        "M7-retry-before-all-answered",
        "M7: a retry starts while a late rank still maps",
        CORE + "commit.py",
        "                txn.cause = txn.cause or cause\n            case UnmapFailed(cause=cause):",
        "                txn.cause = txn.cause or cause\n                txn.waiting.clear()\n"
        "            case UnmapFailed(cause=cause):",
    ),
    Mutant(
        "M7-one-mapped-is-enough",
        "S2: published when the first rank has mapped",
        CORE + "commit.py",
        "            case Released(handles=handles):\n                self._leader.peers[rank].handles = handles\n",
        "            case Released(handles=handles):\n                self._leader.peers[rank].handles = handles\n"
        "            case TxnMessage() if txn.step is TxnStep.MAPPING:\n                txn.waiting.clear()\n",
    ),
    Mutant(
        "M8-restore-only-the-failed",
        "M8: RESTORE goes to the failed rank alone",
        CORE + "commit.py",
        "                self._broadcast(Restore)\n",
        "                txn.waiting = {rank: txn.waiting[rank]}\n                self._leader.send(rank, Restore(self._leader.epoch, txn.txn))\n",
    ),
    Mutant(
        "M8-publish-before-restored",
        "M8: PUBLISH before every rank has restored",
        CORE + "commit.py",
        "                self._broadcast(Restore)\n                return\n",
        "                self._broadcast(Restore)\n                self._restored(txn)\n                return\n",
    ),
    Mutant(
        "M8-release-failure-forgotten",
        "M8: a handle that could not be released leaves the count",
        CORE + "commit.py",
        "                self._retry_release(rank, txn, cause)\n                return\n",
        "                pass\n",
    ),
    Mutant(
        "M9-release-after-first-unmapped",
        "M9: RELEASE before all have unmapped",
        CORE + "commit.py",
        "            case UnmapFailed(cause=cause):\n",
        "            case Unmapped():\n                txn.waiting.clear()\n            case UnmapFailed(cause=cause):\n",
    ),
    # ------------------------------------------------------------------ change of epoch
    Mutant(
        "M1-log-starts-again",
        "M1: log indices do not continue across epochs",
        CORE + "replica.py",
        "        replica.next_index = snapshot.next_index\n",
        "",
    ),
    Mutant(
        "M1-restarted-rank-holds-retained",
        "M1: an emptied rank holds something for retained runs",
        CORE + "join.py",
        "for run, published in wanted.items() if published and run not in held)",
        "for run, published in wanted.items() if run not in held)",
    ),
    Mutant(
        "M2-mapping-becomes-absent",
        "M2: an open MAP is resolved as aborted",
        CORE + "epoch.py",
        "            leader.commit.drop_open(PageState.RETAINED, cause)\n"
        "            leader.commit.retained.append(Retained(txn.runs, txn.tries, cause))\n",
        "            leader.commit.drop_open(PageState.ABSENT, cause)\n",
    ),
    Mutant(
        "M2-unmapping-comes-back",
        "M2: an UNMAP under way is not rolled forward",
        CORE + "epoch.py",
        "        case TxnStep.UNMAPPING | TxnStep.RELEASING:\n            leader.commit.drop_open(PageState.ABSENT, cause)\n",
        "        case TxnStep.UNMAPPING | TxnStep.RELEASING:\n            leader.commit.drop_open(PageState.PUBLISHED, cause)\n",
    ),
    Mutant(
        "M2-draining-rolled-forward",
        "M2: a retirement that drains is not cancelled",
        CORE + "epoch.py",
        "            leader.commit.drop_open(PageState.PUBLISHED, cause)\n",
        "            leader.commit.drop_open(PageState.ABSENT, cause)\n",
    ),
    Mutant(
        "M2-mapped-but-not-logged-is-published",
        "M2: a PUBLISH that no mark has carried counts",
        CORE + "epoch.py",
        "table.become(run, PageState.RETAINED if state is PageState.OPEN else PageState.PUBLISHED)",
        "table.become(run, PageState.PUBLISHED)",
    ),
    Mutant(
        "M2-restored-is-taken-as-mapped",
        "M2: a run that is unmapped here is not mapped again",
        CORE + "join.py",
        "        if state is RunState.UNMAPPED or (state is RunState.RETIRED and self._was_touched(run)):\n            return False\n",
        "",
    ),
    # ------------------------------------------------------------------ details that were once wrong, or nearly
    Mutant(
        "adopt-half-a-batch",
        "S6: a smaller request adopts a part of retained runs",
        CORE + "demand.py",
        "            leader.commit.open_grow(retry.runs, foreground=waiting is not None, retry=retry)\n",
        "            leader.commit.open_grow(retry.runs[:1], foreground=waiting is not None, retry=retry)\n",
    ),
    Mutant(
        "second-map",
        "S9: a lost answer makes a second MAP",
        CORE + "silence.py",
        "            leader.send_query(rank, Query(leader.epoch, txn.txn, pending.number))\n",
        "            leader.send_query(rank, Query(leader.epoch, txn.txn, pending.number)\n"
        "            if txn.step is not TxnStep.MAPPING else __import__('kvcached_dist.coord.core.messages',"
        " fromlist=['Map']).Map(leader.epoch, txn.txn))\n",
    ),
    Mutant(
        "duplicate-map-works-again",
        "S9: a repeated MAP is done again",
        CORE + "participant.py",
        "        if WorkKind.MAP in record.issued:\n",
        "        if False:\n",
    ),
    Mutant(
        "duplicate-unmap-works-again",
        "S9: a repeated UNMAP is done again",
        CORE + "participant.py",
        "        if WorkKind.UNMAP in record.issued:\n",
        "        if False:\n",
    ),
    Mutant(
        "duplicate-reserve-works-again",
        "S9: a repeated RESERVE is done again",
        CORE + "participant.py",
        "        if message.txn in self._records:\n            self._answer_again(message.txn)\n            return\n",
        "",
    ),
    Mutant(
        "duplicate-answer-counts-twice",
        "S9: an answer counts although it is not awaited",
        CORE + "commit.py",
        "txn.step is not expected or rank not in txn.waiting:",
        "txn.step is not expected:",
    ),
    Mutant(
        "abort-keeps-the-handles",
        "L3: an aborted reservation is not released",
        CORE + "participant.py",
        "        self._issue(record, WorkKind.ABORT)\n",
        "",
    ),
    Mutant(
        "abort-frees-the-runs-late",
        "S6: the next RESERVE meets the runs of an ABORT that is under way",
        CORE + "participant.py",
        "        if not record.adopted:\n            self.held.become(record.runs, None)\n        self._issue(record, WorkKind.ABORT)",
        "        self._issue(record, WorkKind.ABORT)",
    ),
    Mutant(
        "beat-counts-reserved",
        "S10: a beat from before the ABORT is compared with the count after it",
        CORE + "participant.py",
        "busy = any(record.queued or record.phase is TxnPhase.RESERVED for record",
        "busy = any(record.queued for record",
    ),
    Mutant(
        "reserve-overtakes-unretire",
        "M4: adopting retained runs whose UNRETIRE is still in the stream",
        CORE + "participant.py",
        "        self._adopt_cancelled(message.runs)\n",
        "",
    ),
    Mutant(
        "failed-rank-is-not-told",
        "L2: the rank whose answer is missing lives and is not told",
        CORE + "leader.py",
        "            if rank != LEADER:\n                self.send(Rank(rank), Fail(self.epoch, cause))",
        "            if rank != LEADER and rank != cause.rank:\n                self.send(Rank(rank), Fail(self.epoch, cause))",
    ),
    Mutant(
        "two-transactions",
        "S6: a grow opens while a reclaim is under way",
        CORE + "demand.py",
        "        if leader.commit.txn is not None or not leader.active or leader.quiescent():\n            return\n",
        "        if not leader.active or leader.quiescent():\n            return\n",
    ),
    Mutant(
        "null-page-retires",
        "S3: the null page is given back",
        CORE + "reclaim.py",
        "fits = run.first > 0 and may_retire",
        "fits = may_retire",
    ),
    Mutant(
        "no-lease",
        "L2: silence for a lease goes unnoticed",
        CORE + "silence.py",
        "silent > leader.policy.lease:",
        "silent > 100 * leader.policy.lease:",
    ),
    Mutant(
        "no-deadline-for-an-operation",
        "L1: an operation waits for as long as the work takes",
        CORE + "demand.py",
        "elif leader.now >= waiting.deadline or (txn is not None and txn.late) or waiting.refusals >= REFUSALS_MAX:",
        "elif waiting.refusals >= REFUSALS_MAX:",
    ),
    Mutant(
        "drain-never-cancelled",
        "L1: a shortage waits for a retirement to drain",
        CORE + "demand.py",
        '            leader.commit.cancel_retirement("an operation needs the blocks")\n            self.advance()\n',
        "            pass\n",
    ),
    Mutant(
        "reserve-only-ever-refused",
        "L5: nothing is ever affordable again after a refusal",
        CORE + "policy.py",
        "        return now < self.until\n",
        "        return self.until > 0\n",
    ),
    # ------------------------------------------------------------------ the applying of marks
    Mutant(
        "entries-apply-twice",
        "S12: an entry of a mark is applied twice",
        "kvcached_dist/marks.py",
        "        for entry in mark.entries:\n            self.apply_entry(entry)\n",
        "        for entry in (*mark.entries, *mark.entries[:1]):\n            self.apply_entry(entry)\n",
    ),
    Mutant(
        "mark-unchecked",
        "S5: a mark is applied without comparing the digest",
        "kvcached_dist/marks.py",
        "        self._replica.check(mark)\n",
        "",
    ),
    Mutant(
        "digest-without-counts",
        "S5: the digest does not see how much was taken",
        CORE + "replica.py",
        "_pack_op(kind, domain, blocks, available, ids_crc)",
        "_pack_op(kind, domain, 0, 0, 0)",
    ),
    Mutant(
        "retire-leaves-the-free-list",
        "S4: RETIRE does not take the runs out of the free list",
        CORE + "replica.py",
        "                free_list.retire(run.first, run.count)\n",
        "                pass\n",
    ),
    Mutant(
        "publish-on-arrival",
        "S5: a rank publishes when its own MAP is done",
        "kvcached_dist/marks.py",
        "                self._participant.publish(txn, runs)\n                self._replica.apply(entry)\n                self._faults",
        "                self._replica.apply(entry)\n                self._faults",
    ),
    Mutant(
        "unretire-is-physical-only",
        "S5: UNRETIRE does not give the blocks back",
        "kvcached_dist/marks.py",
        "                self._participant.unretire(txn)\n                self._replica.apply(entry)\n",
        "                self._participant.unretire(txn)\n                self._replica.next_index += 1\n",
    ),
)

_RANK_LOCAL = Mutant(
    "retire-from-a-rank-local-view",
    "M5: a rank decides with its own free list which runs to retire",
    CORE + "replica.py",
    "            free_list = self.free_lists[run.domain]\n            try:",
    "            free_list = self.free_lists[run.domain]\n"
    "            if self.rank > 0 and free_list.available() < 4:\n                continue\n            try:",
)

ALL = (*MUTANTS, *DEMAND, _RANK_LOCAL)

UNBROKEN = Mutant("unbroken", "nothing", CORE + "ledger.py", "LEADER = Rank(0)\n", "LEADER = Rank(0)\n")
"""The copy without a break: what is found in it says nothing about the mutants."""
