"""Bytes of the parts that messages are made of: integers, texts, runs, causes, entries, marks.

A :class:`Field` knows how one value is written and read. A :class:`Record` is a dataclass on the wire;
messages, entries and causes are records, so adding one means adding a table line. How a record is laid
out follows from its declaration; :func:`layout_text` describes it, so that two releases notice.
Everything is little-endian and built with :mod:`struct`. Reading raises ``ValueError`` (or
``struct.error``) for any bytes that no writer produces, and nothing else: the decoder relies on it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields as dataclass_fields
from enum import IntEnum
from typing import Any, Final, get_type_hints

from ..core.entries import (
    Entry,
    Evict,
    Grant,
    Growable,
    Limit,
    Mark,
    Publish,
    Quarantine,
    Reclaimed,
    Retire,
    Sort,
    Unretire,
)
from ..core.messages import SnapshotRun
from ..core.types import Cause, DomainId, PageId, Run

DETAIL_BYTES_MAX: Final = 600
"""Longest ``Cause.detail`` on the wire, in UTF-8 bytes; longer ones are cut between characters."""

TEXT_BYTES_MAX: Final = 1024
"""Longest text of any other field. Digests and device ids are never cut: a longer one is an error."""

INTS_MAX: Final = 0xFFFF
"""Most integers of one list (handles per pool, blocks per domain)."""

RECORDS_MAX: Final = 1 << 20
"""Most runs or entries of one list; the frame limit of the codec is reached long before."""


class Reader:
    """A cursor over received bytes. Every read checks that the bytes are there."""

    __slots__ = ("_data", "position")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self.position = 0

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self.position

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Read one fixed layout; ``struct.error`` when too few bytes are left."""
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def take(self, size: int) -> memoryview:
        """Read ``size`` raw bytes."""
        if size > self.remaining:
            raise ValueError(f"{size} bytes announced, {self.remaining} left")
        data = self._data[self.position : self.position + size]
        self.position += size
        return data


class Field:
    """How one value becomes bytes and back.

    Args:
        write: appends the bytes of a value.
        read: reads them again; ``ValueError`` or ``struct.error`` when they make no sense.
    """

    __slots__ = ("read", "write")

    def __init__(self, write: Callable[[bytearray, Any], None], read: Callable[[Reader], Any]) -> None:
        self.write = write
        self.read = read


_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_RUN = struct.Struct("<HQQ")
_SNAPSHOT_RUN = struct.Struct("<HQQB")


def _number(code: str) -> Field:
    layout = struct.Struct("<" + code)

    def write(out: bytearray, value: int) -> None:
        out += layout.pack(value)

    def read(reader: Reader) -> int:
        value: int = reader.unpack(layout)[0]
        return value

    return Field(write, read)


def _write_bool(out: bytearray, value: bool) -> None:
    out.append(1 if value else 0)


def _bool(value: int) -> bool:
    if value > 1:
        raise ValueError(f"a truth value is 0 or 1, got {value}")
    return value == 1


def _read_bool(reader: Reader) -> bool:
    return _bool(reader.unpack(_U8)[0])


def enum_field(kind: type[IntEnum]) -> Field:
    """An enumeration whose values travel as one byte; an unknown value does not read."""

    def write(out: bytearray, value: IntEnum) -> None:
        out += _U8.pack(value)

    def read(reader: Reader) -> IntEnum:
        return kind(reader.unpack(_U8)[0])

    return Field(write, read)


def _write_ints(out: bytearray, values: tuple[int, ...]) -> None:
    if len(values) > INTS_MAX:
        raise ValueError(f"a list has {len(values)} integers, at most {INTS_MAX} travel")
    out += struct.pack(f"<H{len(values)}q", len(values), *values)


def _read_ints(reader: Reader) -> tuple[int, ...]:
    count: int = reader.unpack(_U16)[0]
    return struct.unpack(f"<{count}q", reader.take(8 * count))


