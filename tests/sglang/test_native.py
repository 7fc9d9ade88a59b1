"""What is told of an engine whose pools stayed native."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcached_dist.cli import main
from kvcached_dist.sglang import engine
from kvcached_dist.sglang.runtime import Phase
from kvcached_dist.sglang.starting import Starting
from kvcached_dist.snapshot import SnapshotWriter, list_engines
from tests.sglang.test_agreement import configurator, sizes, starting
from tests.sglang.test_reservations import pool_of

WHY = "rank 0: not supported: recurrent state"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "gather", lambda mine, *_: [mine])


def native(state_dir: Path, **settings: Any) -> Starting:
    """A rank that has refused, before its engine builds pools."""
    made = starting(state_dir=str(state_dir), **settings)
    made.agree(configurator(mambaish_config=object()), sizes())
    assert (made.runtime.phase, made.runtime.reason) == (Phase.NATIVE, WHY)
    return made


def closed(made: Starting) -> None:
    assert made._native is not None
    assert made._native._writer is not None
    made._native._writer.close()


def pools() -> Any:
    return SimpleNamespace(token_to_kv_pool=pool_of(k_buffer=[torch.zeros(16)], v_buffer=[torch.zeros(32)]))


def test_every_pool_of_every_rank_has_a_line_and_status_says_why(
    engine_settings: Any, alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "kvcached_dist.sglang")
    made = native(tmp_path, ipc_name="served")
    made.bind(pools())
    made.reserve(pools(), "draft.")
    try:
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("event=pool")]
        assert lines[0] == f"event=pool rank=0 name=all elastic=no why='{WHY}'"
        assert lines[1] == f"event=pool rank=0 name=token_to_kv_pool.k_buffer elastic=no bytes=64 why='{WHY}'"
        assert len(lines) == 5
        (told,) = list_engines(str(tmp_path))
        assert told.name == "served"
        assert main(["status", "--state-dir", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert f"rank 0: nothing is elastic: {WHY}\n" in printed
        assert "draft.token_to_kv_pool.v_buffer 128 B" in printed
    finally:
        closed(made)


def test_without_a_name_of_the_operator_all_ranks_use_that_of_rank_0(
    engine_settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvcached_dist.sglang.offer import Offer

    monkeypatch.setattr(engine, "gather", lambda mine, *_: [Offer(refused="x", name="engine-of-rank-0"), mine])
    monkeypatch.setattr(engine, "world_rank", lambda: 1)
    made = starting(state_dir=str(tmp_path))
    made.agree(configurator(), sizes())
    made.bind(pools())
    try:
        (told,) = list_engines(str(tmp_path))
        assert (told.name, [view.rank for view in told.ranks]) == ("engine-of-rank-0", [1])
    finally:
        closed(made)


def test_a_name_that_is_taken_does_not_end_a_native_engine(
    engine_settings: Any, alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = SnapshotWriter.open(str(tmp_path), "served", 0)
    try:
        native(tmp_path, ipc_name="served").bind(pools())
    finally:
        other.close()
    assert "event=not_shown rank=0" in caplog.text
    assert "a running engine has this name" in caplog.text


def test_what_a_native_engine_has_built_lives_no_longer_for_being_told(
    engine_settings: Any, alone: None, tmp_path: Path
) -> None:
    import gc
    import weakref

    made, built = native(tmp_path), pools()
    made.bind(built)
    gone = weakref.ref(built.token_to_kv_pool)
    del built
    gc.collect()
    closed(made)
    assert gone() is None
