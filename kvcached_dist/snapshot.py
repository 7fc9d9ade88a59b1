"""Snapshots seen from outside: each rank publishes its state in a small memory-mapped file, tools read it.

The layout of a file, and the rules by which files are owned, read and removed, are in
:mod:`kvcached_dist.snapshot_file`; what a snapshot says is in :mod:`kvcached_dist.snapshot_schema`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from .coord.core.errors import ConfigError
from .exit_hooks import on_exit
from .processes import ProcessId
from .setting_kinds import NAME_LENGTH_MAX
from .snapshot_file import (
    FILE_BYTES,
    HEADER,
    LENGTH_CRC,
    LENGTH_OFFSET,
    PAYLOAD_BYTES_MAX,
    SEQUENCE,
    SEQUENCE_OFFSET,
    Header,
    Life,
    RankView,
    file_path,
    lock,
    read_rank,
    remove_dead,
    snapshot_paths,
)
from .snapshot_schema import SCHEMA, SnapshotState

_CLAIM_TRIES: Final = 5


def unique_name() -> str:
    """A generated engine name, unique across containers: a pid alone is often 1 in all of them.

    Rank 0 makes it and hands it to the other ranks.
    """
    return f"engine-{os.getpid()}-{secrets.token_hex(6)}"


class SnapshotWriter:
    """The snapshot file of one rank, owned until it is closed or the process ends.

    Threads: ``publish`` and ``due`` from any thread; ``close`` too, and from a signal handler.
    Blocks: never, beyond the file system.
    """

    def __init__(self, path: Path, name: str, rank: int, fd: int, interval_s: float) -> None:
        """Used by :meth:`open`."""
        self.path = path
        self.name = name
        self.rank = rank
        self._fd = fd
        self._inode = os.fstat(fd)
        self._pid = os.getpid()
        self._started = time.time()
        self._interval_s = interval_s
        self._next_due = 0.0
        self._sequence = 0
        self._publishing = threading.Lock()
        # A mapping keeps its open file alive, and with it the lock. A forked child inherits mappings; through
        # an open file of its own, the mapping does not keep the lock of a dead parent.
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(own, FILE_BYTES)
        finally:
            os.close(own)
        self._take_back: Callable[[], None] | None = None
        _writers.add(self)

    @classmethod
    def open(cls, state_dir: str, name: str, rank: int, *, interval_s: float = 0.0) -> SnapshotWriter:
        """Claims the file of one rank, after sweeping what dead owners have left.

        Args:
            state_dir: directory of the snapshot files.
            name: engine name, used exactly.
            rank: world rank.
            interval_s: how long after a snapshot the next one is due.

        Raises:
            ConfigError: a running process owns the name, or the directory cannot be used.
        """
        try:
            sweep(state_dir)
            fd = _unnamed_file(state_dir)
        except OSError as error:
            raise _unusable(state_dir, error) from error
        try:
            os.pwrite(fd, Header(0, ProcessId.current(), rank, 0, 0).pack(), 0)
            path = file_path(state_dir, name, rank)
            writer = cls(path, name, rank, fd, interval_s)
            _link(fd, path, name, rank)
        except BaseException:
            os.close(fd)
            raise
        writer._take_back = on_exit(writer._unlink)
        return writer

    def due(self) -> bool:
        """Whether the last snapshot is old enough; asked before an expensive state is put together."""
        return self._fd >= 0 and time.monotonic() >= self._next_due

    def publish(self, state: SnapshotState | Mapping[str, object]) -> bool:
        """Replaces the snapshot that readers see, due or not.

        Args:
            state: what to say. The keys that name the owner (schema, name, rank, pid, started, updated) are
                filled in.

        Returns:
            Whether it was written; ``False`` after :meth:`close` and in a forked child.

        Raises:
            ValueError: larger than a file holds even without its log lines.
        """
        with self._publishing:
            if self._fd < 0 or os.getpid() != self._pid:
                return False
            payload = self._payload(state)
            # Odd: readers wait. A reader checks the crc too, so the order of the stores need not be strict.
            SEQUENCE.pack_into(self._map, SEQUENCE_OFFSET, self._sequence + 1)
            LENGTH_CRC.pack_into(self._map, LENGTH_OFFSET, len(payload), zlib.crc32(payload))
            self._map[HEADER.size : HEADER.size + len(payload)] = payload
            self._sequence += 2
            SEQUENCE.pack_into(self._map, SEQUENCE_OFFSET, self._sequence)
            self._next_due = time.monotonic() + self._interval_s
        return True

    def _payload(self, state: Mapping[str, object]) -> bytes:
        owner = {
            "schema": SCHEMA, "name": self.name, "rank": self.rank, "pid": self._pid,
            "started": self._started, "updated": time.time(),
        }  # fmt: skip
        full: dict[str, object] = {**state, **owner}
        payload = json.dumps(full, separators=(",", ":")).encode()
        while len(payload) > PAYLOAD_BYTES_MAX:
            lines = full.get("log")
            if not isinstance(lines, list) or not lines:
                raise ValueError(f"a snapshot of {len(payload)} bytes does not fit into {PAYLOAD_BYTES_MAX} bytes")
            full["log"] = lines[len(lines) // 2 + 1 :]
            payload = json.dumps(full, separators=(",", ":")).encode()
        return payload

    def close(self) -> None:
        """Removes the file and gives the name back. May be called twice. In a forked child: does nothing."""
        if os.getpid() != self._pid:
            return
        self._unlink()
        if self._take_back is not None:
            self._take_back()
        with self._publishing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._map.close()
                os.close(fd)

    def _unlink(self) -> None:
        """Takes no lock: it runs in a signal handler, perhaps in the middle of ``publish``."""
        if self._fd < 0 or os.getpid() != self._pid:
            return
        try:
            # Our lock is held, so nobody else may have replaced the file; a missing one was removed by hand.
            if os.path.samestat(self._inode, os.stat(self.path, follow_symlinks=False)):
                os.unlink(self.path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def _forget_lock(self) -> None:
        """In a forked child: the lock is the parent's alone."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_writers: weakref.WeakSet[SnapshotWriter] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for writer in list(_writers):
        writer._forget_lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclass(frozen=True, slots=True)
