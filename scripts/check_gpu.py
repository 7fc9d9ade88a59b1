#!/usr/bin/env python3
"""The tests of cards, and the memory checker below them, on the card of this machine.

    scripts/check_gpu.py --json docs/benchmarks/data/tests-gpu-h200.json
    scripts/check_gpu.py --memcheck --json docs/benchmarks/data/memcheck-h200.json
    scripts/check_gpu.py -- -k graphs -x

Runs ``tests/gpu`` with the interpreter that runs this, in which kvcached_dist must be installed. The tests run in the
root of the tree, whose own ``kvcached_dist/`` hides an installed one and must find the compiled part: the install is
editable, or the installed ``_native*.so`` is copied beside the sources.

``--memcheck`` runs them below ``compute-sanitizer --tool memcheck``, with every process that they start: it sees each
access of a kernel, and each call of the driver. Refusals of the driver are what some of these tests are about, so those
do not count. It writes one log, of all processes. That it sees those that are started is tried first, with a program
whose child writes where no memory is (``tests/gpu/stray.py``, which needs cuda-python).

Exit 0: every test passed (and no process had an error), 1: not so, 2: it could not be tried here, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent

NOT_BELOW_THE_CHECKER = (
    "tests/gpu/test_oracle_cuda.py::test_the_driver_counts_the_same_bytes",
    "tests/gpu/test_world_cuda.py::test_grow_and_reclaim_cycles_give_the_cards_memory_back_exactly",
)
"""The first compares looks at the free memory of the card, and the checker takes memory of its own in between. So does
the second, which asks for a number of cycles in a time, too; below the checker the native tests do 10,000 of them."""

SANITIZER = (
    "compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--report-api-errors", "no",
    "--require-cuda-init", "no", "--error-exitcode", "86",
)  # fmt: skip

SUMMARY = re.compile(r"^========= ERROR SUMMARY: (\d+) errors?", re.MULTILINE)
HEADER = re.compile(r"^=========\s*(COMPUTE-SANITIZER|ERROR SUMMARY|LEAK SUMMARY|$)")
ENDING = re.compile(
    r"^=========\s*(Error: process didn't terminate successfully|Target application returned an error|"
    r"Error: couldn't find exit code|The application may have hit an error when dereferencing Unified Memory)"
)
"""How the tests ended, and no error in memory: killed, or with a status other than 0 as when a test fails."""

PLANTED = ROOT / "tests" / "gpu" / "stray.py"
"""Has one error in memory, in a process that it starts."""
PLANTED_S = 120.0
"""For it to end: two processes and one kernel."""
IMPORT_S = 60.0
"""For an interpreter to import what the tests need."""

SHOWN_LINES = 40
"""Of what the checker says."""
INTERRUPTED_S = 20.0
"""For the tests to end after the time is over."""


class NotHere(Exception):
    """It cannot be tried on this machine."""


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        test: module and name.
        seconds: of the call, with fixtures.
        outcome: ``passed``, ``failed``, ``error`` or ``skipped``.
        said: why, where it did not pass.
    """

    test: str
    seconds: float
    outcome: str
    said: str = ""


