"""What a starting rank says of its settings, and when it shows itself to tools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcached_dist import Config, observe, startup
from kvcached_dist.parts import Parts
from kvcached_dist.snapshot import list_engines
from tests.coordinator.world import Rank, config, run_world

LIBRARY = logging.getLogger("kvcached_dist")


@pytest.fixture
def level_of_before() -> Iterator[None]:
    """The level of the library's logger is the process's, so it is put back."""
    before = LIBRARY.level
    yield
    LIBRARY.setLevel(before)


@pytest.mark.usefixtures("level_of_before")
def test_a_start_says_once_which_settings_are_in_force_and_where_they_came_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Config.from_env({"KVCACHED_LOG_LEVEL": "info"}, preset="tests", seed=7)
    assert run_world(lambda _: None, settings=settings) == [None]
    [line] = [record.message for record in caplog.records if "event=settings" in record.message]
    assert line.startswith("event=settings rank=0 ")
    for said in ("KVCACHED_DIST_SEED=7 (argument)", "KVCACHED_LOG_LEVEL=INFO (environment)"):
        assert said in line
    assert "KVCACHED_DIST_BEAT_S=0.05 s (preset tests)" in line
    assert "KVCACHED_GPU_UTILIZATION" not in line, "it is at its default"
    assert "\n" not in line


@pytest.mark.usefixtures("level_of_before")
@pytest.mark.parametrize(
    ("environment", "level"), [({}, logging.ERROR), ({"KVCACHED_LOG_LEVEL": "debug"}, logging.DEBUG)]
)
def test_only_a_level_that_was_given_changes_the_logging_of_the_application(
    environment: dict[str, str], level: int
) -> None:
    LIBRARY.setLevel(logging.ERROR)
    assert run_world(lambda _: None, settings=Config.from_env(environment, preset="tests")) == [None]
    assert LIBRARY.level == level


def beats_during_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock beats before the null pages are there, as it may do when the start takes long."""
    begin: Callable[[Parts], None] = startup.begin

    def late(parts: Parts) -> None:
        for call in parts.on_beat:
            call()
        begin(parts)

    monkeypatch.setattr(startup, "begin", late)


def test_a_beat_puts_no_snapshot_together_that_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SNAPSHOT_INTERVAL_S", 3600.0)
    beats_during_start(monkeypatch)
    made: list[Any] = []

    def count(*of: Any) -> dict[str, object]:
        made.append(of)
        return {}

    monkeypatch.setattr(observe, "snapshot", count)

    def body(rank: Rank) -> Any:
        before = len(made)
        for _ in range(5):
            rank.coordinator._parts.agent.beat()
        return before, len(made)

    assert run_world(body) == [(2, 2)], "one during the start, one at its end, and none for a beat soon after"


def test_the_end_of_a_start_is_shown_however_recent_the_last_snapshot_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SNAPSHOT_INTERVAL_S", 3600.0)
    beats_during_start(monkeypatch)
    settings = config(ipc_name="shown-at-start")

    def body(_: Rank) -> Any:
        [engine] = [each for each in list_engines(settings.state_dir) if each.name == "shown-at-start"]
        state = engine.ranks[0].state
        assert state is not None
        return state["domains"]["full"]["published"]

    assert run_world(body, settings=settings) == [1], "the null block"
