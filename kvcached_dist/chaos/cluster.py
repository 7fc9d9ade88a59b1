"""Ray: a local instance or an existing cluster, and the actors of a run on one host of it.

Ray only places processes and carries calls. It restarts nothing (``max_restarts`` stays 0): what dies is seen by the
supervisor, which takes a spare process in its place. A warm spare costs seconds to make and none to use.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigError, KVDistError
from .options import ChaosOptions
from .rank import Identity, RankProcess
from .warden import RUN_VARIABLE, Warden

_log = logging.getLogger(__name__)

ACTOR_CPUS: Final = 0.05
"""Share of a core that an actor asks of Ray, so that a whole world fits any machine."""

SPARES: Final = 2

READY_S: Final = 120.0
"""How long an actor may take to be ready; torch takes its time on a busy machine."""

CONNECT_S: Final = 5.0

CALL_S: Final = 30.0
"""How long a short call to an actor may take."""

THREADS: Final = 4
"""Calls that an actor takes at a time: the work, and orders beside it."""

_RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs workers at the lowest priority but four. A rank that gets no core for a second is lost by the bounds
    # that are checked here, and ranks of an engine are not at the end of the queue either.
    "RAY_worker_niceness": "0",
}
"""For the local instance; an existing cluster has its own."""

_OBJECT_STORE_BYTES: Final = 80 << 20
"""Ray's smallest object store is ample: calls carry small records."""


class RigError(KVDistError):
    """The test rig failed: Ray, an actor, the host. Says nothing about the product."""


class ActorGone(Exception):
    """The process of an actor has ended."""


@dataclass(slots=True)
class Process:
    """An actor that can be a rank.

    Attributes:
        actor: Ray's handle.
        identity: its process; known once it is ready.
    """

    actor: Any
    first_call: Any
    identity: Identity | None = None


