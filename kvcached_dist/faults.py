"""Fault injection: makes the faults of a plan happen on one rank, and keeps a journal of what fired.

The text form of a fault is described in :mod:`kvcached_dist.fault_specs`. ``nth`` counts from
:meth:`Injector.arm`: a coordinator arms at the end of its start, so that a fault hits the run and not the
null pages.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from .coord.core.errors import ConfigError
from .fault_specs import DRIVER_CALLS, MESSAGES, POINTS, FaultPlan, FaultSpec


class FaultHook(Protocol):
    """What the injector needs of the native fault hook of a device."""

    def arm(self, call: str, nth: int, count: int = 1, delay_us: int = 0, fail: bool = True) -> None:
        """Lets the ``nth`` call from now on, and ``count`` in a row, fail or take ``delay_us`` longer."""

    def clear(self) -> None:
        """Switches everything off."""

    def hits(self) -> dict[str, int]:
        """How many calls were hit, by call."""
        ...


@dataclass
class _Counted:
    """Faults of one point or message, and how often it was passed."""

    specs: list[FaultSpec] = field(default_factory=list)
    passed: int = 0


class Injector:
    """Makes the faults of one rank happen.

    Without faults for the rank every method returns after one comparison.

    Args:
        plan: faults of all ranks.
        rank: this rank.
        journal: file to which every fired fault is appended; empty for none.

    Attributes:
        step: engine step that the journal notes; whoever steps the engine sets it.

    Threads: any; ``arm`` before the others.
    Blocks: ``at`` for the length of a hang or delay.

    Raises:
        ConfigError: the journal cannot be opened.
    """

    def __init__(self, plan: FaultPlan | None, rank: int, journal: str = "") -> None:
        self.rank = rank
        self.step = 0
        self._specs = plan.for_rank(rank) if plan else ()
        self._open = plan is not None and plan.open
        self._points: dict[str, _Counted] = {}
        self._messages: dict[str, _Counted] = {}
        self._hook: FaultHook | None = None
        self._driver_specs: list[FaultSpec] = []
        self._driver_hits: dict[str, int] = {}
        self._lock = threading.Lock()
        self._journal = Journal(journal) if self.active and journal else None

    @property
    def active(self) -> bool:
        """Whether there is anything to inject on this rank, or may be later."""
        return bool(self._specs) or self._open

    def arm(self, hook: FaultHook | None) -> None:
        """Switches the faults on; occurrences count from here.

        Args:
            hook: fault hook of this rank's device; ``None`` when no driver call is to fail.
        """
        if not self._specs:
            return
        points: dict[str, _Counted] = {}
        dropped: dict[str, _Counted] = {}
        for spec in self._specs:
            if spec.at:
                points.setdefault(spec.at, _Counted()).specs.append(spec)
            elif spec.op == "drop":
                dropped.setdefault(spec.message, _Counted()).specs.append(spec)
            elif hook is not None:
                self._arm_driver(hook, spec)
        self._hook = hook
        self._driver_hits = dict(hook.hits()) if hook is not None else {}
        with self._lock:
            self._points, self._messages = points, dropped

    def rearm(self, specs: Iterable[FaultSpec], hook: FaultHook | None) -> None:
        """Replaces the faults of this rank by others; occurrences count from here. With none, all is switched off.

        Args:
            specs: the faults from now on; those of other ranks are left out.
            hook: fault hook of this rank's device.

        Raises:
            RuntimeError: the plan that this injector was made from is not open.
        """
        if not self._open:
            raise RuntimeError(f"rank {self.rank}: faults can be changed only under FaultPlan(open=True)")
        self.collect()
        with self._lock:
            self._points, self._messages, self._driver_specs = {}, {}, []
        if hook is not None:
            hook.clear()
        self._specs = tuple(spec for spec in specs if spec.rank == self.rank)
        self.arm(hook)

    def _arm_driver(self, hook: FaultHook, spec: FaultSpec) -> None:
        self._driver_specs.append(spec)
        if spec.op == "slow":
            hook.arm(spec.call, spec.nth, spec.count, delay_us=round(spec.ms * 1000), fail=False)
        else:
            hook.arm(spec.op, spec.nth, spec.count)

    def at(self, point: str) -> None:
        """This rank passes a point; it may be killed, stopped or delayed here."""
        points = self._points
        if point not in points:
            return
        for spec in self._next(points, point):
            if spec.op == "kill":
                self._note(str(spec), "kill")
                kill_self()
            elif spec.op == "hang":
                self._note(str(spec), "hang")
                hang_self(spec.seconds)
                self._note(str(spec), "resumed")
            else:
                self._note(str(spec), "slow")
                time.sleep(spec.ms / 1000)

    def drops(self, message: str) -> bool:
        """Whether the message that is about to be sent is to be lost.

        Args:
            message: its name, for example ``MAP_FAILED``.
        """
        dropped = self._messages
        if message not in dropped:
            return False
        hit = self._next(dropped, message)
        for spec in hit:
            self._note(str(spec), "drop")
        return bool(hit)

    def _next(self, table: dict[str, _Counted], key: str) -> list[FaultSpec]:
        with self._lock:
            counted = table[key]
            counted.passed += 1
            return [spec for spec in counted.specs if spec.hits(counted.passed)]

    def collect(self) -> int:
        """Journals the driver faults that fired since the last call; the native hook only counts them.

        Returns:
            How many driver calls have been hit since arming.
        """
        if not self._driver_specs:
            return 0
        fired: list[tuple[str, int]] = []
        with self._lock:
            if self._hook is not None:
                now = self._hook.hits()
                fired = [(call, now[call] - self._driver_hits.get(call, 0)) for call in now]
                self._driver_hits = dict(now)
            total = sum(self._driver_hits.values())
        for call, hits in fired:
            if hits > 0:
                spec = next((s for s in self._driver_specs if call in (s.op, s.call)), None)
                self._note(str(spec) if spec else f"op={call}", "driver", hits=hits)
        return total

    def close(self) -> None:
        """Collects a last time, switches the native hook off and closes the journal. May be called twice."""
        self.collect()
        with self._lock:
            if self._hook is not None:
                self._hook.clear()
                self._hook = None
            self._points, self._messages = {}, {}
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _note(self, spec: str, fault: str, hits: int = 1) -> None:
        # Noted under the lock: another thread may close the journal, and its descriptor may be somebody else's then.
        with self._lock:
            if self._journal is not None:
                self._journal.append(FiredFault(time.time(), self.rank, self.step, fault, spec, hits))


@dataclass(frozen=True, slots=True)
class FiredFault:
    """One line of the journal.

    Attributes:
        time_s: wall clock, seconds since 1970.
        rank: where it fired.
        step: engine step of that rank.
        fault: ``kill``, ``hang``, ``resumed``, ``slow``, ``drop`` or ``driver``.
        spec: the fault as text.
        hits: calls hit since the line before (driver faults are collected, not seen one by one).
    """

    time_s: float
    rank: int
    step: int
    fault: str
    spec: str
    hits: int = 1


class Journal:
    """An append-only file of fired faults, shared by the ranks of a run.

    Every line is one ``write``: it is whole, and it is with the kernel before the process kills itself.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"KVCACHED_DIST_FAULT_JOURNAL={path}: cannot be opened for appending ({error.strerror});"
                " for example KVCACHED_DIST_FAULT_JOURNAL=/tmp/faults.jsonl"
            ) from error

    def append(self, fired: FiredFault) -> None:
        """Adds one line."""
        line = {name: getattr(fired, name) for name in FiredFault.__slots__}
        os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    @staticmethod
    def read(path: str) -> list[FiredFault]:
        """All faults that fired so far, in the order of their lines; none when there is no file yet."""
        try:
            with open(path, encoding="utf-8") as file:
                return [FiredFault(**json.loads(line)) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return []


def kill_self() -> None:
    """Ends this process at once, as ``kill -9`` would: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


_RESUME = """
import os, select, signal, sys
target = os.pidfd_open(int(sys.argv[1]))
os.write(1, b"r")
waiter = select.poll()
waiter.register(target, select.POLLIN)
if not waiter.poll(float(sys.argv[2]) * 1000):
    signal.pidfd_send_signal(target, signal.SIGCONT)
"""


def hang_self(seconds: float) -> None:
    """Stops every thread of this process, as a debugger or a frozen host would.

    A small child, in a session of its own, continues it. The child holds a pidfd: it never signals a
    process that has inherited the pid, and it leaves as soon as the stopped process is killed.

    Args:
        seconds: how long.

    Raises:
        OSError: the helper could not be started; nothing was stopped.
    """
    command = [sys.executable, "-I", "-S", "-c", _RESUME, str(os.getpid()), repr(seconds)]
    helper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert helper.stdout is not None
    ready, _, _ = select.select([helper.stdout], [], [], 30)
    if not ready or helper.stdout.read(1) != b"r":
        helper.kill()
        helper.wait()
        raise OSError("the process that would end the hang could not be started")
    # Directed at this thread: it is stopped before the call returns, and with it the whole process.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    helper.stdout.close()
    helper.wait(timeout=30)


__all__ = [
    "DRIVER_CALLS",
    "MESSAGES",
    "POINTS",
    "FaultHook",
    "FaultPlan",
    "FaultSpec",
    "FiredFault",
    "Injector",
    "Journal",
    "hang_self",
    "kill_self",
]
