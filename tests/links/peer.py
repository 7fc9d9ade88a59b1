"""Handles of processes at the other end of a link."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.links import peer_main

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 1.0
BEAT_S = 0.05
START_S = 40.0
"""Longest start of a process that imports torch on a machine that is busy."""

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["tests.links.peer_main"])


class Peer:
    """A process that runs ``tests.links.peer_main``; only its handle signals and ends it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        raise NotImplementedError

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; returns the exit status, ``None`` while it runs."""
        raise NotImplementedError

    def end(self) -> None:
        """End it, whatever state it is in."""
        raise NotImplementedError

    def tell(self, do: str, **facts: Any) -> None:
        """Give a command."""
        self._write(json.dumps({"do": do, **facts}))

    def connect(self, port: int, *, serve: bool = False) -> int:
        """Let it connect to a store, or serve one; returns the port."""
        self.tell("connect", host="127.0.0.1", port=port, serve=serve)
        return int(self.expect("connected", START_S)["port"])

    def open(self, *, session: int, epoch: int, follower: int = 1, lease_s: float = LEASE_S, **more: Any) -> None:
        """Let it open its end of a link; does not wait."""
        facts = {"connect_s": 10.0, "beat_s": BEAT_S} | more
        self.tell("open", session=session, epoch=epoch, follower=follower, lease_s=lease_s, **facts)

    def expect(self, event: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The next event, which must be this one. Goodbyes of earlier links are skipped."""
        while True:
            got = self._events.get(timeout=timeout_s)
            if got["event"] == event:
                return got
            assert got["event"] == "bye", f"expected {event!r}, got {got}"

    def silent_for(self, seconds: float) -> bool:
        """Whether no event comes for so long."""
        try:
            self._events.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def kill(self) -> float:
        """SIGKILL; returns when it was sent (monotonic)."""
        sent = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)
        return sent

    def stop(self) -> None:
        """SIGSTOP; returns when no thread runs any more: on a busy machine one can answer a little longer."""
        os.kill(self._pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._pid}/task")
        while any(stat.read_text().rpartition(")")[2].split()[0] not in "TZX" for stat in tasks.glob("*/stat")):
            time.sleep(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)


class ForkedPeer(Peer):
    """Forked from a process that has torch loaded: starts in milliseconds, but ends without the interpreter's end."""

    def __init__(self, **environment: str) -> None:
        self._connection, child_end = _forking.Pipe()
        self._process = _forking.Process(target=peer_main.forked, args=(child_end, environment))
        self._process.start()
        child_end.close()
        assert self._process.pid is not None
        super().__init__(self._process.pid)

    def _read(self) -> None:
        connection: Connection = self._connection
        try:
            while True:
                self._events.put(json.loads(connection.recv()))
        except (EOFError, OSError):
            self._events.put({"event": "end of output"})

    def _write(self, text: str) -> None:
        self._connection.send(text)

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self.go_on()
        self._process.join(10)
        self._reader.join(10)
        self._connection.close()
        self._process.close()


class PeerProcess(Peer):
    """An interpreter of its own, for tests that are about its end."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.links.peer_main"],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        super().__init__(self._process.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "end of output"})

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int | None:
        return self._process.wait(timeout_s)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.go_on()
        self._process.wait(10)
        self._reader.join(10)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.stdin.close()
        except BrokenPipeError:  # a command that nobody read any more
            return
