"""One rank in a process of its own. The supervisor makes it a Ray actor; nothing here knows Ray.

Methods return plain records, failures included: an exception that leaves a method would be an error of the rig.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import zlib
from dataclasses import dataclass, field

from .. import _native
from ..coord.links.store import connect_store
from ..coordinator import Coordinator
from ..errors import GroupFailed, KVDistError, RankLost
from ..fault_specs import FaultPlan, FaultSpec
from ..processes import boot_id, pid_namespace, start_ticks
from ..replay.stamps import Stamps
from ..world import World
from .board import RestBoard
from .options import CARD_BYTES, ChaosOptions
from .workload import Backlog, Rest, Slowest, Workload, published_pages, stamps_of

LOOPBACK = "127.0.0.1"
STORE_WAIT_S = 10.0
BOARD_FILE = "rests"
JOURNAL_FILE = "faults.jsonl"
CARD_PREFIX = "card-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is.

    Attributes:
        pid: process id.
        started: start time in clock ticks after boot; tells it from a later process with the same pid.
        host: name of the host's boot and of the pid namespace: equal in processes that can signal one another.
    """

    pid: int
    started: int
    host: str


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process needs to be a rank.

    Attributes:
        rank: world rank.
        session: name of this incarnation of the world.
        store_port: port of the store server on the ranks' host.
        run_dir: directory of the run on that host.
    """

    rank: int
    session: str
    store_port: int
    run_dir: str


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as data.

    Attributes:
        kind: name of the error's class.
        text: what it says.
        cause_kind: kind of the first cause, where the error carries one.
        cause_rank: rank of the first cause, -1 where there is none.
        at: wall clock of the moment when it reached the caller.
    """

    kind: str
    text: str
    cause_kind: str = ""
    cause_rank: int = -1
    at: float = 0.0

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Describe an error that has just been caught."""
        now = time.time()
        if isinstance(error, GroupFailed | RankLost):
            return cls(type(error).__name__, str(error), error.cause.kind.name, int(error.cause.rank), now)
        return cls(type(error).__name__, str(error), at=now)


@dataclass(frozen=True, slots=True)
class Entered:
    """How entering an epoch went.

    Attributes:
        rank: world rank.
        problem: why not.
        epoch: epoch in force.
        pages: check sum of the published pages of all domains.
        seconds: how long it took.
        at: wall clock of its end.
    """

    rank: int
    problem: Problem | None
    epoch: int
    pages: int
    seconds: float
    at: float


@dataclass(frozen=True, slots=True)
class Work:
    """How the work of one rank in one epoch ended.

    Attributes:
        rank: world rank.
        epoch: epoch of the work.
        problem: why it ended early; ``None`` where the supervisor ended it.
        backlog: requests that are not answered.
        step: steps done.
        rests: ends of waves.
        written: blocks stamped.
        verified: blocks checked.
        corrupt: blocks that did not read as they must.
        corrupt_texts: the first of them.
        leaked_bytes: most that was held above the null pages at the end of a wave.
        misses: operations that found no memory.
        slowest: longest call.
    """

    rank: int
    epoch: int
    problem: Problem | None
    backlog: Backlog
    step: int
    rests: tuple[Rest, ...]
    written: int
    verified: int
    corrupt: int
    corrupt_texts: tuple[str, ...]
    leaked_bytes: int
    misses: int
    slowest: Slowest


@dataclass(frozen=True, slots=True)
class Status:
    """News of a rank that works.

    Attributes:
        rests: the last ends of waves.
        progress: the last moments at which pages were published or given back.
        step: steps done.
    """

    rests: tuple[Rest, ...] = ()
    progress: tuple[float, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """What was left when a rank had closed.

    Attributes:
        rank: world rank.
        leaked_bytes: physical or mapped bytes that were not given back.
        reservations: address ranges that were not given back.
        seconds: how long closing took.
        problem: an error of closing.
    """

    rank: int
    leaked_bytes: int
    reservations: int
    seconds: float
    problem: Problem | None = None


@dataclass(slots=True)
class _Open:
    """What a process holds while it is a rank."""

    seat: Seat
    device: _native.HostDevice
    coordinator: Coordinator
    stamps: Stamps
    workload: Workload | None = None
    told: list[int] = field(default_factory=lambda: [0, 0, 0])


class RankProcess:
    """A process that can be a rank, and another one later.

    Args:
        options: of the run.

    Threads: ``enter``, ``work`` and ``leave`` one at a time; the rest at any time beside them.
    """

    def __init__(self, options: ChaosOptions) -> None:
        import torch

        torch.set_num_threads(1)
        logging.basicConfig(level=logging.WARNING)
        self._options = options
        self._model = options.model_spec()
        self._open: _Open | None = None

    def identity(self) -> Identity:
        """Which process this is. The first call returns when the process is ready."""
        return current_identity()

    # ------------------------------------------------------------------ the life of a rank

    def enter(self, seat: Seat) -> Entered:
        """Start as a rank, or, where this process has lost a fellow rank, enter the next epoch with the others.

        Blocks: at most the start timeout and a grace.
        """
        began = time.monotonic()
        try:
            if self._open is None:
                self._open = self._start(seat)
            else:
                self._open.coordinator.rejoin()
        except (KVDistError, RuntimeError) as error:
            return Entered(seat.rank, Problem.of(error), 0, 0, time.monotonic() - began, time.time())
        coordinator = self._open.coordinator
        pages = zlib.crc32(repr(sorted(published_pages(coordinator).items())).encode())
        return Entered(seat.rank, None, coordinator.epoch, pages, time.monotonic() - began, time.time())

    def _start(self, seat: Seat) -> _Open:
        options = self._options
        world = World(seat.rank, options.tp, options.pp)
        card = f"{seat.run_dir}/{CARD_PREFIX}{seat.rank}"
        device = _native.HostDevice(CARD_BYTES, options.granule_bytes, card=os.path.basename(card), card_file=card)
        store = connect_store(LOOPBACK, seat.store_port, False, world.size, STORE_WAIT_S)
        coordinator = Coordinator.start(
            world=world,
            stage=self._model.stage(world.pp_rank, options.pp),
            device=device,
            config=options.config(seat.run_dir),
            store=store,  # type: ignore[arg-type]
            session=seat.session,
            faults=FaultPlan(open=True),
        )
        return _Open(seat, device, coordinator, stamps_of(coordinator))

    def work(self, backlog: Backlog) -> Work:
        """Serve requests until the supervisor stops the world or something ends the epoch.

        Blocks: until then.
        """
        opened = self._opened()
        coordinator, seat = opened.coordinator, opened.seat
        scope = f"{seat.session} epoch {coordinator.epoch}"
        board = RestBoard(f"{seat.run_dir}/{BOARD_FILE}", seat.rank, self._options.world_size, scope)
        workload = Workload(
            coordinator, opened.stamps, board, backlog, seed=self._options.seed, wave_s=self._options.wave_bound_s
        )
        opened.workload = workload
        problem = None
        try:
            workload.run()
        except KVDistError as error:
            problem = Problem.of(error)
        except Exception as error:
            _log.exception("event=work_ended rank=%d", seat.rank)
            problem = Problem.of(error)
        finally:
            board.close()
        return self._report(opened, workload, problem)

    def _report(self, opened: _Open, workload: Workload, problem: Problem | None) -> Work:
        totals, record = opened.stamps.totals, workload.record
        now = [totals.written, totals.verified, totals.corrupt]
        written, verified, corrupt = (new - old for new, old in zip(now, opened.told, strict=True))
        opened.told = now
        return Work(
            rank=opened.seat.rank,
            epoch=opened.coordinator.epoch,
            problem=problem,
            backlog=workload.backlog(),
            step=workload.step,
            rests=tuple(record.rests),
            written=written,
            verified=verified,
            corrupt=corrupt,
            corrupt_texts=tuple(str(item) for item in totals.first) if corrupt else (),
            leaked_bytes=record.leaked_bytes,
            misses=record.misses,
            slowest=record.slowest,
        )

    def leave(self) -> Left:
        """Close the coordinator and see what is left of its memory. Afterwards this process is nobody.

        Blocks: a few seconds at most.
        """
        opened, began = self._open, time.monotonic()
        self._open = None
        if opened is None:
            return Left(-1, 0, 0, 0.0)
        problem = None
        try:
            opened.coordinator.close()
        except KVDistError as error:
            problem = Problem.of(error)
        seat, device = opened.seat, opened.device
        # Views into the pools keep their address ranges; without them nothing may be left.
        del opened
        gc.collect()
        counters = device.counters()
        leaked = max(counters.bytes_created, counters.bytes_mapped)
        return Left(seat.rank, leaked, counters.reservations, time.monotonic() - began, problem)

    # ------------------------------------------------------------------ at any time

    def inject(self, spec: str) -> None:
        """Arm a fault, instead of all earlier ones; an empty text switches all off."""
        opened = self._opened()
        specs = (FaultSpec.parse(spec),) if spec else ()
        opened.coordinator.faults.rearm(specs, opened.device.faults)

    def stop(self) -> None:
        """Ask the whole world to end its work after the running wave; effective on the leader."""
        opened = self._opened()
        if opened.workload is not None:
            opened.workload.ask_to_stop()

    def status(self) -> Status:
        """How the work goes."""
        opened = self._open
        if opened is None or opened.workload is None:
            return Status()
        opened.coordinator.faults.collect()
        record = opened.workload.record
        return Status(tuple(record.rests)[-8:], tuple(record.progress)[-64:], opened.workload.step)

    def _opened(self) -> _Open:
        if self._open is None:
            raise RuntimeError("this process is no rank now")
        return self._open


def current_identity() -> Identity:
    """The calling process."""
    pid = os.getpid()
    return Identity(pid, start_ticks(pid) or 0, f"{boot_id()}/{pid_namespace()}")


__all__ = [
    "LOOPBACK", "Entered", "Identity", "Left", "Problem", "RankProcess", "Seat", "Status", "Work",
    "current_identity",
]  # fmt: skip
