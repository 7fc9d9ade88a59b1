"""What the script for cards says of a run: outcomes, what the memory checker has found, and what is no success."""

from __future__ import annotations

import json
import os
import subprocess
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
RETURNED = "========= Target application returned an error\n"
FAILING = f"{HEADER}{RETURNED}========= ERROR SUMMARY: 0 errors\n"
STRAY = f"""{HEADER}========= Invalid __global__ write of size 8 bytes
=========     at f+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f1234560000 is out of bounds
=========     and is 74,181,901,825 bytes after the nearest allocation at 0x7f00eec00000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: <module> in <string>:8
=========\x20
========= ERROR SUMMARY: 1 error
"""

PASSED = '<testcase classname="tests.gpu.test_a" name="test_one" time="0.504" />'
SKIPPED = '<testcase classname="tests.gpu.test_a" name="test_two" time="0"><skipped message="two cards" /></testcase>'
FAILED = (
    '<testcase classname="tests.gpu.test_a" name="test_three" time="1"><failure message="assert 1 == 2&#10;more">'
    "trace</failure></testcase>"
)

CHECKER = """#!{python}
import sys
planted = {program!r} in sys.argv
said = {planted!r} if planted else {said!r}
if said is not None:
    open(sys.argv[sys.argv.index("--log-file") + 1], "w").write(said)
if planted:
    sys.exit(86)
tests, = [argument.split("=", 1)[1] for argument in sys.argv if argument.startswith("--junitxml=")]
open(tests, "w").write("<testsuites><testsuite>" + {cases!r} + "</testsuite></testsuites>")
sys.exit({status})
"""

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script with a checker that does not run the tests, and says what it is told."""

    def run(said: str | None, planted: str | None = STRAY, cases: str = PASSED, status: int = 0) -> dict[str, Any]:
        tool = tmp_path / check_gpu.SANITIZER[0]
        filled = {"said": said, "planted": planted, "cases": cases, "status": status}
        tool.write_text(CHECKER.format(python=sys.executable, program=str(check_gpu.PLANTED), **filled))
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


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose children see no installed package, and a tree for them: what is in it is not compiled."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    interpreter.chmod(0o755)
    (tmp_path / "kvcached_dist").mkdir()
    (tmp_path / "kvcached_dist" / "__init__.py").touch()
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(check_gpu, "ROOT", tmp_path)
    return tmp_path


def test_a_tree_that_hides_the_installed_package_is_told_with_what_to_do(bare: Path, capsys: Any) -> None:
    assert check_gpu.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"check_gpu: the tests import kvcached_dist from {bare}, which does not find its compiled part"
    )
    assert "cannot import name '_native' from 'kvcached_dist'" in said
    assert "python -m pip install --no-build-isolation --no-deps -e ." in said
    assert said.count("\n") == 1


def test_the_checker_is_not_tried_without_what_the_planted_error_needs(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(_native, "cuda_available", lambda: (True, ""))
    (bare / "kvcached_dist" / "_native.py").touch()
    monkeypatch.setenv("PATH", str(bare))
    assert check_gpu.main(["--memcheck"]) == 2
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
    (bare / check_gpu.SANITIZER[0]).write_text("")
    (bare / check_gpu.SANITIZER[0]).chmod(0o755)
    assert check_gpu.main(["--memcheck"]) == 2
    assert "needs cuda-python: ModuleNotFoundError: No module named 'cuda'" in capsys.readouterr().err


def test_a_clean_run(checked: Run, capsys: pytest.CaptureFixture[str]) -> None:
    report = checked(CLEAN, cases=PASSED + SKIPPED)
    assert report["problems"] == []
    assert report["tests"] == [
        {"test": "tests.gpu.test_a::test_one", "seconds": 0.5, "outcome": "passed"},
        {"test": "tests.gpu.test_a::test_two", "seconds": 0.0, "outcome": "skipped", "said": "two cards"},
    ]
    assert (report["planted"], report["errors"], report["said"], report["ending"]) == (1, 0, [], [])
    assert "1 skipped; memory checker: 0 errors" in capsys.readouterr().out


def test_an_error_in_any_process_is_no_success_whether_all_tests_pass_or_not(checked: Run) -> None:
    for status in (86, 0):
        report = checked(STRAY, status=status)
        assert report["errors"] == 1
        assert report["problems"][-1].startswith("memory checker: 1 errors\n")
        assert "Invalid __global__ write of size 8 bytes" in report["problems"][-1]
        assert len(report["said"]) == 7


def test_a_checker_that_was_ended_before_its_count_is_no_success(checked: Run, capsys: Any) -> None:
    for text in (None, HEADER):
        report = checked(text)
        assert report["problems"] == ["the memory checker has not come to its end"]
        assert report["errors"] is None
        assert "memory checker: ended without its count" in capsys.readouterr().out
    _, problem = checked(STRAY.rpartition("========= ERROR")[0])["problems"]
    assert problem.startswith("memory checker: uncounted errors\n")
    assert "Invalid __global__ write of size 8 bytes" in problem


def test_a_checker_that_does_not_see_the_planted_error_is_no_success(checked: Run) -> None:
    for text, count in ((CLEAN, 0), (HEADER, None), (None, None)):
        report = checked(CLEAN, planted=text)
        assert report["problems"] == ["the memory checker does not see what processes do that the tests start"]
        assert report["planted"] == count


CUDA = """
import os
class Call:
    def __init__(self, name):
        self.name = name
    def __getattr__(self, name):
        return Call(name)
    def __call__(self, *given):
        print(self.name, os.getpid(), given, flush=True)
        return (700 if self.name == "cuCtxSynchronize" else 0), 8
def __getattr__(name):
    return Call(name)
"""


def test_the_planted_error_is_in_a_child_and_no_process_fails_for_it(tmp_path: Path) -> None:
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    for path in (bindings.parent, bindings):
        (path / "__init__.py").touch()
    for name in ("driver", "nvrtc"):
        (bindings / f"{name}.py").write_text(CUDA)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(check_gpu.PLANTED)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    calls = [line.split(maxsplit=2) for line in said.splitlines()]
    assert [name for name, _, _ in calls][-2:] == ["cuLaunchKernel", "cuCtxSynchronize"]
    assert "((8,)," in calls[-2][2]
    assert str(process.pid) not in {pid for _, pid, _ in calls}


def test_tests_that_fail_or_do_not_run_are_no_success(checked: Run) -> None:
    (problem,) = checked(CLEAN, cases=PASSED + FAILED, status=1)["problems"]
    assert problem == "failed: tests.gpu.test_a::test_three assert 1 == 2"
    failing = checked(FAILING, cases=PASSED + FAILED, status=1)
    assert failing["problems"] == [problem]
    assert failing["ending"] == [RETURNED.strip()]
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
    monkeypatch.setattr(check_gpu, "PLANTED_S", 0.5)
    path = tmp_path / "report.json"
    assert check_gpu.main(["--memcheck", "--limit-s", "2", "--json", str(path)]) == 1
    problems = json.loads(path.read_text())["problems"]
    assert "ended because it took too long: give it more time with --limit-s" in problems
    child = int(noted.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_outcomes_that_were_cut_off_are_none(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text('<testsuites><testsuite><testcase classname="a" name="b" time="1"/>')
    assert check_gpu.read_tests(path) == []


def test_what_cannot_run_below_the_checker_is_there() -> None:
    for name in check_gpu.NOT_BELOW_THE_CHECKER:
        path, test = name.split("::")
        assert f"def {test}(" in (check_gpu.ROOT / path).read_text()
