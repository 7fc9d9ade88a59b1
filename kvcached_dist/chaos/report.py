"""From the outcomes of the faults to what the operator gets: a table, JSON, an exit status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from .plan import Fault, Kind

EXIT_OK: Final = 0
EXIT_VIOLATION: Final = 1
EXIT_INPUT: Final = 2
EXIT_RIG: Final = 3

LAG_WORTH_A_WORD_S: Final = 0.25


@dataclass(slots=True)
class Outcome:
    """What came of one fault.

    Attributes:
        fault: what was planned.
        fired: it happened.
        detected_ms: from the fault to the error, per survivor; empty where nobody is lost.
        recovered_ms: from the fault until pages were published or given back again, or until every rank had entered
            the next epoch or world.
        rejoin_ms: from the order to restart a follower until every rank had entered the next epoch.
        restart_ms: the same for a whole world.
        unanswered: requests that were not answered although the world went on.
        violations: what did not hold.
    """

    fault: Fault
    fired: bool = False
    detected_ms: list[float] = field(default_factory=list)
    recovered_ms: float | None = None
    rejoin_ms: float | None = None
    restart_ms: float | None = None
    unanswered: int = 0
    violations: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for people."""
        parts = [str(self.fault)]
        if not self.fired:
            parts.append("did not happen")
        if self.detected_ms:
            parts.append(f"detected {min(self.detected_ms):.0f}-{max(self.detected_ms):.0f} ms")
        if self.recovered_ms is not None:
            parts.append(f"recovered {self.recovered_ms:.0f} ms")
        parts += [f"VIOLATION {text}" for text in self.violations]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and maximum of some durations."""

    p50: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Summarise; nothing gives nothing."""
        known = sorted(value for value in values if value is not None)
        return cls(round(known[len(known) // 2], 1), round(known[-1], 1)) if known else cls(None, None)

    def to_json(self) -> dict[str, float | None]:
        """As data."""
        return {"p50": self.p50, "max": self.max}

    def cells(self) -> tuple[str, str]:
        """As two cells of a table."""
        return ("-", "-") if self.p50 is None else (f"{self.p50:.0f}", f"{self.max:.0f}")


@dataclass(slots=True)
class Report:
    """A whole run.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline stages.
        seed: of the plan.
        lease_s: of the ranks.
        outcomes: one per fault, in order.
        violations: those that belong to no fault.
        orphans: processes that should not be there.
        files: files that should not be there.
        leaked_bytes: memory that was not given back, over all ranks and worlds.
        answered: requests that were answered.
        unanswered: requests without an answer at the end.
        verified: blocks whose contents were checked.
        corrupt: blocks that did not read as they must.
        misses: operations that found no memory.
        lag_s: longest time that a process of the ranks' host waited for a core.
        wall_s: length of the run.
    """

    tp: int
    pp: int
    seed: int
    lease_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    leaked_bytes: int = 0
    answered: int = 0
    unanswered: int = 0
    verified: int = 0
    corrupt: int = 0
    misses: int = 0
    lag_s: float = 0.0
    wall_s: float = 0.0

    def all_violations(self) -> list[str]:
        """Everything that did not hold, in words, with the fault where it belongs to one."""
        found = [f"fault {outcome.fault}: {text}" for outcome in self.outcomes for text in outcome.violations]
        found += [f"fault {outcome.fault}: did not happen" for outcome in self.outcomes if not outcome.fired]
        found += self.violations
        found += [f"orphan: {text}" for text in self.orphans]
        found += [f"left-over file: {name}" for name in self.files]
        if self.leaked_bytes:
            found.append(f"{self.leaked_bytes} bytes leaked")
        if self.unanswered:
            found.append(f"{self.unanswered} requests without an answer")
        return found

    @property
    def exit_status(self) -> int:
        """0 without a violation, else 1."""
        return EXIT_VIOLATION if self.all_violations() else EXIT_OK

    def to_json(self) -> dict[str, Any]:
        """Everything as data."""
        violations = self.all_violations()
        return {
            "faults": len(self.outcomes),
            "by_kind": {kind.value: self._kind_json(outcomes) for kind, outcomes in self._by_kind()},
            "detect_ms": Spread.of(ms for outcome in self.outcomes for ms in outcome.detected_ms).to_json(),
            "rejoin_ms": Spread.of(outcome.rejoin_ms for outcome in self.outcomes).to_json(),
            "restart_ms": Spread.of(outcome.restart_ms for outcome in self.outcomes).to_json(),
            "violations": len(violations),
            "orphans": len(self.orphans),
            "leaked_bytes": self.leaked_bytes,
            "files": len(self.files),
            "requests": {"answered": self.answered, "unanswered": self.unanswered},
            "blocks": {"verified": self.verified, "corrupt": self.corrupt},
            "misses": self.misses,
            "host_lag_ms": round(1000 * self.lag_s, 1),
            "seed": self.seed,
            "tp": self.tp,
            "pp": self.pp,
            "lease_s": self.lease_s,
            "wall_s": round(self.wall_s, 1),
            "violation_texts": violations,
            "plan": [str(outcome.fault) for outcome in self.outcomes],
        }

    def _by_kind(self) -> list[tuple[Kind, list[Outcome]]]:
        table: dict[Kind, list[Outcome]] = {}
        for outcome in self.outcomes:
            table.setdefault(outcome.fault.kind, []).append(outcome)
        return [(kind, table[kind]) for kind in Kind if kind in table]

    @staticmethod
    def _kind_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return {
            "injected": sum(outcome.fired for outcome in outcomes),
            "detected_ms": Spread.of(ms for outcome in outcomes for ms in outcome.detected_ms).to_json(),
            "recovered_ms": Spread.of(outcome.recovered_ms for outcome in outcomes).to_json(),
            "unanswered": sum(outcome.unanswered for outcome in outcomes),
        }

    def print(self, console: Console) -> None:
        """Write the table and the sums."""
        title = f"Faults, tp {self.tp} x pp {self.pp}, seed {self.seed}, lease {self.lease_s:g} s"
        table = Table(title=title)
        table.add_column("fault")
        for name in ("injected", "detected\nms p50", "detected\nms max", "recovered\nms p50", "recovered\nms max"):
            table.add_column(name, justify="right")
        table.add_column("requests without\nan answer", justify="right")
        for kind, outcomes in self._by_kind():
            detected = Spread.of(ms for outcome in outcomes for ms in outcome.detected_ms)
            recovered = Spread.of(outcome.recovered_ms for outcome in outcomes)
            fired, unanswered = sum(o.fired for o in outcomes), sum(o.unanswered for o in outcomes)
            table.add_row(kind.value, str(fired), *detected.cells(), *recovered.cells(), str(unanswered))
        console.print(table)
        rejoin, restart = (
            Spread.of(values).cells()
            for values in ((o.rejoin_ms for o in self.outcomes), (o.restart_ms for o in self.outcomes))
        )
        console.print(
            f"{len(self.outcomes)} faults in {self.wall_s:.0f} s; rejoin {rejoin[0]} ms (max {rejoin[1]}), restart"
            f" {restart[0]} ms (max {restart[1]}); {self.answered} requests answered, {self.unanswered} not;"
            f" {self.verified} blocks verified, {self.corrupt} corrupt; {len(self.orphans)} orphans,"
            f" {len(self.files)} left-over files, {self.leaked_bytes} leaked bytes",
            highlight=False,
        )
        if self.lag_s > LAG_WORTH_A_WORD_S:
            console.print(
                f"the host is overloaded: a process waited {self.lag_s:.1f} s for a core; bounds were extended by"
                " what it waited, and a rank that gets no core for a lease is lost like one that hangs",
                highlight=False,
            )

    def verdict(self) -> str:
        """One line."""
        violations = self.all_violations()
        if not violations:
            return f"{len(self.outcomes)} faults, no violation (seed {self.seed})"
        return f"{len(violations)} violations (seed {self.seed}); the first: {violations[0]}"


__all__ = ["EXIT_INPUT", "EXIT_OK", "EXIT_RIG", "EXIT_VIOLATION", "Outcome", "Report", "Spread"]
