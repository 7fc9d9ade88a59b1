"""What a test must not do: reach the network, or leave processes and shared memory behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil

GRACE_SECONDS = 2.0
"""How long a process that a test has ended may take to disappear."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that a detached left-over is seen as a child."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# --- network ---------------------------------------------------------------------------------------------------------


def _own_addresses() -> frozenset[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        address.address.split("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    )


def _is_local(host: str, own: frozenset[str]) -> bool:
    if host in ("", "localhost", "0.0.0.0", "::") or host in own:
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return host == socket.gethostname()


def forbid_network() -> None:
    """From now on an attempt of this process to leave the machine fails as it does without a network.

    The refusal is an ordinary ``OSError`` (``ENETUNREACH``), since code that merely asks for its own address by
    connecting outwards must go on working.
    """
    own = _own_addresses()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            address = arguments[1]
            if isinstance(address, tuple) and isinstance(address[0], str) and not _is_local(address[0], own):
                raise OSError(errno.ENETUNREACH, f"tests reach this machine only, not {address[0]}")
        elif event == "socket.getaddrinfo":
            host = arguments[0]
            if isinstance(host, str) and not _is_local(host, own):
                raise socket.gaierror(socket.EAI_NONAME, f"tests reach this machine only, not {host}")

    sys.addaudithook(hook)


# --- processes -------------------------------------------------------------------------------------------------------


def child_processes() -> set[psutil.Process]:
    """Direct children, orphans that were adopted included. Zombies are dead and do not count."""
    found = set()
    # The kernel's own list, per thread, is a hundred times faster than searching all processes for their parent.
    pids: list[str] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            pids += listing.read_text().split()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(int(pid))
            if child.status() != psutil.STATUS_ZOMBIE and not _belongs_to_interpreter(child):
                found.add(child)
    return found


def _belongs_to_interpreter(process: psutil.Process) -> bool:
    """multiprocessing keeps one helper process of its own for as long as the interpreter lives."""
    command = " ".join(process.cmdline())
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def left_over_processes(before: set[psutil.Process]) -> list[str]:
    """Waits for the children that are not in ``before``, ends those that stay, and describes them."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := child_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    described = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            described.append(f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, timeout=GRACE_SECONDS)
    return described


# --- shared memory ---------------------------------------------------------------------------------------------------


def private_state_directory() -> Path:
    """A folder in shared memory in which the engines of this test run publish their snapshots, and nobody else's.

    Processes that tests start inherit the setting, so what lies there after a test is the test's.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvcached_dist-tests-", dir="/dev/shm"))
    os.environ["KVCACHED_DIST_STATE_DIR"] = str(folder)
    return folder


def left_over_files(folder: Path, before: set[Path]) -> list[str]:
    """Removes and describes the files of a folder that are not in ``before``."""
    new = sorted(set(folder.iterdir()) - before)
    for path in new:
        path.unlink(missing_ok=True)
    return [f"shared memory {path}" for path in new]
