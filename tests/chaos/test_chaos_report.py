"""The report: JSON with the promised keys, a table, and an exit status that nothing bad can slip past."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvcached_dist.chaos.plan import Kind, make_plan
from kvcached_dist.chaos.report import Outcome, Report, Spread

PLAN = make_plan(4, 1, 4, 5.0, 2.0)


def report() -> Report:
    outcomes = [
        Outcome(PLAN[0], True, [40.0, 60.0, 50.0], recovered_ms=1400.0, rejoin_ms=1300.0),
        Outcome(PLAN[1], True, recovered_ms=20.0),
        Outcome(PLAN[2], True, recovered_ms=2010.0),
        Outcome(PLAN[3], True, [30.0], recovered_ms=900.0, restart_ms=800.0),
    ]
    return Report(2, 2, 1, 5.0, outcomes, answered=48)


def test_the_json_has_the_promised_keys() -> None:
    data = json.loads(json.dumps(report().to_json()))
    assert data["faults"] == 4
    assert data["detect_ms"] == {"p50": 50.0, "max": 60.0}
    assert data["rejoin_ms"] == {"p50": 1300.0, "max": 1300.0}
    assert (data["violations"], data["orphans"], data["leaked_bytes"]) == (0, 0, 0)
    assert set(data["by_kind"]) == {fault.kind.value for fault in PLAN}
    assert data["by_kind"][Kind.KILL_FOLLOWER.value] == {
        "injected": 1,
        "detected_ms": {"p50": 50.0, "max": 60.0},
        "recovered_ms": {"p50": 1400.0, "max": 1400.0},
        "unanswered": 0,
    }
    assert data["seed"] == 1
    assert data["plan"] == [str(fault) for fault in PLAN]


def test_without_a_violation_the_exit_status_is_0() -> None:
    assert report().exit_status == 0
    assert report().verdict() == "4 faults, no violation (seed 1)"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r.outcomes[2].violations.append("S5: digests differ"), "S5: digests differ"),
        (lambda r: setattr(r.outcomes[1], "fired", False), "did not happen"),
        (lambda r: r.violations.append("a rank did not end in order"), "in order"),
        (lambda r: r.orphans.append("process 12"), "orphan: process 12"),
        (lambda r: r.files.append("x.lock"), "left-over file: x.lock"),
        (lambda r: setattr(r, "unanswered", 3), "3 requests without an answer"),
        (lambda r: setattr(r, "leaked_bytes", 4096), "4096 bytes leaked"),
    ],
)
def test_everything_bad_changes_the_exit_status(spoil: object, says: str) -> None:
    spoiled = report()
    spoil(spoiled)  # type: ignore[operator]
    assert spoiled.exit_status == 1
    assert says in spoiled.all_violations()[0]
    assert spoiled.to_json()["violations"] == 1
    assert "seed 1" in spoiled.verdict()


def test_the_table_has_a_row_per_kind() -> None:
    written = io.StringIO()
    report().print(Console(file=written, width=140))
    text = written.getvalue()
    assert all(fault.kind.value in text for fault in PLAN)
    assert "48 requests answered, 0 not" in text


def test_no_durations_are_shown_as_none() -> None:
    assert Spread.of([]).to_json() == {"p50": None, "max": None}
    assert Spread.of([None, 2.0, 1.0, 3.0]) == Spread(2.0, 3.0)


def test_a_line_says_what_came_of_a_fault() -> None:
    assert "detected 40-60 ms; recovered 1400 ms" in report().outcomes[0].line()
    assert "VIOLATION x" in Outcome(PLAN[0], True, violations=["x"]).line()
    assert "did not happen" in Outcome(PLAN[0]).line()


def test_an_overloaded_host_is_named() -> None:
    for lag_s, named in ((0.1, False), (1.5, True)):
        written = io.StringIO()
        overloaded = report()
        overloaded.lag_s = lag_s
        overloaded.print(Console(file=written, width=200))
        assert ("a process waited 1.5 s for a core" in written.getvalue()) == named
