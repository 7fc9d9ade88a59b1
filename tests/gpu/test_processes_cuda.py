"""Several processes on one card: memory of a killed one, and two engines where memory ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcached_dist import _native

usable, reason = _native.cuda_available()
pytestmark = [pytest.mark.skipif(not usable, reason=reason), pytest.mark.timeout(300)]

GIB = 1 << 30
HELD = 8

HOLDER = f"""
import signal
from kvcached_dist._native import Backing, CudaDevice, PoolGeometry
pool = PoolGeometry(name="held", domain=0, pages={HELD}, reservation_bytes={HELD} << 30, lanes=[(0, 1 << 30)])
backing = Backing(CudaDevice(0), [pool])
assert backing.reserve(1, [(0, 0, {HELD})]).ok and backing.map([(0, 0, {HELD})]).ok
print("held", flush=True)
signal.pause()
"""


def free_bytes() -> int:
    return _native.CudaDevice(0).free_bytes()


def wait_for(reached: int, wait_s: float) -> float:
    """Seconds until the card has this much free."""
    begin = time.monotonic()
    while free_bytes() < reached:
        assert time.monotonic() < begin + wait_s, (free_bytes(), reached)
        time.sleep(0.01)
    return time.monotonic() - begin


def test_a_killed_process_gives_its_memory_back() -> None:
    torch.zeros(1, device="cuda")
    before = free_bytes()
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert before - free_bytes() >= HELD * GIB
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    wait_for(before, 10.0)


@contextlib.contextmanager
def least_free() -> Iterator[list[int]]:
    """The least free memory that was seen meanwhile."""
    seen = [free_bytes()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            seen[0] = min(seen[0], free_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def replay(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "kvcached_dist.cli", "replay", "--trace", "synthetic", "--requests", "40", "--seed",
        str(seed), "--backend", "cuda", "--capacity", "64GiB", "--tp", "1", "--pp", "1", "--cached-tokens", "0",
        "--json", str(folder / f"{seed}.json"),
    ]  # fmt: skip
    environment = {**os.environ, "KVCACHED_PHYSICAL_GROWTH_LOCK_DIR": str(folder), "KVCACHED_GPU_UTILIZATION": "0.95"}
    log = (folder / f"{seed}.log").open("wb")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finished(folder: Path, processes: dict[int, subprocess.Popen[bytes]]) -> list[dict[str, object]]:
    reports = []
    for seed, process in processes.items():
        assert process.wait(120) == 0, (folder / f"{seed}.log").read_text()[-3000:]
        reports.append(json.loads((folder / f"{seed}.json").read_text()))
    return reports


def test_two_engines_share_a_card_whose_memory_ends(tmp_path: Path) -> None:
    """Each would like more than half of what is left: both finish, and the reserve of the card is never taken."""
    torch.zeros(1, device="cuda")
    alone = finished(tmp_path, {1: replay(tmp_path, 1)})[0]
    peak = max(alone["physical_bytes"]["peak"])  # type: ignore[index]
    total = torch.cuda.mem_get_info()[1]
    reserve = total - int(0.95 * total)
    contexts = 2 * GIB  # of two processes, measured generously
    ballast = torch.empty(free_bytes() - reserve - contexts - int(1.2 * peak), dtype=torch.uint8, device="cuda")
    try:
        with least_free() as seen:
            reports = finished(tmp_path, {seed: replay(tmp_path, seed) for seed in (1, 2)})
    finally:
        del ballast
        torch.cuda.empty_cache()
    for report in reports:
        assert report["completed"] == report["requests"]
        assert report["corrupt_blocks"] == 0
    # A create looks at the free memory in its turn and gives back what touched the reserve: at most one growth.
    assert seen[0] >= reserve - GIB
