"""What must hold, judged from outside: the oracle sees messages, marks and memory, never the state of the core."""

from __future__ import annotations

from collections.abc import Sequence

from kvcached_dist.coord.core import messages as m
from kvcached_dist.coord.core.effects import Work
from kvcached_dist.coord.core.entries import Entry, Growable, Mark, Publish, Quarantine, Reclaimed, Retire, Unretire
from kvcached_dist.coord.core.types import Run

from .clock import Loop
from .hardware import RankMemory, mask
from .views import Page, RankView, TxnView, Violation


class Oracle:
    """All checks over one world.

    Args:
        loop: virtual time, for the trace.
        pages: logical capacity per domain.
        blocks_per_page: blocks of a page, per domain.
    """

    def __init__(self, loop: Loop, pages: Sequence[int], blocks_per_page: Sequence[int]) -> None:
        self.loop = loop
        self.pages = tuple(pages)
        self.blocks_per_page = tuple(blocks_per_page)
        self.ranks: list[RankView] = []
        self.runs: dict[Run, tuple[Page, int]] = {}
        self.txns: dict[int, TxnView] = {}
        self.log: list[Entry] = []
        self.ops: list[tuple[object, ...]] = []
        self.checks: dict[str, int] = {}
        self.reformed = False
        """Epochs have changed: a restarted rank holds nothing for retained runs (M1)."""
        self.repeating = False
        """A message is delivered once more: its answer says what was, not what is."""
        self._newest = 0

    def add_rank(self, memory: RankMemory) -> None:
        """Ranks in order."""
        domains = len(self.pages)
        self.ranks.append(RankView(memory, [0] * domains, [0] * domains))

    def require(self, condition: bool, rule: str, detail: str) -> None:
        """Count a check; raise when it fails."""
        self.checks[rule] = self.checks.get(rule, 0) + 1
        if not condition:
            raise Violation(rule, detail)

    def living(self) -> list[tuple[int, RankView]]:
        """Ranks that have not died."""
        return [(rank, view) for rank, view in enumerate(self.ranks) if not view.gone]

    # ------------------------------------------------------------------ messages

    def leader_sends(self, to: int, message: m.Message) -> None:
        """A message of the leader to a rank, its own included."""
        if not isinstance(message, m.TxnMessage) or isinstance(message, m.Query):
            return
        name = type(message).__name__
        if isinstance(message, m.Reserve) and message.txn not in self.txns:
            self._claim(message.txn, message.runs)
        view = self.txns.get(message.txn)
        self.require(view is not None, "S12", f"{name} of txn {message.txn}, which nothing has opened")
        assert view is not None
        if not isinstance(message, m.Release):
            self.require((name, to) not in view.sent, "S9", f"{name} of txn {message.txn} sent twice to rank {to}")
        first = not any(sent == name for sent, _ in view.sent)
        view.sent.add((name, to))
        if first:
            self._first(message, view)

    def _claim(self, txn: int, runs: tuple[Run, ...]) -> None:
        self.require(txn > self._newest, "S12", f"transaction {txn} after {self._newest}")
        before = self.txns.get(self._newest)
        if before is not None and before.verdict == "aborted":
            asked = {rank for name, rank in before.sent if name == "Reserve"}
            told = {rank for name, rank in before.sent if name == "Abort"}
            self.require(asked == told, "S7", f"txn {self._newest}: asked {asked}, ABORT went to {told}")
        self._newest = txn
        self._forget_released()
        known = [self.runs.get(run) for run in runs]
        adopted = all(state is not None for state in known)
        for run, state in zip(runs, known, strict=True):
            if state is None:
                clash = [other for other in self.runs if _overlap(other, run)]
                self.require(not clash, "S6", f"RESERVE txn {txn} over {run}, which overlaps {clash}")
        if adopted:
            owners = {state[1] for state in known if state is not None}
            batch = self.txns[next(iter(owners))]
            identical = len(owners) == 1 and batch.runs == runs and self._is_retained(batch)
            self.require(identical, "S6", f"RESERVE txn {txn} of {runs}: not an identical retained batch ({known})")
        self.require(adopted or not any(known), "S6", f"RESERVE txn {txn} mixes new and retained runs: {known}")
        for run in runs:
            self.runs[run] = (Page.OPEN, txn)
        self.txns[txn] = TxnView(runs, grow=True, adopted=adopted)

    def _forget_released(self) -> None:
        """Runs that every rank has released are absent, whether that is logged yet or not."""
        for run, (state, txn) in list(self.runs.items()):
            view = self.txns[txn]
            if state is not Page.RETIRING or view.verdict not in ("", "reclaimed"):
                continue
            released = all(
                ("Released", rank) in view.answered and not other.memory.holds_any(run) for rank, other in self.living()
            )
            if released:
                view.verdict = "reclaimed"
                del self.runs[run]

    def _is_retained(self, view: TxnView) -> bool:
        """Whether a batch was never published, is mapped somewhere, and every rank has said how far it came (M7)."""
        if view.verdict in ("retained", "restored"):
            return True
        if view.verdict:
            return False
        if not view.grow:
            # Cancelled before any UNMAP (its UNRETIRE may still wait for a mark), or restored.
            unmapped = any(name == "Unmap" for name, _ in view.sent)
            restored = all(("Restored", rank) in view.answered for rank, _ in self.living())
            return view.retained and (restored or not unmapped)
        settled = all(view.answered & {("Mapped", rank), ("MapFailed", rank)} for rank, _ in self.living())
        return settled and any(name == "MapFailed" for name, _ in view.answered)

    def _first(self, message: m.TxnMessage, view: TxnView) -> None:
        txn, name = message.txn, type(message).__name__
        match message:
            case m.Abort():
                self._verdict(txn, view, "aborted")
                mapped = any(sent == "Map" for sent, _ in view.sent)
                self.require(not mapped, "S1", f"ABORT of txn {txn} after its MAP was sent (M3)")
                for run in view.runs:
                    if not view.adopted:
                        del self.runs[run]
                if view.adopted:
                    self.txns[txn].verdict = "retained"
            case m.Map():
                self.require(view.verdict == "", "S1", f"MAP of txn {txn}, which is {view.verdict}")
                for rank, other in self.living():
                    short = [run for run in view.runs if not other.memory.holds(run)]
                    self.require(not short, "S7", f"MAP of txn {txn}, but rank {rank} holds no handles of {short}")
            case m.Unmap():
                self.require(view.verdict == "", "S4", f"UNMAP of txn {txn}, which is {view.verdict}")
                for rank, _ in self.living():
                    drained = ("Drained", rank) in view.answered
                    self.require(drained, "S4", f"UNMAP of txn {txn}, but rank {rank} has not drained (M4)")
            case m.Release():
                for rank, other in self.living():
                    kept = [run for run in view.runs if other.memory.is_mapped(run)]
                    self.require(not kept, "S4", f"RELEASE of txn {txn}, but rank {rank} maps {kept} (M9)")
            case _:
                self.require(name in ("Reserve", "Restore"), "S12", f"the leader sent {name} of txn {txn}")

    def rank_answers(self, rank: int, message: m.Message) -> None:
        """An answer of a rank, whether it arrives or not."""
        if isinstance(message, m.State) or not isinstance(message, m.TxnMessage):
            return
        view = self.txns.get(message.txn)
        if view is None:
            return
        view.answered.add((type(message).__name__, rank))
        this = self.ranks[rank]
        match message:
            case m.Drained() if not self.repeating:
                behind = this.finished >= this.retired_at.get(message.txn, 1 << 60)
                self.require(behind, "S4", f"rank {rank} says DRAINED of txn {message.txn} with batches before it")
            case m.Mapped() | m.Restored() if not self.repeating:
                # A rank that was restarted meanwhile has nothing of runs that were never published (M1).
                runs = [run for run in view.runs if not view.retained or this.memory.holds_any(run)]
                bare = [run for run in runs if not this.memory.is_mapped(run)]
                self.require(not bare, "S2", f"rank {rank} says {type(message).__name__}, but has not mapped {bare}")
            case m.Refused():
                left = this.memory.created_by(message.txn)
                self.require(left == 0, "S7", f"rank {rank} refused txn {message.txn} and keeps {left} handles of it")
            case _:
                pass

    def work_begins(self, rank: int, work: Work) -> None:
        """A rank begins driver work: none lies between its last yes and the publish (S11)."""
        view = self.txns.get(work.txn)
        if view is None or not view.grow:
            return
        said_yes = ("Mapped", rank) in view.answered and view.verdict == ""
        self.require(not said_yes, "S11", f"rank {rank} begins {work.kind.value} of txn {work.txn} after MAPPED")

    # ------------------------------------------------------------------ the log

    def marked(self, mark: Mark, live: Sequence[int]) -> None:
        """The leader broadcasts a mark. ``live`` is the mask of pages that its engine uses, per domain."""
        self.require(
            mark.first_index == len(self.log),
            "S12",
            f"a mark starts at log index {mark.first_index}, the log has {len(self.log)} entries",
        )
        for entry in mark.entries:
            self.log.append(entry)
            self._logged(entry, live)

    def _logged(self, entry: Entry, live: Sequence[int]) -> None:
        match entry:
            case Publish(txn=txn, runs=runs):
                self._publish(txn, runs)
            case Retire(txn=txn, runs=runs, retained=retained):
                self._retire(txn, runs, retained, live)
            case Unretire(txn=txn):
                view = self.txns[txn]
                self.require(
                    not any(name == "Unmap" for name, _ in view.sent), "S4", f"UNRETIRE of txn {txn} after UNMAP (M4)"
                )
                self._verdict(txn, view, "restored")
                for run in view.runs:
                    if self.runs.get(run) == (Page.RETIRING, txn):
                        self.runs[run] = (Page.OPEN, txn) if view.retained else (Page.PUBLISHED, txn)
            case Reclaimed(txn=txn):
                view = self.txns[txn]
                self._forget_released()
                self.require(view.verdict == "reclaimed", "S10", f"RECLAIMED txn {txn}, not released by every rank")
            case Quarantine(runs=runs):
                for run in runs:
                    self.require(run in self.runs, "S6", f"QUARANTINE of {run}, which nobody holds")
                    self.runs[run] = (Page.QUARANTINED, self.runs[run][1])
            case Growable(domain=domain, blocks=blocks):
                most = self._growable_pages(domain) * self.blocks_per_page[domain]
                self.require(0 <= blocks <= most, "S6", f"GROWABLE {blocks} of domain {domain}, at most {most} (M6)")
            case _:
                pass

    def _publish(self, txn: int, runs: tuple[Run, ...]) -> None:
        view = self.txns.get(txn)
        self.require(view is not None and view.runs == runs, "S2", f"PUBLISH txn {txn} of {runs}: never reserved")
        assert view is not None
        self._verdict(txn, view, "published")
        for run in runs:
            state = self.runs.get(run)
            expected = Page.OPEN if view.grow else Page.RETIRING
            self.require(state == (expected, txn), "S6", f"PUBLISH txn {txn} of {run} in state {state}")
            for rank, other in self.living():
                self.require(other.memory.is_mapped(run), "S2", f"PUBLISH txn {txn}: rank {rank} has not mapped {run}")
                self.require(run in other.memory.filled, "S13", f"PUBLISH txn {txn}: rank {rank} has not filled {run}")
            self.runs[run] = (Page.PUBLISHED, txn)

    def _retire(self, txn: int, runs: tuple[Run, ...], retained: bool, live: Sequence[int]) -> None:
        self.require(txn > self._newest, "S12", f"transaction {txn} after {self._newest}")
        self._newest = txn
        for run in runs:
            state = self.runs.get(run)
            if retained:
                held = state is not None and state[0] is not Page.PUBLISHED and self._is_retained(self.txns[state[1]])
                self.require(held, "S6", f"RETIRE txn {txn} of {run}, not retained: {state}")
            else:
                published = state is not None and state[0] is Page.PUBLISHED
                self.require(published, "S6", f"RETIRE txn {txn} of {run} in state {state}")
                self.require(run.first > 0, "S3", f"RETIRE txn {txn} of the null page {run}")
                free = not live[run.domain] & mask(run)
                self.require(free, "S6", f"RETIRE txn {txn} of {run}, in use on the leader")
            self.runs[run] = (Page.RETIRING, txn)
        self.txns[txn] = TxnView(runs, grow=False, retained=retained)

    def _verdict(self, txn: int, view: TxnView, verdict: str) -> None:
        self.require(view.verdict == "", "S1", f"txn {txn} is {verdict} and was {view.verdict}")
        view.verdict = verdict

    def _growable_pages(self, domain: int) -> int:
        """Pages that could still be had: absent ones, those of the open grow until it is published (M6), and
        retained ones, which the identical retry may adopt.
        """
        self._forget_released()
        pages = self.pages[domain]
        for run, (state, owner) in self.runs.items():
            reachable = state is Page.OPEN or (state is Page.RETIRING and self._is_retained(self.txns[owner]))
            if run.domain == domain and not reachable:
                pages -= run.count
        return pages

    def applying(self, rank: int, entry: Entry) -> None:
        """A rank puts the next entry in force."""
        this = self.ranks[rank]
        in_order = this.log_index < len(self.log) and self.log[this.log_index] == entry
        self.require(in_order, "S12", f"rank {rank} applies {entry} as entry {this.log_index}")
        this.log_index += 1
        match entry:
            case Publish(runs=runs):
                for run in runs:
                    self.require(this.memory.is_mapped(run), "S3", f"rank {rank} publishes {run}, not mapped there")
                    this.published[run.domain] |= mask(run)
            case Retire(txn=txn, runs=runs):
                this.retired_at[txn] = this.launched
                for run in runs:
                    used = this.live[run.domain] & mask(run)
                    self.require(not used, "S6", f"rank {rank} retires {run}, where blocks are live")
                    this.published[run.domain] &= ~mask(run)
            case Unretire(txn=txn) if not self.txns[txn].retained:
                for run in self.txns[txn].runs:
                    self.require(this.memory.is_mapped(run), "S3", f"rank {rank} takes back {run}, not mapped there")
                    this.published[run.domain] |= mask(run)
            case _:
                pass

    # ------------------------------------------------------------------ memory and steps

    def before_unmap(self, rank: int, run: Run) -> None:
        """A rank is about to take a mapping away."""
        bits = mask(run)
        for other, view in self.living():
            published = view.published[run.domain] & bits
            self.require(not published, "S3", f"rank {rank} unmaps {run}, published on rank {other}")
        this = self.ranks[rank]
        touched = this.live[run.domain] & bits or any(batch[run.domain] & bits for batch in this.batches)
        self.require(not touched, "S4", f"rank {rank} unmaps {run} under a batch that uses it")

    def launch(self, rank: int) -> None:
        """A batch over all live blocks starts on a rank."""
        this = self.ranks[rank]
        this.launched += 1
        touched = tuple(mask_of_domain | 1 for mask_of_domain in this.live)
        this.batches.append(touched)
        self._touch(rank, touched, "launches")

    def finish(self, rank: int) -> None:
        """The oldest batch of a rank is done."""
        this = self.ranks[rank]
        this.finished += 1
        self._touch(rank, this.batches.pop(0), "finishes")

    def _touch(self, rank: int, touched: tuple[int, ...], what: str) -> None:
        mapped = self.ranks[rank].memory.mapped
        for domain, pages in enumerate(touched):
            stray = pages & ~mapped[domain]
            self.require(not stray, "S4", f"rank {rank} {what} a batch over unmapped pages {stray:b} of {domain}")

    def operated(self, rank: int, what: str, ids: object) -> None:
        """An engine operation and what it returned: the same on every rank (S5)."""
        this = self.ranks[rank]
        record = (what, ids)
        if this.ops == len(self.ops):
            self.ops.append(record)
        else:
            leader = self.ops[this.ops]
            self.require(leader == record, "S5", f"operation {this.ops}: rank {rank} {record}, elsewhere {leader}")
        this.ops += 1

    # ------------------------------------------------------------------ change of epoch

    def resolved(self, snapshot: m.Snapshot) -> None:
        """A new epoch begins with ``snapshot``: compare it with what rule M2 makes of the open transaction."""
        self.reformed = True
        self._forget_released()
        expected: dict[Run, str] = {}
        for run, (state, txn) in list(self.runs.items()):
            expected[run] = what = self._after_epoch(state, self.txns[txn])
            view = self.txns[txn]
            view.verdict = view.verdict or "resolved"
            if what == "absent":
                del self.runs[run]
            elif what == "retained":
                view.verdict = "retained"
                self.runs[run] = (Page.OPEN, txn)
            elif what == "published":
                self.runs[run] = (Page.PUBLISHED, txn)
        named = {item.run: "published" if item.published else "retained" for item in snapshot.runs}
        named |= dict.fromkeys(snapshot.quarantined, "quarantined")
        for run in expected.keys() | named.keys():
            wanted, got = expected.get(run, "absent"), named.get(run, "absent")
            # A quarantine that no mark has carried yet is known to the leader alone.
            right = wanted == got or (wanted, got) == ("retained", "quarantined")
            self.require(right, "S1", f"the snapshot names {run} as {got}, it has to be {wanted} (M2)")
            if got == "quarantined":
                self.runs[run] = (Page.QUARANTINED, self.runs[run][1])
        self.require(snapshot.next_index == len(self.log), "S12", f"snapshot at {snapshot.next_index} (M1)")
        self.ops.clear()

    def _after_epoch(self, state: Page, view: TxnView) -> str:
        sent = {name for name, _ in view.sent}
        if state in (Page.PUBLISHED, Page.QUARANTINED):
            return str(state.value)
        if state is Page.OPEN:
            return "retained" if view.adopted or "Map" in sent or not view.grow else "absent"
        if "Unmap" in sent and "Restore" not in sent:
            return "absent"
        return "retained" if view.retained else "published"

    def joined(self, rank: int, snapshot: m.Snapshot, *, restarted: bool) -> None:
        """A rank has processed the snapshot."""
        this = self.ranks[rank]
        this.log_index, this.ops = snapshot.next_index, 0
        this.live = [0] * len(self.pages)
        this.published = [0] * len(self.pages)
        this.retired_at.clear()
        for run, (state, _) in self.runs.items():
            if state is Page.PUBLISHED:
                self.require(this.memory.is_mapped(run), "S3", f"rank {rank} has joined without {run}")
                this.published[run.domain] |= mask(run)
            elif restarted:
                self.require(not this.memory.holds_any(run), "S10", f"restarted rank {rank} holds {run} (M1)")
        for txn, view in self.txns.items():
            if view.verdict in ("resolved", "reclaimed", "aborted"):
                left = [run for run in view.runs if run not in self.runs and this.memory.holds_any(run)]
                self.require(not left, "L3", f"rank {rank} has joined and keeps {left} of txn {txn}")

    # ------------------------------------------------------------------ at rest

    def at_rest(self, counted: Sequence[tuple[int, ...]]) -> None:
        """Nothing is open or queued. ``counted`` is the leader's count of handles per rank and pool."""
        self._forget_released()
        for txn, seen in self.txns.items():
            if seen.verdict == "aborted":
                for rank, view in self.living():
                    left = view.memory.created_by(txn)
                    self.require(left == 0, "L3", f"txn {txn} was aborted and rank {rank} keeps {left} handles of it")
        held_runs = list(self.runs)
        for rank, view in self.living():
            needed = [
                run
                for run in held_runs
                if not self.reformed or self.runs[run][0] is Page.PUBLISHED or view.memory.holds_any(run)
            ]
            expected = view.memory.counted(needed)
            held = tuple(view.memory.held)
            self.require(held == expected, "S10", f"rank {rank} holds {held} handles, its runs need {expected}")
            self.require(
                counted[rank] == held, "S10", f"rank {rank} holds {held} handles, the leader counts {counted[rank]}"
            )


def _overlap(one: Run, other: Run) -> bool:
    """Whether both runs name a page in common."""
    return one.domain == other.domain and one.first < other.end and other.first < one.end
