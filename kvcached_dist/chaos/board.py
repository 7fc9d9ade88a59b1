"""Where ranks of one host say which wave they have ended, so that the leader begins the next one for all at once.

A coordinator's leader never waits for followers, and physical growth reaches a follower ahead of its step. To see
that every rank holds nothing but its null pages, nobody may begin to grow before all have looked.
"""

from __future__ import annotations

import os
import struct
import zlib

_SLOT = struct.Struct("<QQ")


class RestBoard:
    """One slot per rank in a small file.

    Args:
        path: the file; made when it is missing.
        rank: own slot.
        size: number of slots.
        scope: text equal on all ranks of an epoch and different in every other one.

    Threads: one.
    """

    def __init__(self, path: str, rank: int, size: int, scope: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._rank = rank
        self._size = size
        self._scope = zlib.crc32(scope.encode()) + 1

    def ended(self, wave: int) -> None:
        """This rank has ended a wave and looked at its memory."""
        os.pwrite(self._fd, _SLOT.pack(self._scope, wave), self._rank * _SLOT.size)

    def all_ended(self, wave: int) -> bool:
        """Whether every rank of the epoch has."""
        content = os.pread(self._fd, self._size * _SLOT.size, 0).ljust(self._size * _SLOT.size, b"\0")
        return all(slot == (self._scope, wave) for slot in _SLOT.iter_unpack(content))

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


__all__ = ["RestBoard"]
