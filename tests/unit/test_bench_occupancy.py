"""What comes back when half of the requests have ended."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvcached_dist import _native
from scripts.bench import occupancy, tables


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "PAGES", 256)
    monkeypatch.setattr(occupancy, "TOGETHER", (1,))


@pytest.mark.slow
def test_whole_runs_come_back_and_the_device_says_the_same(small: None) -> None:
    rows = occupancy.measure(_native.HostDevice(2 << 30), 43, (16, 128))
    assert [(row["run_pages"], row["pages"], row["blocks_together"], row["of_run"]) for row in rows] == [
        (16, 256, 1, False), (16, 256, 16, True), (128, 2048, 1, False), (128, 2048, 128, True),
    ]  # fmt: skip
    assert all(row["device_full_bytes"] == row["full_bytes"] > 0 for row in rows)
    assert all(row["device_recovered_bytes"] == row["recovered_bytes"] for row in rows)
    assert rows[2]["recovered_share"] == 0  # of 128 single blocks of a run one lives on, but for odds of 2^-128
    assert 0.2 < rows[3]["recovered_share"] <= 0.5


def test_a_run_length_that_does_not_fit_is_a_reason(small: None) -> None:
    rows = occupancy.measure(_native.HostDevice(100 << 20), 43, (4, 2048))
    assert [("skipped" in row, row["run_pages"]) for row in rows] == [(False, 4), (False, 4), (True, 2048)]
    assert "32768 pages take up to" in rows[2]["skipped"]
    said = io.StringIO()
    tables.occupancy(Console(file=said, width=180), rows)
    assert "run of 2048 pages: not measured, 32768 pages take up to" in said.getvalue()


def test_a_reclaim_without_an_end_is_an_error(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "SETTLE_S", -1.0)
    with pytest.raises(RuntimeError, match="reclaim has not come to an end"):
        occupancy.measure(_native.HostDevice(1 << 30), 43, (16,))
