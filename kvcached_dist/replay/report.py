"""From the outcomes of the ranks to what the operator gets: JSON, a table, an exit status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .outcome import Failure, RankOutcome

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_FAILED = 3
EXIT_CORRUPT = 4

_STATES = ("healthy", "degraded", "failed")


@dataclass(slots=True)
class Report:
    """A whole run.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline stages.
        outcomes: one per rank that could report, in rank order.
        failure: the first cause when the run ended early.
        deaths: ranks whose process died, in words, first one first.
        wall_s: from start to end, processes included.
    """

    tp: int
    pp: int
    outcomes: list[RankOutcome]
    failure: Failure | None
    deaths: list[str]
    wall_s: float

    @property
    def corrupt(self) -> int:
        """Corrupt blocks over all ranks."""
        return sum(outcome.corrupt_blocks for outcome in self.outcomes)

    @property
    def digests_agree(self) -> bool:
        """All ranks reported, and the same digest."""
        return len({outcome.digest for outcome in self.outcomes}) == 1 and len(self.outcomes) == self.tp * self.pp

    @property
    def exit_status(self) -> int:
        """0 done; 2 capacity too small; 3 the group failed; 4 corrupt blocks or ranks that disagree."""
        if self.corrupt or (self.failure is not None and self.failure.kind == "divergence"):
            return EXIT_CORRUPT
        if self.failure is not None:
            return EXIT_INPUT if self.failure.kind in ("capacity", "input") else EXIT_FAILED
        return EXIT_OK if self.digests_agree else EXIT_CORRUPT

    def to_json(self) -> dict[str, Any]:
        """The machine-readable report. ``failure`` is only there when the run ended early."""
        lead = self.outcomes[0] if self.outcomes else RankOutcome(rank=0)
        report: dict[str, Any] = {
            "world": {"tp": self.tp, "pp": self.pp},
            "requests": lead.requests,
            "completed": min((o.totals.get("completed", 0) for o in self.outcomes), default=0),
            "retracted": lead.totals.get("retracted", 0),
            "misses": lead.totals.get("misses", 0),
            "corrupt_blocks": self.corrupt,
            "verified_blocks": sum(o.verified_blocks for o in self.outcomes),
            "grow": _part(lead.grow, ("foreground", "background", "aborted")),
            "reclaim": _part(lead.reclaim, ("completed", "cancelled", "failed")),
            "step_stall_p99_ms": round(max((o.stall_p99_ms for o in self.outcomes), default=0.0), 3),
            "physical_bytes": {
                "peak": [o.physical_peak for o in self.outcomes],
                "mean": [o.physical_mean for o in self.outcomes],
                "final": [o.physical_final for o in self.outcomes],
            },
            "static_bytes": [o.static_bytes for o in self.outcomes],
            "digest": [f"{o.digest:016x}" for o in self.outcomes],
            "stage_lag_steps_max": max((o.lag_steps_max for o in self.outcomes), default=0),
            "health": self._health(),
            "wall_s": round(self.wall_s, 3),
        }
        if self.failure is not None:
            failure = self.failure
            report["failure"] = {"rank": failure.rank, "phase": failure.phase, "cause": failure.cause}
        return report

    def _health(self) -> dict[str, str]:
        """Per domain the worst state that any rank knows."""
        worst: dict[str, str] = {}
        for outcome in self.outcomes:
            for domain, state in outcome.health.items():
                worst[domain] = max(worst.get(domain, _STATES[0]), state, key=_STATES.index)
        return worst

    def print(self, console: Console) -> None:
        """Show the table and the verdict."""
        console.print(self._rank_table())
        console.print(self._run_table())
        for outcome in self.outcomes:
            for corruption in outcome.corruptions:
                console.print(f"corrupt on rank {outcome.rank}: {corruption}", style="red", highlight=False)

    def _rank_table(self) -> Table:
        table = Table(title="physical memory per rank", title_justify="left")
        table.add_column("rank (pp, tp)")
        for name in ("static", "peak", "mean", "final", "mean / static", "digest"):
            table.add_column(name, justify="right", no_wrap=True)
        for o in self.outcomes:
            pp_rank, tp_rank = divmod(o.rank, self.tp)
            share = f"{o.physical_mean / o.static_bytes:.1%}" if o.static_bytes else "-"
            table.add_row(
                f"{o.rank} ({pp_rank}, {tp_rank})", _mib(o.static_bytes), _mib(o.physical_peak), _mib(o.physical_mean),
                _mib(o.physical_final), share, f"{o.digest:016x}",
            )  # fmt: skip
        return table

    def _run_table(self) -> Table:
        data = self.to_json()
        lead = self.outcomes[0] if self.outcomes else RankOutcome(rank=0)
        grow, reclaim = data["grow"], data["reclaim"]
        table = Table(title="run", title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("value")
        rows = [
            ("requests completed", f"{data['completed']} of {data['requests']}"),
            ("retracted, misses", f"{data['retracted']}, {data['misses']}"),
            ("tokens: prefilled, reused, generated", ", ".join(
                f"{lead.totals.get(name, 0):,}" for name in ("prefill_tokens", "reused_tokens", "output_tokens"))),
            ("blocks verified, corrupt", f"{data['verified_blocks']:,}, {data['corrupt_blocks']}"),
            ("growths: background, foreground, aborted",
             f"{grow['background']}, {grow['foreground']}, {grow['aborted']}"
             f"  (p50 {grow['p50_ms']:.1f} ms, p99 {grow['p99_ms']:.1f} ms)"),
            ("reclaims: completed, cancelled, failed",
             f"{reclaim['completed']}, {reclaim['cancelled']}, {reclaim['failed']}"
             f"  (p50 {reclaim['p50_ms']:.1f} ms, p99 {reclaim['p99_ms']:.1f} ms)"),
            ("time in the coordinator per step, p99", f"{data['step_stall_p99_ms']:.2f} ms"),
            ("stage lag at RETIRE, most", f"{data['stage_lag_steps_max']} steps"),
            ("health", ", ".join(f"{name} {state}" for name, state in data["health"].items()) or "-"),
            ("virtual time, steps", f"{lead.virtual_us / 1e6:.1f} s, {lead.steps:,}"),
            ("wall clock", f"{data['wall_s']:.1f} s"),
        ]  # fmt: skip
        for what, value in rows:
            table.add_row(what, value)
        return table

    def verdict(self) -> str:
        """One line: how the run ended."""
        if self.failure is not None:
            failure = self.failure
            deaths = f" [{'; '.join(self.deaths)}]" if self.deaths else ""
            return f"rank {failure.rank}, {failure.phase}: {failure.cause}{deaths}"
        if self.corrupt:
            return f"{self.corrupt} corrupt block(s)"
        if not self.digests_agree:
            return f"the ranks disagree: digests {', '.join(f'{o.digest:016x}' for o in self.outcomes)}"
        return "all requests completed, no corrupt block, all ranks agree"


def _part(values: dict[str, float], counters: tuple[str, ...]) -> dict[str, Any]:
    part: dict[str, Any] = {name: int(values.get(name, 0)) for name in counters}
    for name in ("p50_ms", "p99_ms"):
        part[name] = round(values.get(name, 0.0), 3)
    return part


def _mib(value: int) -> str:
    return f"{value / (1 << 20):,.1f} MiB"


__all__ = ["EXIT_CORRUPT", "EXIT_FAILED", "EXIT_INPUT", "EXIT_OK", "Report"]
