"""Which process is this, and does it still run? A pid alone is not an answer: pids are reused.

A process is named by its pid *and* the moment it started, inside one boot and one pid namespace. Two
containers that share ``/dev/shm`` do not share pids, so a caller that meets a foreign namespace needs
other evidence (see :mod:`kvcached_dist.snapshot`).
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import cache

_START_TIME_FIELD = 19
"""Index of the start time among the fields behind the command name in ``/proc/<pid>/stat`` (proc(5), field 22)."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can be told from a later one with the same pid.

    Attributes:
        pid: process id inside ``namespace``.
        start_ticks: start time in clock ticks after boot.
        namespace: inode of the pid namespace.
        boot: id of the boot.
    """

    pid: int
    start_ticks: int
    namespace: int
    boot: uuid.UUID

    @classmethod
    def current(cls) -> ProcessId:
        """The calling process."""
        pid = os.getpid()
        start = start_ticks(pid)
        return cls(pid, start if start is not None else 0, pid_namespace(), boot_id())

    def same_namespace(self) -> bool:
        """Whether the pid means the same process here as where it was written."""
        return self.namespace == pid_namespace()


def start_ticks(pid: int) -> int | None:
    """Start time of a running process.

    Args:
        pid: process id in the caller's pid namespace.

    Returns:
        Clock ticks after boot, or ``None`` when no such process runs or it cannot be seen. A zombie has
        given back its memory and its locks, so it counts as gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The command name may hold spaces and parentheses; the fields follow the last closing one.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) <= _START_TIME_FIELD or fields[0] in (b"Z", b"X", b"x"):
        return None
    return int(fields[_START_TIME_FIELD])


def runs(process: ProcessId) -> bool:
    """Whether a process of this pid namespace still runs.

    Where ``/proc`` hides the processes of other users, an existing pid counts as running: a wrong "dead"
    would take files away from a live engine.
    """
    if process.boot != boot_id():
        return False
    start = start_ticks(process.pid)
    if start is not None:
        return start == process.start_ticks
    return not os.path.exists(f"/proc/{process.pid}") and _exists(process.pid)


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def boot_id() -> uuid.UUID:
    """Id of this boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return uuid.UUID(file.read().strip())
    except (OSError, ValueError):
        return uuid.UUID(int=0)


def pid_namespace() -> int:
    """Inode of the caller's pid namespace; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


__all__ = ["ProcessId", "boot_id", "pid_namespace", "runs", "start_ticks"]
