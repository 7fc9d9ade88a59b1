"""Bootstrap over a torch ``TCPStore``: session id, start-up barrier, epoch register.

Running growth never needs the store; it serves start-up and changes of epoch. The first ``set`` after the
server died reports success, so what was set is read again; how calls are bounded is said in ``bounded``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from ..core.errors import AmbiguousOutcome, ConfigError, WaitTimeout
from ..core.types import Epoch, Rank
from .bounded import GRACE_S, Poll, Store, StoreConnections, StoreLost, run_bounded

BLOB_BYTES_MAX: Final = 1 << 16
"""Largest blob of the start-up barrier."""


def connect_store(host: str, port: int, is_leader: bool, world: int, timeout_s: float) -> TCPStore:
    """Connect to the bootstrap store; the leader starts its server.

    Does not wait for the other ranks: :class:`StartBarrier` does that and names who is missing.

    Args:
        host: host of the server.
        port: port of the server; 0 lets the leader choose a free one.
        is_leader: start the server in this process.
        world: number of ranks.
        timeout_s: longest wait for the server, in seconds.

    Raises:
        WaitTimeout: no server answered in time.
        ConfigError: the leader cannot listen on this port.

    Blocks: at most ``timeout_s`` and a grace of half a second.
    """

    def connect() -> TCPStore:
        return TCPStore(host, port, world, is_leader, timedelta(seconds=timeout_s), wait_for_workers=False)

    name = f"store server {host}:{port}"
    try:
        return run_bounded(connect, timeout_s + GRACE_S, who=name, what="accept a connection of this rank")
    except DistError as error:
        if is_leader:
            raise ConfigError(f"{name} cannot be started; choose a free MASTER_PORT: {error}") from error
        raise WaitTimeout(name, f"accept a connection of this rank ({error})", timeout_s) from error


def _encoded(blob: bytes) -> str:
    # Never a number and always text: torch stores have mistaken numeric values for counters.
    return "b:" + blob.hex()


def _decoded(value: bytes) -> bytes:
    return bytes.fromhex(value.decode("ascii").removeprefix("b:"))


class StartBarrier:
    """Small blobs exchanged before links exist; finds out which rank is missing.

    Args:
        connections: to the bootstrap store.
        name: prefix of all keys, unique per incarnation (for example the session in hexadecimal).
        rank: world rank of this process.
        world: number of ranks.

    Threads: any.
    """

    def __init__(self, connections: StoreConnections, name: str, rank: Rank, world: int) -> None:
        self._connections = connections
        self._name = name
        self._rank = rank
        self._world = world

    def _key(self, item: str, rank: int) -> str:
        return f"kvcached_dist/{self._name}/start/{item}/{rank}"

    def put(self, item: str, blob: bytes, timeout_s: float) -> None:
        """Publish this rank's blob and see that it arrived.

        Raises:
            ValueError: more than ``BLOB_BYTES_MAX`` bytes.
            WaitTimeout, StoreLost: the blob may not have arrived.

        Blocks: at most ``timeout_s``.
        """
        if len(blob) > BLOB_BYTES_MAX:
            raise ValueError(f"blob {item!r} has {len(blob)} bytes, at most {BLOB_BYTES_MAX} fit")
        key, value = self._key(item, self._rank), _encoded(blob)

        def put(store: Store) -> None:
            store.set(key, value)
            if not store.check([key]) or store.get(key) != value.encode("ascii"):
                raise StoreLost(f"key {key} does not hold what was just written: two ranks {self._rank}?")

        self._connections.call(put, timeout_s, what=f"take key {key}")

    def gather(self, item: str, timeout_s: float, ranks: Collection[int] | None = None) -> dict[Rank, bytes]:
        """Wait for the blobs of all ranks at once.

        Args:
            item: name of the blobs.
            timeout_s: deadline in seconds.
            ranks: whose blobs; all ranks of the world by default.

        Raises:
            WaitTimeout: names the ranks whose blob is missing, and the key.
            StoreLost: the server is gone.

        Blocks: at most ``timeout_s`` and a grace of half a second.
        """
        wanted = sorted(range(self._world) if ranks is None else ranks)
        found: dict[Rank, bytes] = {}

        def missing() -> str:
            names = ", ".join(str(rank) for rank in wanted if rank not in found)
            return f"start-up blob {item!r} of rank(s) {names} (key {self._key(item, 0)[:-2]}/RANK)"

        def gather(store: Store) -> bool:
            poll = Poll(time.monotonic() + timeout_s)
            while True:
                for rank in wanted:
                    if rank not in found and store.check([self._key(item, rank)]):
                        found[Rank(rank)] = _decoded(store.get(self._key(item, rank)))
                if len(found) == len(wanted):
                    return True
                if not poll.again():
                    return False

        if not self._connections.call(gather, timeout_s + GRACE_S, what=missing):
            names = ", ".join(str(rank) for rank in wanted if rank not in found)
            raise WaitTimeout(f"rank(s) {names}", missing(), timeout_s)
        return found

    def exchange(self, item: str, blob: bytes, timeout_s: float) -> dict[Rank, bytes]:
        """Put this rank's blob and gather all; a barrier when the blobs are empty."""
        self.put(item, blob, timeout_s)
        return self.gather(item, timeout_s)


