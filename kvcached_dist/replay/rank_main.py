"""Process of one rank: device, coordinator, pipeline, engine; and one report, whatever happens."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .. import exit_hooks
from ..coordinator import Coordinator
from ..errors import CapacityError, ConfigError, Divergence, GroupFailed, InvariantViolation, KVDistError
from ..fault_specs import FaultPlan
from ..world import World
from .engine import Engine, Progress
from .options import ReplayOptions, shape_of
from .outcome import Failure, RankOutcome
from .pipeline import Pipeline, PipelineBroken
from .report import EXIT_CORRUPT, EXIT_FAILED, EXIT_INPUT, EXIT_OK

if TYPE_CHECKING:
    from .._native import Device

_log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long the loop may take to come out of a broken wait by itself before the process is ended."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread keeps the interpreter: with the default of 5 ms an agent waits that long for a busy scheduler."""

CAUSE_WAIT_S = 2.0
"""How much longer than a lease a rank waits for the coordinator to name the cause of a broken pipeline."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits.

    Attributes:
        rank: world rank.
        session: name of this run, equal on all ranks.
        local_rank: number of the rank on its host; picks the GPU.
    """

    rank: int
    session: str
    local_rank: int


Report = Callable[[RankOutcome], None]


def run_rank(
    options: ReplayOptions, seat: Seat, store: TCPStore | None, report: Report, progress: Progress | None
) -> int:
    """Run one rank to its end.

    Args:
        options: of the run, equal on all ranks.
        seat: which rank this is.
        store: bootstrap store; None for a world of one.
        report: takes the outcome, exactly once.
        progress: called after every step on this rank; None for no news.

    Returns:
        The exit status of the process.

    Blocks: for the run. When the coordinator has failed and the loop does not come back within a grace of a
    second, the outcome is reported and the process ended from a second thread.
    """
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    guard = _Guard(report)
    try:
        return _run(options, seat, store, guard, progress)
    except Exception as error:
        # Everything a rank can meet ends in one report; an unexpected error keeps its traceback in the log.
        failure = _failure_of(error, seat.rank, guard.coordinator)
        if failure.kind == "unexpected":
            _log.exception("event=replay_rank_failed rank=%d", seat.rank)
        guard.finish(failure)
        return _status(failure)
    finally:
        guard.leave()


def _run(options: ReplayOptions, seat: Seat, store: TCPStore | None, guard: _Guard, progress: Progress | None) -> int:
    config = options.config()
    device = _device(options, seat)
    model = options.model_spec(device.granule_bytes)
    world = World(rank=seat.rank, tp=options.tp, pp=options.pp)
    coordinator = Coordinator.start(
        world=world,
        stage=model.stage(world.pp_rank, options.pp),
        device=device,
        config=config,
        store=store,  # type: ignore[arg-type]  # torch's stub of clone() promises less than a store does
        session=seat.session,
        faults=FaultPlan.parse(options.faults, options.world_size),
    )
    guard.watch(coordinator)
    pipeline = Pipeline(
        seat.rank,
        options.tp,
        options.pp,
        None if store is None else PrefixStore(f"replay/{seat.session}", store),
        # A message may legitimately wait for a growth that waits for a rank that hangs within its lease.
        timeout_s=2 * config.lease_s + config.growth_deadline_s,
    )
    engine = Engine(
        coordinator, pipeline, options.load(), shape_of(model),
        cached_tokens=_cache_bound(config.max_cached_tokens), speed=options.speed, progress=progress,
    )  # fmt: skip
    guard.engine = engine
    engine.run()
    outcome = guard.finish(None)
    pipeline.close()
    return EXIT_CORRUPT if outcome.corrupt_blocks else EXIT_OK


def leave(status: int) -> NoReturn:
    """End this process now, after its rank has reported and closed everything.

    The interpreter is not finalised: daemon threads of torch that are inside a wait have aborted processes there.
    """
    exit_hooks.run_hooks()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Guard:
    """Makes sure that a rank reports once, also when its loop is stuck in a collective that cannot be woken."""

    def __init__(self, report: Report) -> None:
        self.coordinator: Coordinator | None = None
        self.engine: Engine | None = None
        self._report = report
        self._lock = threading.Lock()
        self._outcome: RankOutcome | None = None
        self._left = threading.Event()

    def watch(self, coordinator: Coordinator) -> None:
        """End the process when this coordinator has failed and the loop does not come out of it."""
        self.coordinator = coordinator
        threading.Thread(target=self._watch, name="replay-guard", daemon=True).start()

    def finish(self, failure: Failure | None) -> RankOutcome:
        """Report, once; later calls return the first report."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._collect(failure)
                self._report(self._outcome)
            return self._outcome

    def leave(self) -> None:
        """The loop is over: close the coordinator."""
        self._left.set()
        if self.coordinator is not None:
            self.coordinator.close()

    def _collect(self, failure: Failure | None) -> RankOutcome:
        rank = self.coordinator.world.rank if self.coordinator is not None else 0
        outcome = RankOutcome(rank=rank)
        if self.engine is not None:
            outcome = self.engine.outcome()
        outcome.failure = failure
        return outcome

    def _watch(self) -> None:
        coordinator = self.coordinator
        while coordinator is not None and not self._left.is_set():
            failure = coordinator.await_failure(0.5)
            if failure is None:
                continue
            if not self._left.wait(GRACE_S):
                self.finish(_group(failure))
                leave(EXIT_FAILED)


def _failure_of(error: Exception, rank: int, coordinator: Coordinator | None) -> Failure:
    """The first cause of an error, in the operator's words."""
    if isinstance(error, PipelineBroken) and coordinator is not None:
        # A lost peer breaks the pipeline within milliseconds; who it was is the coordinator's to say.
        first = coordinator.await_failure(coordinator.config.lease_s + CAUSE_WAIT_S)
        return _group(first) if first is not None else Failure("group", rank, "the pipeline", str(error))
    if isinstance(error, GroupFailed):
        return _group(error)
    if isinstance(error, ConfigError):
        return Failure("input", rank, "start", str(error))
    if isinstance(error, CapacityError):
        return Failure("capacity", rank, "the replay", str(error))
    if isinstance(error, Divergence | InvariantViolation):
        return Failure("divergence", rank, "the replay", str(error))
    if isinstance(error, KVDistError | TimeoutError):
        return Failure("group", rank, "the replay", str(error))
    return Failure("unexpected", rank, "the replay", f"{type(error).__name__}: {error}")


def _group(failure: GroupFailed) -> Failure:
    kind = "divergence" if failure.cause.kind.name in ("DIVERGENCE", "INVARIANT") else "group"
    return Failure(kind, int(failure.rank), failure.phase, str(failure.cause))


def _status(failure: Failure) -> int:
    return {"input": EXIT_INPUT, "capacity": EXIT_INPUT, "divergence": EXIT_CORRUPT}.get(failure.kind, EXIT_FAILED)


def _cache_bound(tokens: int) -> int:
    return tokens if tokens >= 0 else 1 << 62


def _device(options: ReplayOptions, seat: Seat) -> Device:
    from .. import _native

    if options.backend == "cuda":
        return _native.CudaDevice(seat.local_rank % max(1, torch.cuda.device_count()))
    return _native.HostDevice(options.capacity_bytes, options.config().host_granule_bytes)


__all__ = ["Seat", "leave", "run_rank"]
