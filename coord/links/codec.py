"""Messages as frames of fixed size, and back.

Every frame is ``FRAME_BYTES`` long on the link, because a transport that posts receives ahead must know
the size. The bytes used are a header, a piece of the payload and padding whose content means nothing::

    offset  size  field
         0     4  magic
         4     1  version of the format
         5     1  kind: number of the message, 0 for a frame of the link itself
         6     2  flags: reserved, zero
         8     8  session id
        16     8  epoch of the link
        24     8  transaction, 0 where the message has none
        32     8  sequence number on this link and direction, from 1
        40     8  acknowledged: highest sequence number the sender of this frame has received
        48     2  part index
        50     2  parts of the message
        52     4  payload bytes in this frame
        56     4  crc32 of the header before this field, then of the payload
        60     4  layout: crc32 of the description of all messages, different between releases that differ

A message longer than one frame travels as a chain of parts, one after the other on the same link.

The decoder never raises. A frame it cannot use is dropped and counted by reason. Frames that belong to
another session, another epoch or the past are harmless. A frame that shows that a predecessor was lost,
or an authentic one that cannot be understood, means that the link is no longer FIFO: the decoder is then
``broken`` and delivers nothing more, and the owner of the link must end it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ..core import messages as m
from ..core.messages import Message, TxnMessage
from ..core.types import Epoch, Txn
from .wire import Reader, Record, layout_text

FRAME_BYTES: Final = 4096
"""Size of every frame on every link."""

MAGIC: Final = 0x4C44564B
VERSION: Final = 1

PARTS_MAX: Final = 256
"""Longest chain of one message; with ``FRAME_BYTES`` it bounds what reassembly may hold (about 1 MiB)."""

LINK_KIND: Final = 0
"""Kind of a frame that carries no message, only an acknowledgement."""

_HEADER: Final = struct.Struct("<IBBHQQQQQHHI")
_TRAILER: Final = struct.Struct("<II")
HEADER_BYTES: Final = _HEADER.size + _TRAILER.size
PAYLOAD_BYTES_MAX: Final = FRAME_BYTES - HEADER_BYTES
_U64_MAX: Final = (1 << 64) - 1

KINDS: Final[Mapping[int, type[Message]]] = {
    1: m.Reserve,
    2: m.Reserved,
    3: m.Refused,
    4: m.Abort,
    5: m.Map,
    6: m.Mapped,
    7: m.MapFailed,
    8: m.Drained,
    9: m.Unmap,
    10: m.Unmapped,
    11: m.UnmapFailed,
    12: m.Restore,
    13: m.Restored,
    14: m.RestoreFailed,
    15: m.Release,
    16: m.Released,
    17: m.ReleaseFailed,
    18: m.Query,
    19: m.State,
    20: m.MarkMessage,
    21: m.Hello,
    22: m.Snapshot,
    23: m.Joined,
    24: m.Beat,
    25: m.Fail,
    26: m.Bye,
    27: m.Reform,
}
"""Number of each message on the wire. Numbers are never given to something else."""

_RECORDS: Final = {number: Record(kind, skip=("epoch", "txn")) for number, kind in KINDS.items()}
LAYOUT: Final = zlib.crc32(layout_text(_RECORDS).encode("utf-8"))
"""Stands for the fields of all messages in the header of every frame."""

_NUMBERS: Final = {kind: number for number, kind in KINDS.items()}


@dataclass(slots=True)
class DecodeCounters:
    """What a decoder has seen. Everything but ``frames``, ``messages`` and ``parts`` was dropped.

    Attributes:
        frames: frames given to the decoder.
        messages: messages delivered.
        parts: authentic frames that carried a part of a chain, the last one included.
        truncated: shorter than a header, or than the payload that the header announces.
        malformed: wrong magic, version or flags, or an authentic frame that cannot be understood.
        corrupt: the checksum does not match.
        foreign_session: another run of the job.
        old_epoch: sent before the last epoch change.
        future_epoch: sent for an epoch that this link does not have.
        replayed: sequence number already received.
        gap: a predecessor is missing, or the decoder was broken before.
    """

    frames: int = 0
    messages: int = 0
    parts: int = 0
    truncated: int = 0
    malformed: int = 0
    corrupt: int = 0
    foreign_session: int = 0
    old_epoch: int = 0
    future_epoch: int = 0
    replayed: int = 0
    gap: int = 0

    @property
    def dropped(self) -> int:
        """Frames dropped for any reason."""
        kept = ("frames", "messages", "parts")
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in kept)


class Encoder:
    """Gives messages of one direction of one link their frames and sequence numbers.

    Args:
        session: id of the run, unsigned 64 bits.
        epoch: epoch of the link.

    Threads: one at a time; the link holds its lock.
    """

    def __init__(self, session: int, epoch: Epoch) -> None:
        if not 0 <= session <= _U64_MAX or not 0 <= epoch <= _U64_MAX:
            raise ValueError(f"session and epoch are unsigned 64-bit numbers, got {session} and {epoch}")
        self.session = session
        self.epoch = epoch
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Sequence number of the last frame made; 0 before the first."""
        return self._sequence

    def encode(self, message: Message, acknowledged: int = 0) -> list[bytes]:
        """Frames of a message, without their padding.

        Args:
            message: any message of ``coord.core.messages``, of the epoch of this link.
            acknowledged: highest sequence number received in the other direction.

        Returns:
            At least one frame, each at most ``FRAME_BYTES`` long, to be sent in this order.

        Raises:
            ValueError: wrong epoch, a number that does not fit its field, or a message longer than
                ``PARTS_MAX`` frames. No sequence number is used up.
        """
        if message.epoch != self.epoch:
            raise ValueError(f"{type(message).__name__} of epoch {message.epoch} on a link of epoch {self.epoch}")
        number = _NUMBERS[type(message)]
        payload = bytearray()
        txn = message.txn if isinstance(message, TxnMessage) else 0
        try:
            _RECORDS[number].write(payload, message)
            if len(payload) <= PAYLOAD_BYTES_MAX:
                return [self._frame(number, txn, acknowledged, 0, 1, payload)]
            return self._chain(message, number, txn, acknowledged, payload)
        except struct.error as error:
            raise ValueError(f"a number of {type(message).__name__} does not fit its field: {error}") from error

    def acknowledge(self, acknowledged: int) -> bytes:
        """A frame without a message that tells the peer what has arrived."""
        return self._frame(LINK_KIND, 0, acknowledged, 0, 1, b"")

    def _chain(self, message: Message, number: int, txn: int, acknowledged: int, payload: bytearray) -> list[bytes]:
        parts = -(-len(payload) // PAYLOAD_BYTES_MAX)
        if parts > PARTS_MAX:
            raise ValueError(
                f"{type(message).__name__} needs {len(payload)} bytes in {parts} frames, at most {PARTS_MAX} frames"
                f" ({PARTS_MAX * PAYLOAD_BYTES_MAX} bytes) travel as one message: send fewer entries or runs at once"
            )
        view = memoryview(payload)
        return [
            self._frame(
                number,
                txn,
                acknowledged,
                part,
                parts,
                view[part * PAYLOAD_BYTES_MAX : (part + 1) * PAYLOAD_BYTES_MAX],
            )
            for part in range(parts)
        ]

    def _frame(
        self,
        number: int,
        txn: int,
        acknowledged: int,
        part: int,
        parts: int,
        payload: bytes | bytearray | memoryview,
    ) -> bytes:
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            number,
            0,
            self.session,
            self.epoch,
            txn,
            self._sequence + 1,
            acknowledged,
            part,
            parts,
            len(payload),
        )
        self._sequence += 1
        checksum = zlib.crc32(payload, zlib.crc32(header))
        return b"".join((header, _TRAILER.pack(checksum, LAYOUT), payload))


