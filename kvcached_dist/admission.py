"""The admission turn of a physical GPU: one rank at a time checks free memory and creates handles.

Ranks of one card, in whatever process, container or engine, meet at one file in the lock directory. The
turn is a kernel lock on that file, so a dead holder blocks nobody. The file also holds two records that
make the turn fair and its errors readable; losing them never breaks the lock::

    bytes 0..31   holder: pid (8), token of the turn object (8), padding
    bytes 32..63  waiter: token (8), CLOCK_MONOTONIC in ns when it last looked (8), padding

A file of an older layout is as good as an empty one.

**Unlinking.** Only the holder of the lock may unlink the file, and whoever gets the lock checks that the
path still names the locked file, else it starts again with the new one. So two ranks never hold turns of
one card through two files, whatever removes the file in between.

Covered by a turn: the check of free memory and the creation of handles. Not covered: mapping, filling,
messages, inference.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .coord.core.errors import ConfigError, WaitTimeout
from .exit_hooks import on_exit

_RECORD = struct.Struct("<qQ16x")
_HOLDER_OFFSET: Final = 0
_WAITER_OFFSET: Final = _RECORD.size
_MODE: Final = 0o660
POLL_S: Final = 0.001
"""How often a waiter looks in the long run; up to half of it again is added as jitter."""
FIRST_POLL_S: Final = 0.00003
"""Its first pause. A turn is mostly shorter than ``POLL_S``, and every rank of a card that waits adds its pause to
the growth of all of them; so the pauses follow the time waited and lengthen it by an eighth at most."""
YIELD_S: Final = 10 * POLL_S
"""How long the last holder steps back at most for somebody who waits; less as soon as they have had their turn."""
_WAITER_FRESH_NS: Final = 20_000_000
"""A waiter that has looked within this time still waits, even if it is slow to be scheduled."""
_PID_MAX: Final = 1 << 22
_SETTING: Final = "KVCACHED_PHYSICAL_GROWTH_LOCK_DIR"


class AdmissionTurn:
    """Turns on one physical card.

    Args:
        lock_dir: directory of the lock files; the same real directory for all engines on the card.
        card_id: id of the card that means the same in every process, such as its PCI bus id.
        seed: seed of the jitter; best different on each rank of the card.

    Raises:
        ConfigError: no card id, or the directory or the lock file cannot be used. Found here, at start,
            and not at the first growth.

    Threads: ``take`` from any thread; turns exclude threads as they exclude processes.
    """

    def __init__(
        self,
        lock_dir: str,
        card_id: str,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not card_id.strip():
            raise ConfigError("the device has no card id: an admission turn needs one, for example 0000:3b:00.0")
        self.card_id = card_id
        self.path = Path(lock_dir) / f"kvcached_dist-growth-{re.sub(r'[^A-Za-z0-9]', '_', card_id)}.lock"
        self._token = secrets.randbits(63) | 1
        self._random = random.Random(seed)
        self._clock = clock
        self._sleep = sleep
        os.close(self._open())
        self._take_back = on_exit(self._unlink)

    @contextlib.contextmanager
    def take(self, deadline_s: float) -> Iterator[None]:
        """Holds the turn for the length of a ``with`` block.

        Args:
            deadline_s: longest wait in seconds; at 0 the turn is taken only if it is free.

        Raises:
            WaitTimeout: the turn did not come; names the card and, where known, the holder's pid.
            ConfigError: the lock file can no longer be opened (removed directory, symbolic link).

        Blocks: up to ``deadline_s``.
        """
        fd = self._acquire(deadline_s)
        try:
            yield
        finally:
            # Unlocked by name: a copy of the descriptor in a forked child would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def close(self) -> None:
        """Removes the lock file unless somebody holds it. May be called twice.

        Other engines on the card are not disturbed: the next turn makes the file again.
        """
        self._take_back()
        self._unlink()

    def _unlink(self) -> None:
        """Takes no lock of this process: it also runs in a signal handler."""
        with contextlib.suppress(OSError, ConfigError):
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _try_lock(fd) and self._is_current(fd):
                    os.unlink(self.path)
            finally:
                os.close(fd)

    def _acquire(self, deadline_s: float) -> int:
        started = self._clock()
        deadline = started + max(0.0, deadline_s)
        fd = self._open()
        try:
            self._step_back(fd, min(started + YIELD_S, deadline))
            while True:
                if _try_lock(fd):
                    if self._is_current(fd):
                        _write(fd, _HOLDER_OFFSET, os.getpid(), self._token)
                        return fd
                    # Locked a file that was removed in between; the turn is at the new one.
                    stale, fd = fd, self._open()
                    os.close(stale)
                    continue
                now = self._clock()
                if now >= deadline:
                    if _read(fd, _WAITER_OFFSET)[0] == self._token:
                        _write(fd, _WAITER_OFFSET, 0, 0)
                    raise self._timeout(fd, now - started)
                _write(fd, _WAITER_OFFSET, self._token, time.monotonic_ns())
                pause = min(max(FIRST_POLL_S, (now - started) / 8), POLL_S)
                self._sleep(min(pause * (1 + self._random.random() / 2), deadline - now))
        except BaseException:
            os.close(fd)
            raise

    def _step_back(self, fd: int, until: float) -> None:
        """Lets somebody who waits go first, once, when the last turn was ours.

        Without it a rank that comes again at once wins over those that sleep between two looks.
        """
        waiter, looked_ns = _read(fd, _WAITER_OFFSET)
        waits = waiter not in (0, self._token) and 0 <= time.monotonic_ns() - looked_ns <= _WAITER_FRESH_NS
        while waits and _read(fd, _HOLDER_OFFSET)[1] == self._token and self._clock() < until:
            self._sleep(POLL_S)

    def _timeout(self, fd: int, waited_s: float) -> WaitTimeout:
        pid = _read(fd, _HOLDER_OFFSET)[0]
        holder = f"held by pid {pid}" if 0 < pid <= _PID_MAX else "holder unknown"
        return WaitTimeout(f"the admission turn of card {self.card_id}", f"{holder}, file {self.path}", waited_s)

    def _is_current(self, fd: int) -> bool:
        try:
            at_path = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), at_path)

    def _open(self) -> int:
        """Opens the lock file, making it if it is missing.

        An existing file is opened without O_CREAT: in a sticky directory the kernel may refuse O_CREAT
        for a file of another user (fs.protected_regular), which is what engines of two users share.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            while True:
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(self.path, flags)
                    break
                with contextlib.suppress(FileExistsError):
                    fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, _MODE)
                    os.fchmod(fd, _MODE)  # whatever the umask: engines of one group share the card
                    break
        except OSError as error:
            raise self._unusable(error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ConfigError(f"{_SETTING}={self.path.parent}: {self.path.name} is not a regular file; remove it")
        return fd

    def _unusable(self, error: OSError) -> ConfigError:
        directory = self.path.parent
        if self.path.is_symlink():
            reason = f"{self.path.name} is a symbolic link, which is not followed; remove it"
        elif not directory.is_dir():
            reason = f"not an existing directory; for example {_SETTING}=/tmp"
        else:
            reason = (
                f"{self.path.name} cannot be opened for writing there ({error.strerror});"
                f" choose a directory that all engines on the card can write, for example {_SETTING}=/tmp"
            )
        return ConfigError(f"{_SETTING}={directory}: {reason}")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int, offset: int) -> tuple[int, int]:
    data = os.pread(fd, _RECORD.size, offset)
    if len(data) < _RECORD.size:
        return 0, 0
    first, second = _RECORD.unpack(data)
    return int(first), int(second)


def _write(fd: int, offset: int, first: int, second: int) -> None:
    # A full disk costs fairness and the pid in an error text, not the turn.
    with contextlib.suppress(OSError):
        os.pwrite(fd, _RECORD.pack(first, second), offset)


__all__ = ["POLL_S", "YIELD_S", "AdmissionTurn"]
