"""The report: its exact shape, the verdict, the exit status, the first cause."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvcached_dist.replay.launcher import first_cause
from kvcached_dist.replay.outcome import Event, Failure, MemoryCurve, RankOutcome, percentile
from kvcached_dist.replay.report import Report

LOST = Failure("group", 2, "reserve of txn 7", "rank 2: rank lost (its process ended)")


def outcome(rank: int, **values: object) -> RankOutcome:
    made = RankOutcome(
        rank, requests=5, totals={"completed": 5, "retracted": 1, "misses": 2, "prefill_tokens": 100}, steps=90,
        virtual_us=2_000_000, verified_blocks=10, physical_peak=900 + rank, physical_mean=500, physical_final=100,
        static_bytes=2000, digest=0xABC, stall_p99_ms=1.5 + rank, lag_steps_max=2 if rank > 1 else 0,
        grow={"foreground": 3, "background": 4, "aborted": 1, "p50_ms": 1.25, "p99_ms": 9.5},
        reclaim={"completed": 2, "cancelled": 1, "failed": 0, "p50_ms": 0.5, "p99_ms": 0.75},
        health={"full": "healthy", "swa": "healthy"}, curve=[(0, 100), (5, 900)],
        events=[Event(5, "grow", "full:[1,2)")],
    )  # fmt: skip
    for name, value in values.items():
        setattr(made, name, value)
    return made


def report(*outcomes: RankOutcome, failure: Failure | None = None) -> Report:
    return Report(2, 2, list(outcomes) or [outcome(rank) for rank in range(4)], failure, [], 3.25)


def test_the_json_has_exactly_the_documented_shape() -> None:
    assert json.loads(json.dumps(report().to_json())) == {
        "world": {"tp": 2, "pp": 2},
        "requests": 5,
        "completed": 5,
        "retracted": 1,
        "misses": 2,
        "corrupt_blocks": 0,
        "verified_blocks": 40,
        "grow": {"foreground": 3, "background": 4, "aborted": 1, "p50_ms": 1.25, "p99_ms": 9.5},
        "reclaim": {"completed": 2, "cancelled": 1, "failed": 0, "p50_ms": 0.5, "p99_ms": 0.75},
        "step_stall_p99_ms": 4.5,
        "physical_bytes": {"peak": [900, 901, 902, 903], "mean": [500] * 4, "final": [100] * 4},
        "static_bytes": [2000] * 4,
        "digest": ["0000000000000abc"] * 4,
        "stage_lag_steps_max": 2,
        "health": {"full": "healthy", "swa": "healthy"},
        "wall_s": 3.25,
    }


def test_a_failed_run_names_rank_phase_and_cause() -> None:
    failed = report(failure=LOST)
    assert failed.to_json()["failure"] == {"rank": 2, "phase": LOST.phase, "cause": LOST.cause}
    assert failed.verdict() == f"rank 2, {LOST.phase}: {LOST.cause}"


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (report(), 0),
        (report(failure=LOST), 3),
        (report(failure=Failure("capacity", 0, "the replay", "too small")), 2),
        (report(failure=Failure("input", 0, "start", "bad")), 2),
        (report(failure=Failure("divergence", 1, "the replay", "other batch")), 4),
        (report(*(outcome(rank, corrupt_blocks=int(rank == 3)) for rank in range(4))), 4),
        (report(*(outcome(rank, digest=rank) for rank in range(4))), 4),
        (report(*(outcome(rank) for rank in range(3))), 4),
    ],
)
def test_exit_status(made: Report, status: int) -> None:
    assert made.exit_status == status


def test_health_is_the_worst_that_any_rank_knows() -> None:
    ranks = [outcome(rank) for rank in range(4)]
    ranks[2].health = {"full": "degraded", "swa": "healthy"}
    assert report(*ranks).to_json()["health"] == {"full": "degraded", "swa": "healthy"}


def test_a_run_without_any_outcome_still_has_the_shape() -> None:
    empty = Report(1, 1, [], LOST, ["the process of rank 0 ended with signal 9 (SIGKILL)"], 1.0)
    assert set(empty.to_json()) == {*report().to_json(), "failure"}
    assert "signal 9 (SIGKILL)" in empty.verdict()


def test_the_table_shows_what_was_saved() -> None:
    text = io.StringIO()
    report().print(Console(file=text, width=120))
    assert "5 of 5" in text.getvalue()
    assert "25.0%" in text.getvalue()
    assert "2 (1, 0)" in text.getvalue()


def test_an_outcome_survives_its_journey_as_json() -> None:
    sent = outcome(1, failure=LOST)
    assert RankOutcome.from_json(sent.to_json()) == sent


def test_the_first_cause_is_the_one_that_names_a_dead_rank() -> None:
    elsewhere = Failure("group", 0, "the pipeline", "closed by peer")
    outcomes = [outcome(0, failure=elsewhere), outcome(1, failure=LOST)]
    assert first_cause(outcomes, [(2, "killed"), (3, "killed")], 4) == LOST


def test_a_bare_death_is_reported_with_its_signal() -> None:
    found = first_cause([outcome(0)], [(1, "the process of rank 1 ended with signal 9 (SIGKILL)")], 2)
    assert found is not None
    assert (found.rank, found.kind) == (1, "group")
    assert "SIGKILL" in found.cause


def test_a_cause_inside_a_rank_beats_the_views_of_the_others() -> None:
    small = Failure("capacity", 3, "the replay", "too small")
    assert first_cause([outcome(0, failure=LOST), outcome(3, failure=small)], [], 2) == small


def test_a_rank_that_did_not_report_is_named() -> None:
    found = first_cause([outcome(0), outcome(1), outcome(3)], [], 4)
    assert found is not None
    assert found.rank == 2


def test_no_failure_is_no_cause() -> None:
    assert first_cause([outcome(0), outcome(1)], [], 2) is None


def test_the_mean_is_over_virtual_time() -> None:
    curve = MemoryCurve()
    for when, held in ((0, 100), (10, 100), (10, 500), (20, 500), (40, 0)):
        curve.sample(when, held)
    assert (curve.peak, curve.mean, curve.final) == (500, (100 * 10 + 500 * 30) // 40, 0)
    assert curve.points == [(0, 100), (10, 500), (40, 0)]


def test_a_long_curve_is_thinned_and_keeps_its_peaks_and_its_end() -> None:
    curve = MemoryCurve()
    for when in range(9_000):
        curve.sample(when, 10_000 if when == 8_234 else when % 7)
    thin = curve.thinned()
    assert len(thin) <= 4_001
    assert (8_234, 10_000) in thin
    assert thin[-1] == curve.points[-1]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 99, 0.0),
        ([3.0], 50, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([1.0] * 99 + [9.0], 99, 1.0),
        ([1.0] * 98 + [9.0] * 2, 99, 9.0),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected
