"""One rank of the replay: scheduler, pipeline, stamps and coordinator in one loop.

A step, at the same place on every rank relative to the leader's mark::

    wait for the stage before      (later stages only: they are behind)
    coordinator.step()             entries of the log take effect
    result of step - depth         finished requests leave, one retraction
    schedule                       windows retire, blocks are allocated
    write                          every new block gets its stamp in every pool and layer
    hand on                        activations to the next stage, results from the last one
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..coord.core.entries import Evict, Retire
from ..errors import CapacityError
from .batch import Batch
from .outcome import Event, MemoryCurve, RankOutcome, percentile
from .pipeline import Pipeline
from .rank_store import CoordinatedStore
from .scheduler import Scheduler, SchedulerConfig
from .sequence import Shape
from .workload import Request, VirtualClock

if TYPE_CHECKING:
    from ..coordinator import Coordinator, StepReport

IDLE_PAUSE_S = 0.001
"""Wall-clock pause of a step in which nothing runs, so that idle ranks do not spin."""

SHORT_PAUSE_S = 0.002
"""Wall-clock pause of a step that ran short, so that reclaim and back-off have time to act."""

MEMORY_WAIT_S = 300.0
"""Longest wait of the only request for memory that this run does not hold: a neighbour's, or above a limit."""

MEMORY_NOTICE_S = 5.0
"""After so much of it the operator is told."""

DRAIN_STEPS_MAX = 20_000
"""Steps after the trace in which memory must come back."""

EVENTS_MAX = 20_000
"""Events kept per rank; a run with more of them only counts on."""

Progress = Callable[["Engine"], None]

_log = logging.getLogger(__name__)


