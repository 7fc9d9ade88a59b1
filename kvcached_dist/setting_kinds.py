"""Kinds of settings: how a text becomes a value, and what to say when it does not.

Each kind turns the text of an environment variable or an already typed value into the value in force.
A refusal is one line that names the setting, the value given and a value that would work.
"""

from __future__ import annotations

import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .coord.core.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE | re.ASCII)
_SIZE_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE_END = 1 << 62
_NAME = re.compile(r"[A-Za-z0-9_-]+")
NAME_LENGTH_MAX = 64
"""Characters of an engine name; it becomes part of file names."""

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


def refuse(name: str, value: object, rule: str, example: object) -> ConfigError:
    """The error for an unusable value, always on one line.

    Args:
        name: setting or option, as the user wrote it.
        value: what was given.
        rule: what a usable value looks like.
        example: a value that would work.
    """
    given = str(value) if isinstance(value, (str, int, float)) else repr(value)
    printable = given.encode("unicode_escape").decode("ascii")
    if len(printable) > 120:
        printable = printable[:117] + "..."
    return ConfigError(f"{name}={printable!s}: must be {rule}; for example {name}={example}")


_REFUSED: Final = object()
"""What a kind reads from a value that cannot be used; ``None`` may be a value."""


class Kind(ABC):
    """A kind of setting."""

    @property
    def rule(self) -> str:
        """What a usable value looks like, for error texts and the documentation."""
        return self._rule()

    def accept(self, name: str, value: object) -> Any:
        """Reads a text or checks a typed value.

        Args:
            name: setting, for the error text.
            value: the text of a variable, or a value of the right type.

        Returns:
            The value in force.

        Raises:
            ConfigError: names the setting, the value and a value that would work.
        """
        accepted = self._read(value)
        if accepted is _REFUSED:
            raise refuse(name, value, self.rule, self._example(value))
        return accepted

    @abstractmethod
    def _rule(self) -> str: ...

    @abstractmethod
    def _read(self, value: object) -> object: ...

    @abstractmethod
    def _example(self, value: object) -> str: ...


@dataclass(frozen=True)
class Switch(Kind):
    """On or off. Optional: ``None`` stands for "not given"."""

    empty_is_off: bool = False
    optional: bool = False

    def _rule(self) -> str:
        return "one of " + ", ".join(TRUE_WORDS + FALSE_WORDS)

    def _read(self, value: object) -> object:
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        word = str(value).strip().lower()
        if word in TRUE_WORDS:
            return True
        return False if word in FALSE_WORDS or (word == "" and self.empty_is_off) else _REFUSED

    def _example(self, value: object) -> str:
        return TRUE_WORDS[0]


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number in a closed range, or a multiple of something."""

    least: int | None
    example: int
    most: int | None = None
    multiple_of: int = 1

    def _rule(self) -> str:
        text = "a whole number" if self.multiple_of == 1 else f"a multiple of {self.multiple_of}"
        if self.least is not None and self.most is not None:
            return f"{text} from {self.least} to {self.most}"
        return text if self.least is None else f"{text}, at least {self.least}"

    def _read(self, value: object) -> object:
        number = _whole(value)
        if number is None or number % self.multiple_of:
            return _REFUSED
        above = self.least is None or number >= self.least
        below = self.most is None or number <= self.most
        return number if above and below else _REFUSED

    def _example(self, value: object) -> str:
        return str(self.example)


@dataclass(frozen=True)
class Bytes(Kind):
    """A size in bytes; texts may carry K, M, G or T (powers of 1024)."""

    least: int
    example: str
    power_of_two: bool = False
    zero_is_none: bool = False

    def _rule(self) -> str:
        shape = "a power of two" if self.power_of_two else "a size"
        zero = "0 (none) or " if self.zero_is_none else ""
        return f"{zero}{shape} of at least {self.least} bytes (K, M, G, T are understood)"

    def _read(self, value: object) -> object:
        size = _size(value) if isinstance(value, str) else _whole(value)
        if size == 0 and self.zero_is_none:
            return 0
        if size is None or not self.least <= size < _SIZE_END or (self.power_of_two and size & (size - 1)):
            return _REFUSED
        return size

    def _example(self, value: object) -> str:
        return self.example


@dataclass(frozen=True)
class Seconds(Kind):
    """A finite time above zero. There is no value for "for ever": no wait is without a deadline."""

    example: float
    most: float = 86_400.0

    def _rule(self) -> str:
        return f"a finite number of seconds above 0 and at most {self.most:g} (no wait is without a limit)"

    def _read(self, value: object) -> object:
        number = _real(value)
        return number if number is not None and 0 < number <= self.most else _REFUSED

    def _example(self, value: object) -> str:
        return f"{self.example:g}"


@dataclass(frozen=True)
class Fraction(Kind):
    """A finite number in (0, 1]."""

    example: float

    def _rule(self) -> str:
        return "a finite number above 0 and at most 1"

    def _read(self, value: object) -> object:
        number = _real(value)
        return number if number is not None and 0 < number <= 1 else _REFUSED

    def _example(self, value: object) -> str:
        return f"{self.example:g}"


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words, in whatever case."""

    words: Sequence[str]

    def _rule(self) -> str:
        return "one of " + ", ".join(self.words)

    def _read(self, value: object) -> object:
        word = str(value).strip().lower()
        return next((known for known in self.words if known.lower() == word), _REFUSED)

    def _example(self, value: object) -> str:
        return self.words[0]


