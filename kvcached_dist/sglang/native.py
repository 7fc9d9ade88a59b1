"""What is told of pools that stayed native: by each rank a line for each pool, and a snapshot for tools.

``kvcached-dist status`` then says why nothing is elastic, as it shows what is. Nothing here may end the engine or keep
its memory alive: it has chosen its own pools and serves with them.
"""

from __future__ import annotations

import logging
from multiprocessing.util import Finalize
from typing import Any

from ..config import Config
from ..snapshot import SnapshotWriter
from . import engine
from .reservations import Reservations

_log = logging.getLogger("kvcached_dist.sglang")

EXIT_PRIORITY = 20
"""Of what this library ends with the process, before the engine's own resources go: a scheduler runs finalizers of
``multiprocessing`` and not those of ``atexit``."""


class NativePools:
    """The pools of one rank that the engine has built for itself.

    Args:
        config: settings.
        name: of the engine for tools, equal on all ranks.
        reason: why nothing is elastic.
        configurator: the engine's ``KVCacheConfigurator``.

    Threads: the thread that builds pools.
    """

    def __init__(self, config: Config, name: str, reason: str, configurator: Any) -> None:
        self._config = config
        self._name = name
        self._reason = reason
        self._configurator = configurator
        self._held: dict[str, int] = {}
        self._writer: SnapshotWriter | None = None

    def add(self, pools: Any, prefix: str = "") -> None:
        """The engine has built pools: tell of them.

        Args:
            pools: what its ``_init_pools`` returned.
            prefix: in front of their names: ``draft.``.
        """
        try:
            # Asked once and let go, so that no pool lives longer than the engine wants it to.
            look = Reservations(
                self._held.__setitem__, self._configurator.device, frozenset(), rank=engine.world_rank(),
                why=self._reason,
            )  # fmt: skip
            look.add(pools, prefix)
            self._publish()
        except Exception as error:  # what this version of the engine builds may be anything
            _log.warning("event=not_shown rank=%d why=%r", engine.world_rank(), f"{type(error).__name__}: {error}")

    def _publish(self) -> None:
        if self._writer is None:
            self._writer = SnapshotWriter.open(self._config.state_dir, self._name, engine.world_rank())
            Finalize(None, self._writer.close, exitpriority=EXIT_PRIORITY)
        parallel = engine.parallel_of(self._configurator)
        self._writer.publish(
            {
                "tp": int(parallel.tp_size), "pp": int(parallel.pp_size), "failure": None, "pools": {}, "domains": {},
                "runtime_pools": dict(self._held), "native_because": self._reason, "log": [],
            }
        )  # fmt: skip


__all__ = ["NativePools"]
