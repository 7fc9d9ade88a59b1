"""kvcached_dist: elastic KV cache memory in agreement across tensor- and pipeline-parallel ranks.

``Coordinator`` and ``StreamCoordinator`` are the public classes; see the README for the map of the modules.

Importing this package imports neither torch nor the native module: names are resolved on first use, so that
settings, errors and the protocol core are usable where those are not wanted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import Config
    from .coordinator import Coordinator, StepReport
    from .domain import Domain
    from .errors import (
        AmbiguousOutcome,
        CapacityError,
        ConfigError,
        Divergence,
        DriverError,
        GroupFailed,
        InvariantViolation,
        KVDistError,
        LinkDown,
        RankLost,
        WaitTimeout,
    )
    from .pools.specs import DomainSpec, ModelSpec, PoolSpec, StageSpec
    from .stream import StreamCoordinator
    from .world import World

_HOME = {
    "Config": "config",
    "Coordinator": "coordinator",
    "Domain": "domain",
    "DomainSpec": "pools.specs",
    "ModelSpec": "pools.specs",
    "PoolSpec": "pools.specs",
    "StageSpec": "pools.specs",
    "StepReport": "coordinator",
    "StreamCoordinator": "stream",
    "World": "world",
    **dict.fromkeys(
        (
            "AmbiguousOutcome",
            "CapacityError",
            "ConfigError",
            "Divergence",
            "DriverError",
            "GroupFailed",
            "InvariantViolation",
            "KVDistError",
            "LinkDown",
            "RankLost",
            "WaitTimeout",
        ),
        "errors",
    ),
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]


__all__ = [
    "AmbiguousOutcome",
    "CapacityError",
    "Config",
    "ConfigError",
    "Coordinator",
    "Divergence",
    "Domain",
    "DomainSpec",
    "DriverError",
    "GroupFailed",
    "InvariantViolation",
    "KVDistError",
    "LinkDown",
    "ModelSpec",
    "PoolSpec",
    "RankLost",
    "StageSpec",
    "StepReport",
    "StreamCoordinator",
    "WaitTimeout",
    "World",
    "__version__",
]
