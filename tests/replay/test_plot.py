"""The picture: drawn for any number of ranks, refused early when it could not be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvcached_dist.errors import ConfigError
from kvcached_dist.replay import plot
from kvcached_dist.replay.outcome import Event, RankOutcome


def outcome(rank: int) -> RankOutcome:
    events = [Event(n * 1_000_000, kind, "") for n, kind in enumerate(("grow", "reclaim", "retract", "fault"))]
    return RankOutcome(
        rank,
        virtual_us=5_000_000,
        static_bytes=2 << 30,
        physical_mean=1 << 29,
        curve=[(0, 1 << 28), (3_000_000, 1 << 30)],
        events=events,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_picture_is_drawn(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    plot.draw(str(path), [outcome(rank) for rank in range(ranks)], 2, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_a_rank_without_a_curve_does_not_spoil_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    plot.draw(str(path), [outcome(0), RankOutcome(1, static_bytes=1)], 2, "title")
    assert path.exists()


def test_without_matplotlib_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--plot a\.png: needs matplotlib"):
        plot.check("a.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(
    ("path", "what"), [("memory.doc", "must end in"), ("/nowhere/memory.png", "/nowhere does not exist")]
)
def test_a_file_that_could_not_be_written_is_refused(path: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        plot.check(path)