@dataclass(frozen=True)
class Checked:
    """What the memory checker says of a run, all processes together. Of one that was killed it says nothing.

    Attributes:
        errors: as it counts them; ``None``: it was ended before it could.
        said: its lines but for the header and the ending, the first ones.
        ending: what it says of how the run ended.
    """

    errors: int | None
    said: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Nothing was found as long as it watched."""
        return not self.errors and not self.said


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memcheck", action="store_true", help="below compute-sanitizer")
    parser.add_argument("--json", type=Path, help="write command, machine and outcomes to this file")
    parser.add_argument("--limit-s", type=float, default=3600, help="end it after so many seconds")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, behind --")
    chosen = parser.parse_args(arguments)
    try:
        report = describe(chosen)
    except NotHere as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 2
    if chosen.json is not None:
        chosen.json.open("a").close()  # a place that cannot be written is found now, not when the tests are over
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planted = plant(folder) if chosen.memcheck else None
        began = time.monotonic()
        ended = run(chosen, folder)
        tests = read_tests(folder / "tests.xml")
        checked = read_checked(folder / "memcheck.log") if chosen.memcheck else None
    report |= {"seconds": round(time.monotonic() - began, 1), "exit_status": ended}
    report["tests"] = [{key: value for key, value in asdict(test).items() if value != ""} for test in tests]
    if checked is not None:
        report |= {"planted": planted, **asdict(checked)}
    wrong = problems(ended, tests, checked, planted)
    report["problems"] = wrong
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report) + "\n")
    print(in_words(tests, checked), *wrong, sep="\n")
    return 1 if wrong else 0


def describe(chosen: argparse.Namespace) -> dict[str, Any]:
    """Everything that a reader needs to judge the outcome.

    Raises:
        NotHere: not installed, not seen by the tests, no usable card, or nothing to check memory with where that is
            asked for.
    """
    try:
        from kvcached_dist import __version__, _native
    except ImportError as error:
        raise NotHere(
            f"kvcached_dist cannot be imported by {sys.executable}, run this with one that can: {error}"
        ) from error

    # The import above finds the installed package: the folder of this script comes first there, and not the root.
    refused = _refused("from kvcached_dist import _native")
    if refused:
        raise NotHere(
            f"the tests import kvcached_dist from {ROOT}, which does not find its compiled part: {refused}; build in "
            "place: python -m pip install --no-build-isolation --no-deps -e . (or copy the installed _native*.so into "
            "kvcached_dist/)"
        )
    usable, reason = _native.cuda_available()
    if not usable:
        raise NotHere(f"no test of cards can run here: {reason}")
    if chosen.memcheck:
        if shutil.which(SANITIZER[0]) is None:
            raise NotHere(f"{SANITIZER[0]} is not on the PATH; it comes with the CUDA toolkit")
        refused = _refused("from cuda.bindings import driver, nvrtc")
        if refused:
            raise NotHere(f"the memory checker is tried with a kernel, which needs cuda-python: {refused}")
    import torch

    cards = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    found: dict[str, Any] = {
        "command": shlex.join(["scripts/check_gpu.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "commit": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "cards": cards,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if chosen.memcheck:
        version = [line for line in _said(SANITIZER[0], "--version").splitlines() if "ersion" in line]
        found |= {"checker": version[-1] if version else "unknown", "left_out": list(NOT_BELOW_THE_CHECKER)}
    return found


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


def _refused(statement: str) -> str:
    """Why a process like that of the tests cannot import something; empty: it can."""
    command = [sys.executable, "-c", statement]
    try:
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=IMPORT_S)
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip() or str(error)).splitlines()[-1]
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def plant(folder: Path) -> int | None:
    """Errors that the memory checker counts where a process that is started has one; ``None``: it cannot say."""
    log = folder / "planted.log"
    _within(PLANTED_S, [*_below(log), sys.executable, str(PLANTED)])
    return read_checked(log).errors


def run(chosen: argparse.Namespace, folder: Path) -> int:
    """Run the tests; their exit status, 124 when they took too long.

    Args:
        chosen: arguments of this script.
        folder: gets the outcomes, ``tests.xml`` and ``memcheck.log``.
    """
    below: tuple[str, ...] = ()
    more: list[str] = []
    if chosen.memcheck:
        below = _below(folder / "memcheck.log")
        # Kernels take many times as long there. Tests that say themselves how long they may take have the time.
        more = ["-o", "timeout=600", *(f"--deselect={name}" for name in NOT_BELOW_THE_CHECKER)]
    command = [
        *below, sys.executable, "-m", "pytest", "--lane", "gpu", "tests/gpu", f"--junitxml={folder / 'tests.xml'}",
        "-o", "junit_family=xunit2", *more, *chosen.pytest,
    ]  # fmt: skip
    return _within(chosen.limit_s, command)


def _below(log: Path) -> tuple[str, ...]:
    return (*SANITIZER, "--log-file", str(log))


def _within(limit_s: float, command: Sequence[str]) -> int:
    """Run something in the root of the tree; its exit status, 124 when it took too long."""
    # A group of its own: when the time is over nothing that it has started may keep the card.
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a group that has not ended: pytest writes the outcomes so far when it is interrupted."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPTED_S)
        os.killpg(process.pid, signal.SIGKILL)


def read_tests(path: Path) -> list[Test]:
    """Outcomes as pytest has written them; none where it did not come so far."""
    if not path.exists():
        return []
    found = []
    try:
        cases = ElementTree.parse(path).getroot().iter("testcase")
    except ElementTree.ParseError:
        return []  # ended while it wrote
    for case in cases:
        outcome, said = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "failed" if child.tag == "failure" else child.tag
                said = (child.get("message") or "").splitlines()[0][:300] if child.get("message") else ""
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append(Test(name, round(float(case.get("time") or 0), 2), outcome, said))
    return found


def read_checked(path: Path) -> Checked:
    """What the memory checker has written; nothing where it did not come so far."""
    text = path.read_text(errors="replace") if path.exists() else ""
    counts = [int(count) for count in SUMMARY.findall(text)]
    lines = [line for line in text.splitlines() if line.startswith("=========") and not HEADER.match(line)]
    said = [line for line in lines if not ENDING.match(line)]
    return Checked(
        sum(counts) if counts else None, tuple(said[:SHOWN_LINES]), tuple(line for line in lines if ENDING.match(line))
    )


def problems(ended: int, tests: Sequence[Test], checked: Checked | None, planted: int | None) -> list[str]:
    """Why this is no success; empty: it is one."""
    wrong = [test for test in tests if test.outcome in ("failed", "error")]
    found = [f"{test.outcome}: {test.test} {test.said}".rstrip() for test in wrong]
    if ended == 124:
        found.append("ended because it took too long: give it more time with --limit-s")
    elif ended and not found:
        found.append(f"ended with {ended}")
    if not any(test.outcome == "passed" for test in tests):
        found.append("no test has passed")
    if checked is not None:
        if not planted:
            found.append("the memory checker does not see what processes do that the tests start")
        if checked.errors is None:
            found.append("the memory checker has not come to its end")
        if not checked.clean:
            count = "uncounted" if checked.errors is None else checked.errors
            found.append("\n".join((f"memory checker: {count} errors", *checked.said)))
    return found


def in_words(tests: Sequence[Test], checked: Checked | None) -> str:
    """One line for people."""
    outcomes = [test.outcome for test in tests]
    text = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "error", "skipped"))
    if checked is None:
        return text
    count = "ended without its count" if checked.errors is None else f"{checked.errors} errors"
    return f"{text}; memory checker: {count}"


if __name__ == "__main__":
    sys.exit(main())
