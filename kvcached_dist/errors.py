"""Errors a user of the library meets; see :mod:`kvcached_dist.coord.core.errors` for when to catch which."""

import signal

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


class Interrupted(KVDistError):
    """A run of the command line was ended by a signal.

    Args:
        signum: which.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


__all__ = [
    "AmbiguousOutcome",
    "CapacityError",
    "ConfigError",
    "Divergence",
    "DriverError",
    "GroupFailed",
    "Interrupted",
    "InvariantViolation",
    "KVDistError",
    "LinkDown",
    "RankLost",
    "WaitTimeout",
]