class EngineView:
    """All ranks of one engine name.

    Attributes:
        name: engine name.
        ranks: by rank; only those that have a file.
    """

    name: str
    ranks: tuple[RankView, ...]

    @property
    def life(self) -> str:
        """``live``, ``dead``, ``partly dead``, or ``unknown`` when a file cannot be read."""
        lives = {view.life for view in self.ranks}
        if len(lives) == 1:
            return lives.pop().value
        return "partly dead" if Life.DEAD in lives else "unknown"

    @property
    def live_ranks(self) -> int:
        """How many ranks live."""
        return sum(view.life is Life.LIVE for view in self.ranks)


def list_engines(state_dir: str) -> list[EngineView]:
    """Reads all snapshots of a state directory, dead ones included; removes nothing.

    Raises:
        ConfigError: the directory cannot be read.
    """
    try:
        views = [read_rank(path, name, rank) for path, name, rank in snapshot_paths(state_dir)]
    except OSError as error:
        raise _unusable(state_dir, error) from error
    present = [view for view in views if view is not None]
    return [EngineView(name, tuple(group)) for name, group in groupby(present, key=lambda view: view.name)]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did.

    Attributes:
        removed: files of dead owners that are gone now.
        kept: (file, why) for files of dead owners that could not be removed.
    """

    removed: tuple[Path, ...]
    kept: tuple[tuple[Path, str], ...]


def sweep(state_dir: str) -> SweepReport:
    """Removes the files of dead owners. Never one of a live owner, nor (unless root) of another user.

    Raises:
        OSError: the directory cannot be read.
    """
    removed, kept = [], []
    for path, name, rank in snapshot_paths(state_dir):
        view = read_rank(path, name, rank)
        if view is None or view.life is not Life.DEAD:
            continue
        reason = remove_dead(path)
        if reason is None:
            removed.append(path)
        else:
            kept.append((path, reason))
    return SweepReport(tuple(removed), tuple(kept))


def _unnamed_file(state_dir: str) -> int:
    """A locked file of full size without a name.

    Its memory is committed: a store into a hole of a full file system would end the process with SIGBUS.
    """
    fd = os.open(state_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o644)
        os.posix_fallocate(fd, 0, FILE_BYTES)
        lock(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _link(fd: int, path: Path, name: str, rank: int) -> None:
    """Gives the file its name, where no live owner has it."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(_CLAIM_TRIES):
            try:
                # A directory descriptor makes Python call linkat, which follows the link in /proc to the file.
                os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except FileExistsError:
                _make_room(path, name, rank)
            except OSError as error:
                raise _unusable(str(path.parent), error) from error
            else:
                return
    finally:
        os.close(directory)
    raise ConfigError(f"KVCACHED_IPC_NAME={name}: other processes keep taking this name for rank {rank}")


def _make_room(path: Path, name: str, rank: int) -> None:
    view = read_rank(path, name, rank)
    if view is None:
        return
    other = f"for example KVCACHED_IPC_NAME={name[: NAME_LENGTH_MAX - 2]}-2"
    if view.life is Life.LIVE:
        pid = f"pid {view.owner.pid}" if view.owner else "pid unknown"
        raise ConfigError(
            f"KVCACHED_IPC_NAME={name}: a running engine has this name (rank {rank}, {pid});"
            f" stop it or choose another one, {other}"
        )
    reason = view.problem if view.life is Life.UNKNOWN else remove_dead(path)
    if reason is not None:
        raise ConfigError(
            f"KVCACHED_IPC_NAME={name}: {path} is in the way ({reason}); remove it or choose another name, {other}"
        )


def _unusable(state_dir: str, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        reason = "its file system cannot make unnamed files"
    return ConfigError(
        f"KVCACHED_DIST_STATE_DIR={state_dir}: cannot be used for snapshots ({reason});"
        " for example KVCACHED_DIST_STATE_DIR=/dev/shm"
    )


__all__ = [
    "EngineView",
    "Life",
    "RankView",
    "SnapshotWriter",
    "SweepReport",
    "list_engines",
    "sweep",
    "unique_name",
]
