"""Errors a user of the library meets; see :mod:`kvcached_dist.coord.core.errors` for when to catch which."""

from .coord.core.errors import (
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

__all__ = [
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
]
