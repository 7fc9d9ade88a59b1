"""Messages of which a test names only the fields that it is about."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvcached_dist.coord.core.types import Cause, CauseKind, Epoch, Rank

EPOCH = Epoch(7)


def make(kind: type[Any], **values: Any) -> Any:
    """A message with these fields, of the epoch ``EPOCH``; the others are 0, empty or absent."""
    blank = {"int": 0, "Txn": 0, "str": "", "Cause": Cause(CauseKind.DRIVER, Rank(0)), "bool": False, "Epoch": EPOCH}
    for field in dataclasses.fields(kind):
        declared = str(field.type)
        values.setdefault(field.name, () if declared.startswith("tuple") else blank.get(declared))
    return kind(**values)
