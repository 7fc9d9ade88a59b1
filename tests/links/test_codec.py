"""Every message survives the wire; what does not fit is refused with an error that says why."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_dist.coord.core import entries as entries_module
from kvcached_dist.coord.core import messages as messages_module
from kvcached_dist.coord.core.entries import Mark, PositionKind
from kvcached_dist.coord.core.messages import (
    Bye,
    Fail,
    Hello,
    MarkMessage,
    Message,
    Query,
    Reserve,
    Snapshot,
    SnapshotRun,
    TxnMessage,
)
from kvcached_dist.coord.core.types import Cause, CauseKind, DomainId, Epoch, PageId, Rank, Run, Txn
from kvcached_dist.coord.links.codec import (
    FRAME_BYTES,
    HEADER_BYTES,
    KINDS,
    PARTS_MAX,
    PAYLOAD_BYTES_MAX,
    Decoder,
    Encoder,
)
from kvcached_dist.coord.links.wire import DETAIL_BYTES_MAX, ENTRIES, cut_utf8
from tests.links.blank import EPOCH, make
from tests.links.strategies import SESSION, messages


def travel(*sent: Message) -> list[Message]:
    """What arrives of these messages, sent one after the other over one link."""
    encoder, decoder = Encoder(SESSION, EPOCH), Decoder(SESSION, EPOCH)
    arrived = []
    for message in sent:
        for frame in encoder.encode(message):
            assert len(frame) <= FRAME_BYTES
            if (got := decoder.feed(frame.ljust(FRAME_BYTES, b"\xee"))) is not None:
                arrived.append(got)
    assert decoder.counters.dropped == 0
    return arrived


def snapshot(count: int) -> Snapshot:
    runs = tuple(SnapshotRun(Run(DomainId(0), PageId(2 * i), 1), i % 2 == 0) for i in range(count))
    snapshot: Snapshot = make(Snapshot, runs=runs)
    return snapshot


def test_every_message_and_entry_has_a_number() -> None:
    declared = {
        kind
        for _, kind in inspect.getmembers(messages_module, inspect.isclass)
        if issubclass(kind, Message) and kind not in (Message, TxnMessage)
    }
    assert set(KINDS.values()) == declared
    assert {record.kind for record in ENTRIES.values()} == set(get_args(entries_module.Entry))
    assert max(KINDS) < 256
    assert 0 not in KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_message_survives(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert travel(message, message) == [message, message]


@pytest.mark.parametrize("count", [1, 200, 212, 213, 500])
def test_long_messages_travel_in_parts_among_short_ones(count: int) -> None:
    sent = [Bye(EPOCH), snapshot(count), Bye(EPOCH)]
    assert travel(*sent) == sent
    frames = Encoder(SESSION, EPOCH).encode(snapshot(count))
    assert all(len(frame) == FRAME_BYTES for frame in frames[:-1])
    assert HEADER_BYTES < len(frames[-1]) <= FRAME_BYTES


@pytest.mark.slow
def test_message_that_is_too_long_says_what_and_how_much() -> None:
    encoder = Encoder(SESSION, EPOCH)
    message = snapshot(PARTS_MAX * PAYLOAD_BYTES_MAX // 19 + 1)
    with pytest.raises(ValueError, match=rf"Snapshot needs \d+ bytes in {PARTS_MAX + 1} frames, at most {PARTS_MAX}"):
        encoder.encode(message)
    decoder = Decoder(SESSION, EPOCH)
    assert decoder.feed(encoder.encode(Bye(EPOCH))[0]) == Bye(EPOCH), "a refused message uses no sequence number"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Query(EPOCH, Txn(-1), 1), "Query"),
        (Query(EPOCH, Txn(1), 1 << 63), "Query"),
        (Reserve(EPOCH, Txn(1), (Run(DomainId(1 << 16), PageId(0), 1),)), "Reserve"),
        (make(Hello, spec_digest="d" * 1025), "1025 bytes"),
        (Bye(Epoch(6)), "epoch 6 on a link of epoch 7"),
        (Bye(Epoch(8)), "epoch 8 on a link of epoch 7"),
    ],
)
def test_values_that_do_not_fit_are_refused(message: Message, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Encoder(SESSION, EPOCH).encode(message)


def test_session_and_epoch_must_fit() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Encoder(1 << 64, EPOCH)
    with pytest.raises(ValueError, match="64-bit"):
        Encoder(SESSION, Epoch(-1))


@pytest.mark.parametrize(
    "detail", ["é" * 400, "x" * 599 + "é", "x" * 600, "🙂" * 200, "\ud800" * 700, "", "x" * 599 + "🙂"]
)
def test_detail_is_cut_between_characters(detail: str) -> None:
    sent = Fail(EPOCH, Cause(CauseKind.DRIVER, Rank(3), detail))
    (got,) = travel(sent)
    assert isinstance(got, Fail)
    text = got.cause.detail
    readable = detail.replace("\ud800", "?")
    assert readable.startswith(text)
    size, whole = len(text.encode()), len(readable.encode())
    assert size == whole if whole <= DETAIL_BYTES_MAX else DETAIL_BYTES_MAX - 3 <= size <= DETAIL_BYTES_MAX
    assert replace(got.cause, detail="") == replace(sent.cause, detail="")


def test_cutting_never_splits_a_character() -> None:
    for limit in range(12):
        assert "aé🙂é".startswith(cut_utf8("aé🙂é", limit).decode("utf-8"))


def test_marks_keep_the_epoch_in_which_they_were_logged() -> None:
    mark = Mark(Epoch(3), PositionKind.OP, 9, 4, (), 9, (1 << 64) - 1, True)
    assert travel(MarkMessage(EPOCH, mark)) == [MarkMessage(EPOCH, mark)]


def test_acknowledgements_travel_with_messages_and_alone() -> None:
    encoder, decoder = Encoder(SESSION, EPOCH), Decoder(SESSION, EPOCH)
    decoder.feed(encoder.encode(Bye(EPOCH), 17)[0])
    assert (decoder.received, decoder.acknowledged) == (1, 17)
    assert decoder.feed(encoder.acknowledge(21)) is None
    assert (decoder.received, decoder.acknowledged) == (2, 21)
    decoder.feed(encoder.acknowledge(19))
    assert decoder.acknowledged == 21, "acknowledgements never go back"
