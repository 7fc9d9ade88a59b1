"""A break of the protocol, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One break.

    Attributes:
        name: short and unique.
        rule: the rule it breaks (M1 to M9, S.., L..) or the wrong variant of the protocol it is.
        file: below the root of the project.
        old: text that stands there exactly once.
        new: what replaces it.
    """

    name: str
    rule: str
    file: str
    old: str
    new: str


CORE = "coord/core/"
"""Where the protocol core lies, below the root of the project."""

__all__ = ["CORE", "Mutant"]
