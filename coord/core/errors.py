"""Errors of the project. A class exists only where a caller can react differently.

Expected outcomes are values, not exceptions: an allocation miss is ``None``.

::

    KVDistError
    |-- ConfigError (ValueError)      start-up: names the setting and a value that would work
    |-- CapacityError                 a rank has no memory for what start-up needs
    |-- WaitTimeout (TimeoutError)    a bounded wait ended: who was waited for, for what, how long
    |-- LinkDown                      this link is unusable until the next epoch
    |-- AmbiguousOutcome              a store write may or may not have happened; re-read before acting
    |-- DriverError                   unexpected driver status at start-up or close
    |-- InvariantViolation            a safety rule (S.. or L..) does not hold
    |-- Divergence                    a rank's operations differ from the leader's
    |-- RankLost                      a follower was lost and may rejoin; recoverable on request
    `-- GroupFailed                   terminal; carries the first cause, raised by every later call
"""

from __future__ import annotations

from .types import Cause, Rank


class KVDistError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigError(KVDistError, ValueError):
    """A setting is unusable. For the operator: the text names it and a value that would work."""


class CapacityError(KVDistError):
    """A rank cannot hold what start-up needs. For the operator."""


class WaitTimeout(KVDistError, TimeoutError):
    """A bounded wait ended. For callers that can retry or give up.

    Args:
        who: the rank, peer or file that was waited for.
        what: what was expected of it.
        seconds: how long the wait lasted.
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.2f} s for {who}: {what}")
        self.who = who
        self.what = what
        self.seconds = seconds


class LinkDown(KVDistError):
    """A link ended. Poisoned: every later use raises it again. For the agent.

    Args:
        peer: world rank at the other end.
        reason: what ended it.
        eof: the peer's process is gone (as opposed to silence for a whole lease).
    """

    def __init__(self, peer: int, reason: str, *, eof: bool) -> None:
        super().__init__(f"link to rank {peer} is down: {reason}")
        self.peer = peer
        self.reason = reason
        self.eof = eof


class AmbiguousOutcome(KVDistError):
    """A store write may or may not have happened. Re-read before acting."""


class DriverError(KVDistError):
    """An unexpected driver status outside a transaction: names call, pool, offset and code."""


class InvariantViolation(KVDistError):
    """A safety rule does not hold; state cannot be trusted.

    Args:
        rule: id of the rule, for example ``S6``.
        detail: what was found.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule} violated: {detail}")
        self.rule = rule
        self.detail = detail


class Divergence(KVDistError):
    """This rank's operations differ from the leader's: the engine is not deterministic across ranks."""


class RankLost(KVDistError):
    """A follower was lost and the world may go on without its memory: call ``Coordinator.rejoin``.

    Raised only with ``on_rank_lost="rejoin"``, by every call until the next epoch has begun.

    Args:
        cause: who was lost and how it was noticed.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"{cause}; the world waits for this rank to come back (Coordinator.rejoin)")
        self.cause = cause


class GroupFailed(KVDistError):
    """The coordinator has failed and stays failed. Every later call raises it again.

    Args:
        cause: the first cause, with the rank it comes from.
        phase: what the coordinator was doing.
        who: that rank in words, with its pipeline and tensor-parallel position.
    """

    def __init__(self, cause: Cause, phase: str, who: str = "") -> None:
        place = f" [{who}]" if who else ""
        super().__init__(f"coordinator failed during {phase}: {cause}{place}")
        self.cause = cause
        self.phase = phase
        self.who = who

    @property
    def rank(self) -> Rank:
        """World rank where the first cause lies."""
        return self.cause.rank