class Cluster:
    """The actors of one run. A context manager: at its end nothing of the run is left in Ray.

    Args:
        options: of the run.

    Raises:
        ConfigError: Ray is not installed, or the address cannot be used.
        RigError: Ray does not give what was asked for.

    Threads: one.
    """

    def __init__(self, options: ChaosOptions) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("chaos needs Ray: pip install 'kvcached_dist[chaos]'") from error
        self.ray = ray
        self.run_id = uuid.uuid4().hex[:12]
        self.processes: list[Process] = []
        self.ended: list[Identity] = []
        self._options = options
        self._spares: list[Process] = []
        self._group: Any = None
        self._warden: Any = None
        self._connect(options.address)
        try:
            self._place()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ set up

    def _connect(self, address: str) -> None:
        if self.ray.is_initialized():
            raise RigError("this process is connected to Ray already; chaos begins and ends its own connection")
        for name, value in _RAY_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        wanted: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address:
            _check_answers(address)
            wanted["address"] = address
        else:
            wanted |= {
                "num_cpus": 2,
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
            }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what they say comes as an error too
                self.ray.init(**wanted)
        except (ConnectionError, ValueError, RuntimeError, OSError, ImportError) as error:
            # Ray Client is an extra of its own; what it lacks, it says.
            text = " ".join(str(error).split())[:300]
            if address:
                raise ConfigError(
                    f"--address {address}: no Ray cluster answers there ({text}); one with tokens answers only with"
                    " RAY_AUTH_MODE=token here; leave the address out for a local instance"
                ) from error
            raise RigError(f"Ray does not start: {text}") from error

    def _place(self) -> None:
        ray = self.ray
        # One host: the ranks' memory, files and signals are a host's. Each bundle takes one actor.
        bundles = [{"CPU": ACTOR_CPUS}] * (self._options.world_size + SPARES + 2)
        self._group = ray.util.placement_group(bundles, strategy="STRICT_PACK")
        if not self._group.wait(READY_S):
            raise RigError(f"Ray gave no placement group of {len(bundles)} x {ACTOR_CPUS} CPUs in {READY_S:g} s")
        self._warden = self._actor(Warden).remote(self.run_id)
        for _ in range(self._options.world_size + SPARES):
            self._order_spare()
        self.host = self.warden("identity", timeout_s=READY_S).host

    def _actor(self, cls: type, **options: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return self.ray.remote(cls).options(
            num_cpus=ACTOR_CPUS,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=self._group),
            runtime_env={"env_vars": {RUN_VARIABLE: self.run_id, "OMP_NUM_THREADS": "1"}},
            **options,
        )

    def _order_spare(self) -> None:
        actor = self._actor(RankProcess, max_concurrency=THREADS).remote(self._options)
        self._spares.append(Process(actor, actor.identity.remote()))

    # ------------------------------------------------------------------ processes

    def take_spare(self) -> Process:
        """A process that is ready to be a rank; a new one is ordered in its place.

        Raises:
            RigError: none became ready, or Ray made it on another host.

        Blocks: at most ``READY_S``, not at all where :meth:`await_spares` was called.
        """
        process = self._spares.pop(0)
        self._check(process)
        self.processes.append(process)
        return process

    def order_spares(self, count: int = SPARES) -> None:
        """Order what is missing."""
        while len(self._spares) < count:
            self._order_spare()

    def end_all(self, seconds: float) -> list[str]:
        """End every rank process and every spare; afterwards no process of the run may be left but the warden's.

        Args:
            seconds: how long they may take to leave.

        Returns:
            Processes that should not be there.
        """
        for process in [*self.processes, *self._spares]:
            self.ray.kill(process.actor)
            if process.identity is not None:
                self.ended.append(process.identity)
        self.processes.clear()
        self._spares.clear()
        return list(self.warden("orphans", self.ended, seconds, timeout_s=CALL_S + seconds))

    def await_spares(self, count: int = 1) -> None:
        """Wait until so many spares are ready."""
        for process in self._spares[:count]:
            self._check(process)

    def _check(self, process: Process) -> None:
        if process.identity is not None:
            return
        try:
            process.identity = self.get(process.first_call, READY_S)
        except (ActorGone, TimeoutError) as error:
            raise RigError(f"an actor did not become ready within {READY_S:g} s: {error}") from error
        assert process.identity is not None
        if process.identity.host != self.host:
            raise RigError(
                f"Ray placed a rank on another host ({process.identity.host}) than the warden ({self.host}), against"
                " the placement group"
            )
        pids = [other.identity.pid for other in self.processes if other.identity is not None]
        if process.identity.pid in pids:
            raise RigError(f"Ray placed two ranks into one process ({process.identity.pid})")
        self.warden("watch", process.identity)

    def give_back(self, process: Process) -> None:
        """A process that is no rank any more becomes a spare."""
        self.processes.remove(process)
        self._spares.insert(0, process)

    def end(self, process: Process) -> None:
        """End a process for good and wait until it is gone, with its memory and whatever it started.

        Raises:
            RigError: it does not go.
        """
        # Ray asks a process to end, which one that stands still cannot hear.
        self.warden("signal_rank", process.identity, signal.SIGKILL)
        self.ray.kill(process.actor)
        self.bury(process)

    def bury(self, process: Process) -> None:
        """A process was killed: wait until it is gone. A restart before that would find its memory taken.

        Raises:
            RigError: it is still there after a minute.
        """
        identity = process.identity
        assert identity is not None
        if process in self.processes:
            self.processes.remove(process)
        self.ended.append(identity)
        if not self.warden("await_end", identity, 60.0, timeout_s=90.0):
            raise RigError(f"process {identity.pid} is still there a minute after it was killed")

    # ------------------------------------------------------------------ calls

    def warden(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Call the warden.

        Raises:
            RigError: it does not answer.
        """
        try:
            return self.get(getattr(self._warden, method).remote(*arguments), timeout_s)
        except (ActorGone, TimeoutError) as error:
            raise RigError(f"the warden did not do {method} within {timeout_s:g} s: {error}") from error

    def get(self, reference: Any, timeout_s: float) -> Any:
        """The result of a call.

        Raises:
            ActorGone: its process has ended.
            TimeoutError: no result in time.
            RigError: the call itself failed, which rank processes and the warden never do on purpose.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference, timeout=timeout_s)
        except errors.GetTimeoutError as error:
            raise TimeoutError(f"no answer in {timeout_s:g} s") from error
        except (errors.RayActorError, errors.WorkerCrashedError) as error:
            raise ActorGone(" ".join(str(error).split())[:200]) from error
        except errors.RayError as error:
            raise RigError(f"a call to an actor failed: {' '.join(str(error).split())[:600]}") from error

    def finished(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those of the calls that have ended, after at most ``seconds``; returns early when one has."""
        if not references:
            return []
        done, _ = self.ray.wait(list(references), num_returns=1, timeout=seconds)
        return self.all_finished(references, 0) if done else []

    def all_finished(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those of the calls that have ended, after at most ``seconds``; returns early when all have."""
        if not references:
            return []
        done, _ = self.ray.wait(list(references), num_returns=len(references), timeout=seconds)
        return list(done)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End all actors, remove the placement group, leave Ray. Idempotent; a local instance ends with it."""
        if not self.ray.is_initialized():
            return
        try:
            self._close_actors()
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            _log.warning("event=cluster_not_closed error=%s", " ".join(str(error).split())[:300])
        finally:
            self.ray.shutdown()

    def _close_actors(self) -> None:
        for process in [*self.processes, *self._spares]:
            self.ray.kill(process.actor)
        if self._warden is not None:
            left = self.ray.get(self._warden.close.remote(), timeout=CALL_S)
            if left:
                _log.warning("event=directory_left path=%s", left)
            self.ray.kill(self._warden)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)


def _check_answers(address: str) -> None:
    """Somebody listens at the address; Ray itself tries for minutes before it says no."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not separator or not host or not port.isdigit():
        raise ConfigError(f"--address {address}: not an address; for example --address ray://host:10001")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--address {address}: nobody answers there ({error}); start Ray on that host with 'ray start --head', or"
            " leave the address out for a local instance"
        ) from error


__all__ = ["ActorGone", "Cluster", "Process", "RigError"]
