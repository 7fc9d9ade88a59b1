"""The bytes of a snapshot file, who owns it, and whether the owner lives.

One file per rank, ``<state_dir>/kvcached_dist.<engine name>.<rank>``, of a fixed size::

    offset  bytes  little endian
         0      8  magic
         8      4  version of this layout
        12      4  bytes of the header
        16      8  sequence: odd while the owner writes, goes up by two with each snapshot
        24      8  pid of the owner           32  8  its start time in clock ticks after boot
        40      8  its pid namespace          48 16  its boot
        64      4  rank                       68  4  bytes of the payload
        72      4  crc32 of the payload       76  4  spare
        80         JSON, see ``snapshot_schema``

**Who may remove a file.** The owner holds a kernel lock on its file for life. The file is made without a
name, locked and filled, and only then linked into the directory: no file of ours can be seen unlocked while
its owner lives. Only a process that holds the lock of the very file at the path may unlink it, and a name is
never taken over, only linked where there is none; so a sweep cannot hit a new owner of the same name.

**Liveness.** Inside one pid namespace pid and start time decide. Across namespaces (containers that share
the state directory) pids mean nothing and the lock decides.

Readers use ``pread``: a mapping of a file that somebody truncates would end the reader with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from .processes import ProcessId, runs
from .setting_kinds import NAME_LENGTH_MAX

MAGIC: Final = b"KVDSNAP\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sIIQqQQ16sIIII")
SEQUENCE: Final = struct.Struct("<Q")
SEQUENCE_OFFSET: Final = 16
LENGTH_CRC: Final = struct.Struct("<II")
LENGTH_OFFSET: Final = 68
FILE_BYTES: Final = 128 << 10
PAYLOAD_BYTES_MAX: Final = FILE_BYTES - HEADER.size
_FOREIGN: Final = "not a snapshot file"
PREFIX: Final = "kvcached_dist."
_FILE_NAME = re.compile(rf"kvcached_dist\.([A-Za-z0-9_-]{{1,{NAME_LENGTH_MAX}}})\.(\d{{1,6}})")
_READ_TRIES: Final = 200
_READ_PAUSE_S: Final = 0.0002
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.001


class Life(Enum):
    """What is known of the owner of a file."""

    LIVE = "live"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """The file cannot be read or is not a snapshot."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a file."""

    sequence: int
    owner: ProcessId
    rank: int
    length: int
    crc: int

    def pack(self) -> bytes:
        """Its bytes."""
        who = self.owner
        return HEADER.pack(
            MAGIC, VERSION, HEADER.size, self.sequence, who.pid, who.start_ticks, who.namespace, who.boot.bytes,
            self.rank, self.length, self.crc, 0,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Reads a header of this version.

        Raises:
            ValueError: another file, or another version; says which.
        """
        if len(data) < HEADER.size or not data.startswith(MAGIC):
            raise ValueError(_FOREIGN)
        _, version, size, sequence, pid, ticks, namespace, boot, rank, length, crc, _ = HEADER.unpack(data)
        if (version, size) != (VERSION, HEADER.size):
            raise ValueError(f"snapshot layout {version}, this version reads layout {VERSION}")
        return cls(sequence, ProcessId(pid, ticks, namespace, uuid.UUID(bytes=boot)), rank, length, crc)


@dataclass(frozen=True, slots=True)
class RankView:
    """What one file says.

    Attributes:
        path: the file.
        name: engine name, from the file name.
        rank: world rank, from the file name.
        life: whether the owner lives.
        owner: the owner, ``None`` when the header cannot be read.
        state: the newest snapshot as :class:`kvcached_dist.snapshot_schema.SnapshotState`, checked only for
            being a JSON object; ``None`` when there is none yet or it cannot be read.
        problem: why ``state`` is missing, in words.
    """

    path: Path
    name: str
    rank: int
    life: Life
    owner: ProcessId | None = None
    state: dict[str, Any] | None = None
    problem: str | None = None


def file_path(state_dir: str, name: str, rank: int) -> Path:
    """Path of the file of one rank."""
    return Path(state_dir) / f"{PREFIX}{name}.{rank}"


def snapshot_paths(state_dir: str) -> Iterator[tuple[Path, str, int]]:
    """All (path, engine name, rank) of a state directory, in order of name and rank.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    with os.scandir(state_dir) as entries:
        for entry in entries:
            match = _FILE_NAME.fullmatch(entry.name)
            if match:
                found.append((match.group(1), int(match.group(2)), Path(entry.path)))
    for name, rank, path in sorted(found):
        yield path, name, rank


def read_rank(path: Path, name: str, rank: int) -> RankView | None:
    """Reads one file without disturbing its owner.

    Returns:
        What it says, or ``None`` when there is no such file (any more).

    Blocks: at most some tens of milliseconds, while the owner writes.
    """
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RankView(path, name, rank, Life.UNKNOWN, problem=f"cannot be opened: {error.strerror}")
    try:
        header = _header(fd)
        if isinstance(header, str):
            # Every file with our magic was locked by its owner, whatever its layout.
            life = Life.UNKNOWN if header == _FOREIGN else _life_by_lock(fd)
            return RankView(path, name, rank, life, problem=header)
        life = _life(fd, header.owner)
        state, problem = _payload(fd, patient=life is Life.LIVE)
        return RankView(path, name, rank, life, header.owner, state, problem)
    finally:
        os.close(fd)


def remove_dead(path: Path) -> str | None:
    """Unlinks the file of a dead owner.

    Returns:
        ``None`` when the file is gone, else why it was left.

    Blocks: at most 50 ms, when a reader tests the lock at the same time.
    """
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        owner_uid = os.fstat(fd).st_uid
        if os.geteuid() not in (0, owner_uid):
            return f"belongs to user {owner_uid}"
        header = _header(fd)
        if header == _FOREIGN:
            return _FOREIGN
        if not isinstance(header, str) and _life(fd, header.owner) is Life.LIVE:
            return f"its owner runs (pid {header.owner.pid})"
        if not lock(fd, tries=_LOCK_TRIES):
            return "a process that inherited it from its dead owner still holds it"
        return _unlink_locked(path, fd)
    finally:
        os.close(fd)


def lock(fd: int, tries: int = 1) -> bool:
    """Takes the lock of a file; it lasts until the last copy of the descriptor is closed."""
    for attempt in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < tries:
                time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False


def _unlink_locked(path: Path, fd: int) -> str | None:
    try:
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be removed: {error.strerror}"
    return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _header(fd: int) -> Header | str:
    """The header, or why there is none."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return _FOREIGN
    try:
        return Header.unpack(os.pread(fd, HEADER.size, 0))
    except ValueError as error:
        return str(error)


def _life(fd: int, owner: ProcessId) -> Life:
    if owner.same_namespace():
        return Life.LIVE if runs(owner) else Life.DEAD
    return _life_by_lock(fd)


def _life_by_lock(fd: int) -> Life:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Life.LIVE
    fcntl.flock(fd, fcntl.LOCK_UN)
    return Life.DEAD


def _payload(fd: int, *, patient: bool) -> tuple[dict[str, Any] | None, str | None]:
    for _ in range(_READ_TRIES if patient else 1):
        before = Header.unpack(os.pread(fd, HEADER.size, 0))
        if before.sequence % 2 == 0:
            if before.sequence == 0:
                return None, "no snapshot yet"
            data = os.pread(fd, min(before.length, PAYLOAD_BYTES_MAX), HEADER.size)
            (after,) = SEQUENCE.unpack(os.pread(fd, SEQUENCE.size, SEQUENCE_OFFSET))
            if after == before.sequence and zlib.crc32(data) == before.crc:
                return _decoded(data)
        time.sleep(_READ_PAUSE_S)
    return None, "no consistent snapshot" if patient else "the owner died while it wrote"


def _decoded(data: bytes) -> tuple[dict[str, Any] | None, str | None]:
    with contextlib.suppress(ValueError):
        state = json.loads(data)
        if isinstance(state, dict):
            return state, None
    return None, "the payload is not a JSON object"


__all__ = [
    "FILE_BYTES",
    "HEADER",
    "LENGTH_CRC",
    "LENGTH_OFFSET",
    "MAGIC",
    "PAYLOAD_BYTES_MAX",
    "SEQUENCE",
    "SEQUENCE_OFFSET",
    "VERSION",
    "Header",
    "Life",
    "RankView",
    "file_path",
    "lock",
    "read_rank",
    "remove_dead",
    "snapshot_paths",
]
