"""What the script for cards says of a run: outcomes, processes below the memory checker, and what is no success."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcached_dist import _native
from scripts import check_gpu

HEADER = "========= COMPUTE-SANITIZER\n"
CLEAN = f"{HEADER}========= ERROR SUMMARY: 0 errors\n"
KILLED = f"""{HEADER}========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Target application returned an error
"""
WITHOUT_CUDA = f"{HEADER}========= Error: Target application terminated before first instrumented API call\n"
STRAY = f"""{HEADER}========= Invalid __global__ read of size 4 bytes
=========     at reads(float *)+0x150
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""

PASSED = '<testcase classname="tests.gpu.test_a" name="test_one" time="0.504" />'
SKIPPED = '<testcase classname="tests.gpu.test_a" name="test_two" time="0"><skipped message="two cards" /></testcase>'
FAILED = (
    '<testcase classname="tests.gpu.test_a" name="test_three" time="1"><failure message="assert 1 == 2&#10;more">'
    "trace</failure></testcase>"
)

CHECKER = """#!{python}
import os, re, sys
said = {said!r}
written = sys.argv[sys.argv.index("--log-file") + 1]
for number, text in enumerate(said):
    open(written.replace("%p", str(number)), "w").write(text)
tests, = [argument.split("=", 1)[1] for argument in sys.argv if argument.startswith("--junitxml=")]
open(tests, "w").write("<testsuites><testsuite>" + {cases!r} + "</testsuite></testsuites>")
sys.exit({status})
"""

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script with a checker that does not run the tests, and says what it is told."""

    def run(*said: str, cases: str = PASSED, status: int = 0) -> dict[str, Any]:
        tool = tmp_path / check_gpu.SANITIZER[0]
        tool.write_text(CHECKER.format(python=sys.executable, said=said, cases=cases, status=status))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(check_gpu, "describe", lambda _chosen: {"cards": ["a card"]})
        path = tmp_path / "report.json"
        ended = check_gpu.main(["--memcheck", "--json", str(path)])
        report: dict[str, Any] = json.loads(path.read_text())
        assert ended == (1 if report["problems"] else 0)
        return report

    return run


@pytest.mark.skipif(_native.cuda_available()[0], reason="there is a card")
def test_without_a_card_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_gpu.main([]) == 2
    assert capsys.readouterr().err.startswith("check_gpu: no test of cards can run here: ")


def test_an_interpreter_without_the_package_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "kvcached_dist", None)
    assert check_gpu.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"check_gpu: kvcached_dist cannot be imported by {sys.executable}")
    assert said.count("\n") == 1


def test_a_clean_run_with_processes_that_tests_have_killed(checked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(CLEAN, KILLED, CLEAN, HEADER, WITHOUT_CUDA, cases=PASSED + SKIPPED)
    assert report["problems"] == []
    assert report["tests"] == [
        {"test": "tests.gpu.test_a::test_one", "seconds": 0.5, "outcome": "passed"},
        {"test": "tests.gpu.test_a::test_two", "seconds": 0.0, "outcome": "skipped", "said": "two cards"},
    ]
    assert [process["errors"] for process in report["processes"]] == [0, None, 0, None]
    assert report["processes"][1]["ending"][0].endswith("process didn't terminate successfully")
    assert report["processes_without_cuda"] == 1
    assert "0 errors in 4 processes; 2 ended without its count" in capsys.readouterr().out


def test_an_error_in_any_process_is_no_success_whether_it_was_killed_or_not(checked: Run) -> None:
    for text in (STRAY, STRAY.rpartition("========= ERROR")[0]):
        (problem,) = checked(CLEAN, text)["problems"]
        assert problem.startswith("memory checker, in a process: ")
        assert "Invalid __global__ read of size 4 bytes" in problem


def test_a_checker_that_has_watched_nothing_is_no_success(checked: Run) -> None:
    assert checked()["problems"] == checked(KILLED)["problems"] == checked(WITHOUT_CUDA)["problems"]
    assert checked(KILLED)["problems"] == ["the memory checker has watched no process to its end"]


def test_tests_that_fail_or_do_not_run_are_no_success(checked: Run) -> None:
    (problem,) = checked(CLEAN, cases=PASSED + FAILED, status=1)["problems"]
    assert problem == "failed: tests.gpu.test_a::test_three assert 1 == 2"
    assert checked(CLEAN, cases=SKIPPED)["problems"] == ["no test has passed"]
    assert checked(CLEAN, status=3)["problems"] == ["ended with 3"]


SLOW = """#!{python}
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
open({noted!r}, "w").write(str(child.pid))
time.sleep(60)
"""


@pytest.mark.slow
def test_when_the_time_is_over_nothing_is_left_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, noted = tmp_path / check_gpu.SANITIZER[0], tmp_path / "child"
    tool.write_text(SLOW.format(python=sys.executable, noted=str(noted)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(check_gpu, "describe", lambda _chosen: {})
    path = tmp_path / "report.json"
    assert check_gpu.main(["--memcheck", "--limit-s", "2", "--json", str(path)]) == 1
    problems = json.loads(path.read_text())["problems"]
    assert "ended because it took too long: give it more time with --limit-s" in problems
    child = int(noted.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_cannot_run_below_the_checker_is_there() -> None:
    for name in check_gpu.NOT_BELOW_THE_CHECKER:
        path, test = name.split("::")
        assert f"def {test}(" in (check_gpu.ROOT / path).read_text()
