"""Every scenario file: what happens is what is written, to the line.

``pytest tests/scenarios --rewrite`` writes what happens into the files. Commit such a difference only if you can say
why every line of it is right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .script import Player, Scenario, scenarios

REPORTS = (2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 23, 39, 48, 50, 51, 52, 74, 75, 76)
"""Field reports that have a scenario."""


@pytest.mark.parametrize("path", scenarios(), ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    scenario = Scenario.read(path)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(scenario.text(scenario.play()))
        return
    assert scenario.difference() is None


def test_every_report_has_a_scenario() -> None:
    names = [path.stem for path in scenarios()]
    missing = [number for number in REPORTS if not any(name[:3] == f"r{number:02}" for name in names)]
    assert missing == []


def test_a_scenario_that_differs_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    path.write_text("# Two blocks.\n\nworld ranks=1\n\nalloc 2\n----\n0: alloc #2 -> 9,10\n")
    difference = Scenario.read(path).difference()
    assert difference is not None
    assert "wrong.txt, input 'alloc 2', line 1" in difference


def test_reading_and_writing_agree() -> None:
    for path in scenarios():
        scenario = Scenario.read(path)
        assert scenario.text([block.expected for block in scenario.blocks]) == path.read_text(), path.name


def test_an_unknown_input_names_the_known_ones() -> None:
    player = Player()
    player.play("world ranks=1")
    with pytest.raises(ValueError, match="unknown input 'dance'; known are again, alloc"):
        player.play("dance")
