"""The lanes of the test suite: which folder belongs to which, and what a lane needs.

A lane is a set of folders that is run with one budget of time. A test file belongs to the lane of its folder; nothing
is marked by hand. ``python -m tests.lanes NAME`` prints the test files of a lane, one a line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane.

    Attributes:
        name: what ``--lane`` and ``.ci/run`` call it; also the pytest marker of its tests.
        folders: folders below ``tests/``.
        needs: what it runs with, in words.
        ci: whether ``.ci/run`` runs it.
    """

    name: str
    folders: tuple[str, ...]
    needs: str
    ci: bool = True


LANES = (
    Lane("cpu", ("unit", "native", "scenarios", "simulation", "replay"), "host memory and processes of this machine"),
    Lane("links", ("links", "coordinator"), "real gloo links and stores on the loopback interface"),
    Lane("ray", ("chaos",), "Ray actors on this machine"),
    Lane("model", ("model",), "spin"),
    Lane("sglang", ("sglang",), "SGLang, in an environment of its own: ./scripts/test --sglang"),
    Lane("gpu", ("gpu",), "a CUDA device", ci=False),
)


def lane_of(path: Path) -> Lane | None:
    """The lane of a test file, or ``None`` when its folder belongs to none."""
    try:
        folder = path.resolve().relative_to(TESTS).parts[0]
    except ValueError:
        return None
    return next((lane for lane in LANES if folder in lane.folders), None)


def files(lane: Lane) -> list[Path]:
    """The test files of a lane, sorted."""
    return sorted(path for folder in lane.folders for path in (TESTS / folder).rglob("test_*.py"))


if __name__ == "__main__":
    names = {lane.name: lane for lane in LANES}
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m tests.lanes {{{','.join(names)}}}")
    for file in files(names[sys.argv[1]]):
        print(file.relative_to(TESTS.parent))