def cut_utf8(text: str, bytes_max: int) -> bytes:
    """UTF-8 of ``text``, cut between characters at ``bytes_max``; lone surrogates become ``?``."""
    data = text.encode("utf-8", "replace")
    if len(data) <= bytes_max:
        return data
    return data[:bytes_max].decode("utf-8", "ignore").encode("utf-8")


def _write_detail(out: bytearray, value: str) -> None:
    data = cut_utf8(value, DETAIL_BYTES_MAX)
    out += _U16.pack(len(data))
    out += data


def _write_text(out: bytearray, value: str) -> None:
    data = value.encode("utf-8")
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"a text has {len(data)} bytes, at most {TEXT_BYTES_MAX} travel: {value[:40]!r}...")
    out += _U16.pack(len(data))
    out += data


def _text_reader(bytes_max: int) -> Callable[[Reader], str]:
    def read(reader: Reader) -> str:
        size: int = reader.unpack(_U16)[0]
        if size > bytes_max:
            raise ValueError(f"a text of {size} bytes, at most {bytes_max} are sent")
        return str(reader.take(size), "utf-8")

    return read


def _write_count(out: bytearray, count: int) -> None:
    if count > RECORDS_MAX:
        raise ValueError(f"a list has {count} runs or entries, at most {RECORDS_MAX} travel")
    out += _U32.pack(count)


def _write_runs(out: bytearray, runs: tuple[Run, ...]) -> None:
    _write_count(out, len(runs))
    for run in runs:
        out += _RUN.pack(run.domain, run.first, run.count)


def _run(domain: int, first: int, count: int) -> Run:
    return Run(DomainId(domain), PageId(first), count)


def _read_runs(reader: Reader) -> tuple[Run, ...]:
    count: int = reader.unpack(_U32)[0]
    return tuple(_run(*values) for values in _RUN.iter_unpack(reader.take(_RUN.size * count)))


def _write_snapshot_runs(out: bytearray, runs: tuple[SnapshotRun, ...]) -> None:
    _write_count(out, len(runs))
    for item in runs:
        out += _SNAPSHOT_RUN.pack(item.run.domain, item.run.first, item.run.count, item.published)


def _read_snapshot_runs(reader: Reader) -> tuple[SnapshotRun, ...]:
    count: int = reader.unpack(_U32)[0]
    data = reader.take(_SNAPSHOT_RUN.size * count)
    return tuple(
        SnapshotRun(_run(domain, first, pages), _bool(published))
        for domain, first, pages, published in _SNAPSHOT_RUN.iter_unpack(data)
    )


class Record:
    """A dataclass on the wire: its fields in the order in which they are declared.

    How a field travels follows from its type; what cannot be told from the type is named.

    Args:
        kind: the dataclass.
        skip: fields that travel elsewhere, in the header of the frame.
        special: fields whose bytes differ from what their type says.
    """

    __slots__ = ("fields", "kind", "layout")

    def __init__(self, kind: type[Any], /, skip: Collection[str] = (), **special: Field) -> None:
        self.kind = kind
        hints = get_type_hints(kind)
        self.fields = tuple(
            (field.name, special.get(field.name) or _field_of(kind, field.name, hints[field.name]))
            for field in dataclass_fields(kind)
            if field.name not in skip
        )
        declared = ", ".join(f"{field.name}: {field.type}" for field in dataclass_fields(kind))
        self.layout = f"{kind.__name__}({declared})"

    def write(self, out: bytearray, value: Any) -> None:
        """Append the fields of ``value``."""
        for name, field in self.fields:
            field.write(out, getattr(value, name))

    def read(self, reader: Reader) -> dict[str, Any]:
        """Read the fields as keyword arguments of the dataclass."""
        return {name: field.read(reader) for name, field in self.fields}


