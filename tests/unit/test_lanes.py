"""Every test file is in exactly one lane, and CI runs the lanes that it can."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from tests.lanes import LANES, TESTS, files, lane_of

ROOT = TESTS.parent
CI_SCRIPT = (ROOT / ".ci" / "run").read_text()


def test_no_folder_is_in_two_lanes() -> None:
    counts = Counter(folder for lane in LANES for folder in lane.folders)
    assert [folder for folder, count in counts.items() if count > 1] == []


def test_every_test_file_is_in_exactly_one_lane() -> None:
    listed = Counter(path for lane in LANES for path in files(lane))
    present = set(TESTS.rglob("test_*.py"))
    assert {path for path, count in listed.items() if count > 1} == set()
    assert present - set(listed) == set(), "in a folder that tests/lanes.py does not name"
    assert all(lane_of(path) is not None for path in present)


def test_no_test_hides_in_a_file_that_is_not_collected() -> None:
    hidden = []
    for path in set(TESTS.rglob("*.py")) - set(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        hidden += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.startswith("test_")]
    assert hidden == []


def test_no_lane_is_marked_by_hand() -> None:
    marker = re.compile(r"\bmark\.(" + "|".join(lane.name for lane in LANES) + r")\b")
    by_hand = [str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py") if marker.search(path.read_text())]
    assert by_hand == []


def test_ci_runs_each_of_its_lanes_once() -> None:
    run = re.findall(r"(?:^|&&)\s*lane (\w+) \d+$", CI_SCRIPT, flags=re.MULTILINE)
    assert sorted(run) == sorted(lane.name for lane in LANES if lane.ci)


def test_ci_ends_within_its_time() -> None:
    budgets = [int(seconds) for seconds in re.findall(r'\b(?:lane \w+|budget "[^"]+") (\d+)\b', CI_SCRIPT)]
    assert len(budgets) > len([lane for lane in LANES if lane.ci])
    assert sum(budgets) <= 50 * 60  # worst case; a run on a quiet machine of two cores takes about half of it


def test_lane_marker_is_set(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("cpu") is not None
    others = [lane.name for lane in LANES if lane.name != "cpu" and request.node.get_closest_marker(lane.name)]
    assert others == []
