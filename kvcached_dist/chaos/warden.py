"""What only a process on the ranks' host can do. The supervisor makes it a Ray actor beside the ranks.

It owns the run's directory and the store server, sends signals, reads the journal of faults, and says which
processes and files of the run are left.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import psutil

from ..faults import FiredFault, Journal
from ..processes import start_ticks
from .rank import BOARD_FILE, CARD_PREFIX, JOURNAL_FILE, Identity, current_identity

RUN_VARIABLE = "KVCACHED_CHAOS_RUN"
"""Every process of a run has it in its environment, so that none can get lost."""

STORE_WAIT_S = 60.0
POLL_S = 0.005


class StoreServer:
    """The store server as a process, and a warm one that can take its place.

    Threads: one. Blocks: every wait at most ``STORE_WAIT_S``.
    """

    def __init__(self) -> None:
        self.port = 0
        self._serving: subprocess.Popen[str] | None = None
        self._spare = self._spawn()

    @staticmethod
    def _spawn() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"{__package__}.store_main"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> int:
        """Start to serve, on the same port as before.

        Returns:
            The port.

        Raises:
            TimeoutError: the server did not come.
        """
        process, self._spare = self._spare, self._spawn()
        assert process.stdin is not None
        self._await(process, "warm")
        process.stdin.write(f"{self.port}\n")
        process.stdin.flush()
        self.port = int(self._await(process, "ready").split()[1])
        self._serving = process
        return self.port

    def signal(self, signum: int) -> None:
        """Send a signal to the server; after SIGKILL wait for its end."""
        process = self._serving
        if process is None:
            raise RuntimeError("no store server runs")
        process.send_signal(signum)
        if signum == signal.SIGKILL:
            process.wait(STORE_WAIT_S)
            self._serving = None

    def close(self) -> None:
        """End the server and the warm one."""
        for process in (self._serving, self._spare):
            if process is not None:
                process.kill()
                process.wait(STORE_WAIT_S)
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()
        self._serving = None

    @staticmethod
    def _await(process: subprocess.Popen[str], word: str) -> str:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], STORE_WAIT_S)
        line = process.stdout.readline() if readable else ""
        if not line.startswith(word):
            raise TimeoutError(f"the store server did not say {word!r} within {STORE_WAIT_S:g} s, but {line!r}")
        return line


class Pulse:
    """Notices when this host gives a process no core: how late a thread that only sleeps wakes up.

    Bounds of time say something about the product only where its processes run. The ranks are no witnesses, because
    a thread of theirs may wait for the interpreter.

    Threads: one of its own writes; any reads.
    """

    PAUSE_S = 0.02
    LATE_S = 0.05

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=4096)
        threading.Thread(target=self._beat, name="chaos-pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(self.PAUSE_S)
            late_s = time.monotonic() - began - self.PAUSE_S
            if late_s > self.LATE_S:
                self._late.append((time.time(), late_s))

    def latest_s(self, since: float) -> float:
        """The longest delay that ended after ``since`` (wall clock), in seconds; 0 where none is worth a word."""
        return max((late_s for at, late_s in list(self._late) if at >= since), default=0.0)


class Warden:
    """Services on the ranks' host.

    Args:
        run_id: value of ``RUN_VARIABLE`` in the processes of this run.

    Threads: one call at a time.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.run_dir = tempfile.mkdtemp(prefix="kvcached-chaos-", dir=base)
        self._store = StoreServer()
        self._pulse = Pulse()
        self._ends: dict[Identity, float] = {}

    def identity(self) -> Identity:
        """Which process this is."""
        return current_identity()

    def directory(self) -> str:
        """Directory of the run."""
        return self.run_dir

    def lag_s(self, since: float) -> float:
        """How long this process has waited for a core since ``since`` (wall clock), at most, in seconds."""
        return self._pulse.latest_s(since)

    # ------------------------------------------------------------------ store

    def start_store(self) -> int:
        """Start the store server, again on the same port; returns the port."""
        return self._store.start()

    def signal_store(self, signum: int) -> float:
        """Send a signal to the store server; returns the wall clock of that moment."""
        at = time.time()
        self._store.signal(signum)
        return at

    # ------------------------------------------------------------------ ranks

    def signal_rank(self, process: Identity, signum: int) -> float:
        """Send a signal to a rank; nothing happens where that process is gone.

        Returns:
            Wall clock of that moment.
        """
        at = time.time()
        if start_ticks(process.pid) == process.started:
            os.kill(process.pid, signum)
        return at

    def await_end(self, process: Identity, seconds: float) -> bool:
        """Wait until a process is gone; whether it is."""
        deadline = time.monotonic() + seconds
        while start_ticks(process.pid) == process.started:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def watch(self, process: Identity) -> None:
        """Note when a process ends (:meth:`ended_at`)."""
        threading.Thread(target=self._watch, args=(process,), name="chaos-watch", daemon=True).start()

    def _watch(self, process: Identity) -> None:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll()
            self._ends[process] = time.time()
        finally:
            os.close(handle)

    def ended_at(self, process: Identity) -> float:
        """Wall clock of the moment when a watched process was gone for its kernel; 0 while it is not."""
        return self._ends.get(process, 0.0)

    def fired(self) -> list[FiredFault]:
        """Faults that have fired so far."""
        return Journal.read(f"{self.run_dir}/{JOURNAL_FILE}")

    # ------------------------------------------------------------------ what is left

    def orphans(self, ended: Iterable[Identity], seconds: float) -> list[str]:
        """Processes of the run that should not be there: any but this one and the store server's.

        Args:
            ended: rank processes that were ended.
            seconds: how long they may take to leave by themselves.
        """
        wanted = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        deadline = time.monotonic() + seconds
        gone = tuple(ended)
        while (left := self._survivors(gone) | self._strangers(wanted)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [_described(pid) for pid in sorted(left)]

    @staticmethod
    def _survivors(ended: tuple[Identity, ...]) -> set[int]:
        return {process.pid for process in ended if start_ticks(process.pid) == process.started}

    def _strangers(self, wanted: set[int]) -> set[int]:
        # Ray renames its workers, which hides their environment; they are told apart by their identities instead.
        marker = f"{RUN_VARIABLE}={self._run_id}".encode()
        found = set()
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if marker in environment and process.pid not in wanted and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
            except (OSError, psutil.Error):
                continue  # gone meanwhile, or another user's
        return found

    def files(self) -> list[str]:
        """Files that ranks have left in the run's directory; those of the rig itself do not count."""
        own = {JOURNAL_FILE, BOARD_FILE}
        return sorted(name for name in os.listdir(self.run_dir) if name not in own and not name.startswith(CARD_PREFIX))

    def close(self) -> list[str]:
        """End the store server and remove the run's directory.

        Returns:
            What could not be removed.
        """
        self._store.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        return [self.run_dir] if os.path.exists(self.run_dir) else []


def _described(pid: int) -> str:
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return f"process {pid}"


__all__ = ["RUN_VARIABLE", "StoreServer", "Warden"]