def _field_of(kind: type[Any], name: str, hint: Any) -> Field:
    """The field for a type; start-up fails for a type that has no bytes."""
    hint = getattr(hint, "__supertype__", hint)
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return enum_field(hint)
    field = _FIELD_OF_TYPE.get(hint)
    if field is None:
        raise TypeError(f"{kind.__name__}.{name}: values of type {hint} have no bytes on the wire")
    return field


def layout_text(records: Mapping[int, Record]) -> str:
    """The layout of numbered records in words, the nested ones included."""
    nested = (_CAUSE_RECORD, _MARK_RECORD)
    numbered = [f"{number} {record.layout}" for number, record in (*records.items(), *ENTRIES.items())]
    return "; ".join([*numbered, *(record.layout for record in nested)])


def record_field(record: Record) -> Field:
    """A nested record."""
    return Field(record.write, lambda reader: record.kind(**record.read(reader)))


def optional_field(inner: Field) -> Field:
    """A value that may be ``None``."""

    def write(out: bytearray, value: Any) -> None:
        _write_bool(out, value is not None)
        if value is not None:
            inner.write(out, value)

    def read(reader: Reader) -> Any:
        return inner.read(reader) if _read_bool(reader) else None

    return Field(write, read)


DIGEST: Final = _number("Q")
"""A rolling digest: unsigned 64 bits."""

_FIELD_OF_TYPE: Final[dict[Any, Field]] = {
    int: _number("q"),
    bool: Field(_write_bool, _read_bool),
    str: Field(_write_text, _text_reader(TEXT_BYTES_MAX)),
    tuple[int, ...]: Field(_write_ints, _read_ints),
    tuple[Run, ...]: Field(_write_runs, _read_runs),
    tuple[SnapshotRun, ...]: Field(_write_snapshot_runs, _read_snapshot_runs),
}
_CAUSE_RECORD: Final = Record(Cause, detail=Field(_write_detail, _text_reader(DETAIL_BYTES_MAX)))
_CAUSE: Final = record_field(_CAUSE_RECORD)
_FIELD_OF_TYPE[Cause] = _CAUSE
_FIELD_OF_TYPE[Cause | None] = optional_field(_CAUSE)

ENTRIES: Final[Mapping[int, Record]] = {
    1: Record(Publish),
    2: Record(Grant),
    3: Record(Retire),
    4: Record(Unretire),
    5: Record(Sort),
    6: Record(Evict),
    7: Record(Growable),
    8: Record(Limit),
    9: Record(Quarantine),
    10: Record(Reclaimed),
}
"""Number of each entry on the wire. Numbers are never given to something else."""

_ENTRY_NUMBERS: Final = {record.kind: (number, record) for number, record in ENTRIES.items()}


def _write_entries(out: bytearray, entries: tuple[Entry, ...]) -> None:
    _write_count(out, len(entries))
    for entry in entries:
        number, record = _ENTRY_NUMBERS[type(entry)]
        out.append(number)
        record.write(out, entry)


def _read_entries(reader: Reader) -> tuple[Entry, ...]:
    count: int = reader.unpack(_U32)[0]
    if count > reader.remaining:
        raise ValueError(f"{count} entries announced in {reader.remaining} bytes")
    entries = []
    for _ in range(count):
        number: int = reader.unpack(_U8)[0]
        record = ENTRIES.get(number)
        if record is None:
            raise ValueError(f"entry of unknown kind {number}")
        entries.append(record.kind(**record.read(reader)))
    return tuple(entries)


_MARK_RECORD: Final = Record(Mark, digest=DIGEST, entries=Field(_write_entries, _read_entries))
# The epoch of a mark is informative and may differ from the epoch of the link (rule M1).
_FIELD_OF_TYPE[Mark] = record_field(_MARK_RECORD)


__all__ = [
    "DETAIL_BYTES_MAX",
    "ENTRIES",
    "TEXT_BYTES_MAX",
    "Field",
    "Reader",
    "Record",
    "cut_utf8",
    "layout_text",
]