def agree_session(connections: StoreConnections, run_name: str, is_leader: bool, timeout_s: float) -> int:
    """Agree on a random 64-bit id of this run, which stamps every frame.

    Args:
        connections: to the bootstrap store.
        run_name: name of this incarnation of the job, equal on all ranks; a restarted leader needs a new one.
        is_leader: rank 0 chooses, the others read.
        timeout_s: deadline in seconds.

    Raises:
        WaitTimeout: the leader has published nothing in time.
        ConfigError: leader: the name is taken, by another job on this store or by an earlier incarnation.
        StoreLost: the server is gone.

    Blocks: at most ``timeout_s`` and a grace of half a second.
    """
    key = f"kvcached_dist/session/{run_name}"

    def choose(store: Store) -> int:
        session = secrets.randbits(64) or 1
        value = f"session:{session:016x}"
        reply = store.compare_set(key, "", value)
        if reply != value.encode("ascii") or store.get(key) != reply:
            raise ConfigError(
                f"key {key} exists in the store: another coordinator or an earlier incarnation uses the name"
                f" {run_name!r}; start with a new session name"
            )
        return session

    def read(store: Store) -> int:
        poll = Poll(time.monotonic() + timeout_s)
        while not store.check([key]):
            if not poll.again():
                raise WaitTimeout("rank 0", f"session id (key {key})", timeout_s)
        return int(store.get(key).decode("ascii").removeprefix("session:"), 16)

    return connections.call(choose if is_leader else read, timeout_s + GRACE_S, what=f"session id (key {key})")


@dataclass(frozen=True, slots=True)
class EpochValue:
    """One value of the epoch register.

    Attributes:
        epoch: the epoch.
        writer: rank that wrote it.
        nonce: makes the value unique, so that a reply equal to one's own value proves that it was written.
    """

    epoch: Epoch
    writer: Rank
    nonce: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.writer}:{self.nonce}"

    @classmethod
    def parse(cls, value: bytes) -> EpochValue:
        """Inverse of ``str``; ``ValueError`` for anything else."""
        epoch, writer, nonce = value.decode("ascii").split(":")
        return cls(Epoch(int(epoch)), Rank(int(writer)), nonce)


class EpochRegister:
    """The one key that says which epoch is in force. Written by ``compare_set`` only.

    Args:
        connections: to the bootstrap store.
        session: id of the run.
        rank: world rank of this process.
        timeout_s: deadline of every call, in seconds.

    Threads: any.
    """

    def __init__(self, connections: StoreConnections, session: int, rank: Rank, timeout_s: float) -> None:
        self._connections = connections
        self._rank = rank
        self._timeout_s = timeout_s
        self.key = f"kvcached_dist/{session:016x}/epoch"

    def read(self) -> EpochValue | None:
        """The value in force, ``None`` before the first epoch.

        Raises:
            WaitTimeout, StoreLost: it cannot be read.

        Blocks: at most the register's deadline.
        """

        def read(store: Store) -> EpochValue | None:
            return EpochValue.parse(store.get(self.key)) if store.check([self.key]) else None

        return self._connections.call(read, self._timeout_s, what=f"read the epoch (key {self.key})")

    def advance(self, expected: EpochValue | None, epoch: Epoch) -> EpochValue | None:
        """Try to put a new epoch in force.

        Args:
            expected: the value read before; ``None`` for the first epoch.
            epoch: the new epoch, greater than the expected one.

        Returns:
            The new value when it was written, ``None`` when another writer was first: read again.

        Raises:
            AmbiguousOutcome: it may or may not have been written; :meth:`read` tells, once the store answers:
                the value is this call's own if it carries this rank and the nonce named in the error.
            ValueError: the epoch does not grow.

        Blocks: at most the register's deadline.
        """
        if expected is not None and epoch <= expected.epoch:
            raise ValueError(f"epochs grow: {epoch} does not follow {expected.epoch}")
        desired = EpochValue(epoch, self._rank, f"n{secrets.token_hex(8)}")

        def write(store: Store) -> bool:
            # On a missing key torch answers with the expected value and writes nothing, so only a reply
            # equal to the desired value, seen again by reading, is success.
            reply = store.compare_set(self.key, str(expected or ""), str(desired))
            if reply != str(desired).encode("ascii"):
                return False
            seen = EpochValue.parse(store.get(self.key))
            if seen != desired and seen.epoch <= desired.epoch:
                raise StoreLost(f"key {self.key} was written as {desired} and reads {seen}")
            return True

        try:
            written = self._connections.call(write, self._timeout_s, what=f"epoch {epoch} (key {self.key})")
        except (WaitTimeout, StoreLost) as error:
            raise AmbiguousOutcome(
                f"rank {self._rank} cannot tell whether {desired} was written to {self.key}; read it again: {error}"
            ) from error
        return desired if written else None


__all__ = [
    "BLOB_BYTES_MAX",
    "EpochRegister",
    "EpochValue",
    "StartBarrier",
    "StoreLost",
    "agree_session",
    "connect_store",
]
