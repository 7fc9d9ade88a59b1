"""``kvcached-dist chaos``: mistakes are one line, the plan can be seen, failures of the rig are named as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcached_dist.chaos import run as chaos_run
from kvcached_dist.chaos.cluster import RigError
from kvcached_dist.chaos.options import ChaosOptions
from kvcached_dist.chaos.plan import make_plan
from kvcached_dist.chaos.report import Outcome, Report
from kvcached_dist.cli import chaos as command
from kvcached_dist.cli import main

PLAN = make_plan(2, 1, 4, 5.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "0"], "--tp 0: must be at least 1, for example --tp 2"),
        (["--tp", "1", "--pp", "1"], "1 ranks, but faults between ranks need 2 to 16"),
        (["--tp", "8", "--pp", "4"], "32 ranks"),
        (["--tp", "1", "--pp", "9"], "--pp 9: the model tiny-dsv4 has 8 layers"),
        (["--faults", "0"], "--faults 0: must be from 1 to 100000"),
        (["--faults", "many"], "--faults"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--lease", "0.1"], "--lease 0.1: must be from 0.5 to 60 seconds"),
        (["--granule", "3"], "--granule=3"),
        (["--granule", "4M"], "--granule 4194304: must be at most 2 MiB"),
        (["--json", "/nonexistent/x.json"], "the folder /nonexistent does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert len(written.err.strip().splitlines()) == 1
    assert says in written.err


def test_the_plan_can_be_seen_without_running_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--plan-only", "--faults", "30", "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [str(fault) for fault in chaos_run.plan_of(ChaosOptions(faults=30, seed=5))]


def outcome(violations: list[str] | None = None) -> Outcome:
    return Outcome(PLAN[0], True, [30.0], recovered_ms=100.0, rejoin_ms=90.0, violations=violations or [])


def test_the_seed_and_every_fault_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(options: ChaosOptions, on_outcome: Any) -> Report:
        on_outcome(outcome())
        return Report(2, 2, options.seed, 5.0, [outcome()])

    monkeypatch.setattr(command, "run_chaos", run)
    file = tmp_path / "report.json"
    assert main(["chaos", "--seed", "77", "--json", str(file)]) == 0
    written = capsys.readouterr().out
    assert "seed 77" in written
    assert str(PLAN[0]) in written
    assert '"seed": 77' in file.read_text()


def test_a_violation_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(2, 2, 1, 5.0, [outcome(["S5: digests differ"])])
    monkeypatch.setattr(command, "run_chaos", lambda options, on_outcome: report)
    assert main(["chaos", "--json", "-"]) == 1
    written = capsys.readouterr()
    assert written.out.startswith("{")
    assert "S5: digests differ" in written.err


def test_a_failure_of_the_rig_is_no_failure_of_the_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: ChaosOptions, on_outcome: Any) -> Report:
        raise RigError("Ray placed a rank on another host")

    monkeypatch.setattr(command, "run_chaos", run)
    assert main(["chaos"]) == 3
    assert "rig error, not a failure of the product: Ray placed a rank" in capsys.readouterr().err
