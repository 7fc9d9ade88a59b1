"""What one rank has to say at the end of its replay; plain data that travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

SERIES_POINTS_MAX = 4000
"""Points of the memory curve that a rank hands over; more are thinned, peaks kept."""


@dataclass(slots=True)
class Failure:
    """Why a run ended early.

    Attributes:
        kind: ``group`` (a rank was lost or the protocol failed), ``capacity``, ``divergence`` or ``input``.
        rank: world rank where the first cause lies.
        phase: what was going on.
        cause: one line for the operator.
    """

    kind: str
    rank: int
    phase: str
    cause: str


@dataclass(slots=True)
class Event:
    """Something worth a mark in the picture.

    Attributes:
        at_us: virtual time.
        kind: ``grow``, ``reclaim``, ``fault`` or ``retract``.
        text: what.
    """

    at_us: int
    kind: str
    text: str


class MemoryCurve:
    """Physical bytes over virtual time: a step function, its peak and its mean."""

    def __init__(self) -> None:
        self.points: list[tuple[int, int]] = []
        self.peak = 0
        self._weighted = 0
        self._since_us = 0
        self._bytes = 0

    def sample(self, now_us: int, physical_bytes: int) -> None:
        """From ``now_us`` on the rank holds ``physical_bytes``."""
        self._weighted += self._bytes * (now_us - self._since_us)
        self._since_us = now_us
        self.peak = max(self.peak, physical_bytes)
        if not self.points or self._bytes != physical_bytes:
            self._bytes = physical_bytes
            self.points.append((now_us, physical_bytes))

    @property
    def final(self) -> int:
        """Bytes at the last sample."""
        return self._bytes

    @property
    def mean(self) -> int:
        """Mean over virtual time up to the last sample."""
        start = self.points[0][0] if self.points else 0
        span = self._since_us - start
        return self._weighted // span if span > 0 else self._bytes

    def thinned(self) -> list[tuple[int, int]]:
        """At most ``SERIES_POINTS_MAX`` points and the last one; of neighbours the highest stays."""
        if len(self.points) <= SERIES_POINTS_MAX:
            return list(self.points)
        step = -(-len(self.points) // SERIES_POINTS_MAX)
        kept = [max(self.points[at : at + step], key=lambda p: p[1]) for at in range(0, len(self.points), step)]
        return kept if kept[-1] == self.points[-1] else [*kept, self.points[-1]]


@dataclass(slots=True)
class RankOutcome:
    """The report of one rank.

    Attributes:
        rank: world rank.
        requests: requests of the trace.
        totals: counters of the scheduler.
        steps: engine steps done.
        virtual_us: virtual time reached.
        verified_blocks: blocks whose stamps or fill patterns were checked on this rank.
        corrupt_blocks: those that did not read as they must.
        corruptions: descriptions of the first of them.
        physical_peak: most bytes held.
        physical_mean: mean over virtual time.
        physical_final: bytes held at the end.
        static_bytes: what the native engine would hold all the time.
        curve: (virtual us, bytes).
        events: marks for the picture.
        digest: rolling digest of the operations of this rank.
        stall_p99_ms: 99th percentile over steps of the time in the coordinator.
        lag_steps_max: how far the leader's marks were ahead of this rank at a RETIRE, at most.
        grow: counters and durations of growth; those of the leader count.
        reclaim: counters and durations of reclaim.
        health: state per domain.
        failure: why the run ended early, or None.
        wall_s: wall-clock time of the loop.
    """

    rank: int
    requests: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    virtual_us: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    corruptions: list[str] = field(default_factory=list)
    physical_peak: int = 0
    physical_mean: int = 0
    physical_final: int = 0
    static_bytes: int = 0
    curve: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    digest: int = 0
    stall_p99_ms: float = 0.0
    lag_steps_max: int = 0
    grow: dict[str, float] = field(default_factory=dict)
    reclaim: dict[str, float] = field(default_factory=dict)
    health: dict[str, str] = field(default_factory=dict)
    failure: Failure | None = None
    wall_s: float = 0.0

    def to_json(self) -> str:
        """The outcome as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankOutcome:
        """The outcome that :meth:`to_json` wrote."""
        item: dict[str, Any] = json.loads(text)
        item["events"] = [Event(**event) for event in item["events"]]
        item["curve"] = [(when, held) for when, held in item["curve"]]
        item["failure"] = Failure(**item["failure"]) if item["failure"] else None
        return cls(**item)


def percentile(values: list[float], percent: float) -> float:
    """The value that ``percent`` percent of ``values`` do not exceed (nearest rank); 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = -(-len(ordered) * percent // 100) - 1
    return ordered[max(0, min(len(ordered) - 1, int(at)))]


__all__ = ["Event", "Failure", "MemoryCurve", "RankOutcome", "percentile"]
