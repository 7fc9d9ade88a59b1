"""Whatever bytes arrive, the decoder neither raises nor delivers what was not sent."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_dist.coord.core.messages import Beat, Bye, Map, Message, Query, Snapshot, SnapshotRun
from kvcached_dist.coord.core.types import DomainId, Epoch, PageId, Run, Txn
from kvcached_dist.coord.links.codec import (
    FRAME_BYTES,
    HEADER_BYTES,
    LAYOUT,
    MAGIC,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    VERSION,
    Decoder,
    Encoder,
)
from tests.links.blank import EPOCH, make
from tests.links.strategies import SESSION, any_message

HEADER = struct.Struct("<IBBHQQQQQHHI")


def forge(
    kind: int,
    payload: bytes,
    *,
    txn: int = 0,
    sequence: int = 1,
    part: int = 0,
    parts: int = 1,
    flags: int = 0,
    layout: int = LAYOUT,
) -> bytes:
    """A frame with a correct checksum and any content, as a faulty peer of the same session makes it."""
    header = HEADER.pack(MAGIC, VERSION, kind, flags, SESSION, EPOCH, txn, sequence, 0, part, parts, len(payload))
    return header + struct.pack("<II", zlib.crc32(payload, zlib.crc32(header)), layout) + payload


def decoder_after(*frames: bytes) -> Decoder:
    decoder = Decoder(SESSION, EPOCH)
    for frame in frames:
        decoder.feed(frame)
    return decoder


def frames_of(*messages: Message, session: int = SESSION, epoch: Epoch = EPOCH) -> list[bytes]:
    encoder = Encoder(session, epoch)
    return [frame for message in messages for frame in encoder.encode(message)]


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.binary(max_size=200) | st.binary(min_size=HEADER_BYTES, max_size=FRAME_BYTES + 10), max_size=5))
def test_random_bytes_are_dropped_and_counted(frames: list[bytes]) -> None:
    decoder = Decoder(SESSION, EPOCH)
    assert [decoder.feed(frame) for frame in frames] == [None] * len(frames)
    counters = decoder.counters
    assert (counters.frames, counters.dropped, counters.messages) == (len(frames), len(frames), 0)
    assert counters.truncated == sum(len(frame) < HEADER_BYTES for frame in frames)


@pytest.mark.slow
@settings(max_examples=100)
@given(any_message, st.data())
def test_flipped_bit_is_never_delivered(message: Message, data: st.DataObject) -> None:
    frame = bytearray(frames_of(message)[0])
    # The layout stands behind the checksum; a flip there reads as another release, and ends the link.
    bit = data.draw(st.integers(0, 8 * len(frame) - 1).filter(lambda bit: not 60 <= bit // 8 < HEADER_BYTES))
    frame[bit // 8] ^= 1 << (bit % 8)
    decoder = Decoder(SESSION, EPOCH)
    assert decoder.feed(bytes(frame)) is None
    assert (decoder.counters.dropped, decoder.received, decoder.broken) == (1, 0, None)
    assert decoder.counters.truncated + decoder.counters.malformed + decoder.counters.corrupt == 1


def test_every_truncation_is_counted() -> None:
    (frame,) = frames_of(make(Beat, free_bytes=1, handles=(1, 2)))
    decoder = decoder_after(*(frame[:size] for size in range(len(frame))))
    assert decoder.counters.truncated == decoder.counters.dropped == len(frame)
    assert decoder.feed(frame) is not None


def test_replayed_frames_are_dropped() -> None:
    frames = frames_of(Map(EPOCH, Txn(1)), Map(EPOCH, Txn(2)))
    decoder = decoder_after(*frames, *frames, frames[0])
    assert (decoder.counters.messages, decoder.counters.replayed, decoder.broken) == (2, 3, None)


def test_frames_of_other_sessions_and_epochs_are_dropped() -> None:
    decoder = decoder_after(
        *frames_of(Bye(EPOCH), session=SESSION ^ 1),
        *frames_of(Bye(Epoch(6)), Bye(Epoch(6)), epoch=Epoch(6)),
        *frames_of(Bye(Epoch(8)), epoch=Epoch(8)),
    )
    counters = decoder.counters
    assert (counters.foreign_session, counters.old_epoch, counters.future_epoch) == (1, 2, 1)
    assert (counters.dropped, counters.messages, decoder.broken) == (4, 0, None)
    assert decoder.feed(frames_of(Bye(EPOCH))[0]) == Bye(EPOCH), "noise does not disturb the link"


def test_missing_frame_breaks_the_link() -> None:
    first, second, third = frames_of(*(Map(EPOCH, Txn(txn)) for txn in (1, 2, 3)))
    decoder = decoder_after(first, third)
    assert decoder.broken == "frame 2 is missing, frame 3 arrived"
    assert [decoder.feed(second), decoder.feed(third)] == [None, None], "a broken link delivers nothing"
    assert (decoder.counters.gap, decoder.counters.messages) == (3, 1)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(0, 255), st.binary(max_size=300), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_authentic_nonsense_breaks_the_link(kind: int, payload: bytes, txn: int, part: int, parts: int) -> None:
    decoder = Decoder(SESSION, EPOCH)
    message = decoder.feed(forge(kind, payload, txn=txn, part=part, parts=parts))
    counters = decoder.counters
    assert (message is not None) == (counters.messages == 1)
    assert (decoder.broken is not None) == (counters.malformed == 1)
    assert counters.malformed + counters.messages + counters.parts <= 1


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (forge(200, b""), "unknown kind"),
        (forge(18, bytes(9), txn=1), "Query has 1 bytes too many"),
        (forge(18, b"", txn=1), "Query cannot be read"),
        (forge(26, b"", txn=1), "Bye belongs to no transaction"),
        (forge(3, b"\xff" + bytes(8 * 4) + b"\x00\x00", txn=1), "Refused cannot be read"),
        (forge(19, bytes(8) + b"\x63\x00\x00\x00", txn=1), "TxnPhase"),
        (forge(19, bytes(8) + b"\x00\x02\x00\x00", txn=1), "truth value"),
        (forge(1, struct.pack("<IHQQ", 1, 0, 0, 0), txn=1), "count >= 1"),
        (forge(1, struct.pack("<I", 0xFFFFFFFF), txn=1), "announced"),
        (forge(0, b"x"), "carries no payload"),
        (forge(26, b"", parts=0), "out of place"),
        (forge(26, b"", part=1, parts=2), "out of place"),
        (forge(26, b"", part=0, parts=PARTS_MAX + 1), f"at most {PARTS_MAX} parts"),
        (forge(26, b"", flags=1), "another release"),
        (forge(26, b"", layout=LAYOUT ^ 1), "another release"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_reason_of_a_broken_link_says_what_was_wrong(frame: bytes, why: str) -> None:
    decoder = decoder_after(frame)
    assert decoder.broken is not None
    assert why in decoder.broken
    assert (decoder.counters.malformed, decoder.counters.messages) == (1, 0)


class TestChains:
    def parts(self) -> list[bytes]:
        runs = tuple(SnapshotRun(Run(DomainId(0), PageId(i), 1), True) for i in range(500))
        return frames_of(make(Snapshot, runs=runs), Bye(EPOCH))

    def test_parts_are_counted(self) -> None:
        frames = self.parts()
        decoder = decoder_after(*frames)
        assert (decoder.counters.parts, decoder.counters.messages) == (len(frames) - 1, 2)

    def test_message_inside_a_chain_breaks_the_link(self) -> None:
        decoder = decoder_after(self.parts()[0], forge(26, b"", sequence=2))
        assert decoder.broken is not None
        assert decoder.counters.messages == 0

    def test_part_of_another_chain_breaks_the_link(self) -> None:
        decoder = decoder_after(self.parts()[0], forge(21, b"", sequence=2, part=1, parts=3))
        assert decoder.broken is not None

    def test_reassembly_is_bounded(self) -> None:
        decoder = Decoder(SESSION, EPOCH)
        for part in range(PARTS_MAX - 1):
            frame = forge(22, bytes(PAYLOAD_BYTES_MAX), sequence=part + 1, part=part, parts=PARTS_MAX)
            assert decoder.feed(frame) is None
        assert decoder.broken is None
        assert len(decoder._chain) == (PARTS_MAX - 1) * PAYLOAD_BYTES_MAX
        decoder.feed(forge(22, b"", sequence=PARTS_MAX, part=PARTS_MAX, parts=PARTS_MAX))
        assert decoder.broken is not None
        assert len(decoder._chain) == 0


def test_padding_means_nothing() -> None:
    (frame,) = frames_of(Query(EPOCH, Txn(5), 2))
    for filler in (b"\x00", b"\xff"):
        assert Decoder(SESSION, EPOCH).feed(frame.ljust(FRAME_BYTES, filler)) == Query(EPOCH, Txn(5), 2)


def test_buffer_may_be_reused_after_feeding() -> None:
    buffer = bytearray(FRAME_BYTES)
    decoder = Decoder(SESSION, EPOCH)
    (first, second) = frames_of(make(Beat, handles=(7, 8)), make(Beat, handles=(9,)))
    buffer[: len(first)] = first
    got = decoder.feed(memoryview(buffer))
    buffer[: len(second)] = second
    assert got == make(Beat, handles=(7, 8))
