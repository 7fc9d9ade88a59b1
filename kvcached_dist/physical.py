"""The physical side of a rank: admission, budget and driver work on the pools of its stage."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from .admission import AdmissionTurn
from .coord.core.effects import Work, WorkKind
from .coord.core.errors import ConfigError, WaitTimeout
from .coord.core.types import Cause, CauseKind, Rank
from .pools.backing import StageBacking

if TYPE_CHECKING:
    from ._native import Device, Outcome

_log = logging.getLogger(__name__)


class PhysicalWorker:
    """Performs the driver work that the protocol asks for.

    Args:
        rank: this rank, named in causes.
        device: device that holds the pools.
        backing: pools of this stage.
        turn: admission turn of the physical card, or ``None`` where no other process can use it.
        utilization: share of the device's memory that may be used by all its users, in (0, 1].
        limit_bytes: configured limit: most bytes that this rank may hold (0: none). A logged limit counts too.
        turn_deadline_s: how long to wait for the admission turn (the growth deadline).

    Threads: ``perform`` in one thread at a time; the rest from any thread.
    """

    def __init__(
        self,
        *,
        rank: Rank,
        device: Device,
        backing: StageBacking,
        turn: AdmissionTurn | None,
        utilization: float,
        limit_bytes: int,
        turn_deadline_s: float,
    ) -> None:
        self.rank = rank
        self.device = device
        self.backing = backing
        self._limits = (limit_bytes, 0)
        self.memory_queries = 0
        self._runtime_pools: dict[str, int] = {}
        self._runtime_lock = threading.Lock()
        self._turn = turn
        self.total_bytes = device.total_bytes()
        """Memory of the device."""
        self.free_bytes_seen = 0
        """Free memory of the device when it was last asked."""
        self._reserve_bytes = int((1.0 - utilization) * self.total_bytes)
        self._turn_deadline_s = turn_deadline_s

    @property
    def reserve_bytes(self) -> int:
        """Bytes of the device that must stay free (S14)."""
        return self._reserve_bytes

    def perform(self, work: Work) -> Cause | None:
        """Do the work in the calling thread.

        Returns:
            ``None`` on success, else why not. Never raises for a driver status.

        Blocks: for the driver calls; a RESERVE also for the admission turn, at most the growth deadline.
        """
        match work.kind:
            case WorkKind.RESERVE:
                return self._reserve(work)
            case WorkKind.ABORT:
                return self._cause(self.backing.abort(work.txn))
            case WorkKind.MAP:
                return self._cause(self.backing.map(work.runs))
            case WorkKind.UNMAP:
                return self._cause(self.backing.unmap(work.runs))
            case WorkKind.RESTORE:
                return self._cause(self.backing.restore(work.runs))
            case WorkKind.RELEASE:
                return self._cause(self.backing.release(work.runs))

    @property
    def limit_bytes(self) -> int:
        """Most bytes that this rank may hold: the lower of the configured and the logged limit; 0: none."""
        return min((limit for limit in self._limits if limit), default=0)

    def set_limit(self, limit_bytes: int) -> None:
        """A logged limit takes effect; 0: none. What is held above it stays until it is reclaimed."""
        self._limits = (self._limits[0], limit_bytes)

    def held_bytes(self) -> int:
        """Physical bytes held now."""
        return sum(self.backing.held_bytes())

    def handles(self) -> tuple[int, ...]:
        """Physical handles held now, per pool of the world's list."""
        return tuple(self.backing.held())

    def register_runtime_pool(self, name: str, size_bytes: int) -> None:
        """Account for a pool that the engine's runtime keeps itself; 0 clears the entry (it was taken over)."""
        with self._runtime_lock:
            if size_bytes:
                self._runtime_pools[name] = size_bytes
            else:
                self._runtime_pools.pop(name, None)

    def runtime_pools(self) -> dict[str, int]:
        """Bytes of every pool that the engine's runtime keeps itself, by name."""
        with self._runtime_lock:
            return dict(self._runtime_pools)

    def elastic_bytes(self) -> int:
        """Bytes that elastic pools may use on this device at most: all of it, less the reserve and runtime pools."""
        return self.total_bytes - self._reserve_bytes - sum(self.runtime_pools().values())

    def free_bytes(self) -> int:
        """Free memory of the device. One driver query; a device that cannot say counts as full."""
        self.memory_queries += 1
        try:
            free = self.device.free_bytes()
        except RuntimeError as error:
            _log.warning("event=memory_query_failed rank=%d error=%s", self.rank, error)
            free = 0
        self.free_bytes_seen = free
        return free

    def budget_bytes(self) -> int:
        """Bytes this rank could still create above the reserve, beside runtime pools and below its limit."""
        budget = min(self.free_bytes() - self._reserve_bytes, self.elastic_bytes() - self.held_bytes())
        if self.limit_bytes:
            budget = min(budget, self.limit_bytes - self.held_bytes())
        return max(0, budget)

    def close(self) -> None:
        """Give the lock file of the admission turn back. Idempotent."""
        if self._turn is not None:
            self._turn.close()

    # ------------------------------------------------------------------ inner

    def _reserve(self, work: Work) -> Cause | None:
        """Budget check and creates inside one admission turn; a second look at free memory before it ends (S14)."""
        required = self.backing.missing_bytes(work.runs)
        if not required:
            # A retry that adopts retained runs, pages in granules that are held already, or a stage without layers
            # of these pools: nothing is taken, so there is nobody to take turns with and nothing to ask the card.
            return self._cause(self.backing.reserve(work.txn, work.runs))
        if self._turn is None:
            return self._reserve_now(work, required)
        try:
            with self._turn.take(self._turn_deadline_s):
                return self._reserve_now(work, required)
        except (WaitTimeout, ConfigError, OSError) as error:
            return Cause(CauseKind.ADMISSION, self.rank, str(error))

    def _reserve_now(self, work: Work, required: int) -> Cause | None:
        refused = self._over_budget(required, self.free_bytes())
        if refused is not None:
            return refused
        outcome = self.backing.reserve(work.txn, work.runs)
        if not outcome.ok:
            return self._cause(outcome)
        free = self.free_bytes()
        if free < self._reserve_bytes:
            detail = "another process took memory outside its admission turn"
            if (kept := self._cause(self.backing.abort(work.txn))) is not None:
                detail += f"; what was created for it could not be given back: {kept.detail}"
            return Cause(CauseKind.EXHAUSTED, self.rank, detail, required, free, self._reserve_bytes)
        return None

    def _over_budget(self, required: int, free: int) -> Cause | None:
        if self.limit_bytes:
            held = self.held_bytes()
            if required + held > self.limit_bytes:
                detail = f"the limit is {self.limit_bytes} bytes, {held} are held"
                return Cause(CauseKind.LIMIT, self.rank, detail, required, free, self._reserve_bytes)
        if required > free - self._reserve_bytes:
            return Cause(CauseKind.EXHAUSTED, self.rank, "device memory", required, free, self._reserve_bytes)
        elastic = self.elastic_bytes() - self.held_bytes()
        if required > elastic:
            detail = f"pools of the engine's runtime leave {elastic} bytes for elastic pools"
            return Cause(CauseKind.EXHAUSTED, self.rank, detail, required, free, self._reserve_bytes)
        return None

    def _cause(self, outcome: Outcome) -> Cause | None:
        if outcome.ok:
            return None
        pool = self.backing.pool_name(outcome.pool)
        detail = f"{outcome.call} of {outcome.bytes} bytes at offset {outcome.offset} of pool {pool}: {outcome.detail}"
        kind = CauseKind.EXHAUSTED if outcome.exhausted else CauseKind.DRIVER
        _log.warning(
            "event=driver_refused rank=%d call=%s pool=%s code=%d", self.rank, outcome.call, pool, outcome.code
        )
        free = self.free_bytes() if outcome.exhausted else 0
        return Cause(kind, self.rank, detail, outcome.bytes, free, self._reserve_bytes)