@dataclass(frozen=True)
class EngineName(Kind):
    """An engine name, or empty for a generated one. Used exactly as given, so nothing is replaced."""

    def _rule(self) -> str:
        return f"1 to {NAME_LENGTH_MAX} letters, digits, '_' or '-'"

    def _read(self, value: object) -> object:
        text = str(value)
        return text if text == "" or (len(text) <= NAME_LENGTH_MAX and _NAME.fullmatch(text)) else _REFUSED

    def _example(self, value: object) -> str:
        return re.sub(r"[^A-Za-z0-9_-]+", "_", str(value))[:NAME_LENGTH_MAX]


@dataclass(frozen=True)
class Text(Kind):
    """Text that is read where it is used."""

    example: str

    def _rule(self) -> str:
        return "text"

    def _read(self, value: object) -> object:
        return str(value)

    def _example(self, value: object) -> str:
        return self.example


@dataclass(frozen=True)
class AbsolutePath(Kind):
    """An absolute path; whether it can be used is found where it is used."""

    example: str
    may_be_empty: bool = False

    def _rule(self) -> str:
        return "an absolute path" + (", or empty for none" if self.may_be_empty else "")

    def _read(self, value: object) -> object:
        text = str(value)
        if text == "" and self.may_be_empty:
            return text
        return text if os.path.isabs(text) and "\0" not in text else _REFUSED

    def _example(self, value: object) -> str:
        return self.example


LOG_LEVEL: Final = Choice(tuple(logging.getLevelName(level) for level in (20, 10, 30, 40, 50)))
"""A level of the logging module; the default comes first."""


@dataclass(frozen=True)
class Setting:
    """What is known about one setting.

    Attributes:
        name: environment variable.
        kind: how a value is read and checked.
        meaning: one sentence for the documentation.
        unit: unit of the value, empty for none.
        world: whether all ranks must have the same value.
    """

    name: str
    kind: Kind
    meaning: str
    unit: str = ""
    world: bool = False


def setting_field(default: object, name: str, kind: Kind, meaning: str, unit: str = "", world: bool = False) -> Any:
    """A field of :class:`kvcached_dist.config.Config` that is a setting."""
    return field(default=default, metadata={"setting": Setting(name, kind, meaning, unit, world)})


def shown(value: object) -> str:
    """A value as logs and the documentation show it."""
    if value is None or value == "":
        return "(not set)"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_bytes(name: str, text: str, least: int = 1, example: str = "2G") -> int:
    """A size an operator wrote, for command line options.

    Args:
        name: the option, for the error text.
        text: bytes, optionally with K, M, G or T (powers of 1024).
        least: smallest usable size in bytes.
        example: a value that would work.

    Raises:
        ConfigError: not a size, or too small.
    """
    return int(Bytes(least, example).accept(name, text))


def _size(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit = match.group(1), (match.group(2) or "").upper()
    if "." in number:
        exact = float(number) * (1 << _SIZE_SHIFT[unit])
        return int(exact) if exact.is_integer() else None
    return int(number) << _SIZE_SHIFT[unit] if len(number) < 20 else None


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,19}\s*", value, re.ASCII):
        return int(value)
    return None


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


__all__ = [
    "LOG_LEVEL",
    "NAME_LENGTH_MAX",
    "AbsolutePath",
    "Bytes",
    "Choice",
    "EngineName",
    "Fraction",
    "Integer",
    "Kind",
    "Seconds",
    "Setting",
    "Switch",
    "Text",
    "parse_bytes",
    "refuse",
    "setting_field",
    "shown",
]