class Decoder:
    """Turns the frames of one direction of one link back into messages.

    Args:
        session: id of the run.
        epoch: epoch of the link.

    Attributes:
        counters: what was seen and dropped, by reason.
        received: highest sequence number received in order.
        acknowledged: highest sequence number the peer says it has received.
        broken: why the link is no longer FIFO, or ``None``.

    Threads: one at a time, the reader of the link.
    """

    def __init__(self, session: int, epoch: Epoch) -> None:
        self.session = session
        self.epoch = epoch
        self.counters = DecodeCounters()
        self.received = 0
        self.acknowledged = 0
        self.broken: str | None = None
        self._chain: bytearray = bytearray()
        self._chain_key: tuple[int, int, int] | None = None
        self._chain_next = 0

    def feed(self, frame: bytes | bytearray | memoryview) -> Message | None:
        """Take one frame, with or without padding; nothing of it is kept.

        Args:
            frame: received bytes, 1-D. Longer than ``FRAME_BYTES`` counts as malformed.

        Returns:
            The message that this frame completes, or ``None``: the frame was dropped, carries no
            message, or its chain goes on. Never raises, whatever the bytes are.
        """
        counters = self.counters
        counters.frames += 1
        if len(frame) < HEADER_BYTES:
            counters.truncated += 1
            return None
        magic, version, number, flags, session, epoch, txn, sequence, acknowledged, part, parts, size = (
            _HEADER.unpack_from(frame)
        )
        if magic != MAGIC or version != VERSION or len(frame) > FRAME_BYTES or size > PAYLOAD_BYTES_MAX:
            counters.malformed += 1
            return None
        if HEADER_BYTES + size > len(frame):
            counters.truncated += 1
            return None
        view = memoryview(frame)
        payload = view[HEADER_BYTES : HEADER_BYTES + size]
        checksum, layout = _TRAILER.unpack_from(frame, _HEADER.size)
        if zlib.crc32(payload, zlib.crc32(view[: _HEADER.size])) != checksum:
            counters.corrupt += 1
            return None
        if not self._is_current(session, epoch, sequence):
            return None
        self.received = sequence
        if acknowledged > self.acknowledged:
            self.acknowledged = acknowledged
        try:
            if layout != LAYOUT or flags:
                raise ValueError("the peer runs another release: install the same one on all ranks")
            return self._take(number, txn, part, parts, payload)
        except (ValueError, struct.error) as error:
            counters.malformed += 1
            self.broken = f"frame {sequence} (kind {number}): {error}"
            self._chain = bytearray()
            return None

    def _is_current(self, session: int, epoch: int, sequence: int) -> bool:
        """Whether an intact frame is the next of this link; counts it otherwise."""
        counters = self.counters
        if session != self.session:
            counters.foreign_session += 1
        elif epoch != self.epoch:
            if epoch < self.epoch:
                counters.old_epoch += 1
            else:
                counters.future_epoch += 1
        elif sequence <= self.received:
            counters.replayed += 1
        elif self.broken is not None or sequence != self.received + 1:
            counters.gap += 1
            if self.broken is None:
                self.broken = f"frame {self.received + 1} is missing, frame {sequence} arrived"
        else:
            return True
        return False

    def _take(self, number: int, txn: int, part: int, parts: int, payload: memoryview) -> Message | None:
        """Handle the next frame in order; ``ValueError`` when it makes no sense there."""
        if parts == 1 and part == 0 and self._chain_key is None:
            if number != LINK_KIND:
                return self._message(number, txn, payload)
            if payload.nbytes or txn:
                raise ValueError("a frame of the link carries no payload")
            return None
        key = (number, txn, parts)
        if self._chain_key is None and part == 0 and 1 < parts <= PARTS_MAX and number != LINK_KIND:
            self._chain_key = key
        if key != self._chain_key or part != self._chain_next:
            raise ValueError(f"part {part} of {parts} is out of place (a chain has at most {PARTS_MAX} parts)")
        self.counters.parts += 1
        self._chain += payload
        self._chain_next += 1
        if self._chain_next < parts:
            return None
        whole, self._chain, self._chain_key, self._chain_next = self._chain, bytearray(), None, 0
        return self._message(number, txn, whole)

    def _message(self, number: int, txn: int, payload: memoryview | bytearray) -> Message:
        record = _RECORDS.get(number)
        if record is None:
            raise ValueError("message of unknown kind")
        name = record.kind.__name__
        reader = Reader(payload)
        try:
            values: dict[str, Any] = record.read(reader)
        except (ValueError, struct.error) as error:
            raise ValueError(f"{name} cannot be read: {error}") from error
        if reader.remaining:
            raise ValueError(f"{name} has {reader.remaining} bytes too many")
        if issubclass(record.kind, TxnMessage):
            values["txn"] = Txn(txn)
        elif txn:
            raise ValueError(f"{name} belongs to no transaction, got {txn}")
        self.counters.messages += 1
        message: Message = record.kind(epoch=self.epoch, **values)
        return message


__all__ = [
    "FRAME_BYTES",
    "HEADER_BYTES",
    "KINDS",
    "LAYOUT",
    "PARTS_MAX",
    "PAYLOAD_BYTES_MAX",
    "DecodeCounters",
    "Decoder",
    "Encoder",
]
