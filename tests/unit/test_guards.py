"""The guards of conftest.py see what they are there for."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from kvcached_dist.config import Config
from tests import guards

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
DETACHED = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "GRACE_SECONDS", 0.05)


def test_a_child_left_running_is_found_and_ended() -> None:
    before = guards.child_processes()
    process = subprocess.Popen(SLEEP)
    described = guards.left_over_processes(before)
    assert len(described) == 1
    assert f"process {process.pid} " in described[0]
    assert "time.sleep(60)" in described[0]
    process.wait(timeout=5)
    assert guards.child_processes() - before == set()


@pytest.mark.slow
def test_a_detached_grandchild_is_found_and_ended() -> None:
    before = guards.child_processes()
    subprocess.run([sys.executable, "-S", "-c", DETACHED], check=True, timeout=10)
    described = guards.left_over_processes(before)
    assert len(described) == 1
    assert guards.child_processes() - before == set()


def test_a_child_that_has_ended_is_no_left_over() -> None:
    before = guards.child_processes()
    process = subprocess.Popen(["true"])
    psutil.Process(process.pid).wait(timeout=5)
    assert guards.left_over_processes(before) == []


def test_a_new_file_is_found_and_removed_and_an_old_one_is_not_touched(tmp_path: Path) -> None:
    old, new = tmp_path / "kvcached_dist.old.0", tmp_path / "kvcached_dist.new.0"
    old.touch()
    before = set(tmp_path.iterdir())
    new.touch()
    assert guards.left_over_files(tmp_path, before) == [f"shared memory {new}"]
    assert set(tmp_path.iterdir()) == {old}


def test_engines_of_tests_publish_where_the_guard_looks() -> None:
    folder = Path(Config.from_env().state_dir)
    assert folder.name.startswith("kvcached_dist-tests-")
    assert folder.is_dir()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_a_connection_out_of_this_machine_is_refused(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as outward, pytest.raises(OSError, match="this machine only") as e:
        outward.connect((host, 9))
    assert e.value.errno == errno.ENETUNREACH


def test_a_foreign_name_is_not_looked_up() -> None:
    with pytest.raises(socket.gaierror, match="this machine only"):
        socket.getaddrinfo("kvcached-dist.invalid", 80)


def test_the_loopback_interface_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=lambda: server.accept()[0].close())
        answer.start()
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            assert client.recv(1) == b""
        answer.join()
