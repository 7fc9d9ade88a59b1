"""Whole runs: real processes, real memory, real collectives, and what an operator sees of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcached_dist.replay.options import ReplayOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SMALL = ("--model", "tiny-dsv4", "--capacity", "64M", "--granule", "4096")
LEASE_S = 3.0


@dataclass
class Finished:
    status: int
    report: dict[str, Any]
    stderr: str
    seconds: float


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvcached_dist.cli", "replay", *SMALL, *arguments]


def replay(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> Finished:
    """Run the main job to its end. What it leaves behind is found by the fixture that holds for every test."""
    path = folder / "report.json"
    started = time.monotonic()
    line = [*prefix, *command(*arguments, "--json", str(path))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(path.read_text()) if path.exists() else {}
    return Finished(done.returncode, report, done.stderr, time.monotonic() - started)


def assert_complete(finished: Finished, requests: int, ranks: int) -> None:
    report = finished.report
    assert finished.status == 0, finished.stderr
    assert (report["completed"], report["requests"], report["corrupt_blocks"]) == (requests, requests, 0)
    assert len(report["digest"]) == ranks
    assert len(set(report["digest"])) == 1
    assert report["verified_blocks"] > 100
    assert set(report["health"].values()) == {"healthy"}
    assert "failure" not in report


def test_tp2_pp2_completes_in_agreement_and_gives_its_memory_back(tmp_path: Path) -> None:
    finished = replay(tmp_path, "--requests", "14")
    assert_complete(finished, 14, 4)
    report = finished.report
    # Two on most runs; a short one has few retirements, and which step they meet is a matter of time.
    assert report["stage_lag_steps_max"] >= 1
    assert report["grow"]["background"] + report["grow"]["foreground"] > 3
    assert report["reclaim"]["completed"] > 0
    physical = report["physical_bytes"]
    assert all(mean < static / 2 for mean, static in zip(physical["mean"], report["static_bytes"], strict=True))
    options = ReplayOptions(model="tiny-dsv4", capacity_bytes=64 << 20, granule_bytes=4096)
    for rank, final in enumerate(physical["final"]):
        stage = options.model_spec().stage(rank // 2, 2)
        page = sum(stage.page_bytes(domain.name) for domain in stage.domains)
        # The null pages and at most the upper watermark of free pages, and their borders.
        assert final <= page * (1 + options.config().max_reserved_pages) + (1 << 20)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4)])
def test_other_worlds(tmp_path: Path, tp: int, pp: int) -> None:
    finished = replay(tmp_path, "--requests", "6", "--tp", str(tp), "--pp", str(pp))
    assert_complete(finished, 6, tp * pp)
    assert finished.report["world"] == {"tp": tp, "pp": pp}
    assert (finished.report["stage_lag_steps_max"] >= 2) == (pp > 1)


@pytest.mark.parametrize("model", ["tiny-mla", "tiny-swa", "tiny-mamba"])
def test_other_families(tmp_path: Path, model: str) -> None:
    finished = replay(tmp_path, "--requests", "5", "--tp", "1", "--pp", "2", "--model", model)
    assert_complete(finished, 5, 2)


@pytest.mark.parametrize("op", ["create", "map", "access", "fill", "unmap", "release"])
def test_a_refused_driver_call_ends_in_a_miss_and_the_trace_completes(tmp_path: Path, op: str) -> None:
    nth = 20 if op in ("create", "map", "access", "fill") else 3
    finished = replay(tmp_path, "--requests", "14", "--fault", f"rank=1,op={op},nth={nth}")
    assert_complete(finished, 14, 4)
    if op in ("create", "map", "access", "fill"):
        assert finished.report["grow"]["aborted"] >= 1
    if op == "unmap":
        assert finished.report["reclaim"]["failed"] >= 1


@pytest.mark.parametrize("point", ["reserve", "publish", "unmap"])
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, point: str) -> None:
    finished = replay(tmp_path, "--requests", "30", "--fault", f"rank=2,op=kill,at={point},nth=3")
    assert finished.status == 3
    assert finished.report["failure"]["rank"] == 2
    assert "rank lost" in finished.report["failure"]["cause"]
    assert finished.report["failure"]["phase"]
    assert "signal 9 (SIGKILL)" in finished.stderr
    # The survivors tell what was done.
    assert len(finished.report["digest"]) == 3


def test_a_killed_leader_is_named_by_its_followers(tmp_path: Path) -> None:
    finished = replay(tmp_path, "--requests", "30", "--fault", "rank=0,op=kill,at=mapped,nth=3")
    assert finished.status == 3
    assert finished.report["failure"]["rank"] == 0


def test_a_rank_that_hangs_beyond_the_lease_is_given_up(tmp_path: Path) -> None:
    finished = replay(
        tmp_path, "--requests", "30", "--lease", str(LEASE_S), "--fault", "rank=3,op=hang,at=reserved,seconds=100,nth=3"
    )  # fmt: skip
    assert finished.status == 3
    assert finished.report["failure"]["rank"] == 3
    assert "hung" in finished.report["failure"]["cause"]
    assert finished.seconds < 100


def test_a_rank_that_hangs_within_the_lease_costs_time_but_nothing_else(tmp_path: Path) -> None:
    finished = replay(
        tmp_path, "--requests", "10", "--lease", "8", "--fault", "rank=1,op=hang,at=mapped,seconds=2,nth=3"
    )  # fmt: skip
    assert_complete(finished, 10, 4)


def test_a_lost_answer_is_asked_for(tmp_path: Path) -> None:
    finished = replay(tmp_path, "--requests", "8", "--fault", "rank=1,op=drop,message=RESERVED,nth=2")
    assert_complete(finished, 8, 4)


def test_a_capacity_too_small_for_one_request_ends_with_a_clear_error(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 400000, "output_length": 5}\n')
    finished = replay(tmp_path, "--trace", str(trace), "--tp", "1", "--pp", "2", "--capacity", "4M")
    assert finished.status == 2
    assert "--capacity is too small for request 0 alone (400000 prompt and 5 output tokens)" in finished.stderr


def test_torchrun_can_start_the_ranks(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "kvcached_dist.cli")
    path = tmp_path / "report.json"
    line = [*torchrun, "replay", *SMALL, "--launcher", "torchrun", "--tp", "1", "--pp", "2", "--requests", "5",
            "--json", str(path)]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert_complete(Finished(done.returncode, json.loads(path.read_text()), done.stderr, 0.0), 5, 2)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent(signum: signal.Signals) -> None:
    parent = subprocess.Popen(
        command("--tp", "1", "--pp", "2", "--requests", "60", "--speed", "0.05"), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stderr is not None
    ranks = _wait_for_ranks(parent.pid, 2)
    os.kill(parent.pid, signum)
    assert parent.wait(timeout=60) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    if signum != signal.SIGKILL:
        assert parent.stderr.read() == f"kvcached-dist replay: ended by {signum.name}\n"
    parent.stderr.close()


def _wait_for_ranks(pid: int, count: int) -> list[psutil.Process]:
    """The rank processes, once each of them runs its agent's threads."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = [p for p in psutil.Process(pid).children() if "spawn_main" in " ".join(p.cmdline())]
        if len(children) == count and all(child.num_threads() > 5 for child in children):
            return children
        time.sleep(0.2)
    raise AssertionError("the ranks did not start")


def test_a_rank_killed_before_the_start_is_over_is_named() -> None:
    """R52: the first death is known whatever the other ranks wait for."""
    parent = subprocess.Popen(
        command("--tp", "1", "--pp", "2", "--lease", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 and time.monotonic() < deadline:
        ranks = [p for p in psutil.Process(parent.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        time.sleep(0.02)
    ranks[1].kill()
    _, stderr = parent.communicate(timeout=90)
    assert parent.returncode == 3
    assert "the process of rank 1 ended with signal 9 (SIGKILL)" in stderr
