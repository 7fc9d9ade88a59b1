"""Looks for mutants: each is applied to a copy of the package in a temporary folder, where the scenario files, the
directed schedules, random ones and at last the unit tests of the participant are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .mutant import Mutant
from .mutants import ALL, UNBROKEN

ROOT = Path(__file__).resolve().parents[2]

RANDOM_SCHEDULES = 500
"""Random schedules that a mutant has to survive, after the directed ones, to count as not found."""

TIMEOUT_S = 900

NOT_FOUND = "NOT FOUND"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: by what it was found, and how fast."""

    mutant: Mutant
    found_by: str
    seconds: float


def apply(mutant: Mutant, root: Path) -> None:
    """Change one file below ``root``.

    Raises:
        ValueError: the text does not stand there exactly once.
    """
    path = root / mutant.file
    text = path.read_text()
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {mutant.name}: its text stands {count} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))


def copy_project(target: Path) -> None:
    """What the simulation needs: the package without its build, and the tests."""
    skip = shutil.ignore_patterns("__pycache__", "*.so", "coord")
    shutil.copytree(ROOT / "kvcached_dist", target / "kvcached_dist", ignore=skip)
    shutil.copytree(ROOT / "coord", target / "coord", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "kvcached_dist" / "coord").symlink_to(Path("..") / "coord")
    for folder in ("simulation", "scenarios"):
        shutil.copytree(
            ROOT / "tests" / folder, target / "tests" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "tests" / "unit" / "core", target / "tests" / "unit" / "core")
    for package in (target / "tests", target / "tests" / "unit"):
        (package / "__init__.py").touch()


SITE_PACKAGES = (
    Path(sys.executable).parent.parent
    / "lib"
    / f"python{sys.version_info.major}.{sys.version_info.minor}"
    / "site-packages"
)
UNIT_TESTS = ("tests/unit/core/test_participant.py", "tests/unit/core/test_quantities.py")
"""Asked last: what a restarted epoch finds on a rank, and what a leader knows between two beats, is too rare for random
schedules."""


def run_there(root: Path, arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a copy of the project.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    # -S leaves out the finder of an editable install; all else is then found by its folder.
    path = os.pathsep.join((str(root), str(SITE_PACKAGES)))
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_one(mutant: Mutant) -> Verdict:
    """Apply a mutant to a copy and look for it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcached-mutant-") as name:
        root = Path(name)
        copy_project(root)
        apply(mutant, root)
        found = NOT_FOUND
        for what, arguments in (
            ("scenario", ["-m", "tests.scenarios"]),
            ("simulation", ["-m", "tests.simulation", "--jobs", "1", "--schedules", str(RANDOM_SCHEDULES), "--first"]),
            (
                "unit test",
                ["-m", "pytest", "-q", "-x", "--noconftest", "-c", os.devnull, "--rootdir", name, *UNIT_TESTS],
            ),
        ):
            try:
                done = run_there(root, arguments, TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue  # a break that is not seen within the time counts as not found
            if done.returncode:
                hit = re.search(r"^(?:VIOLATION|DIFFERS|FAILED) (.*)$", done.stdout, flags=re.MULTILINE)
                found = f"{what}: {hit.group(1)[:90] if hit else done.stderr.strip()[-90:]}"
                break
    return Verdict(mutant, found, time.monotonic() - begun)


def run_all(only: str, jobs: int) -> int:
    """Run the mutants whose name contains ``only``; exit status 0 when every one was found."""
    return look_for([mutant for mutant in ALL if only in mutant.name], UNBROKEN, run_one, jobs)


def look_for(chosen: Sequence[Mutant], unbroken: Mutant, run: Callable[[Mutant], Verdict], jobs: int) -> int:
    """Look for mutants and say what became of each.

    Args:
        chosen: which ones.
        unbroken: a change that breaks nothing, and must not be found.
        run: looks for one.
        jobs: so many at the same time.

    Returns:
        Exit status: 0 when every one was found, and there was one.
    """
    baseline = run(unbroken)
    if baseline.found_by != NOT_FOUND:
        print(f"without a mutant there is already a violation: {baseline.found_by}")
        return 1
    verdicts = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for future in as_completed([pool.submit(run, mutant) for mutant in chosen]):
            verdict = future.result()
            verdicts.append(verdict)
            print(f"{verdict.mutant.name:38} {verdict.seconds:6.1f} s  {verdict.found_by}", flush=True)
    missed = [verdict.mutant for verdict in verdicts if verdict.found_by == NOT_FOUND]
    print(f"mutants={len(chosen)} found={len(chosen) - len(missed)} missed={[mutant.name for mutant in missed]}")
    return 1 if missed or not chosen else 0