class Engine:
    """The loop of one rank.

    Args:
        coordinator: of this rank, started.
        pipeline: of this rank.
        requests: the trace, equal on all ranks.
        shape: the model's domains.
        cached_tokens: bound of the prefix cache.
        speed: virtual seconds per wall-clock second; None: as fast as possible.
        progress: called after every step, for people.

    Threads: one; :meth:`outcome` may be called from another while the loop is stuck.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        pipeline: Pipeline,
        requests: list[Request],
        shape: Shape,
        *,
        cached_tokens: int,
        speed: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.pipeline = pipeline
        self.requests = requests
        self.clock = VirtualClock()
        self.curve = MemoryCurve()
        self.step = 0
        self.store = CoordinatedStore(coordinator)
        config = SchedulerConfig(depth=pipeline.depth, cached_tokens=cached_tokens)
        self.scheduler = Scheduler(requests, shape, config, self.store)
        self._speed = speed
        self._progress = progress
        self._checksums: dict[int, int] = {}
        self._stalls_ms: list[float] = []
        self._events: list[Event] = []
        self._faults_hit = 0
        self._retracted = 0
        self._idle: bool | None = None
        self._idle_since = 0
        self._flushed_at: int | None = None
        self._starving_since: float | None = None
        self._starving_told = False
        self._started = time.monotonic()

    def run(self) -> None:
        """Replay the whole trace, then flush the cache and wait until memory is back.

        Raises:
            GroupFailed: a rank was lost or the protocol failed.
            CapacityError: the memory is too small for a single request, or did not come in time.
            PipelineBroken: a message between stages failed; the coordinator knows the first cause.
            Divergence: a peer scheduled something else.

        Blocks: for the run; every single wait in it is bounded.
        """
        self._started = time.monotonic()
        self.curve.sample(0, self._physical())
        while not self._one_step():
            self.step += 1
        self.pipeline.drain(self._checksums)
        self._checksums.clear()

    def _one_step(self) -> bool:
        """Do one step; returns whether it was the last one."""
        step = self.step
        self.pipeline.before_step(step)
        report = self._mark()
        last = self._flushed_at is not None and step > self._flushed_at + 1 and report.settled
        due = step - self.pipeline.depth
        if due in self._checksums:
            self.pipeline.result(due, self._checksums.pop(due))
        self.scheduler.begin(step, self.clock.now_us)
        self._tell_demand()
        batch = self.scheduler.schedule(step)
        for domain, blocks in batch.writes.items():
            self.store.stamps.write(domain, blocks)
        self._checksums[step] = batch.checksum
        self.pipeline.after_step(step, batch.checksum, last=last)
        self._finish_step(batch, report)
        if self.scheduler.done and self._flushed_at is None:
            self.scheduler.flush()
            self._flushed_at = step
        elif self._flushed_at is not None and step > self._flushed_at + DRAIN_STEPS_MAX:
            raise TimeoutError(f"memory did not come back within {DRAIN_STEPS_MAX} steps after the trace")
        return last

    def _mark(self) -> StepReport:
        start = time.perf_counter()
        self.store.waited_s = 0.0
        report = self.coordinator.step()
        self.store.waited_s += time.perf_counter() - start
        self.store.note(report.entries)
        for entry in report.entries:
            if isinstance(entry, Evict):
                self.scheduler.evict(entry.tokens)
            elif isinstance(entry, Retire):
                self._event("reclaim", self.store.runs_text(entry.runs))
        return report

    def _tell_demand(self) -> None:
        idle = not self.scheduler.busy
        if idle != self._idle:
            self._idle = idle
            self._idle_since = self.step
            self.coordinator.idle(idle)
        self.coordinator.demand(self.scheduler.demand())

    def _finish_step(self, batch: Batch, report: StepReport) -> None:
        self.clock.advance(batch.prefill_tokens)
        self._stalls_ms.append(self.store.waited_s * 1e3)
        self._observe()
        # A paced run lives through its pauses: jumping would leave the others waiting for a mark.
        if self._idle and report.settled and self.step > self._idle_since + 1 and self._speed is None:
            arrival = self.scheduler.next_arrival_us
            if arrival is not None:
                self.clock.jump(arrival)
        self._await_memory()
        self._pace(batch)
        if self._progress is not None:
            self._progress(self)

    def _observe(self) -> None:
        now_us = self.clock.now_us
        self.curve.sample(now_us, self._physical())
        for event in self.store.take_events(now_us):
            self._event(event.kind, event.text)
        if self.scheduler.totals.retracted != self._retracted:
            self._retracted = self.scheduler.totals.retracted
            self._event("retract", f"retraction {self._retracted}")
        if self.coordinator.faults.active:
            hits = self.coordinator.faults.collect()
            if hits != self._faults_hit:
                self._faults_hit = hits
                self._event("fault", f"driver fault {hits}")

    def _await_memory(self) -> None:
        """Go on without memory for the only request, but not for ever.

        Rank 0 alone looks at the clock: it ends the run for all, and no two ranks judge differently.
        """
        starving = self.scheduler.starving
        if starving is None or self.coordinator.world.rank:
            self._starving_since, self._starving_told = None, False
            return
        now = time.monotonic()
        if self._starving_since is None:
            self._starving_since = now
        waited = now - self._starving_since
        if waited >= MEMORY_WAIT_S:
            raise CapacityError(
                f"no memory within {MEMORY_WAIT_S:g} s for {starving}, and some rank has no memory for them although"
                " --capacity allows for it: free what other processes hold on the ranks' cards, or raise the limit of"
                " this run, and start it again"
            )
        if waited >= MEMORY_NOTICE_S and not self._starving_told:
            self._starving_told = True
            _log.warning("event=waits_for_memory longest_s=%g %s", MEMORY_WAIT_S, starving)

    def _pace(self, batch: Batch) -> None:
        if self._speed is not None:
            ahead = self._started + self.clock.now_us / 1e6 / self._speed - time.monotonic()
            # Followers wait for the next mark no longer than a lease.
            time.sleep(min(max(0.0, ahead), self.coordinator.config.lease_s / 4))
        elif batch.short:
            time.sleep(SHORT_PAUSE_S)
        elif self._idle:
            time.sleep(IDLE_PAUSE_S)

    def _physical(self) -> int:
        return self.coordinator.device.counters().bytes_created

    def _event(self, kind: str, text: str) -> None:
        if len(self._events) < EVENTS_MAX:
            self._events.append(Event(self.clock.now_us, kind, text))

    def outcome(self) -> RankOutcome:
        """What this rank knows now."""
        coordinator, scheduler, stamps = self.coordinator, self.scheduler, self.store.stamps.totals
        totals, stats = scheduler.totals, coordinator.stats
        grow, reclaim = stats.grow, stats.reclaim
        return RankOutcome(
            rank=coordinator.world.rank,
            requests=len(self.requests),
            totals={name: getattr(totals, name) for name in totals.__slots__},
            steps=self.step,
            virtual_us=self.clock.now_us,
            verified_blocks=stamps.verified,
            corrupt_blocks=stamps.corrupt,
            corruptions=[str(corruption) for corruption in stamps.first],
            physical_peak=self.curve.peak,
            physical_mean=self.curve.mean,
            physical_final=self.curve.final,
            static_bytes=coordinator.stage.static_bytes(),
            curve=self.curve.thinned(),
            events=list(self._events),
            digest=coordinator.digest,
            stall_p99_ms=percentile(self._stalls_ms, 99),
            lag_steps_max=stats.stage_lag_steps_max,
            grow={
                "foreground": stats.grow_foreground, "background": stats.grow_background,
                "aborted": stats.grow_aborted + stats.grow_retained, "p50_ms": grow.p50_ms, "p99_ms": grow.p99_ms,
            },
            reclaim={
                "completed": reclaim.count, "cancelled": stats.reclaim_cancelled, "failed": stats.reclaim_restored,
                "p50_ms": reclaim.p50_ms, "p99_ms": reclaim.p99_ms,
            },
            health={name: state.value for name, state in coordinator.health.items()},
            wall_s=time.monotonic() - self._started,
        )  # fmt: skip


__all__ = ["Engine", "Progress"]
