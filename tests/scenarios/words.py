"""Words of the trace."""

from __future__ import annotations

import dataclasses
import re

from kvcached_dist.coord.core.entries import Entry, Mark
from kvcached_dist.coord.core.messages import MarkMessage, Message
from kvcached_dist.coord.core.types import Cause, Epoch

EPOCH = Epoch(3)
"""The epoch of every scenario; another one is shown."""


def show(message: Message) -> str:
    """A message in one line: ``MAP_FAILED txn=3 cause=...``."""
    if isinstance(message, MarkMessage):
        return show_mark(message.mark)
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).upper()
    words = [name]
    if message.epoch != EPOCH:
        words.append(f"epoch={message.epoch}")
    for item in dataclasses.fields(message):
        value = getattr(message, item.name)
        if item.name == "epoch" or value is None:
            continue
        words.append(f"{item.name}={_value(value)}")
    return " ".join(words)


def show_mark(mark: Mark) -> str:
    """A mark with its entries."""
    entries = "; ".join(map(show_entry, mark.entries)) or "empty"
    settled = " settled" if mark.settled else ""
    return f"MARK {mark.kind.name.lower()}={mark.position} index={mark.first_index}{settled}: {entries}"


def show_entry(entry: Entry) -> str:
    """An entry in one line."""
    words = [type(entry).__name__.upper()]
    for item in dataclasses.fields(entry):
        words.append(f"{item.name}={_value(getattr(entry, item.name))}")
    return " ".join(words)


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + " ".join(str(item) for item in value) + "]"
    if isinstance(value, Cause):
        return f"{{{value}}}"
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(value)


def show_ids(taken: dict[int, tuple[int, ...]]) -> str:
    parts = [",".join(map(str, ids)) for ids in taken.values()]
    return " | ".join(parts)
