"""What the warden does on the host: a store server that can be killed, signals, left-over processes and files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_dist.chaos.rank import LOOPBACK, Identity, current_identity
from kvcached_dist.chaos.warden import RUN_VARIABLE, Pulse, Warden
from kvcached_dist.coord.links.store import connect_store
from kvcached_dist.errors import KVDistError
from kvcached_dist.processes import start_ticks

RUN = "run-of-the-warden-tests"


@pytest.fixture(scope="module")
def warden() -> Iterator[Warden]:
    made = Warden(RUN)
    yield made
    assert made.close() == []


def sleeper(run: str = "") -> subprocess.Popen[bytes]:
    code = "import time; print(flush=True); time.sleep(60)"
    environment = {**os.environ, **({RUN_VARIABLE: run} if run else {})}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def identity(pid: int) -> Identity:
    ticks = start_ticks(pid)
    assert ticks is not None
    return Identity(pid, ticks, current_identity().host)


@pytest.mark.slow
def test_a_killed_store_server_comes_back_on_its_port_and_knows_nothing() -> None:
    with contextlib.closing(Warden(RUN)) as warden:
        see_a_killed_store_server_come_back(warden)


def see_a_killed_store_server_come_back(warden: Warden) -> None:
    port = warden.start_store()
    store = connect_store(LOOPBACK, port, False, 1, 10)
    store.set("key", "value")
    warden.signal_store(signal.SIGKILL)
    with pytest.raises(KVDistError):
        connect_store(LOOPBACK, port, False, 1, 0.3)
    assert warden.start_store() == port
    assert not connect_store(LOOPBACK, port, False, 1, 10).check(["key"])


@pytest.mark.slow
def test_a_signal_reaches_the_process_that_is_meant_and_no_later_one(warden: Warden) -> None:
    process = sleeper()
    mine = identity(process.pid)
    warden.watch(mine)
    warden.signal_rank(Identity(mine.pid, mine.started + 1, mine.host), signal.SIGKILL)
    assert not warden.await_end(mine, 0.05)
    sent_at = warden.signal_rank(mine, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert warden.await_end(mine, 5)
    deadline = time.monotonic() + 5
    while not warden.ended_at(mine) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sent_at <= warden.ended_at(mine) <= time.time()


@pytest.mark.slow
def test_orphans_are_found_by_their_identity_or_by_their_environment(warden: Warden) -> None:
    assert warden.orphans([], 0) == []
    marked, known, foreign = sleeper(RUN), sleeper(), sleeper("another run")
    try:
        found = warden._strangers({os.getpid()})
        assert marked.pid in found
        assert foreign.pid not in found
        assert warden.orphans([identity(known.pid)], 0) != []
    finally:
        for process in (marked, known, foreign):
            process.kill()
            process.wait()


def test_files_of_the_rig_are_no_left_overs(warden: Warden) -> None:
    for name in ("faults.jsonl", "rests", "card-0"):
        Path(warden.run_dir, name).touch()
    assert warden.files() == []
    Path(warden.run_dir, "kvcached_dist-growth-card_0.lock").touch()
    assert warden.files() == ["kvcached_dist-growth-card_0.lock"]


def test_without_a_journal_nothing_has_fired(warden: Warden) -> None:
    Path(warden.run_dir, "faults.jsonl").unlink(missing_ok=True)
    assert warden.fired() == []


def test_the_pulse_tells_how_late_a_sleeper_wakes_up() -> None:
    pulse = Pulse()
    pulse._late.append((100.0, 0.7))
    assert pulse.latest_s(99.0) >= 0.7
    assert pulse.latest_s(time.time() + 60) == 0.0
