"""The handle of a process at the other end of a link."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 1.0
BEAT_S = 0.05
START_S = 40.0
"""Longest start of a process that imports torch on a machine that is busy."""


class PeerProcess:
    """A process that runs ``tests.links.peer_main``; only this object signals and ends it."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.links.peer_main"],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "end of output"})

    def tell(self, do: str, **facts: Any) -> None:
        """Give a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **facts}) + "\n")
        self.process.stdin.flush()

    def connect(self, port: int, *, serve: bool = False) -> int:
        """Let it connect to a store, or serve one; returns the port."""
        self.tell("connect", host="127.0.0.1", port=port, serve=serve)
        return int(self.expect("connected", START_S)["port"])

    def open(self, *, session: int, epoch: int, follower: int = 1, lease_s: float = LEASE_S, **more: Any) -> None:
        """Let it open its end of a link; does not wait."""
        facts = {"connect_s": 10.0, "beat_s": BEAT_S} | more
        self.tell("open", session=session, epoch=epoch, follower=follower, lease_s=lease_s, **facts)

    def expect(self, event: str, timeout_s: float = 5.0) -> dict[str, Any]:
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
        self.process.send_signal(signal.SIGKILL)
        return sent

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.go_on()
        self.process.wait(10)
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # a command that nobody read any more
                continue
