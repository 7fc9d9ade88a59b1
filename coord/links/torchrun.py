"""What torchrun (or a launcher that sets its variables) tells a process about its world."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..core.errors import ConfigError
from ..core.types import Rank
from .store import connect_store


@dataclass(frozen=True, slots=True)
class TorchrunWorld:
    """What a process started by torchrun (or with its variables) knows of its world.

    Attributes:
        host: host of the store server.
        port: its port.
        rank: world rank of this process.
        world: number of ranks.
        serves: whether this process must run the server (torchrun's own agent runs it otherwise).
        run_name: name of this incarnation of the job, new after every restart by torchrun.
    """

    host: str
    port: int
    rank: Rank
    world: int
    serves: bool
    run_name: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> TorchrunWorld:
        """Read ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE`` and torchrun's own variables.

        Raises:
            ConfigError: one is missing or makes no sense; names it and a value that would work.
        """
        host = environment.get("MASTER_ADDR", "")
        if not host:
            raise ConfigError("MASTER_ADDR is not set; it names the host of rank 0, for example 127.0.0.1")
        world = _integer(environment, "WORLD_SIZE", 1, 1 << 16, "2")
        rank = _integer(environment, "RANK", 0, world - 1, "0")
        port = _integer(environment, "MASTER_PORT", 1, 65535, "29500")
        agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False").lower() in ("true", "1")
        run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(host, port, Rank(rank), world, rank == 0 and not agent_serves, f"{run_id}/{restarts}")

    def connect(self, timeout_s: float) -> TCPStore:
        """Connect to the store of this world; see :func:`connect_store`."""
        return connect_store(self.host, self.port, self.serves, self.world, timeout_s)


def _integer(environment: Mapping[str, str], name: str, low: int, high: int, example: str) -> int:
    text = environment.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(f"{name}={text!r} is unusable; it is an integer from {low} to {high}, for example {example}")
    return value


__all__ = ["TorchrunWorld"]
