"""Looks for mutants of the plugin: each is applied to a copy of the project, where tests are run that must fail.

``./scripts/test_sglang --mutants``, with ``--only WORD`` for those whose name has this word.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvcached_dist import _native
from tests.sglang.mutants import MUTANTS, UNBROKEN
from tests.simulation.mutant import Mutant
from tests.simulation.mutation import NOT_FOUND, ROOT, Verdict, apply, look_for, run_there

TESTS = (
    "tests/sglang/test_compaction.py",
    "tests/sglang/test_compaction_marks.py",
    "tests/sglang/test_compaction_windows.py",
    "tests/sglang/test_placement.py",
    "tests/sglang/test_runtime.py",
)
TIMEOUT_S = 300
FAILED = 1
"""Exit status of pytest when tests have failed; others mean that none could run."""


def copy_project(target: Path) -> None:
    """The package with its native part, and the tests."""
    skip = shutil.ignore_patterns("__pycache__", "coord")
    shutil.copytree(ROOT / "kvcached_dist", target / "kvcached_dist", ignore=skip)
    shutil.copytree(ROOT / "coord", target / "coord", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "kvcached_dist" / "coord").symlink_to(Path("..") / "coord")
    native = Path(str(_native.__file__))
    shutil.copy(native, target / "kvcached_dist" / native.name)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)


def run_one(mutant: Mutant) -> Verdict:
    """Apply a mutant to a copy and run the tests there.

    Raises:
        RuntimeError: no test could be run.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcached-mutant-") as name:
        root = Path(name)
        copy_project(root)
        apply(mutant, root)
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--lane", "sglang", *TESTS]
        try:
            done = run_there(root, pytest, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Verdict(mutant, f"tests that hang for {TIMEOUT_S} s", time.monotonic() - begun)
    found = NOT_FOUND
    if done.returncode:
        hit = re.search(r"^FAILED \S*::(\S+)", done.stdout, flags=re.MULTILINE)
        if done.returncode != FAILED or hit is None:
            raise RuntimeError(
                f"mutant {mutant.name}: no test could be run\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        found = hit.group(1)
    return Verdict(mutant, found, time.monotonic() - begun)


def main() -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at the same time")
    parsed = parser.parse_args()
    return look_for([mutant for mutant in MUTANTS if parsed.only in mutant.name], UNBROKEN, run_one, parsed.jobs)


if __name__ == "__main__":
    sys.exit(main())
